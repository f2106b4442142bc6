"""Outputs: where what a processor produces goes, and how it stays in step with the checkpoint.

Holds: `emitted_rows.py` (rows as JSON lines, one file a shard), over `rows.py` (a row
as a line), `reopening.py` (back to the checkpoint), `marks.py` (which length belongs to which
position) and `durable_files.py` (write, sync, replace, lock).
May know: ports, the cores' values, the model. May not know: AWS, processes, how a lease is kept.
Rule: what a sink took in is durable before the checkpoint that covers it is written.
"""
