"""What `kclrun lag` shows: one line a shard, and the worst of them all. Pure, but for printing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from kclrun.cli.lag_measure import Lag
from kclrun.cli.lease_views import print_table, shortened
from kclrun.model.stream_key import called

__all__ = ["LagLine", "as_plain", "further_behind", "lag_line", "print_lag", "spelled"]


class LagLine(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Seconds; None is not known, for `loss_in_s` also "nothing to lose"."""

    shard: str
    state: str
    owner: str
    checkpoint: str
    behind_s: float | None
    oldest_at: str | None
    loss_in_s: float | None
    is_trimmed: bool
    note: str


def lag_line(
    *, shard: str, state: str, owner: str, checkpoint: str, lag: Lag, retention_s: float, note: str
) -> LagLine:
    """What was measured, and what follows from the stream's retention."""
    oldest_at = lag.oldest_at
    loss_in_s = None
    if oldest_at is not None and lag.behind_s is not None:
        loss_in_s = 0.0 if lag.is_trimmed else max(0.0, retention_s - lag.behind_s)
    return LagLine(
        shard=shard,
        state=state,
        owner=owner,
        checkpoint=checkpoint,
        behind_s=None if lag.behind_s is None else round(lag.behind_s, 3),
        oldest_at=None if oldest_at is None else _instant(oldest_at),
        loss_in_s=None if loss_in_s is None else round(loss_in_s, 3),
        is_trimmed=lag.is_trimmed,
        note="; ".join(part for part in (note, lag.note) if part),
    )


def further_behind(lines: Sequence[LagLine], max_s: float) -> tuple[LagLine, ...]:
    """The shards further behind than that, or not known to be nearer: a check that cannot tell
    does not say yes."""
    return tuple(line for line in lines if line.behind_s is None or line.behind_s > max_s)


def as_plain(
    lines: Sequence[LagLine], *, application: str, stream: str, retention_s: float
) -> dict[str, Any]:
    """For JSON: the totals, then every shard."""
    worst, soonest = _worst(lines), _soonest(lines)
    return {
        "application": application,
        "stream": stream,
        "retention_s": retention_s,
        "behind_s_max": None if worst is None else worst.behind_s,
        "loss_in_s_min": None if soonest is None else soonest.loss_in_s,
        "unknown": sum(line.behind_s is None for line in lines),
        "shards": [msgspec.to_builtins(line) for line in lines],
    }


def print_lag(lines: Sequence[LagLine], *, retention_s: float) -> None:
    """The table, and a last line with what matters of it."""
    titles = ["shard", "state", "owner", "checkpoint", "behind", "loss in", "note"]
    rows = [
        [
            called(line.shard),
            line.state,
            line.owner or "-",
            shortened(line.checkpoint) or "-",
            spelled(line.behind_s),
            "-" if line.loss_in_s is None else spelled(line.loss_in_s),
            line.note,
        ]
        for line in lines
    ]
    if not any(line.note for line in lines):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    print_table(titles, rows)
    click.echo("")
    click.echo(_summary(lines, retention_s))


def spelled(seconds: float | None) -> str:
    """In two units at most: `0.4s`, `12s`, `4m 10s`, `1h 3m`, `2d 4h`; `?` if not known."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit_s, unit, smaller_s, smaller in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return (
                f"{whole // unit_s}{unit} {rest}{smaller}" if rest else f"{whole // unit_s}{unit}"
            )
    return f"{whole}s"


def _summary(lines: Sequence[LagLine], retention_s: float) -> str:
    if not lines:
        return "Nothing is left to read: every shard has ended."
    parts = [f"{len(lines)} shards" if len(lines) != 1 else "1 shard"]
    unowned = sum(line.state in {"unowned", "offered", "no lease"} for line in lines)
    unknown = sum(line.behind_s is None for line in lines)
    if unowned:
        parts.append(f"{unowned} without an owner")
    if unknown:
        parts.append(f"{unknown} not known")
    worst, soonest = _worst(lines), _soonest(lines)
    if worst is not None:
        where = f" ({called(worst.shard)})" if worst.behind_s else ""
        parts.append(f"at most {spelled(worst.behind_s)} behind{where}")
    if soonest is None:
        parts.append(f"nothing unread (retention is {spelled(retention_s)})")
    elif soonest.is_trimmed:
        parts.append(f"records may be lost already ({called(soonest.shard)})")
    else:
        parts.append(
            f"first loss in {spelled(soonest.loss_in_s)} ({called(soonest.shard)}),"
            f" retention is {spelled(retention_s)}"
        )
    return "; ".join(parts)


def _worst(lines: Sequence[LagLine]) -> LagLine | None:
    known = [line for line in lines if line.behind_s is not None]
    return max(known, key=lambda line: line.behind_s or 0.0, default=None)


def _soonest(lines: Sequence[LagLine]) -> LagLine | None:
    known = [line for line in lines if line.loss_in_s is not None]
    return min(known, key=lambda line: line.loss_in_s or 0.0, default=None)


def _instant(at: float) -> str:
    shown = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return shown.replace("+00:00", "Z")
