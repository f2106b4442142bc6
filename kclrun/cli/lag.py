"""`kclrun lag`: how far the application is behind, by shard, and how long until records are lost.

Reads the lease table once and each shard once or twice; changes nothing. With `--max-behind` the
exit code answers, for a monitor that knows no more than to run a command.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import config_options
from kclrun.cli.duration_option import DURATION

if TYPE_CHECKING:
    from kclrun.cli.lag_lines import LagLine
    from kclrun.cli.lag_shards import Unleased
    from kclrun.cli.streams import OpenStream
    from kclrun.config.units import Duration
    from kclrun.model.lease import Lease, LeaseKey
    from kclrun.model.stream_key import StreamKey
    from kclrun.model.time import WallTime

__all__ = ["lag"]

# Two requests of some 10 ms a shard: eight threads measure 1,000 shards in three seconds.
_THREADS: Final = 8
_HOUR_S: Final = 3_600.0
_NAMED_MAX: Final = 8


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: totals and every shard.")
@click.option(
    "--max-behind",
    type=DURATION,
    metavar="DURATION",
    help="Exit code 1 if a shard is further behind than that (as 5m), or not known.",
)
def lag(
    config: Path, overrides: tuple[str, ...], *, as_json: bool, max_behind: Duration | None
) -> int:
    """Show how far each shard's checkpoint is behind, and the time until records are lost.

    Behind is the age of the oldest record above the checkpoint, so up to `checkpoint.every` of it
    is normal. Shards without a lease and leases that have not begun are measured, too.

    \b
    kclrun lag --config app.yaml
    kclrun lag --config app.yaml --max-behind 5m || page-somebody
    """
    from kclrun.cli import lag_lines
    from kclrun.cli.fleet_aws import fleet_aws
    from kclrun.cli.lease_views import scan_leases
    from kclrun.cli.streams import open_streams

    aws = fleet_aws(config, overrides)
    streams = open_streams(aws)
    leases = {lease.key: lease for lease in scan_leases(aws)}
    lines = tuple(
        line for key, stream in streams.items() for line in _measured(key, stream, leases)
    )
    retention_s = min(_retention_s(stream) for stream in streams.values())
    if as_json:
        settings = aws.settings
        plain = lag_lines.as_plain(
            lines,
            application=settings.application,
            stream=settings.stream_names,
            retention_s=retention_s,
        )
        click.echo(json.dumps(plain, indent=2))
    else:
        lag_lines.print_lag(lines, retention_s=retention_s)
    return exit_codes.DRAINED if max_behind is None else _judged(lines, max_behind)


def _judged(lines: tuple[LagLine, ...], max_behind: Duration) -> int:
    from kclrun.cli import lag_lines
    from kclrun.model.stream_key import called

    late = lag_lines.further_behind(lines, max_behind)
    if not late:
        return exit_codes.DRAINED
    more = f", … {len(late)} in all" if len(late) > _NAMED_MAX else ""
    named = ", ".join(
        f"{called(line.shard)} {lag_lines.spelled(line.behind_s)}" for line in late[:_NAMED_MAX]
    )
    click.echo(f"Further behind than {max_behind.text}, or not known: {named}{more}", err=True)
    return exit_codes.UNMET


def _retention_s(stream: OpenStream) -> float:
    return stream.summary.retention_hours * _HOUR_S


def _measured(
    key: StreamKey, stream: OpenStream, every: Mapping[LeaseKey, Lease]
) -> tuple[LagLine, ...]:
    """Every shard of a stream that has something left to read, in the order of their ids."""
    from kclrun.cli.lag_shards import unleased
    from kclrun.config.start_position import parse_start
    from kclrun.model.stream_key import qualified_shards, stream_of
    from kclrun.model.time import WallTime

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
    from kclrun.cli.lag_lines import lag_line
    from kclrun.cli.lag_measure import lag_of_lease
    from kclrun.cli.lag_shards import waiting_for
    from kclrun.cli.lease_views import line_of
    from kclrun.model.stream_key import called

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
    from kclrun.cli.lag_lines import lag_line
    from kclrun.cli.lag_measure import Lag, measure
    from kclrun.model.sequence import TRIM_HORIZON
    from kclrun.model.stream_key import shard_id_of

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
