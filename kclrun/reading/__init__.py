"""Reading a stream without leases: `kclrun.read`, and the readers that `kclrun tail` shares.

It knows shards, their order and pages. It knows no lease, no table and no terminal.
"""
