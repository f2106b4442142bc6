"""The configuration: typed settings, how a file becomes them, and what is said when it cannot.

Holds: `schema.py` (every setting with its default and its one line of documentation),
`units.py` (durations and sizes), `load.py` (YAML, `${VAR}`, `--set`, errors with a path).
May know: the model and the errors. May not know: AWS, processes, how a setting is used.
"""
