"""Timers of event time among the records of a range: where a call ends, and which timers then fire.

The records alone decide both (`consuming/timers.py`), so a range that is read again, or in pages of
other sizes, has the same calls, rows and state [K18].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kclrun.consuming.delivery import RowScope
from kclrun.consuming.timers import TimerRun
from kclrun.errors import ProcessorLoadError
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.state import Watermarks
from kclrun.processor import Checkpointer, RecordProcessor, call_method
from kclrun.spark.keyed.shard_state import ShardState
from kclrun.state.event_times import EventTimes


class TimersHost(Protocol):
    """What surrounds the timers of one instance."""

    @property
    def position(self) -> ExtendedSequenceNumber:
        """That of the last delivered record."""
        ...

    def process_part(self, records: Sequence[Record]) -> None:
        """Give these records to user code. Raises: ProcessorError."""
        ...

    def repeat_timer(self, call: Callable[[], None]) -> None:
        """Call `on_timer` until it returns, with its rows and changes of the state. Raises:
        ProcessorError."""
        ...


class EventTimers:
    """The timers of one instance, from the position `begin` on."""

    def __init__(
        self,
        processor: RecordProcessor,
        checkpointer: Checkpointer,
        state: ShardState,
        begin: ExtendedSequenceNumber,
        *,
        watermarks: Watermarks,
        times: EventTimes,
    ) -> None:
        self._processor = processor
        self._checkpointer = checkpointer
        state.live.reserved.is_served = True
        self._run = TimerRun(
            state.live,
            begin,
            lateness_s=watermarks.lateness_s,
            every_s=watermarks.every_s,
            times=times,
        )

    @property
    def watermark(self) -> float | None:
        return self._run.watermark

    def process(self, records: Sequence[Record], host: TimersHost, effects: RowScope) -> None:
        """Process these records, each part of them followed by the timers that it lets fire."""
        self._fire(host)
        start = 0
        while start < len(records):
            end = self._run.part_end(records, start)
            if self._run.must_note:
                effects.begin_batch()
                self._run.note()
                effects.end_batch(host.position)
            host.process_part(records[start:end])
            self._run.arrive()
            self._fire(host)
            start = end

    def _fire(self, host: TimersHost) -> None:
        while self._run.next_event() is not None:
            host.repeat_timer(self._call)

    def _call(self) -> None:
        timer = self._run.next_event()
        if timer is None:
            return
        try:
            self._run.take(timer)
            call_method(self._processor, "on_timer", timer, self._checkpointer)
        finally:
            self._run.end_call()


def refuse_single_records(called: str) -> None:
    """Raises: ProcessorLoadError."""
    raise ProcessorLoadError(
        f"{called}: on_timer needs process_records with engine: spark: write that method"
    )
