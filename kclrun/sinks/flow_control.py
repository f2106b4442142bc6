"""How much one shard is sent, and how often: quick to slow down, slow to recover, off when healthy.

The rule of Hazelcast Jet's Kinesis sink, applied to each shard by itself: a shard that refuses is
sent smaller batches after longer pauses; one that takes everything is sent full requests without
any pause. Nothing is prevented, so that a healthy stream costs no waiting; the rate may be tripped
once, and what follows keeps that rare. Several senders that do not know of each other share a
shard this way.

Pure: `now` is an argument. Times are of any one clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import msgspec

__all__ = [
    "BATCH_RECORDS_MAX",
    "BATCH_RECORDS_MIN",
    "PAUSE_MAX_S",
    "PAUSE_MIN_S",
    "RECOVERY",
    "SLOWNESS_MAX",
    "Flow",
    "ShardFlow",
    "ShardMetrics",
]

# What PutRecords takes at most; below ten a request is not worth its round trip (Jet's bounds).
BATCH_RECORDS_MAX: Final = 500
BATCH_RECORDS_MIN: Final = 10
# A tenth of a second's quota is the least pause a shard can notice. Ten seconds are a lot, and
# needed only where very many senders share one shard: a thousand of them, with ten records each
# ten seconds, are exactly its 1,000 records/s.
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
# A refusal is one step: it halves the batch and, from the second on, doubles the pause. Two
# refusals thus bring a lone sender from "as fast as it goes" to 125 records each 0.2 s, below the
# quota of 1,000/s; eight reach the bottom. A reply without a refusal undoes a tenth of a step,
# Jet's ratio between slowing down and recovering.
RECOVERY: Final = 0.1
# The step at which the pause arrives at its maximum; a storm goes no further than that.
SLOWNESS_MAX: Final = 1 + math.log2(PAUSE_MAX_S / PAUSE_MIN_S)
# Adding tenths leaves a remainder; a millionth of a step is none.
_NONE: Final = 1e-6


class ShardMetrics(msgspec.Struct, frozen=True):
    """One shard's flow control: as of its last request, and in all since its `Flow` was made.

    `pause_s` is 0 while it is off. `slow_s` is how long it was on in all; `recovery_max_s` the
    longest it took from the last refusal of a slow time to full batches without a pause.
    """

    batch_records: int
    pause_s: float
    pause_max_s: float
    refusals: int
    slow_s: float
    recovery_max_s: float


class ShardFlow:
    """The controller of one shard. `resume_at`: before that it should be sent nothing."""

    __slots__ = (
        "_pause_max_s",
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
        self._refusals = 0
        self._pause_max_s = self._slow_s = self._recovery_max_s = 0.0

    @property
    def is_off(self) -> bool:
        """Whether the shard takes whatever comes."""
        return self._slowness == 0.0

    @property
    def batch_records(self) -> int:
        """How many records of this shard one request may hold."""
        return max(BATCH_RECORDS_MIN, round(BATCH_RECORDS_MAX * math.exp2(-self._slowness)))

    @property
    def pause_s(self) -> float:
        """How long from one request to the next."""
        if self.is_off:
            return 0.0
        return min(PAUSE_MAX_S, PAUSE_MIN_S * math.exp2(max(0.0, self._slowness - 1.0)))

    def refused(self, sent_at: float, now: float) -> None:
        """Some of a request's records for this shard were refused.

        What was sent before the last step says nothing about it: it is not counted again.
        """
        if sent_at < self._slowed_at:
            return
        if self.is_off:
            self._slow_since = now
        self._refusals += 1
        self._slowed_at = self._refused_at = now
        self._slowness = min(SLOWNESS_MAX, self._slowness + 1.0)
        self._pause_max_s = max(self._pause_max_s, self.pause_s)
        self.resume_at = sent_at + self.pause_s

    def accepted(self, sent_at: float, now: float) -> None:
        """All of a request's records for this shard were taken."""
        if self.is_off or sent_at < self._slowed_at:
            return
        self._recover(now)
        self.resume_at = sent_at + self.pause_s

    def rest(self, now: float) -> None:
        """Nothing was under way to this shard until now.

        Each pause that passed unused counts as a good reply: a shard that was left alone for long
        enough is not slow for what happened before.
        """
        while not self.is_off and self.resume_at + self.pause_s <= now:
            self.resume_at += self.pause_s
            self._recover(self.resume_at)

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
            slow_s=self._slow_s + (0.0 if self.is_off else now - self._slow_since),
            recovery_max_s=self._recovery_max_s,
        )


class Flow:
    """The controllers of a stream's shards, by shard id; outlives the producers that use it.

    For one stream and one thread at a time. A shard that was never heard of starts at full speed.
    """

    def __init__(self) -> None:
        self._shards: dict[str, ShardFlow] = {}

    def of(self, shard_id: str) -> ShardFlow:
        """The shard's controller, made at first use."""
        return self._shards.setdefault(shard_id, ShardFlow())

    def keep(self, shard_ids: Collection[str]) -> None:
        """Forget all other shards: they were closed, so that resharding does not add up."""
        kept = set(shard_ids)
        self._shards = {each: flow for each, flow in self._shards.items() if each in kept}

    def metrics(self, now: float) -> dict[str, ShardMetrics]:
        """By shard id."""
        return {shard_id: flow.metrics(now) for shard_id, flow in self._shards.items()}
