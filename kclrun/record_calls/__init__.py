"""Calls of `process_record` for the records of a shard, one by one or at the same time.

`consuming/concurrency.py` decides what may start and how far the prefix is done; this makes the
calls. It does not know queues, outputs, letters or Spark: those are the `RecordHost`'s.
"""
