"""Shell 3: a fleet in virtual time.

Drives the very cores of `leases/` and `consuming/` over the stream model and the lease rows of
`local/`: only the world is simulated. `scheduler.py` has time and chance, `table.py` the lease
table behind a network, `shards.py` the stream, `host.py` one manager, `process.py` and `desk.py`
one lease process, `oracles/` and `gaps.py` what is watched, `fleet.py` all of it, `what_if.py`
a scenario and its figures. May not know: the world, the shells. Rule: one seed, one story.
"""
