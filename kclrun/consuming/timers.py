"""Which timer fires next, and where a batch ends because of it. Pure.

The watermark moves in steps, each at a record that the records alone decide. There the batch ends,
and event timers up to the watermark fire before the next record. So it does not matter how records
were cut into batches, nor where a crash was. A timer of the wall clock is not a function of the
records, nor is a watermark that moves on an idle shard: `docs/explanation/commits.md` has the rules
that keep their rows there once [K18, R2].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from kclrun.model.reading import RANGE_SETTLED_S
from kclrun.model.record import Record
from kclrun.model.sequence import IDLE_TICKS, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.state.keyed import LiveEntries
from kclrun.state.timers import WATERMARK, Step, Timer, entry_of

# The timers of one call of the shell: some 3 ms of fast ones between two looks at the fence.
GROUP_MAX = 256


class Quiet(NamedTuple):
    """By the clock of the service: since when the shard is read to its end and had no record, and
    when it was seen so last."""

    since: WallTime
    seen_at: WallTime


class TimerRun:
    """The timers and the watermark of one lease, from its beginning at `position` on.

    `time_of` gives the time of a record: never after its arrival, so that one wrong clock among the
    producers cannot move the watermark of all. `stored` are the cursors that outputs had ahead of
    the row: between the row and the last of them timers of the wall clock fire only where, and as
    many as, the tick of a cursor says. The watermark moves without a record after `idle_s` (None:
    never), and then by rounds that are `round_every_s` apart at least.
    """

    def __init__(
        self,
        live: LiveEntries,
        position: ExtendedSequenceNumber,
        *,
        lateness_s: float,
        every_s: float,
        time_of: Callable[[Record], float],
        stored: Iterable[ExtendedSequenceNumber] = (),
        idle_s: float | None = None,
        round_every_s: float = 0.0,
    ) -> None:
        self._live = live
        self._lateness_s = lateness_s
        self._every_s = every_s
        self._time_of = time_of
        self._stored = sorted(stored)
        self._idle_s = idle_s
        # A round for each step would fall behind the clock where rounds are further apart.
        self._idle_every_s = every_s * max(1, math.ceil(round_every_s / every_s))
        step = live.reserved.step.at(position)
        self.watermark, self._fired = step.watermark, step.fired
        self._upcoming: Step | None = None

    # Event time.

    def part_end(self, records: Sequence[Record], start: int) -> int:
        """Where the call ends that begins with `records[start]`: behind the record that moves the
        watermark, or at the end of the batch."""
        self._upcoming = None
        known, every_s, lateness_s = self.watermark, self._every_s, self._lateness_s
        least = -math.inf if known is None else known + every_s + lateness_s
        time_of = self._time_of
        # This is the hot path of every record.
        for index in range(start, len(records)):
            record = records[index]
            if record.approximate_arrival_timestamp < least:
                continue
            seen_at = _seen_at(record, time_of)
            if seen_at >= least and seen_at != -math.inf:
                watermark = math.floor((seen_at - lateness_s) / every_s) * every_s
                at = record.position
                self._upcoming = Step(
                    self.watermark,
                    self.watermark,
                    watermark,
                    at.sequence_number,
                    at.sub_sequence_number,
                )
                return index + 1
        return len(records)

    @property
    def may_join(self) -> bool:
        """Whether more records may run beside those of the part: the watermark does not move behind
        them, and no timer has to fire at a record that an output knows."""
        return self._upcoming is None and not self._stored

    @property
    def must_note(self) -> bool:
        """Whether `note` has something to write before the part is given to user code."""
        return self._upcoming is not None

    def note(self) -> None:
        """Note the next watermark in the state, as a change of it."""
        assert self._upcoming is not None, "must_note comes first"
        self._write(self._upcoming)

    def arrive(self) -> None:
        """Every record of the part is done: the watermark moves if the part ended with its step."""
        if self._upcoming is not None:
            self._fired, self.watermark = self.watermark, self._upcoming.upcoming
            self._upcoming = None

    def next_event(self) -> Timer | None:
        """The event timer that fires now. A timer that is set at or before the watermark fires when
        the watermark moves again."""
        if self.watermark is None or (self._fired is not None and self._fired >= self.watermark):
            return None
        timer = self._live.earliest_timer("event")
        if timer is not None and timer.at <= self.watermark:
            return timer
        self._fired = self.watermark
        return None

    def _write(self, step: Step) -> None:
        self._live.change_reserved(*WATERMARK, msgspec.msgpack.encode(step))

    # Event time of an idle shard.

    @property
    def may_idle(self) -> bool:
        """Whether event timers wait that would fire if the shard were idle for long enough."""
        is_possible = self._idle_s is not None and not self._stored
        return is_possible and self._live.earliest_timer("event") is not None

    def idle_at(self, quiet_since: float | None) -> float | None:
        """From when on the watermark may move without a record, by the clock of the service, which
        stamped the arrival of each record; None: not before the next one.

        `quiet_since`: since when the shard has been read to its end and had no record.
        """
        if self._idle_s is None or quiet_since is None or self._stored:
            return None
        upcoming = self._idle_watermark()
        if upcoming is None:
            return None
        return max(upcoming + self._lateness_s + RANGE_SETTLED_S, quiet_since + self._idle_s)

    def _idle_watermark(self) -> float | None:
        """The watermark that the first pending event timer waits for; None without one. A function
        of the state alone: the clock decides when it comes, and never which one."""
        timer = self._live.earliest_timer("event")
        if timer is None:
            return None
        ends = math.ceil(timer.at / self._idle_every_s) * self._idle_every_s
        return ends if self.watermark is None else max(ends, self.watermark + self._every_s)

    def advance(self, done: ExtendedSequenceNumber) -> bool:
        """The watermark moves to where the first event timer fires, behind the record at `done`: a
        change of the state. False if no event timer is pending."""
        upcoming = self._idle_watermark()
        if upcoming is None:
            return False
        before, at = self.watermark, done.of_record
        self._write(Step(before, before, upcoming, at.sequence_number, at.sub_sequence_number))
        self._fired, self.watermark = before, upcoming
        return True

    # Wall time.

    def is_event_due(self) -> bool:
        """Whether event timers are to fire before anything else: the lease began between them."""
        return self.next_event() is not None

    def forced(
        self, done: ExtendedSequenceNumber, upcoming: ExtendedSequenceNumber | None
    ) -> ExtendedSequenceNumber | None:
        """The stored cursor whose timers fire now, whatever the clock says: at its record, or
        before the `upcoming` record that lies behind it."""
        while self._stored and self._stored[0] <= done:
            del self._stored[0]
        for each in self._stored:
            is_here = each.of_record == done.of_record
            if is_here or (upcoming is not None and each.of_record < upcoming):
                return each if each.tick else None
        return None

    def group_max(self, at: ExtendedSequenceNumber) -> int:
        """How many timers behind `at` may be one group: it does not pass a cursor, because outputs
        drop the rows of whole groups. User code may have asked for a checkpoint in the middle."""
        ahead = [each.tick - at.tick for each in self._stored if each.of_record == at.of_record]
        return min([GROUP_MAX, *(ticks for ticks in ahead if ticks > 0)])

    def wall_at(self) -> float | None:
        """When the next timer of the wall clock fires, in seconds since the epoch."""
        timer = self._live.earliest_timer("wall")
        return None if timer is None or self._stored else timer.at

    def next_wall(self, now: float, *, is_forced: bool) -> Timer | None:
        """The timer of the wall clock that fires now; below a stored cursor none does by the
        clock."""
        timer = self._live.earliest_timer("wall")
        if timer is None or is_forced:
            return timer
        return timer if timer.at <= now and not self._stored else None

    # Both.

    def take(self, timer: Timer) -> None:
        """The timer fires: it is not pending any more. A change of the state, taken back if
        `on_timer` raises."""
        if timer.clock == "wall" and self.watermark is not None:
            # Event timers up to the watermark have fired: one that is set now waits for its step.
            fired = Step(self.watermark, self.watermark)
            if self._live.reserved.step != fired:
                self._write(fired)
        key, name, _ = entry_of(timer)
        self._live.change_reserved(key, name, None)
        self._live.reserved.firing = timer

    def end_call(self) -> None:
        """`on_timer` returned, or raised."""
        self._live.reserved.firing = None


def is_of_idle(stored: ExtendedSequenceNumber, done: ExtendedSequenceNumber) -> bool:
    """Whether the round up to the tick of `stored` began with a watermark that moved without a
    record. At most one round lies behind `done`, because each ends with a checkpoint."""
    begun = done.tick if done.of_record == stored.of_record else 0
    return stored.tick // IDLE_TICKS > begun // IDLE_TICKS


def _seen_at(record: Record, time_of: Callable[[Record], float]) -> float:
    """The time of a record, not after its arrival; before all others if it has none."""
    try:
        seen_at = float(time_of(record))
    except Exception:  # noqa: BLE001 - user code; process_records will meet this record
        return -math.inf
    arrived_at = record.approximate_arrival_timestamp
    return min(seen_at, arrived_at)


def arrival_of(record: Record) -> float:
    """The time of a record for a processor without `event_time`."""
    return record.approximate_arrival_timestamp
