"""Which timer fires next, and where a batch ends because of it. Pure.

The watermark moves in steps, each at a record that follows from the records alone. A batch ends at
that record, and event timers up to the watermark fire before the next record. So neither the cuts
of batches nor a crash change the result. A timer of the wall clock is not a function of the
records, nor is a watermark that moves on an idle shard: `docs/explanation/commits.md` has the rules
by which their rows appear once [K18, R2].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from kclrun.model.reading import RANGE_SETTLED_S
from kclrun.model.record import Record
from kclrun.model.sequence import IDLE_TICKS, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import LiveEntries
from kclrun.state.timers import WATERMARK, Step, Timer, entry_of

# Timers of one call of the shell: fast ones take some 3 ms between two checks of the fence.
GROUP_MAX: Final = 256


class Quiet(NamedTuple):
    """A shard that was read to its end and had no record, by the clock of the service: from `since`
    to `seen_at`, the time of the last answer."""

    since: WallTime
    seen_at: WallTime


class TimerRun:
    """The timers and the watermark of one lease that begins at `position`.

    `times` has the time of a record. A time after the arrival counts as the arrival, so that one
    wrong clock among the producers does not move the watermark for all. `stored` are the
    cursors that outputs had ahead of the row. Up to the last of them, timers of the wall clock fire
    only at the record of a cursor, and as many as its tick counts. The watermark moves without a
    record after `idle_s` (None: never), in rounds that are `round_every_s` apart at least.
    """

    def __init__(
        self,
        live: LiveEntries,
        position: ExtendedSequenceNumber,
        *,
        lateness_s: float,
        every_s: float,
        times: EventTimes,
        stored: Iterable[ExtendedSequenceNumber] = (),
        idle_s: float | None = None,
        round_every_s: float = 0.0,
    ) -> None:
        self._live = live
        self._lateness_s = lateness_s
        self._every_s = every_s
        self._times = times
        self._stored = sorted(stored)
        self._idle_s = idle_s
        # If rounds are further apart than steps, one step a round would fall behind the clock.
        self._idle_every_s = every_s * max(1, math.ceil(round_every_s / every_s))
        step = live.reserved.step.at(position)
        self.watermark, self._fired = step.watermark, step.fired
        self._upcoming: Step | None = None

    # Event time.

    def part_end(self, records: Sequence[Record], start: int) -> int:
        """The end of the part that begins with `records[start]`: behind the next record that moves
        the watermark, or the end of the batch."""
        self._upcoming = None
        known, every_s, lateness_s = self.watermark, self._every_s, self._lateness_s
        least = -math.inf if known is None else known + every_s + lateness_s
        seen = self._times.seen_at
        # This is the hot path of every record.
        for index in range(start, len(records)):
            record = records[index]
            if record.approximate_arrival_timestamp < least:
                continue
            seen_at = seen(record)
            if seen_at >= least and seen_at != -math.inf:
                watermark = math.floor((seen_at - lateness_s) / every_s) * every_s
                self._upcoming = self._step(watermark, record.position)
                return index + 1
        return len(records)

    @property
    def may_join(self) -> bool:
        """Whether more records may run beside those of the part: the part does not end with a step
        of the watermark, and no output has a cursor ahead."""
        return self._upcoming is None and not self._stored

    @property
    def must_note(self) -> bool:
        """Whether `note` has something to write before the part is given to user code."""
        return self._upcoming is not None

    def note(self) -> None:
        """Write the next watermark, as a change of the state."""
        assert self._upcoming is not None, "must_note comes first"
        self._write(self._upcoming)

    def arrive(self) -> None:
        """Every record of the part is done: the watermark moves if the part ended with a step."""
        if self._upcoming is not None:
            self._fired, self.watermark = self.watermark, self._upcoming.upcoming
            self._upcoming = None

    def next_event(self) -> Timer | None:
        """The event timer that fires now; None if none does. A timer that is set for a time at or
        before the watermark fires when the watermark moves again."""
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
        """The time from which the watermark may move without a record; None: not before the next
        record. By the clock of the service, which stamps the arrival of each record.

        `quiet_since` is the `since` of `Quiet`.
        """
        if self._idle_s is None or quiet_since is None or self._stored:
            return None
        upcoming = self._idle_watermark()
        if upcoming is None:
            return None
        return max(upcoming + self._lateness_s + RANGE_SETTLED_S, quiet_since + self._idle_s)

    def _idle_watermark(self) -> float | None:
        """The watermark that the first pending event timer waits for; None without a timer. It is a
        function of the state alone: the clock decides only when it comes."""
        timer = self._live.earliest_timer("event")
        if timer is None:
            return None
        steps = timer.at / self._idle_every_s
        ends = timer.at if math.isinf(steps) else math.ceil(steps) * self._idle_every_s
        return ends if self.watermark is None else max(ends, self.watermark + self._every_s)

    def advance(self, done: ExtendedSequenceNumber) -> bool:
        """Move the watermark to where the first event timer fires, behind the record at `done`, as
        a change of the state. False if no event timer is pending."""
        upcoming = self._idle_watermark()
        if upcoming is None:
            return False
        self._write(self._step(upcoming, done.of_record))
        self._fired, self.watermark = self.watermark, upcoming
        return True

    def _step(self, upcoming: float, at: ExtendedSequenceNumber) -> Step:
        known = self.watermark
        return Step(known, known, upcoming, at.sequence_number, at.sub_sequence_number)

    # Wall time.

    def is_event_due(self) -> bool:
        """Whether event timers are left to fire at the watermark: the lease began between them."""
        return self.next_event() is not None

    def forced(
        self, done: ExtendedSequenceNumber, upcoming: ExtendedSequenceNumber | None
    ) -> ExtendedSequenceNumber | None:
        """The stored cursor whose timers fire now, regardless of the clock: at the record of the
        cursor, or before the `upcoming` record behind it. None if no stored cursor is there."""
        while self._stored and self._stored[0] <= done:
            del self._stored[0]
        for cursor in self._stored:
            is_here = cursor.of_record == done.of_record
            if is_here or (upcoming is not None and cursor.of_record < upcoming):
                return cursor if cursor.tick else None
        return None

    def group_max(self, at: ExtendedSequenceNumber) -> int:
        """How many timers behind `at` may be one group. A group does not pass a cursor, which user
        code may have made in the middle of a round: outputs drop the rows of whole groups."""
        ahead = [
            cursor.tick - at.tick for cursor in self._stored if cursor.of_record == at.of_record
        ]
        return min([GROUP_MAX, *(ticks for ticks in ahead if ticks > 0)])

    def wall_at(self) -> float | None:
        """When the next timer of the wall clock fires, in seconds since the epoch."""
        timer = self._live.earliest_timer("wall")
        return None if timer is None or self._stored else timer.at

    def next_wall(self, now: float, *, is_forced: bool) -> Timer | None:
        """The timer of the wall clock that fires now. Below a stored cursor none fires by the
        clock, only `is_forced`."""
        timer = self._live.earliest_timer("wall")
        if timer is None or is_forced:
            return timer
        return timer if timer.at <= now and not self._stored else None

    # Both.

    def take(self, timer: Timer) -> None:
        """The timer fires: it is not pending any more. This is a change of the state, which is
        undone if `on_timer` raises."""
        if timer.clock == "wall" and self.watermark is not None:
            # Event timers up to the watermark have fired: a timer set now waits for the next step.
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
    record. `stored` is at most one round ahead of `done`, because each round ends with a
    checkpoint."""
    begun = done.tick if done.of_record == stored.of_record else 0
    return stored.tick // IDLE_TICKS > begun // IDLE_TICKS
