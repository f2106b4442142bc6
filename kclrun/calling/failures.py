"""What happens to the records of a batch whose call raised: repeated, isolated, given up. Pure.

The page at the head of `batches.py` has the states and the rules. The shells have the records and
the clock, make the calls and keep the letters.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final

import msgspec

from kclrun import errors
from kclrun.calling.delivery import Attempts, GiveUp, RetryAfter
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime

# If the first ten records of a batch fail one by one, and none has succeeded, the records are not
# at fault: a database is away, or the program is wrong. A smaller batch whose records all fail does
# not show that; there the limit decides.
OUTAGE_AFTER: Final = 10
# The time over which `on_error.limit` counts.
LIMIT_WINDOW_S: Final = 600.0
# User code may ask for a pause; longer than an hour, the lease would look abandoned.
RETRY_LATER_MAX_S: Final = 3600.0


def outage_words() -> str:
    """Why a lease halts instead of giving those records up."""
    return (
        f"the first {OUTAGE_AFTER} records of a batch failed one by one, and none succeeded:"
        " it looks like an outage"
    )


class Give(msgspec.Struct, frozen=True):
    """Call `process_records` with these records of the batch, by their indexes, ascending."""

    indexes: Sequence[int]


class Rest(msgspec.Struct, frozen=True):
    """Wait, then call `next_step` again, unless delivery was stopped."""

    pause_s: float


class LetGo(msgspec.Struct, frozen=True):
    """This record is given up: keep its letter durably, or count it as skipped. Then call
    `next_step` again.

    `calls` is the number of calls with the record that raised: of the batch, and of the search.
    """

    index: int
    calls: int


class Halt(msgspec.Struct, frozen=True):
    """Halt the lease. If `reason` is empty, the error of the last call is the reason."""

    reason: str = ""


class Finished(msgspec.Struct, frozen=True):
    """Every record of the batch was processed or given up."""


Step = Give | Rest | LetGo | Halt | Finished


class Breaker:
    """Limits how many records are given up: at most `limit` in ten minutes. So an outage does not
    turn a whole shard into dead letters. One instance for each lease."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._given_up: collections.deque[Instant] = collections.deque(maxlen=limit)

    def admits(self, now: Instant) -> bool:
        """Whether one more record may be given up now; counts it if so."""
        is_full = len(self._given_up) == self.limit
        if is_full and now - self._given_up[0] < LIMIT_WINDOW_S:
            return False
        self._given_up.append(now)
        return True


def checked(error: BaseException, given: Sequence[Record]) -> BaseException:
    """The error of a call with the records `given`. A FailedRecords that does not name records of
    that call names no record at fault, so none is processed: it is replaced by another error."""
    if isinstance(error, errors.FailedRecords) and not _named(error, given):
        return errors.ProcessorError(
            "FailedRecords does not name records of the batch of its call"
        ).with_traceback(error.__traceback__)
    return error


def _named(error: errors.FailedRecords, given: Sequence[Record]) -> list[int]:
    """The places in `given` of the records that the error names; none if one is not there."""
    places = {record.position: place for place, record in enumerate(given)}
    found = {
        places.get(record.position, -1) if isinstance(record, Record) else -1
        for record in error.records
    }
    return [] if -1 in found else sorted(found)


class BatchRun:
    """One batch from its first call until each record is processed or given up.

    The shell performs `next_step` again and again, and reports after each Give whether the call
    `returned` or `raised`.

    The search finds the first record at fault of those left. Half of the records that contain it
    are given; if that call returns, it is in the other half. After that, all records left are one
    call again.
    """

    def __init__(self, records: Sequence[Record], policy: ErrorPolicy, breaker: Breaker) -> None:
        self._records = records
        self._policy = policy
        self._breaker = breaker
        self._left: Sequence[int] = range(len(records))
        # How many of the records left are given next; and how many of the first ones are known to
        # contain a record at fault, or 0.
        self._next = len(records)
        self._suspects = 0
        # The records that cannot be decoded: given up when all before them are settled.
        self._undecodable: set[int] = set()
        # The repetitions of the whole batch; None once they are over.
        self._attempts: Attempts | None = Attempts("process_records", policy)
        self._calls_before = 0
        self._calls = 0
        self._has_success = False
        self._reported_settled = 0
        # Given up and not let go of yet: while no record has succeeded, it may be an outage.
        self._held: list[LetGo] = []
        self._due: collections.deque[Step] = collections.deque()

    @property
    def is_isolating(self) -> bool:
        """Whether the repetitions are over, and the search for the records at fault goes on."""
        is_halted = bool(self._due) and isinstance(self._due[0], Halt)
        return self._attempts is None and not is_halted

    @property
    def calls(self) -> int:
        """How many calls raised: of the batch, and of the search under way."""
        return self._calls_before + self._calls

    @property
    def settled(self) -> int:
        """How many of the first records are processed or let go of: a checkpoint may pass them.

        After a FailedRecords, processed records behind those that it names are not counted.
        """
        waiting = [*self._held, *(step for step in self._due if isinstance(step, LetGo))]
        unsettled = [*(step.index for step in waiting), *self._left[:1]]
        return min(unsettled, default=len(self._records))

    def newly_settled(self) -> int | None:
        """`settled`, if it has grown since the last call and is not all: these records count as
        processed, so that a stop during the search checkpoints them."""
        before, self._reported_settled = self._reported_settled, self.settled
        return self.settled if before < self.settled < len(self._records) else None

    @property
    def held(self) -> tuple[LetGo, ...]:
        """Records that are given up, and not let go of before a record of the batch succeeds.
        Before a checkpoint inside a call, keep their letters and call `release`."""
        return tuple(self._held)

    def release(self, now: Instant) -> None:
        """The letters of all records of `held` are kept."""
        for _ in self._held:
            self._breaker.admits(now)
        self._held.clear()

    def next_step(self, now: Instant) -> Step:
        """The next step. Finished and Halt are the last one."""
        while not self._due and self._left and self._left[0] in self._undecodable:
            self._next = 1
            self._give_up(now)
        if not self._due and not self._left:
            self._let_go(now)
        if self._due:
            return self._due.popleft()
        return Give(self._left[: self._next]) if self._left else Finished()

    def returned(self, now: Instant) -> None:
        """The call of the last Give returned."""
        self._has_success = True
        self._advance(self._next)
        self._let_go(now)

    def checked(self, error: BaseException) -> BaseException:
        """The error of the last Give, as the function `checked` returns it."""
        return checked(error, [self._records[index] for index in self._left[: self._next]])

    def raised(
        self,
        error: BaseException,
        now: Instant,
        wall: WallTime,
        *,
        at: ExtendedSequenceNumber | None = None,
        is_host_fault: bool = False,
    ) -> float | None:
        """The call of the last Give raised the error that `checked` returned. Returns: the pause
        before the same call is repeated; None if it is not repeated.

        `at` is the position of the record that the failing line worked on, if that is certain.
        `wall` is on the clock of the records' arrivals. With `is_host_fault` the
        lease is halted instead of giving a record up.
        """
        max_age_s = self._policy.max_age_s
        oldest = self._records[self._left[0]].approximate_arrival_timestamp
        # 0: the service did not give the arrival, so the age of the record is not known.
        is_old = max_age_s is not None and oldest > 0 and wall - oldest > max_age_s
        if isinstance(error, errors.HaltShard):
            self._halt(str(error))
        elif isinstance(error, errors.RetryLater) and not is_old:
            return self._repeat(min(error.after_s, RETRY_LATER_MAX_S))
        elif isinstance(error, errors.ConfigError):
            self._halt()
        elif isinstance(error, errors.UndecodableRecord) and (accused := self.accused(error)):
            self._calls += 1
            if self._policy.then == "halt":
                self._halt()
            else:
                self._begin_isolation()
                self._undecodable.update(accused)
                self._suspects = 0
                self._plan_next()
        else:
            if isinstance(error, errors.FailedRecords):
                named = self._named(error)
                self._has_success = self._has_success or len(named) < self._next
                self._left = [*named, *self._left[self._next :]]
                self._next = len(named)
            self._calls += 1
            decision = GiveUp() if self._attempts is None else self._attempts.raised(error)
            if isinstance(decision, RetryAfter) and not is_old:
                return self._repeat(decision.pause_s)
            if self._policy.then == "halt" or is_host_fault:
                self._halt()
            else:
                self._isolate(at, now, is_named=isinstance(error, errors.FailedRecords))
        return None

    def accused(self, error: BaseException) -> Sequence[int]:
        """The indexes of the records of the last call that `error`, as `checked` returned it, shows
        to be at fault; empty if it shows none. Call it before `raised`."""
        given = self._left[: self._next]
        if isinstance(error, errors.UndecodableRecord):
            return [n for n in given if self._records[n] is error.record]
        if isinstance(error, errors.FailedRecords):
            return self._named(error)
        return given if len(given) == 1 else ()

    def _named(self, error: errors.FailedRecords) -> list[int]:
        """The indexes of the records that the error names; none if one is not of the last call."""
        given = self._left[: self._next]
        return [given[place] for place in _named(error, [self._records[n] for n in given])]

    def _isolate(self, at: ExtendedSequenceNumber | None, now: Instant, *, is_named: bool) -> None:
        """The last call is not repeated: its records are given up, or the search among them begins
        or goes on."""
        self._begin_isolation()
        if is_named or self._next == 1:
            self._give_up(now)
            return
        given = [self._records[index].position for index in self._left[: self._next]]
        place = given.index(at) if at in given else None
        self._suspects = self._next if place is None else place + 1
        self._next = self._next // 2 if place is None else max(1, place)

    def _begin_isolation(self) -> None:
        if self._attempts is not None:
            self._attempts, self._calls_before, self._calls = None, self._calls, 0

    def _repeat(self, pause_s: float) -> float:
        self._due.append(Rest(pause_s))
        return pause_s

    def _halt(self, reason: str = "") -> None:
        """Records that are left or held are not settled."""
        self._due.append(Halt(reason))

    def _advance(self, count: int) -> None:
        """The first `count` of the records left are processed or given up."""
        self._left = self._left[count:]
        self._suspects = max(0, self._suspects - count)
        self._plan_next()

    def _plan_next(self) -> None:
        """Plan a call with half of the suspects, or else with all records left; never with a record
        that cannot be decoded."""
        self._next = max(1, self._suspects // 2) if self._suspects else len(self._left)
        if self._undecodable:
            known = (n for n, index in enumerate(self._left) if index in self._undecodable)
            self._next = min(self._next, next(known, self._next))

    def _give_up(self, now: Instant) -> None:
        """The records of the last call are at fault."""
        self._held += [LetGo(index, self.calls) for index in self._left[: self._next]]
        self._calls = self._suspects = 0
        self._advance(self._next)
        if self._has_success:
            self._let_go(now)
        elif len(self._held) >= OUTAGE_AFTER:
            self._halt(f"{outage_words()}, and nothing was given up")

    def _let_go(self, now: Instant) -> None:
        while self._held:
            if not self._breaker.admits(now):
                self._halt(
                    f"{self._breaker.limit} records were given up within"
                    f" {LIMIT_WINDOW_S / 60:.0f} minutes, and now one more (on_error.limit):"
                    " it looks like an outage"
                )
                return
            self._due.append(self._held.pop(0))
