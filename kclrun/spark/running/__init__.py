"""Runs of `engine: spark`: the application of one file as one Structured Streaming query.

Holds: what the settings say to the source (`source_options.py`), what the query reads and writes
(`query.py`, `building.py`), the phases of a run (`runtime.py`), a query watched and ended between
two batches (`watching.py`, `graceful.py`), what Spark's progress says (`progress.py`,
`counting.py`), what it writes to standard error (`engine_output.py`), and whose a failure is
(`failures.py`, `translating.py`).
May know: the rest of `spark`, the settings, `observe`. May not know: the command line, the manager.
Look next: `runtime.py`.
"""
