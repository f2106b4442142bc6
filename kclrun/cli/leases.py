"""`kclrun leases`: the owner, position and state of each lease, and the verbs that change a lease.

It shows only values of the lease table. The table has no time of a checkpoint or a heartbeat, so an
age is never computed: `--age` watches the counters for a while. `--lag` reads the stream, once for
each shard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import DURATION, ConfigGroup, config_options, load_configuration
from kclrun.cli.lease_moves import find_owner
from kclrun.cli.lease_views import scan_table, watch_table
from kclrun.cli.messages import leases_command
from kclrun.cli.streams import open_streams
from kclrun.config.units import Duration
from kclrun.leases.explaining import Explained, explain
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import Lease, Owner, OwnerId
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.text import harmless

if TYPE_CHECKING:
    from kclrun.cli.lease_views import LeaseLine
    from kclrun.cli.world import Aws
    from kclrun.config.schema import Settings

# `kclrun leases --explain` shows the decisions of each owner's next cycle, with reasons. It runs
# the managers' own planner on two scans that are a failover apart. So an expired lease is observed
# and not computed. It reads the table twice and changes nothing.

# This is never an owner's name: a manager's slot has more parts.
_NEW: Final = "new"


class Explanation(msgspec.Struct, frozen=True):
    """The next decisions of one owner. `leases` is the number of its leases that are not ended."""

    owner: OwnerId
    leases: int
    decisions: tuple[Explained, ...]


def explain_owners(aws: Aws, named: str | None, *, as_json: bool) -> int:
    """Show the next cycle of all live owners, of one, or of a manager that would join (`new`).

    Raises: click.UsageError for an unknown owner; a ServiceError leaf.
    """
    streams = tuple(open_streams(aws)) if aws.settings.streams else (ONLY_STREAM,)
    earlier = scan_table(aws)
    seen = time.monotonic()
    chosen = None
    if named is not None and named != _NEW:
        chosen = find_owner(named, earlier.leases)
    later = watch_table(aws, earlier.leases)
    apart_s = time.monotonic() - seen
    if named == _NEW:
        owners: Sequence[OwnerId] = [Owner(aws.settings.leases.group, _NEW, _NEW).id]
    else:
        owners = [chosen] if chosen else owners_alive(earlier.leases, later.leases)
    explained = [
        Explanation(
            owner,
            sum(lease.owner == owner and not lease.is_ended for lease in later.leases),
            explain(
                earlier.leases,
                later.leases,
                _policy(owner, aws.settings, streams),
                apart_s=apart_s,
                broken=later.broken,
            ),
        )
        for owner in owners
    ]
    if as_json:
        click.echo(json.dumps([_plain(each) for each in explained], indent=2))
    else:
        print_explanations(explained)
    return exit_codes.DRAINED


def owners_alive(earlier: Iterable[Lease], later: Iterable[Lease]) -> tuple[OwnerId, ...]:
    """The kclrun owners that renewed or took a lease between the scans."""
    before = {lease.key: (lease.owner, lease.counter) for lease in earlier}
    alive = {
        lease.owner
        for lease in later
        if lease.owner is not None
        and not lease.is_ended
        and Owner.parse(lease.owner) is not None
        and before.get(lease.key) != (lease.owner, lease.counter)
    }
    return tuple(sorted(alive))


def print_explanations(explained: Sequence[Explanation]) -> None:
    """Print a paragraph for each owner, a line for each decision."""
    if not explained:
        click.echo(
            "No kclrun owner renews a lease now. What one that starts would do:  --owner new"
        )
    for number, each in enumerate(explained):
        if number:
            click.echo("")
        held = "1 lease" if each.leases == 1 else f"{each.leases} leases"
        click.echo(harmless(f"{each.owner} ({held})"))
        for decision in each.decisions:
            click.echo(f"  {harmless(decision.sentence)}")


def _plain(explained: Explanation) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(explained)
    return plain


def _policy(owner: OwnerId, settings: Settings, streams: tuple[StreamKey, ...]) -> ManagerPolicy:
    """The owner's policy, if its settings are those of this file."""
    return ManagerPolicy(
        me=owner,
        failover_s=float(settings.leases.failover),
        leases_max=settings.leases.max,
        moves_per_cycle=settings.leases.moves_per_cycle,
        streams=streams,
    )


# The --config and --set that the group parsed before the verb.
Given = tuple[Path | None, tuple[str, ...]]

# An owner sees a handoff request within a third of a failover and answers after its batch.
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


@click.group(cls=ConfigGroup, invoke_without_command=True)
@config_options
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
        # The subcommand loads the configuration, because its --help needs none.
        context.obj = (config, overrides)
        return exit_codes.DRAINED
    if owner is not None and not explain:
        raise click.UsageError("--owner goes with --explain.")
    aws = _aws(config, overrides)
    if explain:
        return explain_owners(aws, owner, as_json=as_json)
    from kclrun.cli import lease_views

    lines = lease_views.lease_lines(aws, with_lag=with_lag, with_age=with_age)
    _show(lines, by, as_json=as_json)
    if by is None and not as_json:
        assert config is not None, "the table was read by it"
        lease_views.print_remedy(lines, leases_command(config, overrides))
    return exit_codes.DRAINED


@leases.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@config_options
@_yes_option
@click.pass_obj
def resume(
    given: Given,
    shards: tuple[str, ...],
    config: Path | None,
    overrides: tuple[str, ...],
    *,
    yes: bool,
) -> int:
    """Let halted leases go on: the failed batch is given to the processor again.

    Nothing is skipped: mend the processor (or the record's cause) first.
    """
    from kclrun.cli.lease_moves import resume as resume_leases

    return resume_leases(_aws(*_both(given, config, overrides)), shards, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@config_options
@_wait_option
@_yes_option
@click.pass_obj
def release(
    given: Given,
    shard: str,
    config: Path | None,
    overrides: tuple[str, ...],
    wait: Duration,
    *,
    yes: bool,
) -> int:
    """Ask the owner of a lease to give it away, to whichever owner takes it first.

    The owner finishes its batch and checkpoints first: nothing is lost, nothing comes twice.
    Balancing goes on: an owner that then has too few may ask for it again.
    """
    from kclrun.cli.lease_moves import give_away

    aws = _aws(*_both(given, config, overrides))
    return give_away(aws, shard, to=None, wait_s=wait, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@click.option(
    "--to", "to", required=True, metavar="OWNER", help="An owner's id, or a part of it only it has."
)
@config_options
@_wait_option
@_yes_option
@click.pass_obj
def move(
    given: Given,
    *,
    shard: str,
    to: str,
    config: Path | None,
    overrides: tuple[str, ...],
    wait: Duration,
    yes: bool,
) -> int:
    """Ask the owner of a lease to give it to another owner.

    As `release`, but OWNER comes first. It must hold a lease already: owners are known by theirs.
    """
    from kclrun.cli.lease_moves import give_away

    aws = _aws(*_both(given, config, overrides))
    return give_away(aws, shard, to=to, wait_s=wait, is_confirmed=yes)


@leases.command(name="import")
@click.option(
    "--from-spark", "checkpoint", required=True, metavar="CHECKPOINT", help="The query's folder."
)
@config_options
@_yes_option
@click.pass_obj
def import_(
    given: Given,
    checkpoint: str,
    config: Path | None,
    overrides: tuple[str, ...],
    *,
    yes: bool,
) -> int:
    """Write a stopped Spark query's positions to the lease table: the fleet goes on from there.

    No lease goes back, and nothing is written while anybody renews one.
    """
    from kclrun.cli.lease_import import import_leases

    settings = load_configuration(*_both(given, config, overrides)).settings
    return import_leases(settings, checkpoint, is_confirmed=yes)


def _both(given: Given, config: Path | None, overrides: tuple[str, ...]) -> Given:
    """The options before and after the verb; those after the verb have precedence."""
    return config or given[0], (*given[1], *overrides)


def _aws(config: Path | None, overrides: tuple[str, ...]) -> Aws:
    from kclrun.cli.fleet_run import fleet_aws

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
