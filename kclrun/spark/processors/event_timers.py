"""Timers of event time among the records of a range: where a call ends, and which timers then fire.

The records alone decide both (`calling/timer_run.py`), so a range that is read again, or in pages
of other sizes, has the same calls, rows and state [K18].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kclrun.calling.delivery import RowScope
from kclrun.calling.methods import MethodCalls
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.timers import TimerCalls, TimerHost
from kclrun.errors import ProcessorLoadError
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.state import Watermarks
from kclrun.spark.keyed.shard_state import ShardState
from kclrun.state.event_times import EventTimes
from kclrun.state.timers import Timer


class Instance(Protocol):
    """The instance of a processor, around its timers."""

    @property
    def position(self) -> ExtendedSequenceNumber:
        """That of the last delivered record."""
        ...

    def process_part(self, records: Sequence[Record]) -> None:
        """Give these records to user code. Raises: ProcessorError."""
        ...

    def call_timer(self, timer: Timer) -> None:
        """Call `on_timer`, whose rows belong to `position`. Raises: what it raises."""
        ...

    def fired(self, seconds: float) -> None:
        """A timer fired, and is done after this time."""
        ...

    def checkpointed(self) -> ExtendedSequenceNumber:
        """The last position that a checkpoint covers."""
        ...


class EventTimers(TimerHost):
    """The `TimerHost` of one instance, from the position `begin` on. A range has positions of
    records only: the rows of a timer belong to the record before it."""

    def __init__(
        self,
        instance: Instance,
        state: ShardState,
        begin: ExtendedSequenceNumber,
        *,
        methods: MethodCalls,
        effects: RowScope,
        watermarks: Watermarks,
        times: EventTimes,
        clock: Callable[[], float],
    ) -> None:
        self._instance = instance
        self._clock = clock
        self._began: float | None = None  # the calls with the next timer
        state.live.reserved.is_served = True
        self._run = TimerRun(
            state.live,
            begin,
            lateness_s=watermarks.lateness_s,
            every_s=watermarks.every_s,
            times=times,
        )
        # A call may emit so many bytes, and a group is one call.
        self._calls = TimerCalls(self._run, self, methods, effects, begin, group_max=1)

    @property
    def watermark(self) -> float | None:
        return self._run.watermark

    def process(self, records: Sequence[Record]) -> None:
        """Process these records, each part of them followed by the timers that it lets fire.
        Raises: ProcessorError."""
        instance = self._instance
        self._calls.fire_events()
        start = 0
        while start < len(records):
            end = self._run.part_end(records, start)
            self._calls.note(instance.position)
            instance.process_part(records[start:end])
            self._calls.arrive(instance.position)
            start = end

    # As `TimerHost`.

    def call(self, timer: Timer) -> None:
        if self._began is None:
            self._began = self._clock()
        self._instance.call_timer(timer)

    def durable(self) -> ExtendedSequenceNumber | None:
        return self._instance.checkpointed()

    def position_after(self, at: ExtendedSequenceNumber) -> ExtendedSequenceNumber:
        return at

    def limit(self, at: ExtendedSequenceNumber | None) -> None:
        pass

    def reached(self, at: ExtendedSequenceNumber) -> None:
        if self._began is not None:
            self._instance.fired(self._clock() - self._began)
            self._began = None


def refuse_single_records(called: str) -> None:
    """Raises: ProcessorLoadError."""
    raise ProcessorLoadError(
        f"{called}: on_timer needs process_records with engine: spark: write that method"
    )
