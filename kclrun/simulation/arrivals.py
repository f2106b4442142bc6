"""The records that the shards of a simulated stream receive, by arithmetic.

No record is stored, so an hour of a thousand shards costs nothing.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from kclrun.local.sequence_numbers import parse
from kclrun.local.shard_log import ShardLog
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, hash_key_of
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT

# The size of a record, unless another is given: that of `bin/bench`.
RECORD_BYTES: Final = 200
# The keys of a skewed stream. Enough for the shards of a large stream to differ, and few enough
# that the hottest one shows.
_KEYS: Final = 1_000


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream receives. `skew` 0: every hash key is as likely as the next. Above 0 it is the
    exponent of Zipf's law over 1,000 keys: the k-th key has 1/k^skew of the first one's records,
    and the shard of its hash key gets them."""

    records_per_s: float
    record_bytes: int = RECORD_BYTES
    skew: float = 0.0


class Arrivals:
    """What each shard has received, and when.

    A shard receives records at a steady rate: its share of the stream's, by the width of its hash
    range, or by the keys in it where the traffic is skewed. Record number n (from 1) of a shard
    arrives n / rate seconds after it opened.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._weights = _zipf(traffic.skew) if traffic.skew else ()
        self._logs: dict[str, ShardLog] = {}
        self._rates: dict[str, float] = {}
        self._ended_s: float | None = None

    def begin(self, log: ShardLog) -> None:
        """The shard opens."""
        self._logs[log.shard_id] = log
        self._rates[log.shard_id] = self._rate(log)

    def end(self, now: float) -> None:
        """The stream is deleted: no record arrives any more."""
        self._ended_s = now

    def arrived(self, shard_id: str, now: float) -> int:
        """The number of records that the shard has received; none after its stream was deleted."""
        log = self._logs[shard_id]
        if self._ended_s is not None:
            now = min(now, self._ended_s)
        until = wall_of(now) if log.closed_at is None else min(wall_of(now), log.closed_at)
        return max(0, int((until - log.created_at) * self._rates[shard_id]))

    def arrival_of(self, shard_id: str, number: int) -> float:
        """The arrival of record `number`, if the shard stays open; infinite without records."""
        log = self._logs[shard_id]
        rate = self._rates[shard_id]
        return log.created_at - WORLD_BEGAN_AT + number / rate if rate else math.inf

    def total(self, shard_id: str) -> int | None:
        """The total number of its records, once it is closed."""
        log = self._logs[shard_id]
        return (
            None
            if log.closed_at is None
            else self.arrived(shard_id, log.closed_at - WORLD_BEGAN_AT)
        )

    def position(self, shard_id: str, number: int) -> ExtendedSequenceNumber:
        """The sequence number of record `number`."""
        log = self._logs[shard_id]
        second = int(log.created_at + number / self._rates[shard_id])
        return ExtendedSequenceNumber(str(log.numbering.number(number, second)))

    def number_of(self, shard_id: str, position: ExtendedSequenceNumber) -> int:
        """The number of records at or below a position; all of them at SHARD_END."""
        if position == SHARD_END:
            return self.total(shard_id) or 0
        parsed = parse(position.sequence_number)
        return 0 if parsed is None else parsed.counter

    def records_per_s(self, shard_id: str) -> float:
        """The rate at which the shard receives records while it is open."""
        return self._rates[shard_id]

    def bytes_per_s(self, shard_id: str) -> float:
        """The same in payload."""
        return self._rates[shard_id] * self._traffic.record_bytes

    def _rate(self, log: ShardLog) -> float:
        first, last = log.hash_range.start, log.hash_range.end
        if self._weights:
            share = sum(weight for at, weight in self._weights if first <= at <= last)
        else:
            share = (last - first + 1) / (HASH_KEY_MAX + 1)
        return self._traffic.records_per_s * share


def _zipf(skew: float) -> tuple[tuple[int, float], ...]:
    """The hash key of each key, and its share of the records."""
    weights = [1 / rank**skew for rank in range(1, _KEYS + 1)]
    total = sum(weights)
    return tuple(
        (hash_key_of(f"key {number}"), weight / total) for number, weight in enumerate(weights)
    )


def wall_of(now: float) -> WallTime:
    return WallTime(WORLD_BEGAN_AT + now)
