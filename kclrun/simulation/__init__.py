"""The room for shell 3: a fleet in virtual time. Empty so far: it comes with its own issue.

Will hold: a scheduler, hosts with clocks, faults and oracles, driving the very cores of `leases/`
and `consuming/` over the stream model of `local/`. May not know: the world.
"""
