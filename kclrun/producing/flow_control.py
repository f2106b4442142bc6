"""The flow control of one shard: batch size and pause. Quick to slow down, slow to recover.

Pure: `now` is an argument. Times are of any one clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import msgspec

from kclrun.codec.record_sizes import REQUEST_BYTES_MAX
from kclrun.model.quotas import (
    PUT_RECORDS_MAX,
    RECORD_BYTES_DEFAULT,
    SHARD_WRITE_BYTES_MAX,
    SHARD_WRITE_RECORDS_MAX,
)

# With fewer than ten records a request is not worth its round trip (Jet's bound).
BATCH_RECORDS_MIN: Final = 10
# A tenth of a second's quota is the least pause that a shard can notice. Ten seconds are long, and
# needed only if very many senders share one shard: a thousand of them, with ten records each
# ten seconds, are exactly its 1,000 records/s.
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
# A refusal is one step: it halves the batch and, from the second step on, doubles the pause. So two
# refusals bring a single sender from full speed to 125 records each 0.2 s, below the quota of
# 1,000/s; eight reach the slowest speed. A reply without a refusal undoes a tenth of a step: Jet's
# ratio between slowing down and recovering.
RECOVERY: Final = 0.1
# The step at which the pause reaches its maximum; further refusals do not slow it more.
SLOWNESS_MAX: Final = 1 + math.log2(PAUSE_MAX_S / PAUSE_MIN_S)
# A shard that has refused is not sent more than its quota, until so long after its last refusal.
# Then it is tried at full speed again: one refusal a minute is less than a thousandth of the
# aggregates of a full shard.
PACED_S: Final = 60.0
# Of the quota. The rest makes up for requests that arrive closer to each other than they were sent.
_PACE: Final = 0.98
# Adding tenths leaves a remainder; less than a millionth of a step counts as zero.
_NONE: Final = 1e-6


class ShardMetrics(msgspec.Struct, frozen=True):
    """One shard's flow control: as of its last request, and in total since its `Flow` was made.

    `pause_s` is 0 while it is off. `slow_s` is the total time that it was on; `recovery_max_s` the
    longest time from the last refusal of a slow period to full batches without a pause.
    """

    batch_records: int
    pause_s: float
    pause_max_s: float
    refusals: int
    slow_s: float
    recovery_max_s: float


class ShardFlow:
    """The controller of one shard. `resume_at`: before that, nothing should be sent to it.

    The rule of Hazelcast Jet's Kinesis sink, applied to each shard separately. A shard that refuses
    gets smaller batches after longer pauses. A shard that accepts everything gets full requests
    without any pause. Refusals are not prevented in advance, so a healthy stream costs no waiting:
    its limit may be exceeded once, and the steps after that keep refusals rare. So several senders
    that do not know of each other can share a shard. Ours besides: a shard that has refused is sent
    no more than its quota for a minute, so that a single sender is not refused again.
    """

    __slots__ = (
        "_paced_until",
        "_pause_max_s",
        "_quota_at",
        "_recovery_max_s",
        "_refusals",
        "_refused_at",
        "_slow_s",
        "_slow_since",
        "_slowed_at",
        "_slowness",
        "resume_at",
    )

    def __init__(self) -> None:
        self._slowness = 0.0
        self._slowed_at = self._slow_since = self._refused_at = self.resume_at = -math.inf
        # The quota of the records sent so far lasts until then.
        self._quota_at = self._paced_until = -math.inf
        self._refusals = 0
        self._pause_max_s = self._slow_s = self._recovery_max_s = 0.0

    @property
    def is_off(self) -> bool:
        """Whether the shard is sent everything without limit or pause."""
        return self._slowness == 0.0 and self._paced_until == -math.inf

    @property
    def is_slow(self) -> bool:
        """Whether its batches are smaller than full, after pauses."""
        return self._slowness > 0.0

    @property
    def batch_records(self) -> int:
        """The number of records of this shard that one request may hold."""
        return max(BATCH_RECORDS_MIN, round(PUT_RECORDS_MAX * math.exp2(-self._slowness)))

    @property
    def pause_s(self) -> float:
        """The time from one request to the next."""
        if not self.is_slow:
            return 0.0
        return min(PAUSE_MAX_S, PAUSE_MIN_S * math.exp2(max(0.0, self._slowness - 1.0)))

    def refused(self, sent_at: float, now: float) -> None:
        """Some of a request's records for this shard were refused.

        A refusal of a request sent before the last step says nothing about that step: it does not
        count.
        """
        if sent_at < self._slowed_at:
            return
        if not self.is_slow:
            self._slow_since = now
        self._refusals += 1
        self._slowed_at = self._refused_at = now
        self._slowness = min(SLOWNESS_MAX, self._slowness + 1.0)
        self._pause_max_s = max(self._pause_max_s, self.pause_s)
        self._paced_until = now + PACED_S
        # Of earlier requests the service has counted only the records that it took.
        self._quota_at = min(self._quota_at, now)
        self._rest_from(sent_at)

    def sending(self, records: int, size_bytes: int, now: float) -> None:
        """So much is sent to the shard now."""
        quota_s = max(records / SHARD_WRITE_RECORDS_MAX, size_bytes / SHARD_WRITE_BYTES_MAX)
        self._quota_at = max(self._quota_at, now) + quota_s / _PACE

    def accepted(self, sent_at: float, now: float) -> None:
        """All of a request's records for this shard were accepted."""
        if self.is_off or sent_at < self._slowed_at:
            return
        if self.is_slow:
            self._recover(now)
        if now >= self._paced_until:
            self._paced_until = -math.inf
        self._rest_from(sent_at)

    def rest(self, now: float) -> None:
        """No request was under way to this shard until now.

        Each pause that passed unused counts as a good reply: after a long time without requests, a
        shard is not slow any more because of earlier refusals.
        """
        while self.is_slow and self.resume_at + self.pause_s <= now:
            self.resume_at += self.pause_s
            self._recover(self.resume_at)
        if now >= self._paced_until:
            self._paced_until = -math.inf

    def _rest_from(self, sent_at: float) -> None:
        self.resume_at = sent_at + self.pause_s
        if self._paced_until > -math.inf:
            self.resume_at = max(self.resume_at, self._quota_at)

    def _recover(self, now: float) -> None:
        self._slowness -= RECOVERY
        if self._slowness > _NONE:
            return
        self._slowness = 0.0
        self._slow_s += now - self._slow_since
        self._recovery_max_s = max(self._recovery_max_s, now - self._refused_at)

    def metrics(self, now: float) -> ShardMetrics:
        return ShardMetrics(
            batch_records=self.batch_records,
            pause_s=self.pause_s,
            pause_max_s=self._pause_max_s,
            refusals=self._refusals,
            slow_s=self._slow_s + (now - self._slow_since if self.is_slow else 0.0),
            recovery_max_s=self._recovery_max_s,
        )


class Flow:
    """The controllers of a stream's shards, by shard id; outlives the producers that use it.

    For one stream and one thread at a time. A shard that is new to it starts at full speed.
    """

    def __init__(self) -> None:
        self._shards: dict[str, ShardFlow] = {}

    def of(self, shard_id: str) -> ShardFlow:
        """The shard's controller, made at first use."""
        return self._shards.setdefault(shard_id, ShardFlow())

    def keep(self, shard_ids: Collection[str]) -> None:
        """Forget all other shards: they were closed. So resharding does not make it grow."""
        kept = set(shard_ids)
        self._shards = {
            shard_id: flow for shard_id, flow in self._shards.items() if shard_id in kept
        }

    def metrics(self, now: float) -> dict[str, ShardMetrics]:
        """By shard id."""
        return {shard_id: flow.metrics(now) for shard_id, flow in self._shards.items()}


class ProducerSettings(msgspec.Struct, frozen=True):
    """How records are sent.

    `keeps_order`: the records of a partition key arrive in the order in which they were added. A
    request then holds one record of a key: many keys make full requests. A single key gets as many
    records a second as there are requests one after the other (25 at 40 ms).
    `aggregates`: the waiting records of a shard are sent as KPL aggregates, of any keys, in order
    too: many more records in a request, and for a hot key. Readers must open aggregates, as every
    KCL does.
    `concurrency`: requests under way at once. One takes about 40 ms, so four are 50,000 records/s;
    the wire client has eight connections.
    `linger_s`: how long a record may wait for others before a part-filled request is sent (the
    KPL's 100 ms).
    `give_up_after_s`: how long a shard, or the service, may accept nothing before the producer
    raises. A minute is six of the longest pauses, after the ten seconds it takes to reach them.
    `fails_alone`: a record that was not sent until the deadline of its receipt, or that is refused
    for good, fails by itself and leaves the producer; nothing is raised then.
    `buffer_records_max`, `buffer_bytes_max`: records waiting or under way; `add` blocks at either.
    50,000 records are the quota of one shard in 50 s: so long may it lag before it holds up the
    others. An empty record costs about 1 kB here, so these records need no more memory than the
    bytes.
    """

    keeps_order: bool = True
    aggregates: bool = False
    concurrency: int = 4
    linger_s: float = 0.1
    give_up_after_s: float = 60.0
    buffer_records_max: int = 50_000
    buffer_bytes_max: int = 64 * 2**20
    record_bytes_max: int = RECORD_BYTES_DEFAULT
    request_bytes_max: int = REQUEST_BYTES_MAX
    fails_alone: bool = False


class ProducerMetrics(msgspec.Struct, frozen=True):
    """The totals of one producer so far, and the state of its shards.

    `records` were acknowledged; `user_records` counts them with aggregates opened; `bytes` as the
    service counts them. `requests` were answered; `full_requests` of them held only shards that
    flow control did not slow. `refused_records` were sent again, counted each time;
    `failed_requests` failed as a whole. `waiting_records` and `waiting_bytes` are not acknowledged
    yet. `failed_records` were given up, each with an error of its own. `shards` is by shard id, and
    includes the state that earlier producers left in a shared `Flow`.
    """

    records: int
    user_records: int
    bytes: int
    requests: int
    full_requests: int
    refused_records: int
    failed_requests: int
    waiting_records: int
    waiting_bytes: int
    shards: dict[str, ShardMetrics]
    failed_records: int = 0

    @property
    def batch_records(self) -> int:
        """The smallest batch of any shard now, in records: 500 where no shard is slowed."""
        return min((shard.batch_records for shard in self.shards.values()), default=PUT_RECORDS_MAX)

    @property
    def pause_s(self) -> float:
        """The longest pause between two requests of any shard now: 0 where no shard is slowed."""
        return max((shard.pause_s for shard in self.shards.values()), default=0.0)

    @property
    def full_batch_share(self) -> float:
        """The share of requests at full batch; 1 before the first."""
        return self.full_requests / self.requests if self.requests else 1.0

    @property
    def pause_max_s(self) -> float:
        """The largest pause of any shard."""
        return max((shard.pause_max_s for shard in self.shards.values()), default=0.0)

    @property
    def recovery_max_s(self) -> float:
        """The longest time of a shard from its last refusal to full batches without a pause."""
        return max((shard.recovery_max_s for shard in self.shards.values()), default=0.0)
