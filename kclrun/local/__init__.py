"""The embedded AWS: a faithful small model of Kinesis, its HTTP face, and moto for the rest.

Pure (time and secrets are arguments; the simulator drives these in virtual time): `service.py`
over `stream.py` over `shards.py`, with `resharding.py`, `listing.py`, `limits.py`, `puts.py`,
`positions.py`, `iterators.py`, `tokens.py`, `sequence_numbers.py`; `stream_ports.py` is a stream
behind the ports, `lease_rows.py` the lease table in memory, with `row_changes.py`; `operations.py`
speaks AWS's JSON, `signatures.py` verifies who asks.
Shells: `http_face.py` answers Kinesis over HTTP and has `forwarding.py` pass on what is not,
`moto_face.py` answers that; `server.py` starts and ends both processes (`serving.py`).
Rule: nothing here listens anywhere but on 127.0.0.1. The shells need the extra `local`; importing
the pure modules and `server.py` does not.
"""
