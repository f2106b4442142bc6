"""The timers of one lease on its main thread: `on_timer` is called between the batches.

`calling/timers.py` makes the calls, and the delivery queue decides when a call may start.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kclrun.calling.delivery import RowScope
from kclrun.calling.methods import MethodCalls
from kclrun.calling.timer_run import Quiet, TimerRun, is_of_idle
from kclrun.calling.timers import ON_TIMER, TimerCalls, TimerHost
from kclrun.errors import LeaseLost
from kclrun.ipc.board import boottime
from kclrun.methods import call_method
from kclrun.model.sequence import IDLE_TICKS, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import RecordProcessor
from kclrun.state.timers import Timer
from kclrun.worker.delivery_queue import Batch, CheckpointCalls, DeliveryQueue
from kclrun.worker.progress import Progress

# The clock of a machine may be set back or forward, so it is read this often at least.
_LOOK_S: Final = 30.0
# The time of the service has whole seconds.
_TIP_LOOK_S: Final = 1.0


class TimerClocks(NamedTuple):
    """The clocks of the timers of a lease.

    `round_every_s` is None where no output stores its cursor. Otherwise each round of the wall
    clock ends with a checkpoint, so that the next owner knows at which record the round was, and
    two rounds are so many seconds apart at least. `quiet` returns None while the shard is not idle,
    or while that is not known. If `wall` is None, the wall clock stands at the arrival of the last
    record.
    """

    round_every_s: float | None
    quiet: Callable[[], Quiet | None] = lambda: None
    wall: Callable[[], float] | None = time.time


class TimerDelivery(TimerHost):
    """The `TimerHost` of a lease: the rounds of its clocks, and its checkpoints.

    `methods` repeats a call as `on_error` says. Between two groups of timers delivery may be
    stopped; the remaining timers fire later.
    """

    def __init__(
        self,
        run: TimerRun,
        processor: RecordProcessor,
        rows: RowScope,
        checkpoints: CheckpointCalls,
        progress: Progress,
        *,
        queue: DeliveryQueue,
        methods: MethodCalls,
        clocks: TimerClocks,
    ) -> None:
        assert progress.done is not None, "the lease is claimed"
        self.run = run
        self._processor = processor
        self._checkpoints = checkpoints
        self._progress = progress
        self._queue = queue
        self._round_every_s = clocks.round_every_s
        self._next_round = Instant(0.0)
        self._quiet = clocks.quiet
        self._was_idle = False
        self.arrived_at = 0.0  # of the last record given
        self._wall = clocks.wall or (lambda: self.arrived_at)
        self.calls = TimerCalls(run, self, methods, rows, progress.done)

    def wait_s(self, now: Instant, upcoming: ExtendedSequenceNumber | None) -> float | None:
        """The seconds until timers fire, 0 for now; None while none is pending. Called under the
        lock of the queue."""
        if self.run.is_event_due() or self.run.forced(self.calls.done, upcoming) is not None:
            return 0.0
        at = self.run.wall_at()
        waits = [] if at is None else [at - self._wall()]
        if self.run.may_idle:
            waits.append(self._idle_wait_s() if upcoming is None else _TIP_LOOK_S)
        if not waits:
            return None
        return min(_LOOK_S, max(0.0, min(waits), self._next_round - now))

    def _idle_wait_s(self) -> float:
        """The seconds until the watermark may move without a record, as far as known; 0 for now."""
        quiet = self._quiet()
        at = None if quiet is None else self.run.idle_at(quiet.since)
        if quiet is None or at is None:
            return _TIP_LOOK_S
        return 0.0 if at <= quiet.seen_at else max(_TIP_LOOK_S, at - quiet.seen_at)

    def fire(self, upcoming: ExtendedSequenceNumber | None) -> None:
        """Fire the timers that `wait_s` found due."""
        if not self.calls.fire_events():
            return
        stored, begun = self.run.forced(self.calls.done, upcoming), self.calls.done
        if self._repeat_round(stored) if stored is not None else self._round(upcoming):
            self._end_round(begun)

    def _round(self, upcoming: ExtendedSequenceNumber | None) -> bool:
        """Fire the timers of the wall clock that are due, or, in turns with them, the event timers
        of an idle shard."""
        now, at = self._wall(), self.run.wall_at()  # a round has one instant
        is_idle_due = self.run.may_idle and upcoming is None and self._idle_wait_s() == 0.0
        self._was_idle = is_idle_due and not (self._was_idle and at is not None and at <= now)
        if self._was_idle:
            self.calls.advance(IDLE_TICKS)
            return self.calls.fire_events()
        return self.calls.fire(lambda: self.run.next_wall(now, is_forced=False))

    def _repeat_round(self, stored: ExtendedSequenceNumber) -> bool:
        """Fire as many timers as the tick of a stored cursor counts, in the same order."""
        if stored.of_record != self.calls.done.of_record:
            self.calls.reach(stored.of_record)
        if is_of_idle(stored, self.calls.done):
            may_advance = self.calls.advance(IDLE_TICKS)
            next_timer = self.run.next_event
        else:
            may_advance = False
            next_timer = functools.partial(self.run.next_wall, self._wall(), is_forced=True)
        while self.calls.fire(next_timer, stored.tick):
            # Other settings make other steps of an idle shard, but the same timers.
            if self.calls.done >= stored or not may_advance:
                break
            may_advance = self.calls.advance(0)
        else:
            return False
        if self.calls.done < stored:  # the processor set fewer timers now: no row is missing
            self.calls.reach(stored)
        return True

    def _end_round(self, begun: ExtendedSequenceNumber) -> None:
        if self._round_every_s is None or self.calls.done == begun:
            return
        self._next_round = Instant(boottime() + self._round_every_s)
        self._checkpoints.given = self.calls.done
        try:
            # The core ends a lost lease.
            with contextlib.suppress(LeaseLost):
                self._checkpoints.checkpointer.checkpoint()
        finally:
            self._checkpoints.given = None

    # As `TimerHost`.

    def call(self, timer: Timer) -> None:
        call_method(self._processor, ON_TIMER, timer, self._checkpoints.checkpointer)

    def durable(self) -> ExtendedSequenceNumber | None:
        return self._progress.durable()

    def limit(self, at: ExtendedSequenceNumber | None) -> None:
        self._checkpoints.given = at
        self._checkpoints.before = None if at is None else lambda: self._progress.announce(at)

    def may_go_on(self) -> bool:
        return self._queue.may_try_again(0.0, is_batch=True)

    def reached(self, at: ExtendedSequenceNumber) -> None:
        self._progress.reach(at)


class Parts:
    """A batch, and the batches that joined it, in parts that end where the watermark moves."""

    def __init__(self) -> None:
        self._begun: deque[Batch] = deque()  # batches of which a part is not done
        self._batch: Batch | None = None
        self._start = 0

    @property
    def are_left(self) -> bool:
        """Whether records of the last batch are not given yet."""
        return self._batch is not None and self._start < len(self._batch.records)

    @property
    def last(self) -> ExtendedSequenceNumber:
        """The position at which the last batch ends."""
        assert self._batch is not None, "a batch has joined"
        return self._batch.last

    def join(self, batch: Batch) -> None:
        """A batch follows; every record of the batches before it was given."""
        assert not self.are_left, "no part is passed over"
        self._batch, self._start = batch, 0
        if batch.records:
            self._begun.append(batch)

    def next(self, run: TimerRun) -> Batch:
        """The next part, which ends at a record. A whole batch is not copied."""
        batch, start = self._batch, self._start
        assert batch is not None, "a batch has joined"
        records, size = batch.records, batch.payload_bytes
        end = self._start = run.part_end(records, start)
        last = records[end - 1].position
        if start or end < len(records):
            records = records[start:end]
            size = sum(len(record.data) for record in records)
        return Batch(records, last, size, batch.millis_behind_latest)

    def returned(self, part: Batch) -> Batch | None:
        """A part is done. Returns: the batch, if this is its last part."""
        if part.records and part.last == self._begun[0].records[-1].position:
            return self._begun.popleft()
        return None
