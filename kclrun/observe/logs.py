"""Log lines: one a transition, as JSON or text, quiet when healthy.

    {"ts":"2026-03-01T12:00:00.123Z","level":"info","event":"lease_claimed","app":"flights",…}

Holds: `EventLog`, and the bounds of what it writes. May not know: who logs, or what is decided.
Rule [S6]: only fields of the catalogue are written; control characters are escaped, so no text can
forge a line; long unbroken runs (keys, tokens, iterators, encoded payloads) are cut out; a lease
that talks too much is counted instead of written [S14]. Look next: `events.py`, `printing.py`.
"""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from kclrun.observe.events import FIELDS, LEVELS, level_of
from kclrun.observe.line_sink import LINE_BYTES_MAX, LineSink

__all__ = ["EventLog", "RateLimit", "clean_text"]

Value = str | int | float | bool | None
TEXT_CHARACTERS_MAX: Final = 2048
# Secret keys have 40 characters, access keys 20 with a known head, iterators and tokens hundreds.
# A run of that length without a digit, a capital and a small letter is a path, a hash or a number,
# which have to be read.
_SECRET: Final = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|[A-Za-z0-9/+=]{40,}")
_OF_SECRETS: Final = (re.compile(r"[a-z]"), re.compile(r"[A-Z]"), re.compile(r"[0-9]"))
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_BUT_LINES: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# A processor that logs a line a batch has 5 a second at most (the 200 ms floor of a poll).
_BURST_LINES: Final = 50
_LINES_PER_S: Final = 10.0
# As many as a manager has leases; beyond it the one silent the longest is forgotten.
_SOURCES_MAX: Final = 1024
# Lines are cut field by field until they fit a pipe's atomic write.
_CUTS: Final = (TEXT_CHARACTERS_MAX, 800, 200, 60, 20)
# Fields that would pass for the line's own head.
_RENAMED: Final = {"owner": "row_owner"}
_JSON: Final = msgspec.json.Encoder()


def clean_text(
    text: str, characters_max: int = TEXT_CHARACTERS_MAX, *, keeps_lines: bool = False
) -> str:
    """`text` fit for one line: bounded, long runs cut out, control characters escaped.

    The end is kept as well as the beginning: a traceback says what happened in its last line.
    `keeps_lines` leaves line ends and tabs as they are, for JSON, which escapes them itself.
    """
    if len(text) > characters_max:
        half = characters_max // 2
        text = f"{text[: half - 1]}…{text[len(text) - half :]}"
    control = _CONTROL_BUT_LINES if keeps_lines else _CONTROL
    return control.sub(_escaped, _SECRET.sub(_withheld, text))


def _withheld(match: re.Match[str]) -> str:
    run = match[0]
    is_key = run.startswith(("AKIA", "ASIA"))
    return "[withheld]" if is_key or all(kind.search(run) for kind in _OF_SECRETS) else run


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


class RateLimit:
    """A bucket of lines for each source, refilled with time."""

    def __init__(self, burst: int = _BURST_LINES, per_s: float = _LINES_PER_S) -> None:
        self._burst = burst
        self._per_s = per_s
        self._sources: collections.OrderedDict[str, tuple[float, float, int]] = (
            collections.OrderedDict()
        )

    def admit(self, source: str, now: float) -> int | None:
        """How many lines were suppressed since the last admitted one; None: suppress this too."""
        tokens, since, suppressed = self._sources.pop(source, (float(self._burst), now, 0))
        tokens = min(self._burst, tokens + max(0.0, now - since) * self._per_s)
        is_admitted = tokens >= 1.0
        left = (tokens - 1.0, now, 0) if is_admitted else (tokens, now, suppressed + 1)
        self._sources[source] = left
        if len(self._sources) > _SOURCES_MAX:
            self._sources.popitem(last=False)
        return suppressed if is_admitted else None


class EventLog:
    """The log of one process. Threads may share it. Nothing it does waits or raises for the sink.

    `shard` is bound in a lease process; in the manager it comes with each line.
    """

    def __init__(
        self,
        sink: LineSink,
        *,
        app: str,
        owner: str,
        level: str = "info",
        as_json: bool = True,
        shard: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink
        self._app = app
        self._owner = owner
        self._least = LEVELS[level]
        self.as_json = as_json
        self._shard = shard
        self._clock = clock
        self._limit = RateLimit()
        self._dropped_told = 0

    def note(
        self, event: str, *, level: str | None = None, shard: str | None = None, **fields: Value
    ) -> None:
        """Write one line. `level` only where it differs from the catalogue's."""
        self.write(event, fields, level=level, shard=shard)

    def write(
        self,
        event: str,
        fields: Mapping[str, Value],
        *,
        level: str | None = None,
        shard: str | None = None,
    ) -> None:
        """`note`, for fields that came from elsewhere and may be called anything."""
        level = level if level in LEVELS else level_of(event)
        if LEVELS[level] < self._least:
            return
        source = self._shard if shard is None else shard
        now = self._clock()
        suppressed = self._limit.admit(source, now)
        if suppressed is None:
            return
        shown = {_RENAMED.get(name, name): value for name, value in fields.items()}
        if suppressed:
            shown["suppressed"] = suppressed
        self._tell_dropped(now)
        self._sink.write(self._line(now, level, event, source, shown))

    def is_enabled(self, level: str) -> bool:
        return LEVELS[level] >= self._least

    def _tell_dropped(self, now: float) -> None:
        new = self._sink.dropped - self._dropped_told
        if new == 0:
            return
        line = self._line(now, "warning", "lines_dropped", self._shard, {"dropped": new})
        if self._sink.write(line):
            self._dropped_told = self._sink.dropped
        else:
            # The notice itself is not worth counting.
            self._sink.dropped -= 1

    def _line(
        self, now: float, level: str, event: str, shard: str, fields: dict[str, Value]
    ) -> bytes:
        withheld = sorted(name for name in fields if name not in FIELDS)
        shown = {name: value for name, value in fields.items() if name in FIELDS}
        if withheld:
            shown["withheld"] = ",".join(withheld)[:200]
        line = b""
        for characters_max in _CUTS:
            cut = {
                name: _bounded(value, characters_max, keeps_lines=self.as_json)
                for name, value in shown.items()
            }
            line = self._rendered(now, level, clean_text(event, 60), shard, cut)
            if len(line) <= LINE_BYTES_MAX:
                return line
        return line[: LINE_BYTES_MAX - 1] + b"\n"

    def _rendered(
        self, now: float, level: str, event: str, shard: str, fields: dict[str, Value]
    ) -> bytes:
        at = datetime.fromtimestamp(now, UTC)
        shard = clean_text(shard, 200)
        if self.as_json:
            head = {
                "ts": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
                "level": level,
                "event": event,
                "app": self._app,
                "owner": self._owner,
            }
            if shard:
                head["shard"] = shard
            return _JSON.encode({**head, "pid": os.getpid(), **fields}) + b"\n"
        words = [at.strftime("%H:%M:%S"), f"{level:<7}", event]
        if shard:
            words.append(shard)
        words += [f"{name}={_worded(value)}" for name, value in fields.items()]
        return " ".join(words).encode("utf-8", "replace") + b"\n"


def _bounded(value: Value, characters_max: int, *, keeps_lines: bool) -> Value:
    if isinstance(value, str):
        return clean_text(value, characters_max, keeps_lines=keeps_lines)
    return round(value, 3) if isinstance(value, float) else value


def _worded(value: Value) -> str:
    if isinstance(value, str):
        return f'"{value}"' if " " in value or not value else value
    return "-" if value is None else str(value)
