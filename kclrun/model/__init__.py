"""Nouns: records, positions and their order, shards and their graph, leases.

May know: `errors`. Must not know: clocks, threads, AWS, how values are stored or sent. Rule: values
are frozen; a change is a new value.
"""
