"""Calls of `process_record` for the records of a shard, one by one or at the same time.

`consuming/concurrency.py` decides which calls may start and up to which record all are done; this
package makes the calls. It does not know queues, outputs, letters or Spark: the `RecordHost` does.
"""
