"""A `RecordProcessor` inside the reader: the rows it emits are the DataFrame.

Holds: the data source (`source.py`), a task's run over its ranges (`task.py`), one processor and
its calls (`hosting.py`), its rows (`emitting.py`); pure: `tenure.py`, `cache.py`. Rule: an instance
goes on only exactly where it stands; else its lease is lost, and another begins.
"""
