"""The stream: its shards by the model of `local/`, its records by arithmetic.

Each shard receives records at a steady rate, its share of the stream's by the width of its hash
range. Record number n (from 1) of a shard arrives n / rate seconds after it opened; nothing is
stored, so that an hour of a thousand shards costs nothing. May not know: leases.
"""

from __future__ import annotations

import math
from typing import Final

from kclrun.local.limits import STORED_BYTES_MAX, Storage
from kclrun.local.sequence_numbers import parse
from kclrun.local.shards import ShardLog
from kclrun.local.stream import Stream
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, Shard
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT

__all__ = ["RECORD_BYTES", "ShardStream"]

# What a record weighs for `throughputKBps`: DESIGN 14 measures with 200 B.
RECORD_BYTES: Final = 200


class ShardStream:
    """One stream of `shard_count` shards that receives `records_per_s` in all."""

    def __init__(self, shard_count: int, records_per_s: float) -> None:
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
        self._remember(0.0)

    def reshard(self, count: int, now: float) -> None:
        """UpdateShardCount. Raises: InvalidRequest beyond double or half."""
        self._stream.update_shard_count(count, _wall(now))
        self._remember(now)

    def shards(self) -> tuple[ShardLog, ...]:
        """All that ever were, oldest first."""
        return tuple(self._logs.values())

    def open_count(self) -> int:
        return len(self._stream.open_shards())

    def listing(self, now: float) -> tuple[Shard, ...]:
        """ListShards."""
        return tuple(log.describe() for log in self._stream.shards(_wall(now)))

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
        return max(0, int((until - log.created_at) * self._rate(log)))

    def arrival_of(self, shard_id: str, number: int) -> float:
        """When record `number` arrives, if the shard stays open; never, where nothing does."""
        log = self._logs[shard_id]
        rate = self._rate(log)
        return log.created_at - WORLD_BEGAN_AT + number / rate if rate else math.inf

    def total(self, shard_id: str) -> int | None:
        """How many records it holds in all, once it is closed."""
        log = self._logs[shard_id]
        return (
            None
            if log.closed_at is None
            else self.arrived(shard_id, log.closed_at - WORLD_BEGAN_AT)
        )

    def is_closed(self, shard_id: str) -> bool:
        return self._logs[shard_id].closed_at is not None

    def position(self, shard_id: str, number: int) -> ExtendedSequenceNumber:
        """The sequence number of record `number`."""
        log = self._logs[shard_id]
        second = int(log.created_at + number / self._rate(log))
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


def _wall(now: float) -> WallTime:
    return WallTime(WORLD_BEGAN_AT + now)
