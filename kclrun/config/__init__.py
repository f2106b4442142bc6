"""The configuration: typed settings, how a file becomes them, and what is said when it cannot.

Holds: `schema.py` (every setting with its default and its one line of documentation), `units.py`
(durations and sizes), `load.py` (the way from a file to `Settings`, through `trust.py`,
`yaml_reader.py`, `expand.py`, `settle.py` and `rules.py`), `start_position.py` (`start:` in typed
form), `json_schema.py` (for editors).
May know: the model and the errors. May not know: AWS, processes, how a setting is used.
"""
