"""Pending timers of a shard, and its watermark: entries of the state under names that user code
cannot use. So versions, restores, splits and merges need no rule for them.

Must not know: when a timer fires (`calling/timer_run.py`), clocks, user code.
"""

from __future__ import annotations

import heapq
import math
from datetime import datetime
from typing import Final, Literal

import msgspec

from kclrun.errors import HaltShard, LimitExceeded
from kclrun.model.sequence import ExtendedSequenceNumber

Clock = Literal["event", "wall"]

# Reserved names begin with this character. A timer is the entry (key, _TIMER + name) of the state.
RESERVED: Final = "\0"
_TIMER: Final = "\0timer/"
_VALUE: Final = msgspec.msgpack.Decoder(tuple[float, bool])
_ENCODER: Final = msgspec.msgpack.Encoder()
# The watermark belongs to the shard, not to a key: no record has an empty partition key.
WATERMARK: Final = ("", "\0watermark")
# A pending timer takes some 470 bytes of memory (measured; 500,000 of them: 225 MiB), and as many
# calls of 10 µs that are due at once take 5 s, in which no record is processed.
TIMERS_MAX: Final = 500_000


class Timer(msgspec.Struct, frozen=True, order=True):
    """A timer of a key, as `on_timer` gets it. Ordered as those of a clock fire.

    `at` is its time in seconds since the epoch. `key` is the partition key, or the key of the
    state, that it was set for; `name` the name that it was set with, and a key has one timer of
    each name. `clock` is `event` for the watermark of the shard, and `wall` for the clock of
    the machine.
    """

    at: float
    key: str
    name: str = ""
    clock: Clock = "event"


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The present `watermark` of a shard; `fired`, the watermark up to which timers have fired; and
    `upcoming`, the next watermark, which holds from the record at `position` on. In seconds since
    the epoch; None: there is none yet.

    The next watermark is written before its record is given to user code. So each version of the
    state that has the record also has its watermark; in a version without the record the next
    watermark has no effect.
    """

    watermark: float | None = None
    fired: float | None = None
    upcoming: float | None = None
    position: str = ""
    sub: int = 0

    def at(self, position: ExtendedSequenceNumber) -> Step:
        """The watermark once every record up to `position` is done.

        Behind the record of the step its timers have fired. So a timer that a later record set for
        a time before the watermark waits for the next step, also if the lease begins in between.
        """
        if self.upcoming is None:
            return self
        noted = ExtendedSequenceNumber(self.position, self.sub)
        if position < noted:
            return self
        return Step(self.upcoming, self.fired if position.of_record == noted else self.upcoming)


def is_reserved(name: str) -> bool:
    """Whether an entry of this name is a timer or the watermark."""
    return name.startswith(RESERVED)


def entry_of(timer: Timer) -> tuple[str, str, bytes]:
    """The entry of a timer in the state: key, name and value."""
    is_wall = timer.clock == "wall"
    return timer.key, _TIMER + timer.name, _ENCODER.encode((timer.at, is_wall))


def timer_of(key: str, name: str, value: bytes) -> Timer | None:
    """The timer of an entry; None for an entry of another kind."""
    if not name.startswith(_TIMER):
        return None
    at, is_wall = _VALUE.decode(value)
    return Timer(at, key, name.removeprefix(_TIMER), "wall" if is_wall else "event")


def seconds_of(at: float | datetime) -> float:
    """A time as seconds since the epoch. Raises: LimitExceeded for a datetime without a zone, NaN
    and infinity."""
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise LimitExceeded("the time of a timer needs a zone: datetime.now(UTC)")
        return at.timestamp()
    if not math.isfinite(at):
        raise LimitExceeded("the time of a timer is a number of seconds since 1970")
    return float(at)


class ReservedEntries:
    """The reserved entries of a shard, with its timers in the order in which they fire.

    `is_served`: the processor has `on_timer`. `firing` is the timer whose call runs.
    """

    def __init__(self) -> None:
        self.is_served = False
        self.firing: Timer | None = None
        self._values: dict[tuple[str, str], bytes] = {}
        self._heaps: dict[Clock, list[Timer]] = {"event": [], "wall": []}
        self._count = 0

    def __len__(self) -> int:
        """How many timers are pending."""
        return self._count

    def pending(self) -> list[Timer]:
        """The timers, those of each clock in the order in which they fire."""
        found = (timer_of(key, name, value) for (key, name), value in self._values.items())
        return sorted(timer for timer in found if timer is not None)

    def get(self, key: str, name: str) -> bytes | None:
        """The value of an entry; None if there is none."""
        return self._values.get((key, name))

    def refuse(self, timer: Timer, key: str, name: str) -> None:
        """Raises: LimitExceeded for a timer that would fire again and again; HaltShard for a timer
        with a new name if there are TIMERS_MAX already."""
        firing = self.firing
        if firing is not None and firing.clock == timer.clock and timer.at <= firing.at:
            raise LimitExceeded(
                "on_timer sets timers for later times than that of the timer that fires: this one"
                " would come again at once, and no record after it"
            )
        if self._count >= TIMERS_MAX and (key, name) not in self._values:
            raise HaltShard(
                f"this shard has {TIMERS_MAX} pending timers, the most that one may have: delete"
                " those that are done (context.delete_timer), set one for several keys, or split"
                " the shard"
            )

    def set(self, key: str, name: str, value: bytes | None) -> None:
        """Set an entry, or remove it with None."""
        before = self._values.pop((key, name), None)
        if value is not None:
            self._values[key, name] = value
        self._count += (value is not None) - (before is not None) if (key, name) != WATERMARK else 0
        timer = None if value is None else timer_of(key, name, value)
        if timer is not None:
            heap = self._heaps[timer.clock]
            heapq.heappush(heap, timer)
            # Timers that were replaced or deleted stay until they come to the top.
            if len(heap) > 2 * self._count + 64:
                # Only then once each: 0.0 and -0.0 are equal, and only one of them is pending.
                heap[:] = {entry for entry in heap if self._is_pending(entry)}
                heapq.heapify(heap)

    def earliest(self, clock: Clock) -> Timer | None:
        """The timer of this clock that fires first; None if none is pending."""
        heap = self._heaps[clock]
        while heap and not self._is_pending(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _is_pending(self, timer: Timer) -> bool:
        key, name, value = entry_of(timer)
        return self._values.get((key, name)) == value

    @property
    def step(self) -> Step:
        """The watermark as it was written last."""
        value = self._values.get(WATERMARK)
        return Step() if value is None else msgspec.msgpack.decode(value, type=Step)


def merged_watermark(values: list[bytes | None], ends: ExtendedSequenceNumber) -> bytes | None:
    """The watermark of a child: that of its parent at the parent's end, of two the smaller.

    A parent without a watermark has seen no record: its timers stay pending, and it does not count.
    """
    known = [
        step
        for value in values
        if value is not None
        and (step := msgspec.msgpack.decode(value, type=Step).at(ends)).watermark is not None
    ]
    if not known:
        return None
    watermark = min(step.watermark or 0.0 for step in known)
    return msgspec.msgpack.encode(Step(watermark, watermark))
