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
from kclrun.cli.duration_option import DURATION
from kclrun.config.units import Duration

if TYPE_CHECKING:
    from kclrun.cli.lease_views import LeaseLine
    from kclrun.cli.world import Aws

__all__ = ["leases", "move", "release", "resume"]

# What the group read before the verb: its --config and --set.
Given = tuple[Path | None, tuple[str, ...]]

# An owner sees an ask within a third of a failover and answers after its batch.
_wait_option = click.option(
    "--wait",
    type=DURATION,
    default="30s",
    metavar="DURATION",
    show_default=True,
    help="How long to wait for the new owner.",
)
_yes_option = click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
_OWNER_HELP = "With --explain: only this owner (or a part of its id); `new` for one that joins."
# Before the verb or behind it.
_config_option = click.option(
    "--config", "-c", metavar="FILE", type=click.Path(path_type=Path), help="(required)"
)


@click.group(invoke_without_command=True)
@click.option("--config", "-c", metavar="FILE", help="(required)", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, positions in full.")
@click.option("--by", type=click.Choice(["owner", "group"]), help="Totals by owner or group.")
@click.option("--lag", "with_lag", is_flag=True, help="Ask the stream: one read a shard.")
@click.option(
    "--age", "with_age", is_flag=True, help="Watch the counters for one failover: who renews?"
)
@click.option(
    "--explain", is_flag=True, help="Say what each owner would do next, and why; changes nothing."
)
@click.option("--owner", metavar="ID", help=_OWNER_HELP)
@click.pass_context
def leases(
    context: click.Context,
    config: Path | None,
    overrides: tuple[str, ...],
    by: str | None,
    owner: str | None,
    *,
    as_json: bool,
    with_lag: bool,
    with_age: bool,
    explain: bool,
) -> int:
    """Show every lease: owner, state, checkpoint, counter, owner switches.

    \b
    kclrun leases --config app.yaml                   a table
    kclrun leases --config app.yaml --lag             with each shard's lag (one read a shard)
    kclrun leases --config app.yaml --age             with who has stopped renewing (takes 10 s)
    kclrun leases --config app.yaml --by group        totals by availability zone
    kclrun leases --config app.yaml --explain         what each owner would do next, and why
    kclrun leases --config app.yaml resume SHARD      what resuming a halted lease would do
    kclrun leases --config app.yaml move SHARD --to OWNER --yes
    """
    if context.invoked_subcommand is not None:
        # Read by the subcommand: its --help needs no configuration.
        context.obj = (config, overrides)
        return exit_codes.DRAINED
    if owner is not None and not explain:
        raise click.UsageError("--owner goes with --explain.")
    aws = _aws(config, overrides)
    if explain:
        from kclrun.cli.lease_explaining import explain_owners

        return explain_owners(aws, owner, as_json=as_json)
    from kclrun.cli import lease_views

    lines = lease_views.lease_lines(aws, with_lag=with_lag, with_age=with_age)
    _show(lines, by, as_json=as_json)
    return exit_codes.DRAINED


@leases.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@_config_option
@_yes_option
@click.pass_obj
def resume(given: Given, shards: tuple[str, ...], config: Path | None, *, yes: bool) -> int:
    """Let halted leases go on: the failed batch is given to the processor again.

    Nothing is skipped: mend the processor (or the record's cause) first.
    """
    from kclrun.cli.lease_resume import resume as resume_leases

    return resume_leases(_aws(config or given[0], given[1]), shards, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@_config_option
@_wait_option
@_yes_option
@click.pass_obj
def release(given: Given, shard: str, config: Path | None, wait: Duration, *, yes: bool) -> int:
    """Ask the owner of a lease to give it away, to whichever owner takes it first.

    The owner finishes its batch and checkpoints first: nothing is lost, nothing comes twice.
    Balancing goes on: an owner that then has too few may ask for it again.
    """
    from kclrun.cli.lease_moves import give_away

    aws = _aws(config or given[0], given[1])
    return give_away(aws, shard, to=None, wait_s=wait, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@click.option(
    "--to", "to", required=True, metavar="OWNER", help="An owner's id, or a part of it only it has."
)
@_config_option
@_wait_option
@_yes_option
@click.pass_obj
def move(
    given: Given, shard: str, to: str, config: Path | None, wait: Duration, *, yes: bool
) -> int:
    """Ask the owner of a lease to give it to another owner.

    As `release`, but OWNER comes first. It must hold a lease already: owners are known by theirs.
    """
    from kclrun.cli.lease_moves import give_away

    aws = _aws(config or given[0], given[1])
    return give_away(aws, shard, to=to, wait_s=wait, is_confirmed=yes)


@leases.command(name="import")
@click.option(
    "--from-spark", "checkpoint", required=True, metavar="CHECKPOINT", help="The query's folder."
)
@_config_option
@_yes_option
@click.pass_obj
def import_(given: Given, checkpoint: str, config: Path | None, *, yes: bool) -> int:
    """Write a stopped Spark query's positions to the lease table: the fleet goes on from there.

    No lease goes back, and nothing is written while anybody renews one.
    """
    from kclrun.cli.lease_import import import_leases

    file = config or given[0]
    if file is None:
        raise click.UsageError("Missing option '--config' / '-c'.")
    settings = load_configuration(file, given[1]).settings
    return import_leases(settings, checkpoint, is_confirmed=yes)


def _aws(config: Path | None, overrides: tuple[str, ...]) -> Aws:
    from kclrun.cli.fleet_aws import fleet_aws

    if config is None:
        raise click.UsageError("Missing option '--config' / '-c', which goes before the verb.")
    return fleet_aws(config, overrides)


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
