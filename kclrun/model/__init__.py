"""Nouns: records, positions and their order, shards and their graph, leases, writes and outcomes.

May know: `errors`. May not know: clocks, threads, AWS, how any of these are stored or sent.
Rule: values are frozen; a change is a new value. Look next: `sequence.py`, then `lease.py`.
"""
