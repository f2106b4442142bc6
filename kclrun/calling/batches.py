"""The calls of `process_records` with one batch: the one driver of every host.

`BatchRun` decides. `BatchCalls` performs that: it makes the calls, describes what they raise, and
keeps what belongs together during a batch. A `BatchHost` (a lease process, a Spark task, the test
kit, the redrive of letters) has the clock, the rests, the letters and the reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from kclrun.calling.tracebacks import Failure, describe
from kclrun.codec.kpl import drop_until
from kclrun.consuming.delivery import RowScope, attempt, host_fault
from kclrun.consuming.failures import (
    BatchRun,
    Breaker,
    Finished,
    Give,
    Halt,
    LetGo,
    Rest,
    checked,
)
from kclrun.consuming.retry_later import RetryLaters, Waited
from kclrun.errors import FailedRecords, RetryLater
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime

PROCESS_RECORDS: Final = "process_records"


class Raised(NamedTuple):
    """A call raised, and this was decided.

    `pause_s` is the pause before the same call is repeated; None if it is not. `waits` is how often
    user code asked for that by RetryLater in a row; 0 if it raised anything else. `begins_search`:
    the records at fault are searched for from here on.
    """

    error: BaseException
    failure: Failure
    is_host_fault: bool
    pause_s: float | None
    waits: int
    begins_search: bool


class BatchHost(Protocol):
    """What `BatchCalls` needs of its shell, on the thread of `BatchCalls.run`.

    The bodies are those of a shell without a lease that could be stopped, and without reports.
    """

    def now(self) -> Instant: ...

    def call(self, records: Sequence[Record]) -> None:
        """Call `process_records` with these records, at least one. Raises: what it raises."""
        ...

    def ends_run(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether this error is not one of user code, so that `run` raises it."""
        return False

    def durable(self) -> ExtendedSequenceNumber | None:
        """The records up to here are not given again: a checkpoint covers them."""
        ...

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        """The next call has a part of a batch, up to `last`: a checkpoint in it covers no more, and
        `BatchCalls.keep_held` comes before it. None: the call has ended."""
        ...

    def raised(self, raised: Raised) -> None:
        """A call raised."""
        ...

    def waited(self, waited: Waited) -> None:  # noqa: ARG002
        """User code asks for no more time."""
        return

    def rest(self, pause_s: float) -> bool:
        """Wait before the next call. False if a stop came meanwhile."""
        ...

    def may_go_on(self) -> bool:
        """Whether another call of the same batch may follow now. False if a stop came."""
        return True

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep the letter of a record that is given up durably, or count the record as skipped.
        From the thread that asks for a checkpoint. Raises: SinkError."""
        ...

    def let_go(self, record: Record, failure: Failure, calls: int) -> bool:
        """Give a record up by `keep`, on the thread of `run`. False if a stop came before that was
        done, or if the lease is halted because it cannot be done."""
        self.keep(record, failure, calls)
        return True

    def halt(self, reason: str, calls: int) -> None:
        """Halt the lease. If `reason` is empty, the error of the last call is the reason. `calls`
        is how many calls raised: of the batch, and of the search under way."""
        ...

    def settled(self, position: ExtendedSequenceNumber) -> None:  # noqa: ARG002
        """The records of the batch up to here are processed or given up, and others are left."""
        return

    def recovered(self, calls: int) -> None:  # noqa: ARG002
        """The batch is done after some of its calls raised, with so many calls. A call that raised
        RetryLater is not counted."""
        return


class BatchCalls:
    """The calls of one processor, batch by batch.

    A checkpoint inside a batch holds, even if the call that made it then raised: the records that
    it covers are not given again. The rows of a call belong to the position of its last record, or
    of the last record of an earlier call of the batch whose rows stay.
    """

    def __init__(self, host: BatchHost, policy: ErrorPolicy) -> None:
        self._host = host
        self._policy = policy
        self._breaker = Breaker(policy.limit)
        self._retry_laters = RetryLaters()
        self._keeping = threading.Lock()
        # Of the batch under way. `covers` is the position of the rows of the call under way.
        self.covers: ExtendedSequenceNumber
        self._records: Sequence[Record] = ()
        self._last: ExtendedSequenceNumber
        self._rows: RowScope | None = None
        self._covered: ExtendedSequenceNumber | None = None
        self._run: BatchRun | None = None  # once a call raised
        self._failures: dict[int, Failure] = {}
        self._failed = 0

    def run(
        self, records: Sequence[Record], last: ExtendedSequenceNumber, rows: RowScope | None
    ) -> bool:
        """Give these records, at least one, until each is processed or given up. False if a stop
        came before that, or if the lease is halted.

        `last` is the position at which the batch ends, `rows` are those that the calls emit.
        """
        self._records, self._last, self._rows = records, last, rows
        self._covered = self._run = None
        self._retry_laters.forget()
        # Nearly every batch is processed by its first call, which needs no decision.
        error = self._attempt(records, last)
        if error is None:
            return True
        run = self._run = BatchRun(records, self._policy, self._breaker)
        run.next_step(self._host.now())
        self._failures, self._failed = {}, 0
        self._raised(error, records, run)
        return self._is_done(run)

    def keep_held(self) -> None:
        """User code asks for a checkpoint: first keep the letters of all records of the batch that
        are given up [I13]. Any thread of user code. Raises: SinkError."""
        run = self._run
        if run is None:
            return
        with self._keeping:
            for step in run.held:
                self._host.keep(self._records[step.index], self._failures[step.index], step.calls)
            run.release(self._host.now())

    def _is_done(self, run: BatchRun) -> bool:
        """Perform what is decided after the first call raised."""
        host, records = self._host, self._records
        may_go = False
        while True:
            if (settled := run.newly_settled()) is not None:
                host.settled(records[settled - 1].position)
            match run.next_step(host.now()):
                case Finished():
                    self._waits_no_more()
                    if self._failed:
                        host.recovered(self._failed + 1)
                    return True
                case Rest(pause_s):
                    may_go = host.rest(pause_s)
                case Give(indexes):
                    may_go = may_go or host.may_go_on()
                    if may_go:
                        self._give(indexes, run)
                        may_go = False
                        continue
                case LetGo(index, calls):
                    may_go = host.let_go(records[index], self._failures[index], calls)
                case Halt(reason):
                    self._waits_no_more()
                    host.halt(reason, run.calls)
                    return False
            if not may_go:
                return False

    def _give(self, indexes: Sequence[int], run: BatchRun) -> None:
        """One call with some records of the batch."""
        records = self._records
        is_whole = len(indexes) == len(records)
        given = records if is_whole else [records[index] for index in indexes]
        is_to_the_end = indexes[-1] == len(records) - 1
        last = self._last if is_to_the_end else given[-1].position
        if run.is_isolating:
            self._host.limit(last)
        error = self._attempt(given, last)
        if error is None:
            run.returned(self._host.now())
        else:
            self._raised(error, given, run)

    def _attempt(
        self, given: Sequence[Record], last: ExtendedSequenceNumber
    ) -> BaseException | None:
        """Make one call. Returns: what it raised. The rows that a call emitted before it raised
        stay only if it named the records that failed: then the others are processed."""
        host, covered = self._host, self._covered
        durable = host.durable()
        left = given if durable is None else drop_until(given, durable)
        covers = self.covers = last if covered is None else max(covered, last)
        failed: FailedRecords | None = None

        def call() -> None:
            nonlocal failed
            try:
                if left:  # else a checkpoint covers every record of the call
                    host.call(left)
            except FailedRecords as raised:
                error = checked(raised, given)
                if error is not raised:
                    raise error from raised
                failed = raised

        try:
            attempt(call, self._rows, covers, host.durable)
        except BaseException as error:
            if not host.ends_run(error):
                return error
            raise
        finally:
            host.limit(None)
        self._covered = covers
        return failed

    def _raised(self, error: BaseException, given: Sequence[Record], run: BatchRun) -> None:
        failure = describe(error, given)
        self._failures.update(dict.fromkeys(run.accused(error), failure))
        self._failed += 1
        was_isolating, now = run.is_isolating, self._host.now()
        is_host_fault = host_fault(error) is not None
        pause_s = run.raised(
            error, now, WallTime(time.time()), at=failure.position, is_host_fault=is_host_fault
        )
        waits = 0
        if isinstance(error, RetryLater) and pause_s is not None:
            self._failed -= 1
            waits = self._retry_laters.asked(PROCESS_RECORDS, now)
        else:
            self._waits_no_more()
        begins_search = run.is_isolating and not was_isolating
        self._host.raised(Raised(error, failure, is_host_fault, pause_s, waits, begins_search))

    def _waits_no_more(self) -> None:
        """The call returned, or failed in another way than by RetryLater."""
        waited = self._retry_laters.over(PROCESS_RECORDS, self._host.now)
        if waited is not None:
            self._host.waited(waited)
