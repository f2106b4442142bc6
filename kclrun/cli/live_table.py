"""The live table of `kclrun run` on a terminal: one line a lease, drawn from a `Snapshot`.

Drawing only; `live_display.py` puts it on the terminal.
Rule: every foreign text is escaped; a narrow terminal loses columns, never the note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kclrun.cli.messages import harmless
from kclrun.model.stream_key import called
from kclrun.observe.snapshot import LeaseView, Snapshot

__all__ = ["render"]

# Above this many leases the busiest are shown: a terminal has some fifty lines.
_LEASES_SHOWN_MAX: Final = 40
# Columns that go when the terminal is narrower than this.
_WIDE: Final = 100
_STYLES: Final = {"halted": "bold red", "backing off": "yellow", "running": "green"}
_UNKNOWN: Final = "-"


class _Column(NamedTuple):
    title: str
    cell: Callable[[LeaseView], str]
    is_wide_only: bool = False
    is_of_lease: bool = False
    justify: str = "right"


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """The table for one moment, for a terminal of `width` columns."""
    is_wide = width >= _WIDE
    columns = [
        column
        for column in _COLUMNS
        if (is_wide or not column.is_wide_only) and (snapshot.has_leases or not column.is_of_lease)
    ]
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_note = column.title == "note"
        table.add_column(
            column.title,
            justify="left" if column.justify == "left" else "right",
            no_wrap=True,
            ratio=1 if is_note else None,
            overflow="ellipsis",
        )
    for lease in _shown(snapshot):
        style = _STYLES.get(lease.state, "")
        table.add_row(*(Text(harmless(column.cell(lease))) for column in columns), style=style)
    return Group(_headline(snapshot), table, _footer(snapshot))


def _shown(snapshot: Snapshot) -> tuple[LeaseView, ...]:
    """In the order of the shards; where they are too many, those with a note and the busiest."""
    chosen = sorted(snapshot.leases, key=lambda lease: (not lease.note, -lease.records_per_s))
    return tuple(sorted(chosen[:_LEASES_SHOWN_MAX], key=lambda lease: lease.shard))


def _headline(snapshot: Snapshot) -> Text:
    state = "  draining" if snapshot.is_draining else ""
    return Text(
        harmless(
            f"{snapshot.application} on {snapshot.stream}  {_clock(snapshot.uptime_s)}{state}\n"
            f"{snapshot.owner}"
        ),
        overflow="ellipsis",
        no_wrap=True,
    )


def _footer(snapshot: Snapshot) -> Text:
    hidden = max(0, len(snapshot.leases) - _LEASES_SHOWN_MAX)
    kept = [
        f"{len(snapshot.leases)} leases here",
        f"{snapshot.leases_elsewhere} elsewhere",
        f"{snapshot.leases_free} free",
    ]
    parts = [
        *(kept if snapshot.has_leases else [f"{len(snapshot.leases)} shards"]),
        f"{snapshot.ended_total} ended",
        f"{snapshot.records_total:,} records",
        f"{snapshot.records_per_s:,.0f}/s",
        f"lag {_lag(snapshot.lag_ms_max)}",
    ]
    if hidden:
        parts.append(f"{hidden} {'leases' if snapshot.has_leases else 'shards'} not shown")
    return Text(", ".join(parts), style="dim")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


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


def _short(shard: str) -> str:
    """`shardId-000000000003` as `3`: the zeros are the same on every line. Among several streams
    the stream's name stands before it."""
    stream, colon, shard_id = called(shard).rpartition(":")
    number = shard_id.removeprefix("shardId-")
    is_plain = number != shard_id and number.isdecimal()
    return f"{stream}{colon}{int(number) if is_plain else shard_id}"


_COLUMNS: Final = (
    _Column("shard", lambda lease: _short(lease.shard)),
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
