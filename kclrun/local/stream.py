"""One stream of the model: hash routing, resharding, retention, and reading a shard to its end.

It knows neither other streams nor wire formats nor clocks. Sources: the Kinesis API reference;
where that says nothing, the behaviour that the Java KCL relies on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from kclrun.errors import Throttled
from kclrun.local.hash_ranges import Merge, Split, even_ranges_near, steps_to
from kclrun.local.limits import Storage
from kclrun.local.refusals import (
    invalid_argument,
    limit_exceeded,
    resource_in_use,
    resource_not_found,
    throughput_exceeded,
    validation,
)
from kclrun.local.settings import KinesisSettings
from kclrun.local.shard_log import RECORD_OVERHEAD_BYTES, ShardLog, StoredRecord, shard_id_of
from kclrun.local.shard_map import ShardMap
from kclrun.model.quotas import (
    GET_BYTES_MAX,
    HASH_KEY_DIGITS_MAX,
    PARTITION_KEY_CHARACTERS_MAX,
    RECORD_BYTES_DEFAULT,
    RETENTION_HOURS_MIN,
)
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, hash_key_of
from kclrun.model.time import WallTime

# A record to put, its bounds, and its result. A refusal names neither data nor partition key.


class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """One record to be written. `hash_key` is the ExplicitHashKey."""

    data: bytes = msgspec.field(name="Data")
    partition_key: str | None = msgspec.field(name="PartitionKey", default=None)
    hash_key: str | None = msgspec.field(name="ExplicitHashKey", default=None)


class PutResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The result of one record of a PutRecords: its shard and sequence number, or an error."""

    sequence_number: str | None = msgspec.field(name="SequenceNumber", default=None)
    shard_id: str | None = msgspec.field(name="ShardId", default=None)
    error_code: str | None = msgspec.field(name="ErrorCode", default=None)
    error_message: str | None = msgspec.field(name="ErrorMessage", default=None)


def check_entry(entry: PutEntry, bytes_max: int, where: str) -> int | None:
    """The explicit hash key as a number, if there is one. `where` names the record in a refusal.

    Raises: InvalidRequest for a key, an explicit hash key or a size out of bounds.
    """
    key = entry.partition_key
    if not key or len(key) > PARTITION_KEY_CHARACTERS_MAX:
        raise invalid_argument(
            f"PartitionKey of {where} must have 1 to {PARTITION_KEY_CHARACTERS_MAX} characters."
        )
    size_bytes = len(entry.data) + len(key.encode())
    if size_bytes > bytes_max:
        raise invalid_argument(
            f"{where} is of {size_bytes} bytes (data and partition key), more than the stream's"
            f" maximum of {bytes_max} bytes."
        )
    text = entry.hash_key
    if text is None:
        return None
    is_number = text.isascii() and text.isdigit() and len(text) <= HASH_KEY_DIGITS_MAX
    if not is_number or int(text) > HASH_KEY_MAX:
        raise invalid_argument(
            f"ExplicitHashKey of {where} is not a number between 0 and {HASH_KEY_MAX}."
        )
    return int(text)


# The modes of a stream. The model does not scale by itself.
PROVISIONED: Final = "PROVISIONED"
ON_DEMAND: Final = "ON_DEMAND"
# "You can assign up to 50 tags to a data stream." Their keys may not begin as AWS's own do.
_TAGS_MAX: Final = 50
_OF_AWS: Final = "aws:"


def add_tags(tags: dict[str, str], more: Mapping[str, str]) -> None:
    """Add or replace tags. Raises: InvalidRequest, before anything is changed."""
    if any(key.lower().startswith(_OF_AWS) for key in more):
        raise invalid_argument(f"The key of a tag must not begin with {_OF_AWS}")
    if len(tags.keys() | more.keys()) > _TAGS_MAX:
        raise invalid_argument(f"There would be more than {_TAGS_MAX} tags.")
    tags.update(more)


_DAY_S: Final = 24 * 3600.0
RETENTION_DEFAULT_S: Final = RETENTION_HOURS_MIN * 3600.0
# UpdateShardCount: "Scale more than ten times per rolling 24-hour period per stream", "Scale up to
# more than 10000 shards in a stream".
_SCALINGS_MAX: Final = 10
SCALED_SHARDS_MAX: Final = 10_000


class Page(msgspec.Struct, frozen=True):
    """The result of one read of a shard. `next_position` None is the end of a closed shard."""

    records: list[StoredRecord]
    next_position: int | None
    millis_behind_latest: int
    children: tuple[ChildShard, ...] = ()


class Stream:
    """One stream: its phases and changes, and the records that go into its shards and come out.

    A closed shard keeps its records until the retention trims them, and is listed until its end is
    older than the retention.
    """

    def __init__(
        self,
        name: str,
        shard_count: int,
        settings: KinesisSettings,
        storage: Storage,
        now: WallTime,
        *,
        record_bytes_max: int = RECORD_BYTES_DEFAULT,
        mode: str = PROVISIONED,
    ) -> None:
        self.name = name
        self.arn = f"arn:aws:kinesis:{settings.region}:{settings.account_id}:stream/{name}"
        # By name and time of creation: an iterator of a deleted stream must not be valid for a
        # later stream of the same name.
        identity = blake2b(f"{self.arn}@{now!r}".encode(), digest_size=8).digest()
        self.stream_id = int.from_bytes(identity, "big")
        self.created_at = now
        self.retention_s = RETENTION_DEFAULT_S
        self.record_bytes_max = record_bytes_max
        self.tags: dict[str, str] = {}
        self.mode = mode
        # Remembered for the descriptions; nothing here depends on them.
        self.encryption_key: str | None = None
        self.shard_metrics: frozenset[str] = frozenset()
        self._account_id = settings.account_id
        self._storage = storage
        self._limits = settings.limits
        self._settle_s = settings.settle_s
        self._update_s = max(settings.settle_s, settings.update_s)
        # When UpdateShardCount was called, in the last day.
        self._scaled_at: deque[WallTime] = deque()
        self._phase = "CREATING"
        self._settled_at = WallTime(now + settings.settle_s)
        self._shards = ShardMap(shard_count, now, settings.limits)

    def status(self, now: WallTime) -> str:
        """CREATING or UPDATING until the change has settled, DELETING until it is removed."""
        return "ACTIVE" if now >= self._settled_at and self._phase != "DELETING" else self._phase

    def is_gone(self, now: WallTime) -> bool:
        return self._phase == "DELETING" and now >= self._settled_at

    def delete(self, now: WallTime) -> None:
        """Remove the records at once. The stream itself is removed after `settle_s`."""
        self._enter("DELETING", now)
        for shard in self._shards.all():
            shard.free(self._storage)
        self._shards.clear()

    def horizon(self, now: WallTime) -> WallTime:
        """The arrival time before which records are trimmed."""
        return WallTime(max(now - self.retention_s, self.created_at))

    def shards(self, now: WallTime) -> list[ShardLog]:
        """All shards that can still hold records, oldest first."""
        self.trim(now)
        return self._shards.all()

    def open_shards(self) -> list[ShardLog]:
        """In the order of their hash ranges; a later split or merge does not change the list."""
        return self._shards.open()

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
        """Remove records older than the retention, and shards that were closed before that."""
        horizon = self.horizon(now)
        for shard in self._shards.all():
            shard.trim(horizon, self._storage)
            if self._is_forgotten(shard, now):
                # If a clock was set back, records may have arrived "after" the shard was closed.
                shard.free(self._storage)
                self._shards.remove(shard)

    def put(
        self, data: bytes, partition_key: str, hash_key: int | None, now: WallTime
    ) -> tuple[str, StoredRecord]:
        """Write one record. Also returns its shard's id. `hash_key` overrides the key's MD5.

        The caller must check the bounds of a record. Raises: Throttled (a shard's rate, or the
        whole model's bytes).
        """
        size_bytes = len(data) + len(partition_key.encode())
        key = hash_key_of(partition_key) if hash_key is None else hash_key
        shard = self._shards.open_at(key)
        self._storage.require_room(size_bytes + RECORD_OVERHEAD_BYTES)
        if shard.meter is not None and not shard.meter.admit_write(size_bytes, now):
            raise self._rate_exceeded(shard)
        return shard.shard_id, shard.append(data, partition_key, size_bytes, now, self._storage)

    def read(self, shard_number: int, position: int, limit: int, now: WallTime) -> Page:
        """Up to `limit` records from a position on. Raises: NotFound, Throttled.

        The page that reaches the end of a closed shard ends it, with or without records. A page
        that is filled to a bound never ends the shard, because it does not look further.
        """
        shard = self.shard(shard_id_of(shard_number), now)
        shard.trim(self.horizon(now), self._storage)
        meter = shard.meter
        if meter is not None and not meter.admit_read(now):
            raise self._rate_exceeded(shard)
        first = max(position, shard.start)
        records = shard.page(first, limit, GET_BYTES_MAX)
        following = first + len(records)
        if meter is not None:
            meter.count_read(shard.size_between(first, following), now)
        if following < shard.end:
            behind_s = now - shard.arrival_of(following)
            return Page(records, following, max(1, int(behind_s * 1000)))
        if shard.closed_at is None or len(records) == limit:
            return Page(records, following, 0)
        return Page(records, None, 0, self._shards.children_of(shard))

    def children_of(self, shard: ShardLog) -> tuple[ChildShard, ...]:
        return self._shards.children_of(shard)

    def split(self, shard_id: str, at: int, now: WallTime) -> None:
        """Close a shard and open two. Raises: NotFound, InvalidRequest, Unavailable (in use)."""
        self._require_scalable("SplitShard", now)
        shard = self._open_shard(shard_id, now)
        if not shard.hash_range.start + 1 < at < shard.hash_range.end:
            raise invalid_argument(
                f"NewStartingHashKey {at} used in SplitShard() on shard {shard_id} in stream"
                f" {self.name} under account {self._account_id} is not both greater than one plus"
                f" the shard's StartingHashKey {shard.hash_range.start} and less than the shard's"
                f" EndingHashKey {shard.hash_range.end}."
            )
        self._shards.reshard(Split(shard.hash_range, at), now)
        self._enter("UPDATING", now)

    def merge(self, shard_id: str, adjacent_id: str, now: WallTime) -> None:
        """Close two neighbours and open one. Raises: NotFound, InvalidRequest, Unavailable."""
        self._require_scalable("MergeShards", now)
        one, other = self._open_shard(shard_id, now), self._open_shard(adjacent_id, now)
        low, high = sorted((one, other), key=lambda shard: shard.hash_range.start)
        if low.hash_range.end + 1 != high.hash_range.start:
            raise invalid_argument(
                f"Shards {shard_id} and {adjacent_id} in stream {self.name} under account"
                f" {self._account_id} are not an adjacent pair of shards eligible for merging"
            )
        self._shards.reshard(Merge(one.hash_range, other.hash_range), now)
        self._enter("UPDATING", now)

    def update_shard_count(self, count: int, now: WallTime) -> None:
        """Uniform scaling. Raises: InvalidRequest (beyond double or half; its mode), Throttled
        (too often, with limits), Unavailable."""
        self._require_scalable("UpdateShardCount", now)
        current = self._shards.open_count
        if count > 2 * current or 2 * count < current or count > SCALED_SHARDS_MAX:
            raise invalid_argument(
                f"UpdateShardCount cannot go from {current} open shards to {count}: at most double"
                f" and at least half of the current count is possible in one call, and at most"
                f" {SCALED_SHARDS_MAX} shards."
            )
        if self._limits is not None:
            self._count_scaling(now)
        ranges = [shard.hash_range for shard in self._shards.open()]
        for step in steps_to(ranges, even_ranges_near(ranges, count)):
            self._shards.reshard(step, now)
        self._enter("UPDATING", now)

    def _count_scaling(self, now: WallTime) -> None:
        while self._scaled_at and self._scaled_at[0] <= now - _DAY_S:
            self._scaled_at.popleft()
        if len(self._scaled_at) >= _SCALINGS_MAX:
            raise limit_exceeded(
                f"Stream {self.name} under account {self._account_id} was scaled {_SCALINGS_MAX}"
                " times within 24 hours, the most that is possible."
            )
        self._scaled_at.append(now)

    def change(self, now: WallTime) -> None:
        """One of its settings changes: it is UPDATING. Raises: Unavailable (in use)."""
        self._require_active(now)
        self._enter("UPDATING", now)

    def change_mode(self, mode: str, now: WallTime) -> None:
        """Raises: Unavailable (in use)."""
        self.change(now)
        self.mode = mode

    def encrypt(self, key: str | None, now: WallTime) -> None:
        """Remember the key of encryption at rest, None for none. Raises: Unavailable (in use)."""
        self.change(now)
        self.encryption_key = key

    def _open_shard(self, shard_id: str, now: WallTime) -> ShardLog:
        shard = self.shard(shard_id, now)
        if shard.closed_at is not None:
            raise invalid_argument(
                f"Shard {shard_id} in stream {self.name} under account {self._account_id} is"
                " closed: only open shards can be split or merged."
            )
        return shard

    def _require_active(self, now: WallTime) -> None:
        if self.status(now) != "ACTIVE":
            raise resource_in_use(
                f"Stream {self.name} under account {self._account_id} not ACTIVE, instead in"
                f" state {self.status(now)}"
            )

    def _require_scalable(self, operation: str, now: WallTime) -> None:
        self._require_active(now)
        if self.mode == ON_DEMAND:
            raise validation(
                f"{operation} is not possible for stream {self.name} under account"
                f" {self._account_id}: its mode is {ON_DEMAND}."
            )

    def _enter(self, phase: str, now: WallTime) -> None:
        self._phase = phase
        self._settled_at = WallTime(
            now + (self._update_s if phase == "UPDATING" else self._settle_s)
        )

    def _is_forgotten(self, shard: ShardLog, now: WallTime) -> bool:
        return shard.closed_at is not None and shard.closed_at < now - self.retention_s

    def _rate_exceeded(self, shard: ShardLog) -> Throttled:
        return throughput_exceeded(
            f"Rate exceeded for shard {shard.shard_id} in stream {self.name} under account"
            f" {self._account_id}."
        )
