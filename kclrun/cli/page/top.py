"""`kclrun top`: the whole fleet as a live table in one terminal; without one, as one snapshot.

It reads as the page does, through the same reader, and only reads.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options, json_option
from kclrun.cli.messages import echo, naming_table
from kclrun.cli.page.command import every_option, refuse_interval
from kclrun.cli.reports import print_json, print_report
from kclrun.cli.terminal import stop_signals
from kclrun.config.units import Duration
from kclrun.model.stream import short_name
from kclrun.model.text import sanitize
from kclrun.model.time import WallTime
from kclrun.operating.summaries import (
    duration_text,
    host_of,
    on_one_line,
    soonest,
    with_short_positions,
    worst,
)
from kclrun.page.lag_history import measured_every_s
from kclrun.page.layout import lag_text
from kclrun.page.snapshot import URGENT, ShardRow, Snapshot, most_urgent_first, rows_of

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.config.schema import Settings

# Whether there is a new reading, or another size of the terminal. To draw costs 20 ms, to look
# nothing.
_LOOK_EVERY_S: Final = 0.5
# Without a terminal everything is printed, as wide as it is: rich is asked for the width.
_ANY_WIDTH: Final = 1_000_000
# A row of ours has some 400 bytes, and half a unit reads 4 KB, eventually consistent.
_UNITS_A_ROW: Final = 400 / 4096 / 2
_STYLES: Final = {
    "halted": "bold red",
    "unreadable": "bold red",
    "paused": "cyan",
    "unowned": "yellow",
    "offered": "yellow",
    "no lease": "yellow",
}
_COLUMNS: Final[Mapping[str, JustifyMethod]] = {
    "shard": "left",
    "state": "left",
    "behind": "right",
    "loss in": "right",
    "KiB/s": "right",
    "CPU": "right",
    "owner": "left",
    "note": "left",
}
# In a narrow terminal.
_LEFT_OUT_FIRST: Final = ("CPU", "KiB/s", "note", "owner", "loss in")
_OWNER_WIDE: Final = 32
_ON_TERMINAL: Final[Mapping[str, dict[str, Any]]] = {
    "owner": {"max_width": _OWNER_WIDE},
    "note": {"ratio": 1},
}
# Fewer characters of a note are of no use.
_NOTE_LEAST: Final = 12
_GAP: Final = 2
_TROUBLE_LINES_MAX: Final = 3
_SORTS: Final[Mapping[str, Callable[[ShardRow], Any]]] = {
    "urgency": most_urgent_first,
    "lag": lambda row: (-((row.lag and row.lag.behind_s) or 0.0), row.key),
    "owner": lambda row: (row.owner, row.key),
    "shard": lambda row: row.key,
}


@click.command(cls=ConfigCommand)
@config_options
@click.option(
    "--once",
    is_flag=True,
    help="Print one snapshot and end; so it is without a terminal, and on a dumb one.",
)
@click.option("--sort", type=click.Choice(list(_SORTS)), default="urgency", show_default=True)
@every_option
@json_option("One JSON array of the shards, as --once.")
def top(config: ConfigChoice, *, once: bool, sort: str, every: Duration, as_json: bool) -> int:
    """Show the whole fleet as a live table: shards, states, owners, lag, time to loss.

    It only reads, as `kclrun page`, and its last line shows what the reads cost. Ctrl-C ends it.

    \b
    kclrun top --config app.yaml
    kclrun top --config app.yaml --once --sort lag
    """
    refuse_interval(every)
    from kclrun.cli.page.reading import FleetReader
    from kclrun.cli.services import fleet_aws
    from kclrun.local.server import signal_event

    aws = fleet_aws(config)
    aws.credentials.current()
    reader = FleetReader(aws, every_s=float(every))
    console = Console()
    if once or as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
        width = console.width if console.is_terminal else None
        reader.read_table()
        reader.require_listener()
        reader.read_lags()

        def print_text(snapshot: Snapshot) -> None:
            shown = render_fleet(aws.settings, snapshot, sort=sort, every_s=None, width=width)
            _print_once(console, shown, width)

        print_report(
            reader.look(),
            print_text,
            as_json=as_json,
            in_json=lambda snapshot: print_json(sorted(rows_of(snapshot), key=_SORTS[sort])),
        )
        if reader.look().table_at is None:
            _raise_why(aws)
        return exit_codes.DRAINED
    ended = signal_event(stop_signals())
    try:
        reader.start()
        reader.require_listener()
        with Live(console=console, auto_refresh=False, screen=True) as live:
            drawn: object = None
            while not ended.is_set():
                snapshot, size = reader.look(), console.size
                state = (snapshot.table_at, snapshot.lags_at, snapshot.problems, size)
                if state != drawn:
                    shown = render_fleet(
                        aws.settings,
                        snapshot,
                        sort=sort,
                        every_s=float(every),
                        width=size.width,
                        height=size.height,
                    )
                    live.update(shown, refresh=True)
                    drawn = state
                ended.wait(_LOOK_EVERY_S)
    finally:
        reader.close()
    return exit_codes.DRAINED


def _print_once(console: Console, shown: RenderableType, width: int | None) -> None:
    """On a terminal in colours; in a pipe without the blanks that fill a line up."""
    if width is not None:
        console.print(shown)
        return
    console = Console(width=max(1, Console(width=_ANY_WIDTH).measure(shown).maximum))
    with console.capture() as capture:
        console.print(shown)
    echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _raise_why(aws: Aws) -> None:
    """Raises: the error of the table, for its exit code; none if it can be read by now."""
    with naming_table(aws.settings.table):
        next(iter(aws.table.items(consistent=False)), None)


def render_fleet(
    settings: Settings,
    snapshot: Snapshot,
    *,
    sort: str,
    every_s: float | None,
    width: int | None = None,
    height: int | None = None,
) -> RenderableType:
    """The fleet of a snapshot. `every_s` None: read once. `height` None: every row is shown; else
    the rows that do not fit are counted in one line. Columns that do not fit are left out, but of
    no `width` (None) everything is shown whole.
    Ended shards are only counted. Every foreign text is escaped."""
    rows = sorted(rows_of(snapshot), key=_SORTS[sort])
    living = [row for row in rows if row.state != "ended"]
    head = [_line(f"{settings.application} on {settings.stream_names}, table {settings.table}")]
    head += [*map(_line, _filled(_figures(rows, snapshot), width)), _line(_times(snapshot))]
    head += [
        _line(f"{problem.about}: {problem.message.partition(chr(10))[0]}", "red")
        for problem in snapshot.problems
    ]
    foot = [
        *_trouble(living, snapshot, width),
        _line(_cost(len(rows), len(living), every_s), "dim"),
    ]
    # Besides: the titles, and the count of the rows that are hidden.
    room = len(living) if height is None else max(1, height - len(head) - len(foot) - 2)
    hidden = Counter(row.state for row in living[room:])
    more = ", ".join(f"{count:,} {state}" for state, count in hidden.most_common())
    left = [_line(f"… and {len(living) - room:,} more: {more}", "dim")] if hidden else []
    return Group(*head, _table(living[:room], snapshot, width), *left, *foot)


def _filled(text: str, width: int | None, lines_max: int | None = None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(
        sanitize(text), width, max_lines=lines_max, placeholder=" …", break_on_hyphens=False
    )


def _trouble(rows: Sequence[ShardRow], snapshot: Snapshot, width: int | None) -> list[Text]:
    """The note of the first shard that needs an operator, if its column is too narrow for it."""
    urgent = [row for row in rows if row.urgency == URGENT and row.note]
    if width is None or not urgent:
        return []
    first = min(urgent, key=most_urgent_first)
    story = with_short_positions(on_one_line(first.note))
    if len(on_one_line(first.note)) <= _room_of_note(rows, snapshot, width):
        return []
    lines = _filled(f"{short_name(first.key)} {first.state}: {story}", width, _TROUBLE_LINES_MAX)
    return [_line(line, _STYLES.get(first.state, "")) for line in lines]


def _line(text: str, style: str = "") -> Text:
    return Text(sanitize(text), style=style, no_wrap=True, overflow="ellipsis")


def _figures(rows: Sequence[ShardRow], snapshot: Snapshot) -> str:
    counted = ", ".join(
        f"{n:,} {state}" for state, n in Counter(r.state for r in rows).most_common()
    )
    lags = tuple(row.lag for row in rows if row.lag is not None)
    furthest, first = worst(lags), soonest(lags)
    behind = (
        "lag not known"
        if furthest is None
        else f"at most {duration_text(furthest.behind_s)} behind"
    )
    lost = "" if first is None else f", {duration_text(first.loss_in_s)} to the first loss"
    owners = {lease.owner for lease in snapshot.leases.values() if lease.owner}
    silent = f" ({len(snapshot.owners.silent)} silent)" if snapshot.owners.silent else ""
    counted_owners = "1 owner" if len(owners) == 1 else f"{len(owners)} owners"
    return f"{counted_owners}{silent}; {counted or 'no leases'}; {behind}{lost}"


def _times(snapshot: Snapshot) -> str:
    def read(at: WallTime | None) -> str:
        return (
            "not read yet" if at is None else f"read at {datetime.fromtimestamp(at, UTC):%H:%M:%S}"
        )

    return f"table {read(snapshot.table_at)}, lag {read(snapshot.lags_at)} UTC"


def _cost(rows: int, shards: int, every_s: float | None) -> str:
    units = rows * _UNITS_A_ROW
    if every_s is None:
        return f"cost: one scan, about {max(0.5, units):.1f} read units; a read of {shards} shards"
    return (
        f"cost: about {units / every_s:.1f} read units a second; a read of {shards} shards every"
        f" {measured_every_s(every_s, shards):.0f} s; no write. Ctrl-C ends it"
    )


def _table(rows: Sequence[ShardRow], snapshot: Snapshot, width: int | None) -> Table:
    """The columns that fit: a figure that is cut would be a wrong one. The shard, its state and its
    lag are always shown."""
    cells = [_cells(row, snapshot) for row in rows]
    left_out = _left_out(cells, width)
    table = Table(expand=width is not None, box=None, pad_edge=False, header_style="bold")
    for title, justify in _COLUMNS.items():
        if title not in left_out:
            more: dict[str, Any] = {}
            if width is not None and title in _ON_TERMINAL:
                more = _ON_TERMINAL[title]
            table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", **more)
    for row, line in zip(rows, cells, strict=True):
        style = "yellow" if row.key in snapshot.owners.expired else _STYLES.get(row.state, "")
        named = zip(_COLUMNS, line, strict=True)
        table.add_row(*(Text(cell) for title, cell in named if title not in left_out), style=style)
    return table


def _widths(cells: Sequence[tuple[str, ...]]) -> dict[str, int]:
    """Of each column; of the note the least."""
    wide = {
        title: max(len(title), *(len(line[at]) for line in cells), 0)
        for at, title in enumerate(_COLUMNS)
    }
    return wide | {
        "owner": min(wide["owner"], _OWNER_WIDE),
        "note": min(wide["note"], _NOTE_LEAST),
    }


def _left_out(cells: Sequence[tuple[str, ...]], width: int | None) -> set[str]:
    """The columns that find no room."""
    wide = _widths(cells)
    left_out: set[str] = set()
    for title in ("", *_LEFT_OUT_FIRST):
        left_out.add(title)
        shown = [wide[column] + _GAP for column in _COLUMNS if column not in left_out]
        if width is None or sum(shown) - _GAP <= width:
            break
    return left_out


def _room_of_note(rows: Sequence[ShardRow], snapshot: Snapshot, width: int) -> int:
    """The columns that a note has; 0 if it is left out."""
    cells = [_cells(row, snapshot) for row in rows]
    left_out = _left_out(cells, width)
    if "note" in left_out:
        return 0
    wide = _widths(cells)
    others = [wide[title] + _GAP for title in _COLUMNS if title not in {*left_out, "note"}]
    return width - sum(others)


def _cells(row: ShardRow, snapshot: Snapshot) -> tuple[str, ...]:
    """In the order of `_COLUMNS`."""
    lease = snapshot.leases.get(row.key)
    load = lease.load if lease is not None else None
    loss_in_s = row.lag.loss_in_s if row.lag is not None else None
    cells = (
        short_name(row.key),
        row.state,
        lag_text(row),
        "-" if loss_in_s is None else duration_text(loss_in_s),
        "-" if load is None else f"{load.kbps:.1f}",
        "-" if load is None else f"{load.cpu:.3f}",
        host_of(row.owner) or "-",
        on_one_line(row.note),
    )
    return tuple(map(sanitize, cells))
