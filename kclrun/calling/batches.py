"""The calls of `process_records` with one batch: the one driver of every host [I6].

`BatchRun` decides. `BatchSteps` is a batch step by step, and nothing in it waits. `BatchCalls`
performs the steps on one thread. A `BatchHost` (a lease process, a Spark task, the test kit, the
redrive of letters) has the clock, the rests, the letters and the reports. The simulator performs
the steps by events.
"""

# The calls of a batch
# --------------------
#
# A batch is given to user code in one call. If this call returns, the batch is done, and nothing
# below applies: no `BatchRun` is made. If it raises, the `BatchRun` of `failures.py` decides which
# records the next call has, until each record of the batch is processed or given up:
#
#     whole batch ──raises──► repeated ──raises──► halves ──► one record ──► given up; then the rest
#
# The states of a batch, each with the step that follows:
#
#     given       a call is made: with the whole batch, or with some of its records (Give)
#     resting     the same call is repeated after a pause (Rest, then Give)
#     isolating   the repetitions are over, and the records at fault are searched for (Give)
#     finished    each record is processed or given up (Finished)
#     halted      the lease halts, or the task of Spark fails, and no call follows (Halt)
#
# The states of a record in it:
#
#     left        a call with it will follow
#     processed   it was in a call that returned, or in one that raised FailedRecords and did not
#                 name it; or a checkpoint that user code made within a call covers it
#     held        it is given up, and waits until it is clear that this is not an outage
#     let go      its letter is kept, or it is counted as skipped (LetGo)
#
# The error of a call is judged by the first line that fits:
#
#     HaltShard          halts.
#     RetryLater         rests as long as it says, an hour at most. It is not an attempt. If the
#                        oldest record of the call is older than `max_age`, it is an error as any.
#     ConfigError        halts.
#     UndecodableRecord  that names a record of the call: with `then: halt` it halts; otherwise this
#                        record is given up once all before it are settled. No call has it again.
#     FailedRecords      that names records of the call: the other records of the call are
#                        processed, and the next call has only the named ones. It is repeated as any
#                        error is, and in place of the search all named records are given up.
#     any error          the same call is repeated, as often as `on_error` says and while its oldest
#                        record is not older than `max_age`. After that, with `then: halt` it halts,
#                        and so it does if the host lacks a resource (memory, threads, descriptors,
#                        room on a disk); otherwise the search begins.
#
# The search finds the first record at fault. It gives the first half of the records that contain
# it. If that call returns, the record is in the other half; if it raises, in this half. It is not
# repeated. A call with one record that raises ends the search: this record is given up, and all
# records that are left are one call again. So a record among n is found in at most ⌈log2 n⌉ + 1
# calls, or in two if the traceback shows which record the failing line worked on.
#
# A record that is given up is held until a record of the batch was processed, or until no record is
# left. If ten are held and none was processed, the records are not at fault: the lease halts, and
# none of the ten is let go. The `Breaker` halts it too, before more than `on_error.limit` records
# are let go in ten minutes; it counts those that a checkpoint releases, and does not stop them.
#
# What holds always:
#
# - A call has records in the order of the shard.
# - Each record of a finished batch is processed or let go. A record that is processed is not given
#   again in this batch.
# - The letter of a record is durable before the call that follows its LetGo. Before a checkpoint
#   that user code makes within a call of the search, the letters of all held records are kept
#   (`keep_held`). So no checkpoint passes a record that was neither processed, nor kept, nor
#   skipped by the settings [I13].
# - The rows that a call emits belong to one position (`covers`). If the call raises, they are taken
#   back, but for two cases: it raised FailedRecords that names records of the call, or a checkpoint
#   within the call covers them.
# - A checkpoint within a call holds, even if the call then raised.
# - A stop ends a batch between two calls. The first records that are processed or let go
#   (`settled`) may then be covered by a checkpoint; the others are left.
#
# What may be repeated: what user code did in a call that raised, with each record that is given
# again; and after a stop or a crash, what it did with all records above the last checkpoint.
# Nothing of this file is stored. The next owner of the shard, or the next try of a Spark task, has
# batches that are cut in its own way, and judges their records anew, also those that were held or
# let go (`docs/explanation/commits.md` says which of their letters count).
#
# What may be lost: no record. Only one that is let go is passed without being processed.

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, assert_never

from kclrun.calling.delivery import RowScope, attempt, host_fault
from kclrun.calling.failures import (
    BatchRun,
    Breaker,
    Finished,
    Give,
    Halt,
    LetGo,
    Rest,
    Step,
    checked,
)
from kclrun.calling.retry_later import RetryLaters, Waited
from kclrun.calling.tracebacks import Failure, describe
from kclrun.codec.kpl import drop_until
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


class StepHost(Protocol):
    """What `BatchSteps` needs of its shell.

    The bodies are those of a shell without a lease that could be stopped, and without reports.
    """

    def now(self) -> Instant: ...

    def wall(self) -> WallTime:
        """Now, on the clock of the arrivals of records."""
        return WallTime(time.time())

    def durable(self) -> ExtendedSequenceNumber | None:
        """The records up to here are not given again: a checkpoint covers them."""
        ...

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        """The next call has a part of a batch, up to `last`: a checkpoint in it covers no more, and
        `BatchSteps.keep_held` comes before it. None: the call has ended."""
        ...

    def describe(self, error: BaseException, records: Sequence[Record]) -> Failure:
        """What a call with these records raised, in words."""
        return describe(error, records)

    def raised(self, raised: Raised) -> None:
        """A call raised."""
        ...

    def waited(self, waited: Waited) -> None:
        """User code asks for no more time."""
        return

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep the letter of a record that is given up durably, or count the record as skipped.
        From the thread that asks for a checkpoint. Raises: SinkError."""
        ...

    def halt(self, reason: str, calls: int) -> None:
        """Halt the lease. If `reason` is empty, the error of the last call is the reason. `calls`
        is how many calls raised: of the batch, and of the search under way."""
        ...

    def settled(self, position: ExtendedSequenceNumber) -> None:
        """The records of the batch up to here are processed or given up, and others are left."""
        return

    def recovered(self, calls: int) -> None:
        """The batch is done after some of its calls raised, with so many calls. A call that raised
        RetryLater is not counted."""
        return


class BatchHost(StepHost, Protocol):
    """What `BatchCalls` needs of its shell, on the thread of `BatchCalls.run`."""

    def call(self, records: Sequence[Record]) -> None:
        """Call `process_records` with these records, at least one. Raises: what it raises."""
        ...

    def ends_run(self, error: BaseException) -> bool:
        """Whether this error is not one of user code, so that `run` raises it."""
        return False

    def rest(self, pause_s: float) -> bool:
        """Wait before the next call. False if a stop came meanwhile."""
        ...

    def may_go_on(self) -> bool:
        """Whether another call of the same batch may follow now. False if a stop came."""
        return True

    def let_go(self, record: Record, failure: Failure, calls: int) -> bool:
        """Give a record up by `keep`, on the thread of `run`. False if a stop came before that was
        done, or if the lease is halted because it cannot be done."""
        self.keep(record, failure, calls)
        return True


class BatchSteps:
    """The batches of one processor, step by step; nothing here waits.

    `begin` a batch. Then make a call with the records of `next_call`, and report whether it
    `returned` or `raised`. After a call that raised, perform `next_step` again and again: a Give
    asks for another call, and Finished and Halt are the last step.

    A checkpoint inside a batch holds, even if the call that made it then raised: the records that
    it covers are not given again. The rows of a call belong to the position of its last record, or
    of the last record of an earlier call of the batch whose rows stay.
    """

    def __init__(self, host: StepHost, policy: ErrorPolicy) -> None:
        self._shell = host
        self._policy = policy
        self._breaker = Breaker(policy.limit)
        self._retry_laters = RetryLaters()
        self._keeping = threading.Lock()
        # Of the batch under way, and of its call. `covers` is the position of the call's rows.
        self.covers: ExtendedSequenceNumber
        self._records: Sequence[Record] = ()
        self._last: ExtendedSequenceNumber
        self._given: Sequence[Record] = ()
        self._upto: ExtendedSequenceNumber
        self._covered: ExtendedSequenceNumber | None = None
        self._run: BatchRun | None = None  # once a call raised
        self._failures: dict[int, Failure] = {}
        self._failed = 0

    def begin(self, records: Sequence[Record], last: ExtendedSequenceNumber) -> None:
        """These records, at least one, are given until each is processed or given up. `last` is the
        position at which the batch ends."""
        self._records = self._given = records
        self._last = self._upto = last
        self._covered = self._run = None

    @property
    def has_raised(self) -> bool:
        """Whether a call of the batch raised."""
        return self._run is not None

    @property
    def settled(self) -> int:
        """How many of the first records are processed or let go of, once a call raised: a
        checkpoint may pass them."""
        return 0 if self._run is None else self._run.settled

    def next_call(self) -> Sequence[Record]:
        """The records of the call that follows. None are left if a checkpoint covers them all: then
        the call counts as one that returned."""
        durable, covered, upto = self._shell.durable(), self._covered, self._upto
        if self._run is not None and self._run.is_isolating:
            self._shell.limit(upto)
        self.covers = upto if covered is None else max(covered, upto)
        return self._given if durable is None else drop_until(self._given, durable)

    def returned(self) -> None:
        """The call returned. If none raised before, the batch is done: no step follows."""
        self._covered = self.covers
        if self._run is not None:
            self._run.returned(self._shell.now())

    def raised(self, error: BaseException) -> None:
        """The call raised this."""
        host, run = self._shell, self._run
        if run is None:
            run = self._run = BatchRun(self._records, self._policy, self._breaker)
            run.next_step(host.now())  # the whole batch, which was given
            self._failures, self._failed = {}, 0
            self._retry_laters.forget()  # waits of a batch that was stopped
        error = run.checked(error)
        if isinstance(error, FailedRecords):
            self._covered = self.covers
        failure = host.describe(error, self._given)
        self._failures.update(dict.fromkeys(run.accused(error), failure))
        self._failed += 1
        was_isolating, now = run.is_isolating, host.now()
        is_host_fault = host_fault(error) is not None
        pause_s = run.raised(
            error, now, host.wall(), at=failure.position, is_host_fault=is_host_fault
        )
        waits = 0
        if isinstance(error, RetryLater) and pause_s is not None:
            self._failed -= 1
            waits = self._retry_laters.asked(PROCESS_RECORDS, now)
        else:
            self._waits_no_more()
        begins_search = run.is_isolating and not was_isolating
        host.raised(Raised(error, failure, is_host_fault, pause_s, waits, begins_search))

    def next_step(self) -> Step:
        """What follows after a call raised."""
        host, run, records = self._shell, self._run, self._records
        assert run is not None, "a call raised"
        if (settled := run.newly_settled()) is not None:
            host.settled(records[settled - 1].position)
        step = run.next_step(host.now())
        match step:
            case Give(indexes):
                self._plan(indexes)
            case Finished():
                self._waits_no_more()
                if self._failed:
                    host.recovered(self._failed + 1)
            case Halt(reason):
                self._waits_no_more()
                host.halt(reason, run.calls)
            case Rest() | LetGo():
                pass
            case _:
                assert_never(step)
        return step

    def keep_held(self) -> None:
        """User code asks for a checkpoint: first keep the letters of all records of the batch that
        are given up [I13]. Any thread of user code. Raises: SinkError."""
        run = self._run
        if run is None:
            return
        with self._keeping:
            for step in run.held:
                failure = self._failures[step.index]
                self._shell.keep(self._records[step.index], failure, step.calls)
            run.release(self._shell.now())

    def _plan(self, indexes: Sequence[int]) -> None:
        """The next call has these records of the batch."""
        records = self._records
        if len(indexes) == len(records):
            self._given = records
        elif isinstance(indexes, range):
            self._given = records[indexes.start : indexes.stop]
        else:
            self._given = [records[index] for index in indexes]
        is_to_the_end = indexes[-1] == len(records) - 1
        self._upto = self._last if is_to_the_end else self._given[-1].position

    def _waits_no_more(self) -> None:
        """The call returned, or failed in another way than by RetryLater."""
        waited = self._retry_laters.over(PROCESS_RECORDS, self._shell.now)
        if waited is not None:
            self._shell.waited(waited)


class BatchCalls(BatchSteps):
    """Performs the steps of batches on the thread of `run`."""

    def __init__(self, host: BatchHost, policy: ErrorPolicy) -> None:
        super().__init__(host, policy)
        self._host = host
        self._rows: RowScope | None = None

    def run(
        self, records: Sequence[Record], last: ExtendedSequenceNumber, rows: RowScope | None
    ) -> bool:
        """Give these records, at least one, until each is processed or given up. False if a stop
        came before that, or if the lease is halted.

        `last` is the position at which the batch ends, `rows` are those that the calls emit.
        """
        self.begin(records, last)
        self._rows = rows
        # Nearly every batch is processed by its first call, which needs no decision.
        self._attempt()
        return self._run is None or self._is_done()

    def _is_done(self) -> bool:
        """Perform what follows after the first call raised."""
        host, records = self._host, self._records
        may_go = False
        while True:
            step = self.next_step()
            match step:
                case Finished():
                    return True
                case Halt():
                    return False
                case Rest(pause_s):
                    may_go = host.rest(pause_s)
                case Give():
                    may_go = may_go or host.may_go_on()
                    if may_go:
                        self._attempt()
                        may_go = False
                        continue
                case LetGo(index, calls):
                    may_go = host.let_go(records[index], self._failures[index], calls)
                case _:
                    assert_never(step)
            if not may_go:
                return False

    def _attempt(self) -> None:
        """Make one call. The rows that it emitted before it raised stay only if it named the
        records that failed: then the others are processed."""
        host, given, left = self._host, self._given, self.next_call()
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
            attempt(call, self._rows, self.covers, host.durable)
        except BaseException as error:
            host.limit(None)
            if not host.ends_run(error):
                self.raised(error)
                return
            raise
        host.limit(None)
        if failed is not None:
            self.raised(failed)
        elif self._run is not None:  # or else the batch is done
            self.returned()
