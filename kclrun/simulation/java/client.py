"""The DynamoDB and Kinesis clients of a JVM: blocking calls, and the SDK's own retries.

The SDK repeats a request that was throttled, found no way, or was left without an answer: the same
request, under the same condition. That a first attempt may have been applied is the caller's to
find out. May not know: leases' lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Applied, ConditionFailed, Outcome, Throttled
from kclrun.model.shard import Shard
from kclrun.simulation.java.items import ItemWrite
from kclrun.simulation.java.threads import GoOn, Steps, sleep
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.table import Failed
from kclrun.simulation.world import World

__all__ = ["DependencyFailed", "JavaClient", "ThroughputExceeded"]

Answer = TypeVar("Answer")
Ask = Callable[[Callable[[Any], None], Failed], None]

# AWS SDK for Java 2, `DynamoDbRetryPolicy` in its default (legacy) mode: eight retries, after full
# jitter of 25 ms doubled each time.
_RETRIES_MAX: Final = 8
_BACKOFF_BASE_S: Final = 0.025


class ThroughputExceeded(Exception):
    """The last attempt was throttled."""


class DependencyFailed(Exception):
    """No attempt was answered."""


class JavaClient:
    """`who` is the sender, for the story."""

    def __init__(self, jvm: OsProcess, world: World, who: str) -> None:
        self._jvm = jvm
        self._world = world
        self._uplink = jvm.machine.uplink
        self._who = who
        self._chance = world.scheduler.chance(f"{who}:retries")

    def write(self, request: ItemWrite) -> Steps[bool]:
        """Whether an attempt was told that it applied; False where the condition failed.

        Raises: ThroughputExceeded, DependencyFailed.
        """
        for attempt in range(1 + _RETRIES_MAX):
            outcome: Outcome | None = yield self._sending(request)
            if isinstance(outcome, Applied | ConditionFailed):
                return isinstance(outcome, Applied)
            yield from self._back_off(attempt)
        if isinstance(outcome, Throttled):
            raise ThroughputExceeded
        raise DependencyFailed

    def row(self, key: LeaseKey) -> Steps[Lease | None]:
        """`getLease`. Raises: DependencyFailed."""
        found: Lease | None = yield from self._ask(
            lambda reply, failed: self._uplink.read(key, reply, failed)
        )
        return found

    def rows(self) -> Steps[tuple[Lease, ...]]:
        """`listLeases`. Raises: DependencyFailed."""
        found: tuple[Lease, ...] = yield from self._ask(self._uplink.scan)
        return found

    def shards(self) -> Steps[tuple[Shard, ...]]:
        """ListShards. Raises: DependencyFailed."""
        world = self._world

        def listing() -> tuple[Shard, ...]:
            return world.stream.listing(world.scheduler.now)

        found: tuple[Shard, ...] = yield from self._ask(
            lambda reply, failed: self._uplink.ask_kinesis(listing, reply, failed)
        )
        return found

    def _sending(self, request: ItemWrite) -> Callable[[GoOn], None]:
        return lambda go_on: self._uplink.write(self._who, request, go_on)

    def _ask(self, ask: Ask) -> Steps[Any]:
        def asking(go_on: GoOn) -> None:
            ask(lambda answer: go_on((True, answer)), lambda _: go_on((False, None)))

        for attempt in range(1 + _RETRIES_MAX):
            is_answered, answer = yield asking
            if is_answered:
                return answer
            yield from self._back_off(attempt)
        raise DependencyFailed

    def _back_off(self, attempt: int) -> Steps[None]:
        longest_s = _BACKOFF_BASE_S * 2**attempt
        yield from sleep(self._jvm, self._chance.uniform(0, longest_s))
