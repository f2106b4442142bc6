"""Log lines: one for each transition, as JSON or text, and few while all is well.

    {"ts":"2026-03-01T12:00:00.123Z","level":"info","event":"lease_claimed","app":"flights",…}

It also sends the user's own print and logging, in a lease process, through the same log.
"""

from __future__ import annotations

import collections
import io
import logging
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kclrun.model.logger import CAPPED_LOGGERS
from kclrun.model.stream import short_name
from kclrun.model.text import escaped
from kclrun.observe.events import FIELDS, INNER_FIELDS, LEVELS, level_of

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.observe.loggers import LoggerLevels

# The name of kclrun's own events in `log.levels`.
OWN_LOGGER: Final = "kclrun"
# A line that never ends is cut into pieces of this size.
_LINE_CHARACTERS_MAX: Final = 2048


def configure_lease_logging(
    log: EventLog, levels: LoggerLevels, shard_here: Callable[[], str] = lambda: ""
) -> None:
    """Send print, sys.stderr and logging of this process through `log`. Once, after the fork.

    Our own lines do not depend on changes that user code makes to logging or to sys.stdout.
    `shard_here` names the shard of the calling thread, where one process serves several: printed
    pieces of a line are put together for each of them.
    """
    sys.stdout = _PrintedLines(log, "stdout", shard_here)
    sys.stderr = _PrintedLines(log, "stderr", shard_here)
    root = logging.getLogger()
    root.handlers[:] = [_LoggedLines(log, levels)]
    for name in CAPPED_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    levels.apply()
    logging.captureWarnings(capture=True)


class _LoggedLines(logging.Handler):
    """One line for each log record that is shown; its message is cleaned like any text."""

    def __init__(self, log: EventLog, levels: LoggerLevels) -> None:
        super().__init__()
        self._log = log
        self._levels = levels

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < self._levels.least(record.name):
            return
        if record.levelno < logging.INFO and record.name.partition(".")[0] in CAPPED_LOGGERS:
            return
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
        except Exception as error:  # noqa: BLE001 - a wrong format string of user code
            text = f"a log line could not be formatted: {type(error).__name__}"
        self._log.note("logged", level=_level(record.levelno), logger=record.name, message=text)


def _level(number: int) -> str:
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"


class _PrintedLines(io.TextIOBase):
    """A text stream whose lines become log lines."""

    def __init__(self, log: EventLog, name: str, shard_here: Callable[[], str]) -> None:
        self._log = log
        self._name = name
        self._shard_here = shard_here
        self._rests: dict[str, str] = {}

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a read-only attribute of the base
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        shard = self._shard_here()
        *lines, rest = (self._rests.pop(shard, "") + text).split("\n")
        for line in lines:
            self._print(line)
        while len(rest) > _LINE_CHARACTERS_MAX:
            self._print(rest[:_LINE_CHARACTERS_MAX])
            rest = rest[_LINE_CHARACTERS_MAX:]
        if rest:
            self._rests[shard] = rest
        return len(text)

    def flush(self) -> None:
        """Only an unfinished line is held, and it waits for its end."""

    def fileno(self) -> int:
        """The descriptor of the stream, for code that bypasses Python (faulthandler)."""
        return 1 if self._name == "stdout" else 2

    def _print(self, line: str) -> None:
        if line:
            self._log.note("printed", text=line, resource=self._name)


# PIPE_BUF on Linux: writes of up to this size are all or nothing.
LINE_BYTES_MAX: Final = 4096


class LineSink:
    """Writes whole lines to `fd` without ever waiting, even if its reader does not read.

    A full pipe, a closed terminal or a full disk costs the line, never the process; lost lines are
    counted. Lines of up to PIPE_BUF bytes reach a pipe whole, so the lines of many processes do not
    mix. The caller still owns `fd`. Threads may share a sink; a fork needs a new one.
    """

    def __init__(self, fd: int) -> None:
        self._write, self._own_fd = _writer(fd)
        self._lock = threading.Lock()
        self.dropped = 0

    def write(self, line: bytes) -> bool:
        """Write one line, its newline included; False if it was dropped. Never waits or raises."""
        with self._lock:
            try:
                is_whole = self._write(line) == len(line)
            except OSError:
                is_whole = False
            self.dropped += not is_whole
            return is_whole

    def close(self) -> None:
        if self._own_fd is not None:
            os.close(self._own_fd)
            self._own_fd = None
            self._write = _nowhere


def _writer(fd: int) -> tuple[Callable[[bytes], int], int | None]:
    """A way to write to this kind of descriptor without waiting, and a descriptor of our own."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return _nowhere, None
    if stat.S_ISREG(mode):
        # A write to a file does not wait for a reader. A descriptor opened by us would have an
        # offset of its own, and overwrite the lines of sibling processes.
        return (lambda line: os.write(fd, line)), None
    if stat.S_ISSOCK(mode):
        return _socket_writer(fd)
    try:
        # With a new open, O_NONBLOCK applies to us alone; set on the shared descriptor it would
        # disturb the shell that started us.
        own = os.open(
            f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except OSError:
        return (lambda line: _write_if_ready(fd, line)), None
    return (lambda line: os.write(own, line)), own


def _socket_writer(fd: int) -> tuple[Callable[[bytes], int], int]:
    # journald passes a socket to services; a socket has a non-blocking flag for each call.
    own = os.dup(fd)

    def send(line: bytes) -> int:
        with socket.socket(fileno=os.dup(own)) as sock:
            return sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    return send, own


def _write_if_ready(fd: int, line: bytes) -> int:
    """For another user's pipe, which cannot be opened again: a writable one has PIPE_BUF free."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    ready = poller.poll(0)
    return os.write(fd, line) if ready and ready[0][1] & select.POLLOUT else 0


def _nowhere(_line: bytes) -> int:
    return 0


Value = str | int | float | bool | None
TEXT_CHARACTERS_MAX: Final = 2048
# Secret keys have 40 characters, access keys 20 with a known prefix, iterators and tokens hundreds.
# A run of that length without a digit, a capital and a small letter is a path, a hash or a number:
# these must stay readable.
_RUN_MIN: Final = 40
# Secrets are looked for in so much of a text: the rest of a longer one is cut out first.
_SEARCHED_MAX: Final = 8_192
_SECRET: Final = re.compile(rf"\b(?:AKIA|ASIA)[A-Z0-9]{{12,}}|[A-Za-z0-9/+=]{{{_RUN_MIN},}}")
# The user and the password in a URL: libraries name the URL that they could not reach.
_USER_INFO: Final = re.compile(r"(?<=://)[^\s/?#\"']+@")
# The end of a path of `model.output.roll_folder`, up to the first hyphen. It makes a long run of
# names of the settings, and messages about outputs name those paths.
_OF_ROLLS: Final = re.compile(r"/[0-9]{8}T[0-9]{6}Z/shardId\Z")
# What leads to a run without a space: the beginning of a path.
_TOKEN: Final = re.compile(r"[^\s\"'=(\[,;]*\Z")
_SLASHES_MIN: Final = 3
# The words of a name, and its numbers: OrdersProcessor2 has three. Random characters change between
# capitals, small letters and digits far more often than at each fourth one.
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+|[+=]")
_WORD_MIN: Final = 4
_OF_SECRETS: Final = (re.compile(r"[a-z]"), re.compile(r"[A-Z]"), re.compile(r"[0-9]"))
# A processor that logs a line for each batch writes 5 a second at most: polls are 200 ms apart.
_BURST_LINES: Final = 50
_LINES_PER_S: Final = 10.0
# More than a manager has leases. Beyond it, the source that was silent the longest is forgotten.
_SOURCES_MAX: Final = 1024
# Lines are shortened field by field until they fit a pipe's atomic write.
_CUTS: Final = (TEXT_CHARACTERS_MAX, 800, 200, 60, 20)
_DIGITS_SHOWN_MAX: Final = 20
# Fields that would look like the first fields of the line.
_RENAMED: Final = {"owner": "row_owner"}
# In text format these fields stand below their line, unchanged: people read a traceback in lines.
_BLOCKS: Final = ("traceback",)
_BLOCK_MARK: Final = "    | "
_JSON: Final = msgspec.json.Encoder()


def clean_text(
    text: str, characters_max: int = TEXT_CHARACTERS_MAX, *, keeps_lines: bool = False
) -> str:
    """`text` fit for one line: bounded, secrets cut out, control characters escaped.

    The end is kept as well as the beginning: the last line of a traceback has the exception.
    `keeps_lines` leaves line ends and tabs unchanged, for JSON, which escapes them itself.
    """
    searched = _ends_of(text, max(_SEARCHED_MAX, 4 * characters_max))
    # Before the cut: the pattern does not recognize a part of a secret.
    searched = _USER_INFO.sub("[withheld]@", searched)
    text = _ends_of(_SECRET.sub(_withheld, searched), characters_max)
    return escaped(text, keeps_lines=keeps_lines)


def _ends_of(text: str, characters_max: int) -> str:
    if len(text) <= characters_max:
        return text
    half = characters_max // 2
    return f"{text[: half - 1]}…{text[len(text) - half :]}"


def _withheld(match: re.Match[str]) -> str:
    run = _OF_ROLLS.sub("", match[0])
    is_key = run.startswith(("AKIA", "ASIA"))
    is_secret = len(run) >= _RUN_MIN and _is_mixed(run) and not _is_of_path(match)
    return "[withheld]" if is_key or is_secret else match[0]


def _is_mixed(run: str) -> bool:
    return all(kind.search(run) for kind in _OF_SECRETS)


def _is_of_path(match: re.Match[str]) -> bool:
    """Whether the run is a part of an absolute path, or of a URL of a bucket, all of whose names
    are made of words."""
    begun = _TOKEN.search(match.string, 0, match.start())
    token = (begun[0] if begun is not None else "") + match[0].rpartition("=")[2]
    names = match[0].rpartition("=")[2].split("/")
    is_path = token.startswith(("/", "./", "~/", "s3://")) and token.count("/") >= _SLASHES_MIN
    return is_path and all(
        len(_WORDS.findall(name)) <= len(name) / _WORD_MIN + 1
        for name in names
        if len(name) > _WORD_MIN
    )


class _Bucket(NamedTuple):
    """The tokens of one source at an instant, and how many lines were suppressed before."""

    tokens: float
    since: float
    suppressed: int


class RateLimit:
    """A token bucket for each source of lines, refilled with time."""

    def __init__(self, burst: int = _BURST_LINES, per_s: float = _LINES_PER_S) -> None:
        self._burst = burst
        self._per_s = per_s
        self._sources: collections.OrderedDict[str, _Bucket] = collections.OrderedDict()

    def admit(self, source: str, now: float) -> int | None:
        """The number of lines suppressed since the last admitted one; None: suppress this one."""
        former = self._sources.pop(source, _Bucket(float(self._burst), now, 0))
        tokens = min(self._burst, former.tokens + max(0.0, now - former.since) * self._per_s)
        is_admitted = tokens >= 1.0
        self._sources[source] = (
            _Bucket(tokens - 1.0, now, 0)
            if is_admitted
            else _Bucket(tokens, now, former.suppressed + 1)
        )
        if len(self._sources) > _SOURCES_MAX:
            self._sources.popitem(last=False)
        return former.suppressed if is_admitted else None


class EventLog:
    """The log of one process. Threads may share it. It never waits for the sink, nor raises for it.

    Only fields of the catalogue are written. Control characters are escaped, so no text can forge a
    line. Long unbroken runs (keys, tokens, iterators, encoded payloads) are cut out [S6]. If a
    lease writes too many lines, they are counted instead of written [S14].

    `listeners` get the event, the shard and the fields of each line, also of those that are not
    written: the log's level and limits are not those of the story of a shard.

    `shard` is set in a lease process, and called for each line where that serves several leases; in
    the manager each line has its own. `level` is that of kclrun's own events, `printed_level` that
    of lines that user code prints, if it differs.
    """

    def __init__(
        self,
        sink: LineSink,
        *,
        app: str,
        owner: str,
        level: str = "info",
        as_json: bool = True,
        shard: str | Callable[[], str] = "",
        clock: Callable[[], float] = time.time,
        printed_level: str | None = None,
    ) -> None:
        self.listeners: tuple[Callable[[str, str, Mapping[str, Value]], None], ...] = ()
        self._sink = sink
        self._app = app
        self._owner = owner
        self._least = LEVELS[level]
        # Of the user's lines: what is logged is chosen by its logger already.
        self._least_of = {"logged": 0, "printed": LEVELS[printed_level or level]}
        self.as_json = as_json
        self._shard = shard
        self._clock = clock
        self._limit = RateLimit()
        self._dropped_reported = 0

    def note(
        self, event: str, *, level: str | None = None, shard: str | None = None, **fields: Value
    ) -> None:
        """Write one line. Give `level` only if it differs from the catalogue's."""
        self.write(event, fields, level=level, shard=shard)

    def write(
        self,
        event: str,
        fields: Mapping[str, Value],
        *,
        level: str | None = None,
        shard: str | None = None,
    ) -> None:
        """`note`, for fields with names from elsewhere, which may be any names."""
        for listener in self.listeners:
            listener(event, self._own_shard() if shard is None else shard, fields)
        level = level if level in LEVELS else level_of(event)
        if LEVELS[level] < self._least_of.get(event, self._least):
            return
        source = self._own_shard() if shard is None else shard
        now = self._clock()
        suppressed = self._limit.admit(source, now)
        if suppressed is None:
            return
        shown = {_RENAMED.get(name, name): value for name, value in fields.items()}
        if suppressed:
            shown["suppressed"] = suppressed
        self._report_dropped(now)
        self._sink.write(self._line(now, level, event, source, shown))

    def _own_shard(self) -> str:
        return self._shard if isinstance(self._shard, str) else self._shard()

    def is_enabled(self, level: str) -> bool:
        return LEVELS[level] >= self._least

    def _report_dropped(self, now: float) -> None:
        new = self._sink.dropped - self._dropped_reported
        if new == 0:
            return
        line = self._line(now, "warning", "lines_dropped", self._own_shard(), {"dropped": new})
        if self._sink.write(line):
            self._dropped_reported = self._sink.dropped
        else:
            # A lost notice of dropped lines does not count as a dropped line.
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
                name: _bounded(value, characters_max, keeps_lines=self.as_json or name in _BLOCKS)
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
            words.append(f"shard={short_name(shard)}")
        blocks = "".join(_block(str(fields.get(name) or "")) for name in _BLOCKS)
        with_inner = self.is_enabled("debug")
        words += [
            f"{name}={_worded(value)}"
            for name, value in fields.items()
            if value is not None
            and name not in _BLOCKS
            and (with_inner or name not in INNER_FIELDS)
        ]
        return f"{' '.join(words)}\n{blocks}".encode("utf-8", "replace")


def _bounded(value: Value, characters_max: int, *, keeps_lines: bool) -> Value:
    if isinstance(value, str):
        return clean_text(value, characters_max, keeps_lines=keeps_lines)
    return round(value, 3) if isinstance(value, float) else value


def _block(text: str) -> str:
    """The text below its log line, each line with a mark, so that none looks like a log line."""
    return "".join(f"{_BLOCK_MARK}{line}\n" for line in text.splitlines())


def _worded(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    # A sequence number: its two ends distinguish positions, and JSON has all 56 digits.
    if len(value) > _DIGITS_SHOWN_MAX and value.isdecimal():
        return f"{value[:5]}…{value[-6:]}"
    return f'"{value}"' if " " in value or not value else value


def log_of(settings: Settings, owner: str, sink: LineSink) -> EventLog:
    """The log of a run: JSON lines, or plain text if stderr is a terminal, unless the settings say
    which."""
    wanted = settings.log.format
    return EventLog(
        sink,
        app=settings.application,
        owner=owner,
        level=settings.log.levels.get(OWN_LOGGER, settings.log.level),
        as_json=wanted == "json" or (wanted == "auto" and not sys.stderr.isatty()),
    )
