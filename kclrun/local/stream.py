"""One stream: hash routing, resharding, retention, and reading a shard to its end.

Knows: its shards, open and closed, and what their limits are. May not know: other streams, wire
formats, clocks. Rules: the open shards tile the hash space at every moment; a closed shard keeps
its records until retention trims them, and is listed until its end is that old. Sources: the
Kinesis API reference; where it is silent, what the Java KCL relies on. Look next: `shards.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import md5
from typing import Final

import msgspec

from kclrun.errors import Throttled
from kclrun.local.limits import MIB, ShardLimits, ShardMeter, Storage
from kclrun.local.refusals import (
    invalid_argument,
    resource_in_use,
    resource_not_found,
    throughput_exceeded,
)
from kclrun.local.resharding import Merge, Split, even_ranges, steps_to
from kclrun.local.shards import RECORD_OVERHEAD_BYTES, ShardLog, StoredRecord, shard_id_of
from kclrun.model.shard import ChildShard, HashRange
from kclrun.model.time import WallTime

__all__ = [
    "PAGE_BYTES_MAX",
    "PAGE_RECORDS_MAX",
    "RECORD_BYTES_DEFAULT",
    "RETENTION_DEFAULT_S",
    "Page",
    "Stream",
    "hash_key_of",
]

# GetRecords: "up to 10 MB of data ... or up to 10,000 records".
PAGE_BYTES_MAX: Final = 10 * MIB
PAGE_RECORDS_MAX: Final = 10_000
RECORD_BYTES_DEFAULT: Final = MIB
RETENTION_DEFAULT_S: Final = 24 * 3600.0


class Page(msgspec.Struct, frozen=True):
    """What one read of a shard gives. `next_position` None is the end of a closed shard."""

    records: list[StoredRecord]
    next_position: int | None
    millis_behind_latest: int
    children: tuple[ChildShard, ...] = ()


def hash_key_of(partition_key: str) -> int:
    """MD5 of the key's UTF-8 bytes as an unsigned 128-bit number."""
    return int.from_bytes(md5(partition_key.encode(), usedforsecurity=False).digest(), "big")


class Stream:
    """One stream and all its shards that are not forgotten yet."""

    def __init__(
        self,
        *,
        name: str,
        arn: str,
        stream_id: int,
        account_id: str,
        shard_count: int,
        now: WallTime,
        storage: Storage,
        limits: ShardLimits | None = None,
        settle_s: float = 0.0,
        record_bytes_max: int = RECORD_BYTES_DEFAULT,
    ) -> None:
        self.name = name
        self.arn = arn
        self.stream_id = stream_id
        self.created_at = now
        self.retention_s = RETENTION_DEFAULT_S
        self.record_bytes_max = record_bytes_max
        self.tags: dict[str, str] = {}
        self._account_id = account_id
        self._storage = storage
        self._limits = limits
        self._settle_s = settle_s
        self._phase = "CREATING"
        self._settled_at = WallTime(now + settle_s)
        self._shards: dict[str, ShardLog] = {}
        self._meters: dict[str, ShardMeter] = {}
        self._next_number = 0
        for hash_range in even_ranges(shard_count):
            self._open(hash_range, (), now)
        self._route()

    def status(self, now: WallTime) -> str:
        """CREATING or UPDATING until `settle_s` after the change, DELETING until it is gone."""
        return "ACTIVE" if now >= self._settled_at and self._phase != "DELETING" else self._phase

    def is_gone(self, now: WallTime) -> bool:
        return self._phase == "DELETING" and now >= self._settled_at

    def delete(self, now: WallTime) -> None:
        """Records are gone at once; the stream is, once its status has lasted `settle_s`."""
        self._enter("DELETING", now)
        for shard in self._shards.values():
            shard.free(self._storage)
        self._shards.clear()
        self._route()

    def horizon(self, now: WallTime) -> WallTime:
        """The arrival time before which records are gone."""
        return WallTime(max(now - self.retention_s, self.created_at))

    def shards(self, now: WallTime) -> list[ShardLog]:
        """All shards that can still hold records, oldest first."""
        self.trim(now)
        return list(self._shards.values())

    def open_shards(self) -> list[ShardLog]:
        """In the order of their hash ranges."""
        return self._open_shards

    def shard(self, shard_id: str, now: WallTime) -> ShardLog:
        """Raises: NotFound, also for a closed shard whose records have all expired."""
        shard = self._shards.get(shard_id)
        if shard is None or self._is_forgotten(shard, now):
            raise resource_not_found(
                f"Could not find shard {shard_id} in stream {self.name} under account"
                f" {self._account_id}."
            )
        return shard

    def trim(self, now: WallTime) -> None:
        """Forget records older than the retention, and closed shards that ended before that."""
        horizon = self.horizon(now)
        for shard in list(self._shards.values()):
            shard.trim(horizon, self._storage)
            if self._is_forgotten(shard, now):
                # After a clock was set back, records may have arrived "after" the shard's end.
                shard.free(self._storage)
                del self._shards[shard.shard_id]
                self._meters.pop(shard.shard_id, None)

    def put(
        self, data: bytes, partition_key: str, hash_key: int | None, now: WallTime
    ) -> tuple[str, StoredRecord]:
        """Write one record; gives its shard's id too. `hash_key` overrides the key's MD5.

        Bounds of a record are the caller's to check. Raises: Throttled (a shard's rate, or the
        whole model's bytes).
        """
        size_bytes = len(data) + len(partition_key.encode())
        key = hash_key_of(partition_key) if hash_key is None else hash_key
        shard = self._open_shards[bisect_right(self._open_starts, key) - 1]
        self._reserve(size_bytes)
        meter = self._meters.get(shard.shard_id)
        if meter is not None and not meter.admit_write(size_bytes, now):
            raise self._rate_exceeded(shard)
        return shard.shard_id, shard.append(data, partition_key, size_bytes, now, self._storage)

    def read(self, shard_number: int, position: int, limit: int, now: WallTime) -> Page:
        """Up to `limit` records from a position on. Raises: NotFound, Throttled.

        The page that reaches the end of a closed shard ends it, with or without records; a page
        filled to a bound never does, as it has not looked further.
        """
        shard = self.shard(shard_id_of(shard_number), now)
        shard.trim(self.horizon(now), self._storage)
        meter = self._meters.get(shard.shard_id)
        if meter is not None and not meter.admit_read(now):
            raise self._rate_exceeded(shard)
        first = max(position, shard.start)
        records = shard.page(first, limit, PAGE_BYTES_MAX)
        following = first + len(records)
        if meter is not None:
            meter.count_read(shard.size_between(first, following), now)
        if following < shard.end:
            behind_s = now - shard.arrival_of(following)
            return Page(records, following, max(1, int(behind_s * 1000)))
        if shard.closed_at is None or len(records) == limit:
            return Page(records, following, 0)
        return Page(records, None, 0, self.children_of(shard.shard_id))

    def children_of(self, shard_id: str) -> tuple[ChildShard, ...]:
        return tuple(
            ChildShard(child.shard_id, child.parents, child.hash_range)
            for child in self._shards.values()
            if shard_id in child.parents
        )

    def split(self, shard_id: str, at: int, now: WallTime) -> None:
        """Close a shard and open two. Raises: NotFound, InvalidRequest, Unavailable (in use)."""
        self._require_active(now)
        shard = self._open_shard(shard_id, now)
        if not shard.hash_range.start + 1 < at < shard.hash_range.end:
            raise invalid_argument(
                f"NewStartingHashKey {at} used in SplitShard() on shard {shard_id} in stream"
                f" {self.name} under account {self._account_id} is not both greater than one plus"
                f" the shard's StartingHashKey {shard.hash_range.start} and less than the shard's"
                f" EndingHashKey {shard.hash_range.end}."
            )
        self._apply(Split(shard.hash_range, at), now)
        self._enter("UPDATING", now)

    def merge(self, shard_id: str, adjacent_id: str, now: WallTime) -> None:
        """Close two neighbours and open one. Raises: NotFound, InvalidRequest, Unavailable."""
        self._require_active(now)
        one, other = self._open_shard(shard_id, now), self._open_shard(adjacent_id, now)
        low, high = sorted((one, other), key=lambda shard: shard.hash_range.start)
        if low.hash_range.end + 1 != high.hash_range.start:
            raise invalid_argument(
                f"Shards {shard_id} and {adjacent_id} in stream {self.name} under account"
                f" {self._account_id} are not an adjacent pair of shards eligible for merging"
            )
        self._apply(Merge(one.hash_range, other.hash_range), now)
        self._enter("UPDATING", now)

    def update_shard_count(self, count: int, now: WallTime) -> None:
        """Uniform scaling. Raises: InvalidRequest (beyond double or half), Unavailable."""
        self._require_active(now)
        current = len(self._open_shards)
        if count > 2 * current or 2 * count < current:
            raise invalid_argument(
                f"UpdateShardCount cannot go from {current} open shards to {count}: at most double"
                " and at least half of the current count is possible in one call."
            )
        ranges = [shard.hash_range for shard in self._open_shards]
        for step in steps_to(ranges, even_ranges(count)):
            self._apply(step, now)
        self._enter("UPDATING", now)

    def _apply(self, step: Split | Merge, now: WallTime) -> None:
        by_range = {shard.hash_range: shard for shard in self._open_shards}
        match step:
            case Split(whole, at):
                parent = by_range[whole]
                parent.close(now)
                self._open(HashRange(whole.start, at - 1), (parent,), now)
                self._open(HashRange(at, whole.end), (parent,), now)
            case Merge(one, other):
                parents = (by_range[one], by_range[other])
                for parent in parents:
                    parent.close(now)
                start, end = min(one.start, other.start), max(one.end, other.end)
                self._open(HashRange(start, end), parents, now)
        self._route()

    def _open(self, hash_range: HashRange, parents: tuple[ShardLog, ...], now: WallTime) -> None:
        shard = ShardLog(self._next_number, hash_range, parents, now)
        self._next_number += 1
        self._shards[shard.shard_id] = shard
        if self._limits is not None:
            self._meters[shard.shard_id] = ShardMeter(self._limits, now)

    def _route(self) -> None:
        """Rebuild the routing table: the open shards by where their hash range starts."""
        still_open = [shard for shard in self._shards.values() if shard.closed_at is None]
        self._open_shards = sorted(still_open, key=lambda shard: shard.hash_range.start)
        self._open_starts = [shard.hash_range.start for shard in self._open_shards]

    def _open_shard(self, shard_id: str, now: WallTime) -> ShardLog:
        shard = self.shard(shard_id, now)
        if shard.closed_at is not None:
            raise invalid_argument(
                f"Shard {shard_id} in stream {self.name} under account {self._account_id} is"
                " closed: only open shards can be split or merged."
            )
        return shard

    def _reserve(self, size_bytes: int) -> None:
        if not self._storage.has_room(size_bytes + RECORD_OVERHEAD_BYTES):
            raise throughput_exceeded(
                f"The embedded Kinesis is full: {self._storage.used_bytes} of at most"
                f" {self._storage.bytes_max} bytes are held and none is older than its stream's"
                " retention. Delete a stream, or start it with a larger stored_bytes_max."
            )

    def _require_active(self, now: WallTime) -> None:
        if self.status(now) != "ACTIVE":
            raise resource_in_use(
                f"Stream {self.name} under account {self._account_id} not ACTIVE, instead in"
                f" state {self.status(now)}"
            )

    def _enter(self, phase: str, now: WallTime) -> None:
        self._phase = phase
        self._settled_at = WallTime(now + self._settle_s)

    def _is_forgotten(self, shard: ShardLog, now: WallTime) -> bool:
        return shard.closed_at is not None and shard.closed_at < now - self.retention_s

    def _rate_exceeded(self, shard: ShardLog) -> Throttled:
        return throughput_exceeded(
            f"Rate exceeded for shard {shard.shard_id} in stream {self.name} under account"
            f" {self._account_id}."
        )
