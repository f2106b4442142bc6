"""`kclrun lag`: the lag of each shard's checkpoint, and the time until records are lost.

Reads the lease table once and each shard once or twice; changes nothing. With `--max-behind` the
exit code is the answer, for a monitor that can only run a command.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import DURATION, ConfigCommand, config_options
from kclrun.cli.lag.measure import Lag, Unleased, lag_of_lease, measure, unleased, waiting_for
from kclrun.cli.leases.views import line_of, print_table, scan_leases, shortened
from kclrun.cli.messages import some_of
from kclrun.config.units import Duration, parse_start
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import StreamKey, called, qualified_shards, shard_id_of, stream_of
from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.cli.streams import OpenStream
    from kclrun.model.lease import Lease, LeaseKey


class LagLine(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Times are in seconds. None is unknown; for `loss_in_s` also "nothing to lose"."""

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
    """The line of a measured lag, with the time to loss by the stream's retention."""
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
    """The shards whose lag is larger than `max_s` or unknown: an unknown lag must not pass the
    check."""
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
    """Print the table, and a summary as the last line."""
    titles = ["shard", "state", "owner", "checkpoint", "behind", "loss in", "note"]
    rows = [
        [
            called(line.shard),
            line.state,
            line.owner or "-",
            shortened(line.checkpoint) or "-",
            spelled(line.behind_s),
            "-" if line.loss_in_s is None else spelled(line.loss_in_s),
            line.note.split("\n", 1)[0],
        ]
        for line in lines
    ]
    if not any(line.note for line in lines):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    print_table(titles, rows)
    click.echo("")
    click.echo(_summary(lines, retention_s))


def spelled(seconds: float | None) -> str:
    """In two units at most: `0.4s`, `12s`, `4m 10s`, `1h 3m`, `2d 4h`; `?` if unknown."""
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


# A shard takes two requests of some 10 ms: eight threads measure 1,000 shards in three seconds.
_THREADS: Final = 8
_HOUR_S: Final = 3_600.0


@click.command(cls=ConfigCommand)
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: totals and every shard.")
@click.option(
    "--max-behind",
    type=DURATION,
    metavar="DURATION",
    help="Exit code 1 if a shard is further behind than that (as 5m), or not known.",
)
def lag(
    config: Path | None, overrides: tuple[str, ...], *, as_json: bool, max_behind: Duration | None
) -> int:
    """Show how far each shard's checkpoint is behind, and the time until records are lost.

    Behind is the age of the oldest record above the checkpoint, so up to `checkpoint.every` of it
    is normal. Shards without a lease and leases that have not begun are measured, too.

    \b
    kclrun lag --config app.yaml
    kclrun lag --config app.yaml --max-behind 5m || page
    """
    from kclrun.cli.streams import open_streams
    from kclrun.cli.world import fleet_aws

    aws = fleet_aws(config, overrides)
    streams = open_streams(aws)
    leases = {lease.key: lease for lease in scan_leases(aws)}
    remark_unread(leases.values(), streams)
    lines = tuple(
        line for key, stream in streams.items() for line in _measured(key, stream, leases)
    )
    retention_s = min(_retention_s(stream) for stream in streams.values())
    if as_json:
        settings = aws.settings
        plain = as_plain(
            lines,
            application=settings.application,
            stream=settings.stream_names,
            retention_s=retention_s,
        )
        click.echo(json.dumps(plain, indent=2))
    else:
        print_lag(lines, retention_s=retention_s)
    return exit_codes.DRAINED if max_behind is None else _judged(lines, max_behind)


def remark_unread(leases: Iterable[Lease], streams: Collection[StreamKey]) -> None:
    """Name on standard error the leases that are not measured, since their stream is not read."""
    left_out = sorted(
        called(lease.key)
        for lease in leases
        if not lease.is_ended and stream_of(lease.key) not in streams
    )
    if left_out:
        named = some_of(left_out)
        click.echo(f"Not measured, their stream is not of the application: {named}", err=True)


def _judged(lines: tuple[LagLine, ...], max_behind: Duration) -> int:
    late = further_behind(lines, max_behind)
    if not late:
        return exit_codes.DRAINED
    named = some_of([f"{called(line.shard)} {spelled(line.behind_s)}" for line in late])
    click.echo(f"Further behind than {max_behind.text}, or not known: {named}", err=True)
    return exit_codes.UNMET


def _retention_s(stream: OpenStream) -> float:
    return stream.summary.retention_hours * _HOUR_S


def _measured(
    key: StreamKey, stream: OpenStream, every: Mapping[LeaseKey, Lease]
) -> tuple[LagLine, ...]:
    """Every shard of a stream with records left to read, in the order of their ids."""
    leases: dict[str, Lease] = {
        lease.key: lease for lease in every.values() if stream_of(lease.key) == key
    }
    first = parse_start(stream.settings.start or "TRIM_HORIZON", WallTime(time.time()))
    shards = qualified_shards(key, stream.admin.list_shards())

    def of_lease(lease: Lease) -> LagLine:
        return _of_lease(stream, lease, leases, first.at)

    def of_unleased(shard: Unleased) -> LagLine:
        return _of_unleased(stream, shard)

    unended = [lease for lease in leases.values() if not lease.is_ended]
    with ThreadPoolExecutor(_THREADS) as pool:
        lines = [
            *pool.map(of_lease, unended),
            *pool.map(of_unleased, unleased(shards, leases, first)),
        ]
    return tuple(sorted(lines, key=lambda line: line.shard))


def _of_lease(
    stream: OpenStream,
    lease: Lease,
    leases: Mapping[str, Lease],
    start_at: WallTime | None,
) -> LagLine:
    line = line_of(lease)
    parents = [called(parent) for parent in waiting_for(lease, leases)]
    waits = f"waits for {' and '.join(parents)}" if parents else ""
    return lag_line(
        shard=line.shard,
        state=line.state,
        owner="" if line.state == "offered" else line.owner,
        checkpoint=line.checkpoint,
        lag=lag_of_lease(lease, start_at, stream.reader),
        retention_s=_retention_s(stream),
        note="; ".join(part for part in (waits, line.halt_reason, line.note) if part),
    )


def _of_unleased(stream: OpenStream, shard: Unleased) -> LagLine:
    at_tip = Lag(0.0, note="it would begin at the tip")
    return lag_line(
        shard=shard.shard_id,
        state="no lease",
        owner="",
        checkpoint="",
        lag=at_tip
        if shard.start is None
        else measure(stream.reader, shard_id_of(shard.shard_id), shard.start, TRIM_HORIZON),
        retention_s=_retention_s(stream),
        note=shard.note,
    )
