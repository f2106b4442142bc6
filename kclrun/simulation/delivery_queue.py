"""User code of one lease process, reduced to the times of its events.

It does not know leases or rows; `fetching.py` brings the records.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, assert_never, overload

import msgspec

from kclrun.calling.batches import BatchSteps, Raised, StepHost
from kclrun.calling.delivery import (
    Call,
    ConfirmEnd,
    ConfirmStop,
    Delivery,
    Repetition,
    StartBatch,
    error_words,
)
from kclrun.calling.failures import Finished, Give, Halt, LetGo, Rest
from kclrun.calling.tracebacks import Failure
from kclrun.errors import LeaseLost
from kclrun.lease import commands, events
from kclrun.lease.policy import batch_records_max
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.reports import ProcessorFailed
from kclrun.simulation.fetching import FetchHost, QueueTimes, SimulatedFetching
from kclrun.simulation.observer import Observer, Reader
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.user_code import Attempt, BatchUserCode

# A page of GetRecords, and a batch: both are 10,000 records at most.
_BATCH_MAX: Final = 10_000
# Create the processor and call `initialize`: most processors do little there.
_CALL_S: Final = 0.005
# Measured with a processor that parses JSON: 20 MB take a second of a core.
_CPU_S_PER_BYTE: Final = 1 / 20e6
# The retries and the backoff of `on_error`, by default.
_ON_ERROR: Final = (5, 1.0)
# To write a dead letter and its folder to a disk.
_KEEP_S: Final = 0.004


class _Batch(msgspec.Struct):
    """The batch that user code processes now, or gets again after a pause. `given` are the first
    and last record of its call under way, or of the last one."""

    first: int
    last: int
    position: ExtendedSequenceNumber  # of the last
    given: tuple[int, int]
    may_go_again: bool = False


class _Records(Sequence[Record]):
    """The records of a batch, as far as a driver reads them: their positions, made when read."""

    def __init__(
        self,
        numbers: range,
        position: Callable[[int], ExtendedSequenceNumber],
        made: dict[int, Record] | None = None,
    ) -> None:
        self._numbers = numbers
        self._position = position
        self._made: dict[int, Record] = {} if made is None else made

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> _Records: ...

    def __getitem__(self, index: int | slice) -> Record | _Records:
        if isinstance(index, slice):
            return _Records(self._numbers[index], self._position, self._made)
        number = self._numbers[index]
        record = self._made.get(number)
        if record is None:
            record = Record(b"", "", self._position(number).sequence_number)
            self._made[number] = record
        return record


class SimulatedDeliveryQueue(StepHost, FetchHost):
    """The records that `fetching` brings are given to user code, which behaves as `user_code.py`
    draws. As in a lease process `calling/delivery.py` decides about its calls, and
    `calling/batches.py` about the calls of a batch. `post` takes events for the core."""

    def __init__(
        self,
        reader: Reader,
        stream: ShardStream,
        observer: Observer,
        times: QueueTimes,
        *,
        fetching: SimulatedFetching,
        post: Callable[[events.Event], None],
        user_code: BatchUserCode,
        uncheckpointed_max: int,
    ) -> None:
        self.fetching = fetching
        self._reader = reader
        self._key: LeaseKey = reader.key
        self._stream = stream
        self._observer = observer
        self._world_now = times.world_now
        self._now = times.now
        self._after = times.after
        self._post = post
        self._user_code = user_code
        self._calls = BatchSteps(self, ErrorPolicy(*_ON_ERROR, then=user_code.kind.then))
        self._delivery = Delivery(min(_BATCH_MAX, batch_records_max(uncheckpointed_max)))
        self._is_busy = False
        self.cpu_s = 0.0  # that the process has used
        self.busy_since = Instant(0.0)  # as in the status: 0 while user code is not running
        self._batch: _Batch | None = None
        # Of the last call that raised, and the record that its traceback shows.
        self._error: BaseException | None = None
        self._shown: ExtendedSequenceNumber | None = None
        self._requests = itertools.count(1)
        self._waits_for: tuple[int, Callable[[commands.AnswerCheckpoint], None]] | None = None
        self._durable: ExtendedSequenceNumber | None = None
        self._fence = Instant(-math.inf)
        self._delivered = 0
        self._given: int | None = None  # None: all that was delivered

    @property
    def is_inside_user_code(self) -> bool:
        """Whether a batch is being processed now."""
        return self._is_busy and self._batch is not None

    # Commands of the core.

    def allow_delivery(self, permit: commands.AllowDelivery) -> None:
        self._delivery.allow(permit)
        self._fence = permit.fence
        self._go_on()

    def stop_delivery(self) -> None:
        self._delivery.stop()
        self._go_on()

    def call(self, call: Call) -> None:
        self._delivery.call(call)
        self._go_on()

    def answer(self, answer: commands.AnswerCheckpoint) -> None:
        """User code that waits for a checkpoint continues."""
        if self._waits_for is not None and self._waits_for[0] == answer.request:
            _, go_on = self._waits_for
            self._waits_for = None
            self._after(0.0, lambda: go_on(answer))

    def note_durable(self, position: ExtendedSequenceNumber) -> None:
        """A checkpoint is on the row: a batch that is given again begins behind it."""
        self._durable = position

    # As `FetchHost`.

    def page_came(self) -> None:
        permit = self._delivery.permit
        if permit is not None and self._now() >= permit.fence:
            self._observer.coverage.seen("fence_passed_mid_fetch")
        self._go_on()

    def shard_expired(self) -> None:
        self._go_on()

    # The order of calls.

    def _go_on(self) -> None:
        """Start the next call of user code, if user code is idle and may run."""
        if self._is_busy:
            return
        self.busy_since = Instant(0.0)
        batch = self._batch
        if batch is not None:  # its call raised
            repetition = self._delivery.repetition(self._now(), is_batch=True)
            if repetition is Repetition.NOW and batch.may_go_again:
                self._give(batch, self._user_code.again)
            if repetition is not Repetition.NEVER:
                return
            self._leave_undone(batch)
        self._start_next()

    def _start_next(self) -> None:
        waiting = self.fetching.fetched - self._delivered or None
        if waiting is None and (self.fetching.is_expired or self.fetching.is_over()):
            self._delivery.end()
        match self._delivery.next_start(waiting, self._now()):
            case None:
                if waiting and self._delivery.may_start(self._now()):
                    self._observer.coverage.seen("delivery_stopped_at_the_cap")
            case StartBatch(records):
                self._deliver(records)
            case ConfirmStop():
                self._post(events.DeliveryStopped())
            case ConfirmEnd():
                self._report_exhausted()
            case call:
                self._work(_CALL_S, lambda: self._called(call))

    def _report_exhausted(self) -> None:
        if self.fetching.is_expired:
            self._post(events.ShardExhausted((), is_expired=True))
            return
        self._observer.shard_exhausted(self._reader)
        self._post(events.ShardExhausted(self._stream.children_of(self._key)))

    def _called(self, call: Call) -> None:
        """User code reached the end of a call other than a batch."""
        if isinstance(call, commands.CallInitialize):
            self._begin(call.row)
        saves = not isinstance(call, commands.CallInitialize | commands.CallLeaseLost)
        if saves and self._user_code.kind.checkpoints_by_hand:
            self._checkpoint(self._given, lambda _: self._post(events.CallReturned()))
        else:
            self._post(events.CallReturned())

    def _begin(self, row: Lease) -> None:
        self._delivered = self._stream.records.number_of(self._key, row.checkpoint)
        self.fetching.begin(row, self)

    # Batches.

    def _deliver(self, size: int) -> None:
        first, last = self._delivered + 1, self._delivered + size
        position = self._position(last)
        batch = self._batch = _Batch(first, last, position, (first, last))
        self._delivered = last
        self._calls.begin(_Records(range(first, last + 1), self._position), position)
        self._give(batch, self._user_code.begin)
        payload_bytes = size * self._stream.traffic.record_bytes
        self.cpu_s += payload_bytes * _CPU_S_PER_BYTE
        self._post(events.BatchDelivered(batch.position, size, payload_bytes))

    def _give(self, batch: _Batch, drawn: Callable[[], Attempt]) -> None:
        """Make the next call of a batch. Records that a checkpoint covers are not given again."""
        records = self._calls.next_call()
        if records:
            batch.given = (self._number(records[0].position), self._number(records[-1].position))
            self._attempt(batch, drawn())
        else:
            self._returned(batch)

    def _number(self, position: ExtendedSequenceNumber) -> int:
        return self._stream.records.number_of(self._key, position)

    def _position(self, number: int) -> ExtendedSequenceNumber:
        return self._stream.records.position(self._key, number)

    def _attempt(self, batch: _Batch, attempt: Attempt) -> None:
        batch.may_go_again = False
        first, last = batch.given
        self._observer.batch_begun(self._reader, first, last)
        poison = self._user_code.kind.first_poison(first, last)
        share, until = attempt.checkpointed_share, last if poison is None else poison - 1

        def worked() -> None:
            if share is None or until < first:
                self._over(batch, attempt, poison)
            else:
                self._calls.keep_held()
                covered = first + int((until - first) * share)
                self._observer.batch_vouched_for(self._reader, first, covered)
                self._checkpoint(
                    covered, lambda answer: self._answered(batch, attempt, poison, answer)
                )

        self._work(attempt.duration_s, worked)

    def _answered(
        self,
        batch: _Batch,
        attempt: Attempt,
        poison: int | None,
        answer: commands.AnswerCheckpoint,
    ) -> None:
        """A lost lease raises LeaseLost, and this user code does not catch it."""
        if answer.answer is commands.CheckpointAnswer.LOST:
            self._raised(batch, LeaseLost(answer.detail))
        else:
            self._over(batch, attempt, poison)

    def _over(self, batch: _Batch, attempt: Attempt, poison: int | None) -> None:
        if attempt.raises or poison is not None:
            self._raised(batch, ValueError("as drawn"), poison)
        else:
            if self._calls.has_raised:
                self._observer.coverage.seen("user_code_raised_and_held")
            self._observer.batch_processed(self._reader, *batch.given)
            self._returned(batch)

    def _returned(self, batch: _Batch) -> None:
        if self._now() >= self._fence:
            self._observer.coverage.seen("fence_passed_mid_batch")
        self._calls.returned()
        if self._calls.has_raised:
            self._step(batch)
        else:
            self._processed(batch)

    def _processed(self, batch: _Batch) -> None:
        self._batch = None
        self._post(events.BatchProcessed(batch.position))

    def _raised(self, batch: _Batch, error: Exception, poison: int | None = None) -> None:
        """`poison` is the record that the traceback shows; user code of every second batch shows
        none."""
        is_shown = poison is not None and batch.first % 2 == 0
        self._shown = self._position(poison) if poison and is_shown else None
        self._observer.batch_raised(self._reader, batch.given[0])
        self._calls.raised(error)
        self._step(batch)

    def _step(self, batch: _Batch) -> None:
        """Perform the next step of a batch whose call raised."""
        if self._batch is not batch:
            return
        step = self._calls.next_step()
        match step:
            case Finished():
                self._observer.left_out_before(self._reader, batch.last + 1)
                self._processed(batch)
                self._go_on()
            case Rest(pause_s):
                self._after(pause_s, lambda: self._step(batch))
            case Give(indexes):
                batch.given = (batch.first + indexes[0], batch.first + indexes[-1])
                self._observer.left_out_before(self._reader, batch.given[0])
                batch.may_go_again = True
                self._after(0.0, self._go_on)
            case LetGo(index):
                self._after(_KEEP_S, lambda: self._kept(batch, batch.first + index))
            case Halt():
                pass
            case _:
                assert_never(step)

    def _leave_undone(self, batch: _Batch) -> None:
        """A checkpoint of user code from here on covers no more than the records that are done."""
        self._batch = None
        self._given = batch.first + self._calls.settled - 1

    def _kept(self, batch: _Batch, number: int) -> None:
        """The letter is durable, whatever became of the batch meanwhile."""
        self._observer.gave_up(self._reader, number)
        self._step(batch)

    # As `StepHost`. The simulator has no rows, and no bounds of a checkpoint inside a batch:
    # user code names the record up to which it checkpoints.

    def now(self) -> Instant:
        return self._now()

    def wall(self) -> WallTime:
        return WallTime(0.0)  # no record is too old

    def durable(self) -> ExtendedSequenceNumber | None:
        durable, batch = self._durable, self._batch
        is_within = durable and batch and self._number(durable) >= batch.given[0]
        return durable if is_within else None

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        pass

    def describe(self, error: BaseException, records: Sequence[Record]) -> Failure:
        return Failure(error_words(error), position=self._shown)

    def raised(self, raised: Raised) -> None:
        self._error = raised.error

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        self._observer.gave_up(self._reader, self._number(record.position))

    def halt(self, reason: str, calls: int) -> None:
        batch = self._batch
        assert batch is not None, "a batch is halted while it is under way"
        self._leave_undone(batch)
        self._delivery.halt()
        words = reason or (error_words(self._error) if self._error is not None else "")
        self._post(ProcessorFailed("process_records", words, calls, batch.position))

    def settled(self, position: ExtendedSequenceNumber) -> None:
        self._post(events.BatchProcessed(position))

    def _checkpoint(
        self, last: int | None, answered: Callable[[commands.AnswerCheckpoint], None]
    ) -> None:
        """User code asks for a checkpoint and waits; None means all records it was given."""
        request = next(self._requests)

        def go_on(answer: commands.AnswerCheckpoint) -> None:
            self._is_busy = False
            is_lost = answer.answer is commands.CheckpointAnswer.LOST
            name = "checkpoint_by_hand_refused" if is_lost else "checkpoint_by_hand"
            self._observer.coverage.seen(name)
            answered(answer)
            self._go_on()

        self._is_busy = True
        self._waits_for = (request, go_on)
        self._observer.vouched_for(self._reader, self._delivered if last is None else last)
        position = None if last is None else self._position(last)
        self._post(events.CheckpointRequested(request, position))

    def _work(self, duration_s: float, worked: Callable[[], None]) -> None:
        self._is_busy = True
        self.busy_since = self.busy_since or self._now()

        def done() -> None:
            self._is_busy = False
            worked()
            self._go_on()

        self._after(duration_s, done)
