"""Kinesis on Spark, in Python: a source, a sink, and the runner of `engine: spark`.

Holds, from the inside out: nouns and decisions that are pure and know no Spark (`positions.py`,
`offsets.py`, `ranges.py`, `settings.py`, `lineage.py`, `scout/`); what asks Kinesis
(`scouting.py` on the driver, `reading.py` on executors); what translates to PySpark's data source
API (`source.py`, `sink.py`, `processing.py`); sessions and runs (`session.py`, `running/`).
May know: `aws`, `sinks`, `observe` and everything below them. May not know: the manager, the lease
processes. Rule: the rows of a batch are a function of its two offsets, always.
"""
