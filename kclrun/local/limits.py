"""The write and read limits of one shard, and the bytes that the whole model may store.

Time is an argument. It may stand still or go back, and then no tokens are added.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.local.refusals import throughput_exceeded
from kclrun.model.quotas import (
    MIB,
    SHARD_READ_BYTES_MAX,
    SHARD_READ_CALLS_MAX,
    SHARD_WRITE_BYTES_MAX,
    SHARD_WRITE_RECORDS_MAX,
)
from kclrun.model.time import WallTime

# A development machine has room for it; the demo's year of flights is under 200 MiB.
STORED_BYTES_MAX: Final = 2 * 1024 * MIB


class ShardLimits(msgspec.Struct, frozen=True):
    """The limits of one shard for each second."""

    write_records: int
    write_bytes: int
    read_calls: int
    read_bytes: int


AWS_LIMITS: Final = ShardLimits(
    write_records=SHARD_WRITE_RECORDS_MAX,
    write_bytes=SHARD_WRITE_BYTES_MAX,
    read_calls=SHARD_READ_CALLS_MAX,
    read_bytes=SHARD_READ_BYTES_MAX,
)


class _Bucket:
    """A token bucket, refilled at `rate` a second. It holds the tokens of one second."""

    __slots__ = ("_at", "_rate", "_tokens")

    def __init__(self, rate: float, now: WallTime) -> None:
        self._rate = rate
        self._tokens = rate
        self._at = now

    def has(self, tokens: float, now: WallTime) -> bool:
        if now > self._at:
            self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
            self._at = now
        return self._tokens >= tokens

    def take(self, tokens: float) -> None:
        self._tokens -= tokens


class ShardMeter:
    """Counts one shard's traffic against its limits."""

    __slots__ = ("_limits", "_read_bytes", "_read_calls", "_reads_resume_at", "_writes", "_written")

    def __init__(self, limits: ShardLimits, now: WallTime) -> None:
        self._limits = limits
        self._writes = _Bucket(limits.write_records, now)
        self._written = _Bucket(limits.write_bytes, now)
        self._read_calls = _Bucket(limits.read_calls, now)
        self._read_bytes = _Bucket(limits.read_bytes, now)
        self._reads_resume_at = now

    def admit_write(self, size_bytes: int, now: WallTime) -> bool:
        """Whether a record of this size may be written now; if so it is counted.

        A record larger than the limit of one second (10 MiB records on a 1 MiB/s shard) needs a
        full bucket and makes it negative, like the service's burst for large records.
        """
        needed = min(size_bytes, self._limits.write_bytes)
        if not (self._writes.has(1, now) and self._written.has(needed, now)):
            return False
        self._writes.take(1)
        self._written.take(size_bytes)
        return True

    def admit_read(self, now: WallTime) -> bool:
        """Whether a GetRecords may be made now; if so the call is counted."""
        if now < self._reads_resume_at:
            return False
        if not (self._read_calls.has(1, now) and self._read_bytes.has(0, now)):
            return False
        self._read_calls.take(1)
        return True

    def count_read(self, size_bytes: int, now: WallTime) -> None:
        """Count an answer. "If a call returns 10 MB, calls made within the next 5 seconds throw":
        after an answer above the limit of one second, the next call must wait for all of it."""
        if size_bytes > self._limits.read_bytes:
            self._reads_resume_at = WallTime(now + size_bytes / self._limits.read_bytes)
        else:
            self._read_bytes.take(size_bytes)


class Storage:
    """The bytes that the whole model holds, and their limit."""

    __slots__ = ("bytes_max", "used_bytes")

    def __init__(self, bytes_max: int = STORED_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self.bytes_max

    def require_room(self, size_bytes: int) -> None:
        """Raises: Throttled if a record of this size does not fit."""
        if not self.has_room(size_bytes):
            raise throughput_exceeded(
                f"The embedded Kinesis is full: {self.used_bytes} of at most"
                f" {self.bytes_max} bytes are held and none is older than its stream's"
                " retention. Delete a stream, or start it with a larger stored_bytes_max."
            )
