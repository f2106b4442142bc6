"""The stream: its shards by the model of `local/`, its records by arithmetic.

It does not know leases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kclrun.local.limits import Storage
from kclrun.local.sequence_numbers import parse
from kclrun.local.settings import KinesisSettings
from kclrun.local.shard_log import ShardLog
from kclrun.local.stream import Stream
from kclrun.model.quotas import RESUBSCRIBE_AFTER_S
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, Shard, hash_key_of
from kclrun.model.time import WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT

# The size of a record, unless another is given: that of `bin/bench`.
RECORD_BYTES: Final = 200
# The keys of a skewed stream. Enough for the shards of a large stream to differ, and few enough
# that the hottest one shows.
_KEYS: Final = 1_000


# The shortest time that the service needs to delete a stream and to create one.
_MADE_AGAIN_AFTER_S: Final = 15.0

FetchFate = Literal["throttled", "unreachable", "expired_iterator", "not_found"]


class StreamFaults(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requests to Kinesis that fail, and how late a listing shows new shards.
    `not_found`: the share of reads that do not find an existing shard."""

    throttled: float = 0.0
    unreachable: float = 0.0
    expired_iterator: float = 0.0
    not_found: float = 0.0
    listing_lag_max_s: float = 0.0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream receives. `skew` 0: every hash key is as likely as the next. Above 0 it is the
    exponent of Zipf's law over 1,000 keys: the k-th key has 1/k^skew of the first one's records,
    and the shard of its hash key gets them."""

    records_per_s: float
    record_bytes: int = RECORD_BYTES
    skew: float = 0.0


class ShardStream:
    """One stream of `shard_count` shards that receives this traffic.

    Each shard receives records at a steady rate: its share of the stream's, by the width of its
    hash range, or by the keys in it where the traffic is skewed. Record number n (from 1) of a
    shard arrives n / rate seconds after it opened. No record is stored, so an hour of a thousand
    shards costs nothing.

    `faults` may be changed at any time: a storm, then calm. `chance` is for the faults.
    """

    def __init__(
        self, shard_count: int, traffic: Traffic, chance: random.Random | None = None
    ) -> None:
        self.traffic = traffic
        self.faults = StreamFaults()
        self._chance = chance if chance is not None else random.Random(0)
        self._weights = _zipf(traffic.skew) if traffic.skew else ()
        self._stream = _new_stream(shard_count, 0.0)
        self._made_again_s: float | None = None
        self._logs: dict[str, ShardLog] = {}
        self._rates: dict[str, float] = {}
        self._children: dict[str, list[ShardLog]] = {}
        self._expired: set[str] = set()
        self._subscriptions: dict[str, tuple[float, Callable[[], None]]] = {}
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
        """MergeShards. Raises: InvalidRequest if they are not adjacent, or closed."""
        self._stream.merge(shard_id, adjacent_id, _wall(now))
        self._remember(now)

    def expire(self, closed_for_s: float, now: float) -> int:
        """The retention is lowered to `closed_for_s` for a moment: shards that have been closed for
        longer are trimmed. Returns: their number."""
        before = {log.shard_id for log in self._stream.shards(_wall(now))}
        retention_s, self._stream.retention_s = self._stream.retention_s, closed_for_s
        self._stream.trim(_wall(now))
        self._stream.retention_s = retention_s
        trimmed = before - {log.shard_id for log in self._stream.shards(_wall(now))}
        self._expired |= trimmed
        return len(trimmed)

    def make_again(self, shard_count: int, now: float) -> None:
        """The stream is deleted and created again under its name, which takes a while: until then
        no listing shows a shard. The remembered shards are the old ones: no read finds one of them,
        and no record of the new stream is ever read."""
        self._stream = _new_stream(shard_count, now + _MADE_AGAIN_AFTER_S)
        self._made_again_s = now

    @property
    def is_made_again(self) -> bool:
        return self._made_again_s is not None

    def finds(self, shard_id: str) -> bool:
        """Whether a read finds this shard."""
        return not (self.is_made_again or shard_id in self._expired)

    @property
    def created_at(self) -> WallTime:
        """The creation time as the service returns it."""
        return self._stream.created_at

    def is_expired(self, shard_id: str) -> bool:
        """Whether it was trimmed by `expire`: no request finds it any more."""
        return shard_id in self._expired

    def shards(self) -> tuple[ShardLog, ...]:
        """All shards that ever existed, oldest first."""
        return tuple(self._logs.values())

    def open_ids(self) -> tuple[str, ...]:
        """The open shards in the order of their hash ranges."""
        return tuple(log.shard_id for log in self._stream.open_shards())

    def open_count(self) -> int:
        return len(self._stream.open_shards())

    def listing(self, now: float) -> tuple[Shard, ...]:
        """ListShards: the stream as it is, or as it was a while ago."""
        lag_max_s = self.faults.listing_lag_max_s
        shown_at = _wall(now - (self._chance.uniform(0, lag_max_s) if lag_max_s else 0.0))
        logs = self._stream.shards(_wall(now))
        return tuple(_as_of(shown_at, log) for log in logs if log.created_at <= shown_at)

    def fetch_fate(self) -> FetchFate | None:
        """The fate of one GetRecords; None is an answer."""
        faults = self.faults
        drawn = self._chance.random() if faults != _FAULTLESS else 1.0
        if drawn < faults.throttled:
            return "throttled"
        if drawn < faults.throttled + faults.unreachable:
            return "unreachable"
        if drawn < faults.throttled + faults.unreachable + faults.expired_iterator:
            return "expired_iterator"
        if self._chance.random() < faults.not_found:
            return "not_found"
        return None

    def subscribe(self, shard_id: str, now: float, taken_over: Callable[[], None]) -> bool:
        """SubscribeToShard by the fleet's consumer. False: refused, because the last subscription
        began less than five seconds ago. Else that one has been taken over, and is notified."""
        began, former_taken_over = self._subscriptions.get(shard_id, (-math.inf, None))
        if now - began < RESUBSCRIBE_AFTER_S:
            return False
        self._subscriptions[shard_id] = (now, taken_over)
        if former_taken_over is not None:
            former_taken_over()
        return True

    def at_trim_horizon(self, now: float) -> tuple[Shard, ...]:
        """ListShards AT_TRIM_HORIZON: the shards without an existing parent."""
        listed = self.listing(now)
        ids = {shard.shard_id for shard in listed}
        return tuple(shard for shard in listed if ids.isdisjoint(shard.parents))

    def children_of(self, shard_id: str) -> tuple[ChildShard, ...]:
        """The children, also those that were trimmed since."""
        return tuple(
            ChildShard(log.shard_id, log.parents, log.hash_range)
            for log in self._children.get(shard_id, ())
        )

    def parents_of(self, shard_id: str) -> tuple[str, ...]:
        return self._logs[shard_id].parents

    def arrived(self, shard_id: str, now: float) -> int:
        """The number of records that the shard has received; none after its stream was deleted."""
        log = self._logs[shard_id]
        if self._made_again_s is not None:
            now = min(now, self._made_again_s)
        until = _wall(now) if log.closed_at is None else min(_wall(now), log.closed_at)
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

    def holds(self, shard_id: str, now: float) -> bool:
        """Whether the service has not forgotten it, whatever a listing shows. After the deletion of
        a stream its rows keep their shards: they must not be judged by the new stream."""
        if self.is_made_again:
            return shard_id in self._logs and shard_id not in self._expired
        return any(log.shard_id == shard_id for log in self._stream.shards(_wall(now)))

    def is_known(self, shard_id: str) -> bool:
        """Whether such a shard ever existed."""
        return shard_id in self._logs

    def is_closed(self, shard_id: str) -> bool:
        return self._logs[shard_id].closed_at is not None

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
        return self._rates[shard_id] * self.traffic.record_bytes

    def _rate(self, log: ShardLog) -> float:
        first, last = log.hash_range.start, log.hash_range.end
        if self._weights:
            share = sum(weight for at, weight in self._weights if first <= at <= last)
        else:
            share = (last - first + 1) / (HASH_KEY_MAX + 1)
        return self.traffic.records_per_s * share

    def _remember(self, now: float) -> None:
        for log in self._stream.shards(_wall(now)):
            if log.shard_id in self._logs:
                continue
            self._logs[log.shard_id] = log
            for parent in log.parents:
                self._children.setdefault(parent, []).append(log)
            self._rates.setdefault(log.shard_id, self._rate(log))


def _zipf(skew: float) -> tuple[tuple[int, float], ...]:
    """The hash key of each key, and its share of the records."""
    weights = [1 / rank**skew for rank in range(1, _KEYS + 1)]
    total = sum(weights)
    return tuple(
        (hash_key_of(f"key {number}"), weight / total) for number, weight in enumerate(weights)
    )


def _new_stream(shard_count: int, now: float) -> Stream:
    settings = KinesisSettings(account_id="000000000000", region="eu-central-1")
    return Stream("simulated", shard_count, settings, Storage(), _wall(now))


def _as_of(then: WallTime, log: ShardLog) -> Shard:
    """A shard that was closed later was still open then."""
    shard = log.describe()
    if log.closed_at is None or log.closed_at <= then:
        return shard
    return msgspec.structs.replace(shard, ending_sequence_number=None)


_FAULTLESS: Final = StreamFaults()


def _wall(now: float) -> WallTime:
    return WallTime(WORLD_BEGAN_AT + now)
