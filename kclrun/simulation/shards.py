"""The stream: its shards by the model of `local/`, its records by arithmetic (`arrivals.py`).

It does not know leases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kclrun.local.limits import Storage
from kclrun.local.settings import KinesisSettings
from kclrun.local.shard_log import ShardLog
from kclrun.local.stream import Stream
from kclrun.model.quotas import RESUBSCRIBE_AFTER_S
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import WallTime
from kclrun.simulation.arrivals import Arrivals, Traffic, wall_of

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


class ShardStream:
    """One stream of `shard_count` shards that receives this traffic.

    `faults` may be changed at any time: a storm, then calm. `chance` is for the faults.
    """

    def __init__(
        self, shard_count: int, traffic: Traffic, chance: random.Random | None = None
    ) -> None:
        self.traffic = traffic
        self.faults = StreamFaults()
        self._chance = chance if chance is not None else random.Random(0)
        self.records = Arrivals(traffic)
        self._stream = _new_stream(shard_count, 0.0)
        self.is_made_again = False
        self._logs: dict[str, ShardLog] = {}
        self._children: dict[str, list[ShardLog]] = {}
        self._expired: set[str] = set()
        self._subscriptions: dict[str, tuple[float, Callable[[], None]]] = {}
        self._remember(0.0)

    def reshard(self, count: int, now: float) -> None:
        """UpdateShardCount. Raises: InvalidRequest beyond double or half."""
        self._stream.update_shard_count(count, wall_of(now))
        self._remember(now)

    def split(self, shard_id: str, now: float) -> None:
        """SplitShard, in the middle of its hash range. Raises: InvalidRequest if it is closed."""
        hash_range = self._logs[shard_id].hash_range
        self._stream.split(shard_id, (hash_range.start + hash_range.end + 1) // 2, wall_of(now))
        self._remember(now)

    def merge(self, shard_id: str, adjacent_id: str, now: float) -> None:
        """MergeShards. Raises: InvalidRequest if they are not adjacent, or closed."""
        self._stream.merge(shard_id, adjacent_id, wall_of(now))
        self._remember(now)

    def expire(self, closed_for_s: float, now: float) -> int:
        """The retention is lowered to `closed_for_s` for a moment: shards that have been closed for
        longer are trimmed. Returns: their number."""
        before = {log.shard_id for log in self._stream.shards(wall_of(now))}
        retention_s, self._stream.retention_s = self._stream.retention_s, closed_for_s
        self._stream.trim(wall_of(now))
        self._stream.retention_s = retention_s
        trimmed = before - {log.shard_id for log in self._stream.shards(wall_of(now))}
        self._expired |= trimmed
        return len(trimmed)

    def make_again(self, shard_count: int, now: float) -> None:
        """The stream is deleted and created again under its name, which takes a while: until then
        no listing shows a shard. The remembered shards are the old ones: no read finds one of them,
        and no record of the new stream is ever read."""
        self._stream = _new_stream(shard_count, now + _MADE_AGAIN_AFTER_S)
        self.is_made_again = True
        self.records.end(now)

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
        shown_at = wall_of(now - (self._chance.uniform(0, lag_max_s) if lag_max_s else 0.0))
        logs = self._stream.shards(wall_of(now))
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

    def holds(self, shard_id: str, now: float) -> bool:
        """Whether the service has not forgotten it, whatever a listing shows. After the deletion of
        a stream its rows keep their shards: they must not be judged by the new stream."""
        if self.is_made_again:
            return shard_id in self._logs and shard_id not in self._expired
        return any(log.shard_id == shard_id for log in self._stream.shards(wall_of(now)))

    def is_known(self, shard_id: str) -> bool:
        """Whether such a shard ever existed."""
        return shard_id in self._logs

    def is_closed(self, shard_id: str) -> bool:
        return self._logs[shard_id].closed_at is not None

    def _remember(self, now: float) -> None:
        for log in self._stream.shards(wall_of(now)):
            if log.shard_id in self._logs:
                continue
            self._logs[log.shard_id] = log
            for parent in log.parents:
                self._children.setdefault(parent, []).append(log)
            self.records.begin(log)


def _new_stream(shard_count: int, now: float) -> Stream:
    settings = KinesisSettings(account_id="000000000000", region="eu-central-1")
    return Stream("simulated", shard_count, settings, Storage(), wall_of(now))


def _as_of(then: WallTime, log: ShardLog) -> Shard:
    """A shard that was closed later was still open then."""
    shard = log.describe()
    if log.closed_at is None or log.closed_at <= then:
        return shard
    return msgspec.structs.replace(shard, ending_sequence_number=None)


_FAULTLESS: Final = StreamFaults()
