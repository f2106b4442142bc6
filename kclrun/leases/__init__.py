"""Core 1: what a lease manager decides. Events in, commands out.

Holds: shard sync, expiry as observed, assignment, lineage, custody of the leases we own, cleanup.
May know: the model. May not know: clocks, chance, threads, DynamoDB, pids; `now` and `chance`
are arguments. Rule: every command's outcome comes back as an event, whatever the outcome.
Look next: `manager.py` (the one `handle`), `events.py`, `commands.py`.
"""
