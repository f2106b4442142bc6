"""What is put into a stream: one record to be, and what the service said about it.

May not know: how it is sent. Rule: neither payload nor key is in a representation.
"""

from __future__ import annotations

import msgspec

__all__ = ["PutEntry", "PutResult"]


class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """One record to put. `user_records` is how many it holds: more than one in an aggregate."""

    data: bytes
    partition_key: str
    explicit_hash_key: str | None = None
    user_records: int = 1

    @property
    def size_bytes(self) -> int:
        """As the service counts it."""
        return len(self.data) + len(self.partition_key.encode())

    def __repr__(self) -> str:
        return f"PutEntry({len(self.data)} bytes)"


class PutResult(msgspec.Struct, frozen=True, rename="pascal"):
    """What became of one record: where it went, or the code of the refusal."""

    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
