"""The embedded AWS: a small, exact model of Kinesis, its HTTP endpoint, and moto for the rest.

The model is pure: time and secrets are arguments, and the simulator drives it in virtual time. Only
`http_server.py`, `moto_server.py`, `forwarding.py`, `server.py` and the process modules do I/O, and
they listen only on 127.0.0.1. They need the extra `local`; importing `server.py` or the pure
modules does not.
"""
