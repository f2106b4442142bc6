"""The embedded AWS: a faithful small model of Kinesis, its HTTP face, and moto for the rest.

Pure (time and secrets are arguments; the simulator drives these in virtual time):
`stream.py` over `shards.py`, `resharding.py`, `listing.py`, `limits.py`, `iterators.py`,
`sequence_numbers.py`; `service.py` is the account that holds the streams.
Shells: `operations.py` speaks AWS's JSON, `http_face.py` HTTP, `forwarding.py` passes on what is
not Kinesis, `moto_process.py` answers it; `server.py` starts and ends both processes.
Rule: nothing here listens anywhere but on 127.0.0.1. Needs the extra `local`; importing the pure
modules does not.
"""
