"""`kclrun leases`: who has which shard, how far each is, what stands still; and `leases resume`.

Shows what the lease table says and nothing it does not: the table holds no time of a checkpoint
or a heartbeat, so an age is never made up. `--age` watches the counters for a while; `--lag` asks
the stream, one read a shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import load_configuration
from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from kclrun.cli.lease_views import LeaseLine
    from kclrun.cli.world import Aws

__all__ = ["leases", "resume"]


@click.group(invoke_without_command=True)
@click.option("--config", "-c", metavar="FILE", help="(required)", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, positions in full.")
@click.option("--by", type=click.Choice(["owner", "group"]), help="Totals by owner or group.")
@click.option("--lag", "with_lag", is_flag=True, help="Ask the stream: one read a shard.")
@click.option(
    "--age", "with_age", is_flag=True, help="Watch the counters for one failover: who renews?"
)
@click.pass_context
def leases(
    context: click.Context,
    config: Path | None,
    overrides: tuple[str, ...],
    by: str | None,
    *,
    as_json: bool,
    with_lag: bool,
    with_age: bool,
) -> int:
    """Show every lease: owner, state, checkpoint, counter, owner switches.

    \b
    kclrun leases --config app.yaml                   a table
    kclrun leases --config app.yaml --lag             with each shard's lag (one read a shard)
    kclrun leases --config app.yaml --age             with who has stopped renewing (takes 10 s)
    kclrun leases --config app.yaml --by group        totals by availability zone
    kclrun leases --config app.yaml resume SHARD      what resuming a halted lease would do
    kclrun leases --config app.yaml resume SHARD --yes
    """
    if context.invoked_subcommand is not None:
        # Read by the subcommand: its --help needs no configuration.
        context.obj = (config, overrides)
        return exit_codes.DRAINED
    from kclrun.cli import lease_views

    aws = _aws(config, overrides)
    lines = lease_views.lease_lines(aws, with_lag=with_lag, with_age=with_age)
    _show(lines, by, as_json=as_json)
    return exit_codes.DRAINED


@leases.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
@click.pass_obj
def resume(
    given: tuple[Path | None, tuple[str, ...]], shards: tuple[str, ...], *, yes: bool
) -> int:
    """Let halted leases go on: the failed batch is given to the processor again.

    Nothing is skipped: mend the processor (or the record's cause) first.
    """
    from kclrun.cli.lease_resume import resume as resume_leases

    return resume_leases(_aws(*given), shards, is_confirmed=yes)


def _aws(config: Path | None, overrides: tuple[str, ...]) -> Aws:
    from kclrun.cli.world import Aws

    if config is None:
        raise click.UsageError("Missing option '--config' / '-c', which goes before 'resume'.")
    settings = load_configuration(config, overrides).settings
    if settings.engine == "spark":
        raise SettingsError(
            "engine: spark keeps no leases: positions are in the query's checkpoint,"
            f" {settings.spark.checkpoint or 'made by each run'}\n"
            "Lag and progress by shard:  kclrun --config … on a terminal, or --report FILE"
        )
    return Aws(settings)


def _show(lines: Sequence[LeaseLine], by: str | None, *, as_json: bool) -> None:
    from kclrun.cli import lease_views

    if by is not None:
        totals = lease_views.totals(lines, by)
        if as_json:
            click.echo(json.dumps(totals, indent=2))
        else:
            lease_views.print_totals(totals, by)
    elif as_json:
        click.echo(json.dumps([lease_views.as_plain(line) for line in lines], indent=2))
    else:
        lease_views.print_lines(lines)
