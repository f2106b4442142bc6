"""The stream: its shards by the model of `local/`, its records by arithmetic.

Each shard receives records at a steady rate, its share of the stream's by the width of its hash
range. Record number n (from 1) of a shard arrives n / rate seconds after it opened; nothing is
stored, so that an hour of a thousand shards costs nothing. May not know: leases.
"""

from __future__ import annotations

import math
import random
from typing import Final, Literal

import msgspec

from kclrun.local.limits import STORED_BYTES_MAX, Storage
from kclrun.local.sequence_numbers import parse
from kclrun.local.shards import ShardLog
from kclrun.local.stream import Stream
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, Shard
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT

__all__ = ["RECORD_BYTES", "FetchFate", "ShardStream", "StreamFaults"]

# What a record weighs for `throughputKBps`: DESIGN 14 measures with 200 B.
RECORD_BYTES: Final = 200


FetchFate = Literal["throttled", "unreachable", "expired_iterator"]


class StreamFaults(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requests to Kinesis that fail, and how late a listing shows new shards."""

    throttled: float = 0.0
    unreachable: float = 0.0
    expired_iterator: float = 0.0
    listing_lag_max_s: float = 0.0


class ShardStream:
    """One stream of `shard_count` shards that receives `records_per_s` in all.

    `faults` may be changed at any time: a storm, then calm. `chance` is for them.
    """

    def __init__(
        self, shard_count: int, records_per_s: float, chance: random.Random | None = None
    ) -> None:
        self.faults = StreamFaults()
        self._chance = chance if chance is not None else random.Random(0)
        self._records_per_s = records_per_s
        self._stream = Stream(
            name="simulated",
            arn="arn:aws:kinesis:eu-central-1:000000000000:stream/simulated",
            stream_id=1,
            account_id="000000000000",
            shard_count=shard_count,
            now=WallTime(WORLD_BEGAN_AT),
            storage=Storage(STORED_BYTES_MAX),
        )
        self._logs: dict[str, ShardLog] = {}
        self._rates: dict[str, float] = {}
        self._remember(0.0)

    def reshard(self, count: int, now: float) -> None:
        """UpdateShardCount. Raises: InvalidRequest beyond double or half."""
        self._stream.update_shard_count(count, _wall(now))
        self._remember(now)

    def split(self, shard_id: str, now: float) -> None:
        """SplitShard, in the middle of its hash range. Raises: InvalidRequest if it is closed."""
        hash_range = self._logs[shard_id].hash_range
        self._stream.split(shard_id, (hash_range.start + hash_range.end + 1) // 2, _wall(now))
        self._remember(now)

    def merge(self, shard_id: str, adjacent_id: str, now: float) -> None:
        """MergeShards. Raises: InvalidRequest if they are no neighbours, or closed."""
        self._stream.merge(shard_id, adjacent_id, _wall(now))
        self._remember(now)

    def shards(self) -> tuple[ShardLog, ...]:
        """All that ever were, oldest first."""
        return tuple(self._logs.values())

    def open_ids(self) -> tuple[str, ...]:
        """In the order of their hash ranges."""
        return tuple(log.shard_id for log in self._stream.open_shards())

    def open_count(self) -> int:
        return len(self._stream.open_shards())

    def listing(self, now: float) -> tuple[Shard, ...]:
        """ListShards: as the stream is, or was a while ago."""
        lag_max_s = self.faults.listing_lag_max_s
        shown_at = _wall(now - (self._chance.uniform(0, lag_max_s) if lag_max_s else 0.0))
        logs = self._stream.shards(_wall(now))
        return tuple(_as_of(shown_at, log) for log in logs if log.created_at <= shown_at)

    def fetch_fate(self) -> FetchFate | None:
        """What becomes of one GetRecords; None is an answer."""
        faults = self.faults
        drawn = self._chance.random() if faults != _FAULTLESS else 1.0
        if drawn < faults.throttled:
            return "throttled"
        if drawn < faults.throttled + faults.unreachable:
            return "unreachable"
        if drawn < faults.throttled + faults.unreachable + faults.expired_iterator:
            return "expired_iterator"
        return None

    def at_trim_horizon(self, now: float) -> tuple[Shard, ...]:
        """ListShards AT_TRIM_HORIZON, while nothing is trimmed: the shards without a parent."""
        return tuple(shard for shard in self.listing(now) if not shard.parents)

    def children_of(self, shard_id: str) -> tuple[ChildShard, ...]:
        return self._stream.children_of(shard_id)

    def parents_of(self, shard_id: str) -> tuple[str, ...]:
        return self._logs[shard_id].parents

    def arrived(self, shard_id: str, now: float) -> int:
        """How many records the shard has received by now."""
        log = self._logs[shard_id]
        until = _wall(now) if log.closed_at is None else min(_wall(now), log.closed_at)
        return max(0, int((until - log.created_at) * self._rates[shard_id]))

    def arrival_of(self, shard_id: str, number: int) -> float:
        """When record `number` arrives, if the shard stays open; never, where nothing does."""
        log = self._logs[shard_id]
        rate = self._rates[shard_id]
        return log.created_at - WORLD_BEGAN_AT + number / rate if rate else math.inf

    def total(self, shard_id: str) -> int | None:
        """How many records it holds in all, once it is closed."""
        log = self._logs[shard_id]
        return (
            None
            if log.closed_at is None
            else self.arrived(shard_id, log.closed_at - WORLD_BEGAN_AT)
        )

    def holds(self, shard_id: str, now: float) -> bool:
        """Whether the service has not forgotten it, whatever a listing shows."""
        return any(log.shard_id == shard_id for log in self._stream.shards(_wall(now)))

    def is_known(self, shard_id: str) -> bool:
        """Whether there ever was such a shard."""
        return shard_id in self._logs

    def is_closed(self, shard_id: str) -> bool:
        return self._logs[shard_id].closed_at is not None

    def position(self, shard_id: str, number: int) -> ExtendedSequenceNumber:
        """The sequence number of record `number`."""
        log = self._logs[shard_id]
        second = int(log.created_at + number / self._rates[shard_id])
        return ExtendedSequenceNumber(str(log.numbering.number(number, second)))

    def number_of(self, shard_id: str, position: ExtendedSequenceNumber) -> int:
        """How many records are at or below a position; all of them at SHARD_END."""
        if position == SHARD_END:
            return self.total(shard_id) or 0
        parsed = parse(position.sequence_number)
        return 0 if parsed is None else parsed.counter

    def _rate(self, log: ShardLog) -> float:
        width = log.hash_range.end - log.hash_range.start + 1
        return self._records_per_s * width / (HASH_KEY_MAX + 1)

    def _remember(self, now: float) -> None:
        for log in self._stream.shards(_wall(now)):
            self._logs.setdefault(log.shard_id, log)
            self._rates.setdefault(log.shard_id, self._rate(log))


def _as_of(then: WallTime, log: ShardLog) -> Shard:
    """A shard that was closed later was open then."""
    shard = log.describe()
    if log.closed_at is None or log.closed_at <= then:
        return shard
    return msgspec.structs.replace(shard, ending_sequence_number=None)


_FAULTLESS: Final = StreamFaults()


def _wall(now: float) -> WallTime:
    return WallTime(WORLD_BEGAN_AT + now)
