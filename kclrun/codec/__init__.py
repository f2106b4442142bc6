"""Bytes in, values out: GetRecords bodies and KPL aggregates, each within declared limits.

Holds: the decoder of GetRecords bodies (`get_records`), the opening of aggregates (`kpl`), their
making (`aggregator`), the schema of both (`kpl.proto`, `kpl_messages`), hash keys (`hash_keys`).
May know: `model`, `errors`, msgspec, protobuf, hashlib. May not know: clocks, sockets, files,
threads, boto3, ports, who asks.
Rule: any bytes give a value or one named error, and never more memory than a small multiple of
the limits declared here. No message names a payload, a key or an iterator.
"""
