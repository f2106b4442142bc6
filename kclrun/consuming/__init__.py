"""Core 2: one lease's life inside its process. Events in, commands out.

Holds: the states of a lease, its own row and what may be written to it, the fence, the checkpoint
ledger, the end of a shard, giving the lease away, losing it, pacing of reads, the policy for errors
of user code.
May know: the model. May not know: clocks, chance, threads, sockets, DynamoDB.
Rule: every command's outcome comes back as an event, whatever the outcome.
Look next: `states.py` (the table), `life.py` (the one `handle`), `own_row.py` (P2, P5, P6, P7),
`giving_away.py` (P16, P17), `loss.py` (P19).
"""
