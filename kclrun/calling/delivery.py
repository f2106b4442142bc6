"""When user code is called, called again, and considered done. Pure.

The shells (lease process, Spark task, simulator, test kit) have the records and the clock, and make
the calls. This module decides what may start next, and what follows if a call raises.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from kclrun.errors import ConfigError, HaltShard, OutputLocked, is_host_shortage
from kclrun.lease.commands import (
    AllowDelivery,
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
)
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import DOUBLINGS_MAX, Instant, backoff_s

Call = CallInitialize | CallShardEnded | CallShutdownRequested | CallLeaseLost


class StartBatch(msgspec.Struct, frozen=True, gc=False):
    """Give user code the next `records` records. With 0 the page that waits has no records: it
    counts as processed without a call."""

    records: int


class ConfirmStop(msgspec.Struct, frozen=True):
    """Post DeliveryStopped: no batch may start, and no user code runs."""


class ConfirmEnd(msgspec.Struct, frozen=True):
    """Post ShardExhausted: every record of the shard was processed. Returned once."""


Start = StartBatch | Call | ConfirmStop | ConfirmEnd


class Repetition(enum.Enum):
    """Whether a call that raised may be made again, once its pause is over."""

    NOW = enum.auto()
    AFTER_RENEWAL = enum.auto()
    NEVER = enum.auto()


class Delivery:
    """What user code may be given next.

    The shell passes the commands of the core to it, and calls `next_start` whenever user code is
    idle. One call at a time: the shell calls it again only when the last start has returned. A
    batch that is repeated because its call raised is still that start: the shell calls
    `repetition`.

    After `stop` no batch starts and none is repeated before the next permit. No batch starts at or
    after the fence of its permit [P7, P17]. A batch has at most `batch_max` records.
    `delivered_total` counts the records of all batches; `permit` is None after a stop.

    If user code gets single records, a batch starts all of its records. Further batches may join it
    (`next_batch`), and a stop ends it between two records (`is_ending`).
    """

    def __init__(self, batch_max: int) -> None:
        self.delivered_total = 0
        self.permit: AllowDelivery | None = None
        self._batch_max = batch_max
        self._call: Call | None = None
        self._is_stop_asked = self._is_halted = self._is_held = False
        self._has_end = self._is_end_confirmed = False

    def allow(self, permit: AllowDelivery) -> None:
        """The core allows batches; a later permit replaces this one."""
        self.permit = permit

    def stop(self) -> None:
        """No batch starts from here on; ConfirmStop follows as soon as user code is idle.

        A requested call that has not begun is withdrawn: it would come after DeliveryStopped.
        """
        self.permit = None
        self._call = None
        self._is_stop_asked = True

    def halt(self) -> None:
        """Start no batch any more, even with a permit: a batch was given up [I9], or user code
        requested the release of the lease. Other calls are not affected."""
        self._is_halted = True

    def hold(self) -> None:
        """An output is so full that no batch may start. A batch that runs goes on, and is repeated
        if it raises."""
        self._is_held = True

    def release(self) -> None:
        """The output has room again."""
        self._is_held = False

    def call(self, call: Call) -> None:
        """The core requests a call of user code, which is idle or about to be."""
        assert self._call is None, "one call at a time"
        self._call = call

    def end(self) -> None:
        """No further record will come: the shard ends behind the records that wait, or was
        trimmed."""
        self._has_end = True

    def may_start(self, now: Instant) -> bool:
        """Whether a batch may start, as far as permit, fence and halt decide."""
        return self._valid_permit(now) is not None

    def next_start(self, waiting: int | None, now: Instant) -> Start | None:
        """What starts now; None if nothing may. Only while user code is idle.

        `waiting` is how many records the next batch may have: 0 for a page without user records,
        None if no page waits.
        """
        if self._is_stop_asked:
            self._is_stop_asked = False
            return ConfirmStop()
        if self._call is not None:
            call, self._call = self._call, None
            return call
        if waiting is not None or self._valid_permit(now) is None:
            return self.next_batch(waiting, now)
        if self._has_end and not self._is_end_confirmed:
            self._is_end_confirmed = True
            return ConfirmEnd()
        return None

    def next_batch(self, waiting: int | None, now: Instant) -> StartBatch | None:
        """The batch that starts now; None if none may. Also while records of other batches run."""
        permit = self._valid_permit(now)
        if permit is None or self._is_stop_asked:
            return None
        if waiting:
            total = self.delivered_total
            size = min(self._batch_max, waiting, permit.delivered_max - total)
            if total >= permit.start_below or size < 1:
                return None
            self.delivered_total = total + size
            return StartBatch(size)
        if waiting is not None:
            return StartBatch(0)  # no cap counts it: a position without records must not wait
        return None

    @property
    def is_ending(self) -> bool:
        """Whether a batch of single records has to end early: delivery was stopped, or user code
        requested the release of the lease."""
        return self._is_stop_asked or self._is_halted

    def may_fire(self, now: Instant) -> bool:
        """Whether timers may fire: while a batch may start, and the shard has not ended."""
        is_taken = self._call is not None or self._is_stop_asked or self._is_end_confirmed
        return not is_taken and self._valid_permit(now) is not None

    def repetition(self, now: Instant, *, is_batch: bool) -> Repetition:
        """Whether a call that raised may be made again now.

        A batch is repeated before the fence only; past it, the repetition waits for the next
        renewal. A halt does not stop it, because it has begun. `initialize` and `shard_ended` need
        no permit; only a stop ends their repetitions.
        """
        if self._is_stop_asked:
            return Repetition.NEVER
        if is_batch and (self.permit is None or now >= self.permit.fence):
            return Repetition.AFTER_RENEWAL
        return Repetition.NOW

    def _valid_permit(self, now: Instant) -> AllowDelivery | None:
        permit = self.permit
        if permit is None or self._is_halted or self._is_held or now >= permit.fence:
            return None
        return permit


# A shard that has failed for long is tried twice a minute.
BACKOFF_MAX_S: Final = 30.0
_CAUSES_MAX: Final = 10


class RetryAfter(msgspec.Struct, frozen=True):
    """Call again with the same batch after so many seconds."""

    pause_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """Halt the lease: owned and renewed, not processed, until an operator resumes it."""


ErrorDecision = RetryAfter | GiveUp


def decision_after(attempts: int, policy: ErrorPolicy) -> ErrorDecision:
    """The decision after the `attempts`-th call (from 1) of the same function raised."""
    if attempts > policy.retries:
        return GiveUp()
    doubled = policy.backoff_s * 2.0 ** min(attempts - 1, DOUBLINGS_MAX)
    return RetryAfter(min(doubled, BACKOFF_MAX_S))


def destination_pause_s(failed: int) -> float:
    """The pause after a destination of rows or letters failed `failed` times in a row: 1 s, doubled
    up to BACKOFF_MAX_S."""
    return backoff_s(failed - 1, 1.0, base_s=1.0, max_s=BACKOFF_MAX_S)


def host_fault(error: BaseException) -> str | None:
    """The resource that the host lacks, in words, if that caused the error; None for other errors.

    Before the first record such an error is a failed start: the same start may work in a moment, or
    on another host, and the lease itself is sound.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return None
        if is_host_shortage(cause) or isinstance(cause, OutputLocked):
            return error_words(error)
        cause = cause.__cause__ or cause.__context__
    return None


def error_words(error: BaseException) -> str:
    """The class and message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - user code's own __str__ may raise
        return type(error).__name__


# The last calls of a lease that ends: they are not repeated.
CALLED_ONCE: Final = frozenset({"shutdown_requested", "lease_lost"})


class Attempts:
    """The attempts at one call of user code, from its first failure until it returns or is given
    up. `where` is the name of the method.

    A call is given up at once after an error of the settings, which would come again, or a
    HaltShard; so are the calls of `CALLED_ONCE`. For all others the error policy decides.
    """

    def __init__(self, where: str, policy: ErrorPolicy) -> None:
        self.where = where
        self.failed = 0
        self._policy = policy

    def raised(self, error: BaseException) -> ErrorDecision:
        """Another attempt raised; the decision about the next one."""
        self.failed += 1
        if isinstance(error, ConfigError | HaltShard) or self.where in CALLED_ONCE:
            return GiveUp()
        return decision_after(self.failed, self._policy)


class RowScope(Protocol):
    """The rows that one call of user code emits. `end_batch` may raise, if a destination refuses
    them: the call is then one that raised, and its rows are taken back."""

    def begin_batch(self) -> None: ...

    def end_batch(self, position: ExtendedSequenceNumber, /) -> None: ...

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None, /) -> None: ...


def attempt(
    call: Callable[[], None],
    rows: RowScope | None,
    covers: ExtendedSequenceNumber | None,
    durable: Callable[[], ExtendedSequenceNumber | None],
) -> None:
    """Make one attempt at a call of user code, with the rows that it emits.

    The rows belong to the position `covers` (None: the call may emit none). If the call raises,
    they are taken back, except those that a checkpoint acknowledged during the call covers:
    `durable` gives the last one. Raises: what the call and the rows raise.
    """
    if rows is None or covers is None:
        call()
        return
    rows.begin_batch()
    try:
        call()
        rows.end_batch(covers)
    except BaseException:
        rows.take_back_batch(durable())
        raise
