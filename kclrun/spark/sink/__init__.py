"""The sink: rows of a DataFrame into a stream.

Holds: PySpark's writers (`writers.py`), what runs in a task (`task.py`, `entries.py`), the map of
shards (`shards.py`), and `kclrun.spark.write` (`writing.py`); pure: `options.py`, `columns.py`,
`report.py`. The producer itself is `kclrun/sinks`. Rule: a task returns once every record of it was
acknowledged, or raises.
"""
