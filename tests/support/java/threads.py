"""Threads of a JVM in virtual time: generators that yield where a thread blocks.

Java's threads block, so their code reads from top to bottom. Here a yield marks each blocking
point; the yielded value is called with a function that continues the thread. The module does not
know the protocol of leases.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import Instant
from kclrun.protocol.writes import Applied, ConditionFailed, Outcome, Throttled
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.network import Failed
from kclrun.simulation.world import SimulatedWorld
from tests.support.java.rows import ItemWrite

Result = TypeVar("Result")
GoOn = Callable[[Any], None]
Wait = Callable[[GoOn], None]
Steps = Generator[Wait, Any, Result]


def start(jvm: OsProcess, steps: Steps[object], ended: Callable[[], None] | None = None) -> None:
    """Run a thread from its first step; `ended` is called when it has returned."""

    def go_on(answer: Any) -> None:
        try:
            wait = steps.send(answer)
        except StopIteration:
            if ended is not None:
                ended()
            return
        wait(lambda answer: jvm.act(lambda: go_on(answer)))

    go_on(None)


def sleep(jvm: OsProcess, duration_s: float) -> Steps[None]:
    """Sleep that long by the machine's clock."""
    pause_s = max(0.0, duration_s) / jvm.machine.clock.rate

    def wait(go_on: GoOn) -> None:
        jvm.after(pause_s, lambda: go_on(None))

    yield wait


def together(jvm: OsProcess, threads: Sequence[Steps[object]]) -> Steps[None]:
    """Run threads in parallel, and wait for all."""
    left = len(threads)

    def wait(go_on: GoOn) -> None:
        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                go_on(None)

        for steps in threads:
            start(jvm, steps, ended)

    if threads:
        yield wait


class Monitor:
    """`synchronized`: one thread at a time; the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[GoOn] = deque()

    def enter(self) -> Steps[None]:
        if self._is_held:
            yield self._waiting.append
        self._is_held = True

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft()(None)
        else:
            self._is_held = False


class HeldLease:
    """Known by its identity, as in Java by its concurrency token: a second take is another one.

    `incremented` is when a write of this worker was last *answered*; the KCL has no earlier
    instant. `answered_late_s`: how long before that it may have been applied.
    """

    def __init__(self, row: Lease, counter: int, incremented: Instant) -> None:
        self.key: LeaseKey = row.key
        self.counter = counter
        self.position: ExtendedSequenceNumber = row.checkpoint
        self.owner_switches = row.owner_switches
        self.parents = row.parents
        self.children = row.children
        self.hash_range: HashRange | None = row.hash_range
        self.incremented = incremented
        self.answered_late_s = 0.0
        self.monitor = Monitor()

    def has_expired(self, now: Instant, failover_s: float) -> bool:
        """`Lease.isExpired`: longer than a failover without an increment."""
        return now - self.incremented > failover_s


# The DynamoDB and Kinesis clients of a JVM: blocking calls, and the SDK's own retries.
#
# The SDK repeats a request that was throttled, found no connection, or got no answer: the same
# request, under the same condition. A first attempt may have been applied; the caller must find
# that out.
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
    """`who` is the sender's name in the story."""

    def __init__(self, jvm: OsProcess, world: SimulatedWorld, who: str) -> None:
        self._jvm = jvm
        self._world = world
        self._uplink = jvm.machine.uplink
        self._who = who
        self._chance = world.scheduler.chance(f"{who}:retries")

    def write(self, request: ItemWrite) -> Steps[bool]:
        """Whether an attempt was answered as applied; False where the condition failed.

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
