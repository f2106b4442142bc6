"""The part that runs in Spark's tasks: reads exact ranges of shards and makes Arrow rows of them.

A range ends at its bound and nowhere else. The package does not know the driver, offsets or
PySpark's API.
"""
