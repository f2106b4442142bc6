"""Windows of time over the records of each key: tumbling, hopping and session windows.

They are a value of `context.state` and an event timer for each key, no more: what a window is
closed with, and when, is that of `Context.set_timer`. It must not know how either is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.record import Record
from kclrun.processor import Context, RecordContext
from kclrun.state.timers import Timer

__all__ = ["Hopping", "Session", "Tumbling", "Window", "Windows"]

T = TypeVar("T")
# A record of a hopping window is merged into each of them, and a key's open windows are one value.
HOPS_MAX: Final = 100


class Tumbling(msgspec.Struct, frozen=True):
    """Windows of `size_s` seconds that follow each other, the first from 1970 on, in UTC. In whole
    milliseconds, as arrival times are: a float counts as the millisecond that it stands for."""

    size_s: float

    def __post_init__(self) -> None:
        _refuse_nothing(size_s=self.size_s)

    def of(self, at: float) -> list[tuple[float, float]]:
        """The windows of a time: begin (inclusive) and end (exclusive)."""
        size = _whole_ms(self.size_s)
        return [_seconds(_ms_of(at) // size * size, size)]


class Hopping(msgspec.Struct, frozen=True):
    """Windows of `size_s` seconds, one from every `every_s` seconds on: a record is in several."""

    size_s: float
    every_s: float

    def __post_init__(self) -> None:
        _refuse_nothing(size_s=self.size_s, every_s=self.every_s)
        if self.every_s > self.size_s or self.size_s > HOPS_MAX * self.every_s:
            raise SettingsError(
                f"a hopping window is as long as every_s, or up to {HOPS_MAX} times as long"
            )

    def of(self, at: float) -> list[tuple[float, float]]:
        """As `Tumbling.of`, the earliest first."""
        size, every, at_ms = _whole_ms(self.size_s), _whole_ms(self.every_s), _ms_of(at)
        first, last = (at_ms - size) // every + 1, at_ms // every
        return [_seconds(number * every, size) for number in range(first, last + 1)]


class Session(msgspec.Struct, frozen=True):
    """A window goes on while the next record of the key comes within `gap_s` seconds."""

    gap_s: float

    def __post_init__(self) -> None:
        _refuse_nothing(gap_s=self.gap_s)

    def of(self, at: float) -> list[tuple[float, float]]:
        """The session of one record alone."""
        return [(at, at + self.gap_s)]


class Window(msgspec.Struct, Generic[T], frozen=True):
    """What the records of `key` from `start` on and before `end` came to: `value`. The times are in
    seconds since the epoch. The end of a session is `gap_s` behind its last record."""

    key: str
    start: float
    end: float
    value: T


class Windows(Generic[T]):
    """The windows of one processor, by `name` in its state.

    `of` is the type of a value, and `merge` makes one of two: that of the window so far, and that
    of a record (or of another session, if a record joins two).

    The time of a record is the processor's `event_time`, its arrival if it defines none. It counts
    here as it is, also after the arrival. `time_of` is another one for these windows alone. The
    watermark, which closes them, follows `event_time` nevertheless: a record whose `time_of` is far
    before its `event_time` is late.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        kind: Tumbling | Hopping | Session,
        of: type[T],
        merge: Callable[[T, T], T],
        *,
        time_of: Callable[[Record], float] | None = None,
    ) -> None:
        self._context = context
        self._name = name
        self._timer = f"window/{name}"
        self._kind = kind
        self._type = list[tuple[float, float, of]]  # type: ignore[valid-type]  # made at run time
        self._merge = merge
        self._time_of = time_of

    def add(self, record: Record, value: T, context: Context | RecordContext | None = None) -> bool:
        """Merge the value into the windows of the record, by its partition key. `context` is that
        of the call under way: in `process_record` it must be given, in `process_records` it is the
        one given to `initialize`, and may be left out.

        Returns: False for a late record, of which no window is open any more: the watermark has
        passed their ends, and nothing was changed. The log says how many were late, and so does
        `late` of a test's run. Raises: as `context.state`, `set_timer` and `event_time`.
        """
        times = self._context._times  # noqa: SLF001 - the two are one interface
        at = times.of(record) if self._time_of is None else self._time_of(record)
        of = context or self._context
        known = self._open(record.partition_key, of)
        watermark = of.watermark
        if isinstance(self._kind, Session):
            changed = self._with_session(known, self._kind.of(at)[0], value, watermark)
        else:
            changed = self._with_value(known, self._kind.of(at), value, watermark)
        if changed is None:
            times.note_late(self._name)
            return False
        self._keep(record.partition_key, changed, of)
        return True

    def closed(self, timer: Timer) -> list[Window[T]]:
        """The windows that the timer closes, the earliest first; none if it is another's. Call it
        from `on_timer`: each window is given once, and is forgotten."""
        if timer.name != self._timer:
            return []
        known = self._open(timer.key, self._context)
        self._keep(timer.key, [window for window in known if window[1] > timer.at], self._context)
        return [Window(timer.key, *window) for window in known if window[1] <= timer.at]

    def open(
        self, key: Record | str, context: Context | RecordContext | None = None
    ) -> list[Window[T]]:
        """The windows of a key that are not closed yet, the earliest first; `context` as in
        `add`."""
        name = key if isinstance(key, str) else key.partition_key
        return [Window(name, *window) for window in self._open(name, context or self._context)]

    def _open(self, key: str, of: Context | RecordContext) -> list[tuple[float, float, T]]:
        found: list[tuple[float, float, T]]
        found = of.state[key].get(self._name, [], type=self._type)
        return found

    def _keep(
        self, key: str, known: list[tuple[float, float, T]], of: Context | RecordContext
    ) -> None:
        values = of.state[key]
        if not known:
            values.delete(self._name)
            of.delete_timer(key, self._timer)
            return
        values[self._name] = known
        of.set_timer(key, min(end for _, end, _ in known), self._timer)

    def _with_value(
        self,
        known: list[tuple[float, float, T]],
        spans: list[tuple[float, float]],
        value: T,
        watermark: float | None,
    ) -> list[tuple[float, float, T]] | None:
        spans = [span for span in spans if not _is_past(span[1], watermark)]
        if not spans:
            return None
        by_span = {(start, end): held for start, end, held in known}
        for span in spans:
            by_span[span] = self._merge(by_span[span], value) if span in by_span else value
        return [(*span, by_span[span]) for span in sorted(by_span)]

    def _with_session(
        self,
        known: list[tuple[float, float, T]],
        span: tuple[float, float],
        value: T,
        watermark: float | None,
    ) -> list[tuple[float, float, T]] | None:
        start, end = span
        joined = [window for window in known if window[0] <= end and start <= window[1]]
        if not joined and _is_past(end, watermark):
            return None
        merged = value
        if joined:
            merged = joined[0][2]
            for _, _, held in joined[1:]:
                merged = self._merge(merged, held)
            merged = self._merge(merged, value)
        start = min([start, *(window[0] for window in joined)])
        end = max([end, *(window[1] for window in joined)])
        rest = [window for window in known if window not in joined]
        return sorted([*rest, (start, end, merged)], key=lambda each: each[:2])


def _is_past(end: float, watermark: float | None) -> bool:
    return watermark is not None and end <= watermark


def _refuse_nothing(**seconds: float) -> None:
    for name, value in seconds.items():
        if not value > 0:
            raise SettingsError(f"{name} is {value}: expected more than 0 seconds")
        if not math.isfinite(value) or abs(value * 1000 - _whole_ms(value)) > _NOISE_MS:
            raise SettingsError(f"{name} is {value}: expected whole milliseconds")


# A float of this century, in milliseconds, is off by 1e-4 of one at most.
_NOISE_MS: Final = 1e-3


def _whole_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _ms_of(at: float) -> int:
    """The millisecond of a time. 0.3 is a float just below, and in the window that 0.3 s begin."""
    return math.floor(at * 1000 + _NOISE_MS)


def _seconds(start_ms: int, size_ms: int) -> tuple[float, float]:
    return start_ms / 1000, (start_ms + size_ms) / 1000
