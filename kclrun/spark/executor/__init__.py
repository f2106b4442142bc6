"""What runs in Spark's tasks: exact ranges of shards read, and Arrow rows made of them.

Holds: the pure cursor of one range (`range_cursor.py`, `read_pace.py`), the shells that ask
(`shard_reading.py`, `read_ahead.py`, `reading.py`), and rows (`rows.py`). May not know: the driver,
offsets, PySpark's API. Rule: a range ends at its bound and nowhere else.
"""
