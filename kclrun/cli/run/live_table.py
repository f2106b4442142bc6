"""The live table of `kclrun run` on a terminal: a line for each lease of a sample."""

from __future__ import annotations

import os
import select
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kclrun.model.stream import short_name
from kclrun.model.text import sanitize
from kclrun.observe.sample import LeaseSample, ManagerSample, how_to_resume
from kclrun.operating.summaries import with_short_positions

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from kclrun.local.filling import Filling


# Lines for the log above the table, if the terminal has enough lines.
_LOG_LINES: Final = 4
_LEASES_SHOWN_MIN: Final = 3
# The lines for the note of one lease in trouble; the log has the rest. The advice and the totals
# fit completely in three lines of 60 columns.
_STORY_LINES_MAX: Final = 2
_WHOLE_LINES_MAX: Final = 3
# On a narrower terminal some columns are left out. On a lower one the owner is left out.
_WIDE: Final = 100
_HIGH: Final = 30
# The states that are shown first, the worst first.
_TROUBLES: Final = ("halted", "failing", "backing off", "paused")
_STYLES: Final = {
    "halted": "bold red",
    "failing": "yellow",
    "backing off": "yellow",
    "paused": "cyan",
    "running": "green",
}
_UNKNOWN: Final = "-"


class _Column(NamedTuple):
    title: str
    cell: Callable[[LeaseSample], str]
    is_wide_only: bool = False
    is_of_lease: bool = False
    justify: JustifyMethod = "right"


def render(sample: ManagerSample, width: int, height: int) -> RenderableType:
    """The table of one sample, for a terminal of `width` columns and `height` lines.

    Leases in trouble come first, and the totals are always shown. If there are too many leases,
    the healthy ones are counted in one line. A narrow terminal loses columns, but never the note.
    Every foreign text is escaped.
    """
    head = _headline(sample, is_high=height >= _HIGH)
    foot = [*_trouble(sample, width), *_totals(sample, width)]
    # The two other lines are the titles and the count of the hidden leases.
    room = height - _LOG_LINES - len(head) - len(foot) - 2
    shown = _shown(sample, max(_LEASES_SHOWN_MIN, room))
    hidden = [lease for lease in sample.leases if lease not in shown]
    return Group(*head, _table(sample, shown, width), *_more(hidden), *foot)


def _table(sample: ManagerSample, shown: Sequence[LeaseSample], width: int) -> Table:
    columns = [
        column
        for column in _COLUMNS
        if (width >= _WIDE or not column.is_wide_only)
        and (sample.has_leases or not column.is_of_lease)
    ]
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_note = column.title == "note"
        table.add_column(
            column.title,
            justify=column.justify,
            no_wrap=True,
            ratio=1 if is_note else None,
            overflow="ellipsis",
        )
    for lease in shown:
        style = _STYLES.get(lease.state, "")
        table.add_row(*(Text(sanitize(column.cell(lease))) for column in columns), style=style)
    return table


def _shown(sample: ManagerSample, room: int) -> tuple[LeaseSample, ...]:
    """The leases in trouble, the worst first; then the busiest, in the order of their shards."""
    troubled = sorted(
        (lease for lease in sample.leases if lease.state in _TROUBLES),
        key=lambda lease: (_TROUBLES.index(lease.state), lease.shard),
    )[:room]
    others = sorted(
        (lease for lease in sample.leases if lease.state not in _TROUBLES),
        key=lambda lease: (-lease.records_per_s, lease.shard),
    )[: room - len(troubled)]
    return (*troubled, *sorted(others, key=lambda lease: lease.shard))


def _more(hidden: Sequence[LeaseSample]) -> list[Text]:
    if not hidden:
        return []
    states = Counter(lease.state for lease in hidden)
    counted = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    return [Text(f"… and {len(hidden):,} more: {counted}", style="dim", no_wrap=True)]


def _trouble(sample: ManagerSample, width: int) -> list[Text]:
    """The number of leases in trouble, the note of the first one, and advice."""
    troubled = [lease for lease in sample.leases if lease.state in _TROUBLES]
    if not troubled:
        return []
    states = Counter(lease.state for lease in troubled)
    counted = ", ".join(f"{states[state]:,} {state}" for state in _TROUBLES if states[state])
    first = min(troubled, key=lambda lease: (_TROUBLES.index(lease.state), lease.shard))
    # Sequence numbers of 56 digits fill a line; the log has all digits.
    story = with_short_positions(first.note)
    lines = _filled(f"{counted}. {short_name(first.shard)}: {story}", width, _STORY_LINES_MAX)
    if first.state == "halted" and sample.has_leases:
        remedy = how_to_resume(sample.leases_command, first.shard)
        lines += _filled(remedy, width, _WHOLE_LINES_MAX)
    return [Text(line, style=_STYLES[first.state], no_wrap=True) for line in lines]


def _filled(text: str, width: int, lines_max: int) -> list[str]:
    return textwrap.wrap(
        sanitize(" ".join(text.split())),
        width,
        max_lines=lines_max,
        placeholder=" …",
        break_on_hyphens=False,
    )


def _headline(sample: ManagerSample, *, is_high: bool) -> list[Text]:
    state = "  draining" if sample.is_draining else f"  {sample.doing}".rstrip()
    lines = [f"{sample.application} on {sample.stream}  {_clock(sample.uptime_s)}{state}"]
    if is_high:
        kind = "leases are taken as" if sample.has_leases else "run"
        lines.append(f"{kind} {sample.owner}")
    return [Text(sanitize(line), overflow="ellipsis", no_wrap=True) for line in lines]


def _totals(sample: ManagerSample, width: int) -> list[Text]:
    kept = [
        f"{len(sample.leases)} leases here",
        f"{sample.leases_elsewhere} elsewhere",
        f"{sample.leases_free} free",
    ]
    parts = [
        *(kept if sample.has_leases else [f"{len(sample.leases)} shards"]),
        f"{sample.ended_total} ended",
        f"{sample.records_total:,} records",
        f"{sample.records_per_s:,.0f}/s",
        f"lag {_lag_of_all(sample)}",
        *([f"{sample.given_up_total:,} records given up"] if sample.given_up_total else []),
    ]
    return [
        Text(line, style="dim", no_wrap=True)
        for line in _filled(", ".join(parts), width, _WHOLE_LINES_MAX)
    ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _lag_of_all(sample: ManagerSample) -> str:
    """The greatest lag; it says so if that of some shards is not known."""
    known, unknown = sample.lag_ms_max, sample.lags_unknown
    return _lag(known) if known is None or not unknown else f"{_lag(known)} ({unknown} not known)"


def _lag(lag_ms: int | None) -> str:
    if lag_ms is None:
        return _UNKNOWN
    if lag_ms < 1_000:
        return f"{lag_ms}ms"
    seconds = lag_ms / 1000
    if seconds < 120:
        return f"{seconds:.1f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.1f}h"


def _memory(memory_bytes: int | None) -> str:
    return _UNKNOWN if memory_bytes is None else f"{memory_bytes / 2**20:.0f}M"


_COLUMNS: Final = (
    _Column("shard", lambda lease: short_name(lease.shard)),
    _Column("state", lambda lease: lease.state, justify="left"),
    _Column("records", lambda lease: f"{lease.records_total:,}"),
    _Column("per s", lambda lease: f"{lease.records_per_s:,.0f}"),
    _Column("lag", lambda lease: _lag(lease.lag_ms)),
    _Column(
        "cpu",
        lambda lease: _UNKNOWN if lease.cpu_percent is None else f"{lease.cpu_percent:.0f}%",
        is_of_lease=True,
    ),
    _Column(
        "memory", lambda lease: _memory(lease.memory_bytes), is_wide_only=True, is_of_lease=True
    ),
    _Column("pid", lambda lease: str(lease.pid or _UNKNOWN), is_wide_only=True, is_of_lease=True),
    _Column("restarts", lambda lease: str(lease.restarts), is_wide_only=True, is_of_lease=True),
    _Column("note", lambda lease: lease.note, justify="left"),
)


# The terminal of a running application: the live table below, log lines above.

_STDOUT: Final = 1
_STDERR: Final = 2
# Twice as often as the manager, which shows a sample a second.
_DRAW_EVERY_S: Final = 0.5
_READ_BYTES_MAX: Final = 65_536
# A line without an end is printed in parts of this size.
_LINE_BYTES_MAX: Final = 8_192
# The time at the end to print the rest of the pipe. A stopped terminal may need longer.
_END_MAX_S: Final = 2.0
# As wide as the time and the level of a log line.
_INDENT: Final = " " * 17
# A terminal narrower than this wraps the rows itself.
_COLUMNS_MIN: Final = 40


def wrapped(line: str, columns: int) -> list[str]:
    """The rows of a line on a terminal with `columns` columns, cut between words, and indented
    after the first one. A line that fits is one unchanged row."""
    if len(line) <= columns:
        return [line]
    return textwrap.wrap(
        line,
        max(columns, _COLUMNS_MIN),
        subsequent_indent=_INDENT,
        replace_whitespace=False,
        break_on_hyphens=False,
    )


class LiveDisplay:
    """A context manager that draws the live table and restores the terminal at the end.

    Standard output and error of this process and of every process it starts go into a pipe
    meanwhile. A separate thread prints the lines of the pipe and draws the newest sample. `show`
    may be called from any thread and never waits: a terminal stopped with Ctrl-S must not stop a
    manager. Nor may a lost terminal (that of an SSH session) stop user code that prints: then the
    thread reads the pipe, and shows nothing.
    """

    def __init__(self, bars: Bars | None = None) -> None:
        self._bars = bars
        self._newest: ManagerSample | None = None
        self._drawn: ManagerSample | None = None
        self._rest = b""
        self._saved: tuple[int, int]
        self._read_fd: int
        self._is_ending = threading.Event()

    def show(self, sample: ManagerSample) -> None:
        """Draw this sample next. Returns at once, without waiting for the terminal."""
        self._newest = sample

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(_STDOUT), os.dup(_STDERR))
        self._read_fd, write_fd = os.pipe()
        os.dup2(write_fd, _STDOUT)
        os.dup2(write_fd, _STDERR)
        os.close(write_fd)
        self._thread = threading.Thread(target=self._draw_all, name="display", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._saved[0], _STDOUT)
        os.dup2(self._saved[1], _STDERR)
        self._is_ending.set()
        self._thread.join(_END_MAX_S)
        if self._thread.is_alive():
            return  # the terminal is stopped: the thread still uses the descriptors
        for descriptor in (*self._saved, self._read_fd):
            os.close(descriptor)

    def _draw_all(self) -> None:
        try:
            with suppress(OSError):  # the terminal is lost
                self._draw_on_terminal()
        finally:
            while self._read_arrived() or not self._is_ending.is_set():
                pass

    def _draw_on_terminal(self) -> None:
        with os.fdopen(os.dup(self._saved[1]), "w", encoding="utf-8", errors="replace") as terminal:
            console = Console(file=terminal, force_terminal=True)
            # Without rich's refresh thread and capture of Python's streams: both are done here.
            with Live(
                console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as live:
                while self._print_arrived(console) or not self._is_ending.is_set():
                    self._draw(live, console)
                self._draw(live, console)

    def _draw(self, live: Live, console: Console) -> None:
        newest = self._newest
        if newest is not None and newest is not self._drawn:
            bars = self._bars.at(newest) if self._bars is not None else ()
            # With COLUMNS=0 a terminal has no column.
            table = render(newest, max(1, console.width), console.height - len(bars))
            live.update(Group(table, drawn_bars(bars)) if bars else table, refresh=True)
            self._drawn = newest

    def _print_arrived(self, console: Console) -> bool:
        """Print the complete lines of the pipe. Returns whether any bytes had arrived.

        At the end it does not wait for bytes.
        """
        arrived = self._read_arrived()
        if arrived is None:
            return False
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX or (not arrived and self._rest):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            text = sanitize(line.decode(errors="replace").rstrip("\r"))
            for row in wrapped(text, console.width):
                console.print(Text(row), soft_wrap=True)
        return bool(arrived)

    def _read_arrived(self) -> bytes | None:
        """The bytes of the pipe; None if none arrived in time."""
        wait_s = 0.0 if self._is_ending.is_set() else _DRAW_EVERY_S
        if not select.select([self._read_fd], [], [], wait_s)[0]:
            return None
        return os.read(self._read_fd, _READ_BYTES_MAX)


_BAR_COLUMNS: Final = 30


class Bar(NamedTuple):
    """One bar. `share` is from 0 to 1; `text` is the text that follows it."""

    title: str
    share: float
    text: str


class Bars:
    """The bars of one run. `filling` returns the progress of the fill (None without a fill);
    `is_until`: the run ends when everything is read.

    A bar is shown only if its total is known, and a share is never guessed. Without a fill, the
    total is the largest lag of the shards so far.
    """

    def __init__(self, filling: Callable[[], Filling | None], *, is_until: bool) -> None:
        self._filling = filling
        self._is_until = is_until
        self._behind_ms = 0

    def at(self, sample: ManagerSample) -> tuple[Bar, ...]:
        """The bars to draw with this sample. Call it for each sample, in order."""
        filling = self._filling()
        bars = []
        if filling is not None and filling.total and filling.done < filling.total:
            bars.append(_counted("filled", filling.done, filling.total))
        if self._is_until:
            if filling is None:
                bars += self._by_lag(sample)
            elif filling.total:
                bars.append(_counted("read", sample.records_total, filling.total))
        return tuple(bars)

    def _by_lag(self, sample: ManagerSample) -> list[Bar]:
        lag_ms = sample.lag_ms_max
        if lag_ms is None:
            return []
        self._behind_ms = max(self._behind_ms, lag_ms)
        if self._behind_ms == 0:
            return []
        share = 1 - lag_ms / self._behind_ms
        return [Bar("read", share, f"of {self._behind_ms / 1000:,.0f} s that were behind")]


def _counted(title: str, done: int, total: int) -> Bar:
    # A record that is processed again counts again, so the share is limited to 1.
    return Bar(title, min(1.0, done / total), f"{min(done, total):,} of {total:,} records")


def drawn_bars(bars: tuple[Bar, ...]) -> Table:
    """The bars as a table, a line for each."""
    table = Table.grid(padding=(0, 1))
    for bar in bars:
        table.add_row(
            Text(bar.title, style="bold"),
            ProgressBar(total=1.0, completed=bar.share, width=_BAR_COLUMNS),
            Text(f"{bar.share:4.0%}  {bar.text}"),
        )
    return table
