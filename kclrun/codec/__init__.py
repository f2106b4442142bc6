"""Bytes to values and back, each within declared limits: GetRecords bodies, KPL aggregates, event
streams, CBOR, payloads, rows.

It must not know clocks, sockets, files, threads or ports. Rule: any bytes give a value or one named
error, and never more memory than a small multiple of the limits. No message names a payload, a key
or an iterator.
"""
