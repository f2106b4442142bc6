"""Outputs: where what a processor produces goes, and how it stays in step with the checkpoint.

Holds: `emitted_rows.py` (rows as JSON lines, one file a shard), over `rows.py` (a row
as a line), `reopening.py` (back to the checkpoint), `marks.py` (which length belongs to which
position) and `durable_files.py` (write, sync, replace, lock).
And `kinesis_producer.py` (records into a stream), over `pending_records.py` (what a request holds,
in which order), `put_request.py` (what a request may hold), `lanes.py` (which shard a record waits
for), `flow_control.py` (how much a shard is sent) and `producing.py` (settings and metrics); all
but the first of these are pure.
May know: ports, the cores' values, the model. May not know: AWS, processes, how a lease is kept.
Rule: what a sink took in is durable before the checkpoint that covers it is written; for a stream,
once `flush` has returned.
"""
