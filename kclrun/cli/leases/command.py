"""`kclrun leases`: the owner, position and state of each lease, and the verbs that change a lease.

It shows only values of the lease table. The table has no time of a checkpoint or a heartbeat, so an
age is never computed: `--age` watches the counters for a while. `kclrun lag` reads the stream.
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
from kclrun.cli.config_options import DEFAULT_CONFIG, DURATION, ConfigGroup, config_options
from kclrun.cli.leases import moves, views
from kclrun.cli.messages import leases_command
from kclrun.config.units import Duration
from kclrun.leases import explaining
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import Lease, Owner, OwnerId
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.text import harmless
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.aws.table_setup import IndexState
    from kclrun.cli.world import Aws
    from kclrun.config.schema import Settings

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
    with_age: bool,
    explain: bool,
) -> int:
    """Show every lease: owner, state, checkpoint, counter, owner switches.

    \b
    kclrun leases --config app.yaml                   a table
    kclrun leases --config app.yaml --age             with who has stopped renewing (takes 10 s)
    kclrun leases --config app.yaml --by group        totals by availability zone
    kclrun leases --config app.yaml --explain         what each owner would do next, and why
    kclrun leases --config app.yaml resume SHARD      what resuming a halted lease would do
    kclrun leases --config app.yaml move SHARD --to OWNER --yes
    """
    if context.invoked_subcommand is not None:
        return exit_codes.DRAINED
    if owner is not None and not explain:
        raise click.UsageError("--owner goes with --explain.")
    aws = _aws(config, overrides)
    if explain:
        return explain_owners(aws, owner, as_json=as_json)
    lines = views.lease_lines(aws, with_age=with_age)
    _show(lines, by, as_json=as_json)
    if by is None and not as_json:
        views.print_remedy(lines, leases_command(config or DEFAULT_CONFIG, overrides))
    return exit_codes.DRAINED


@leases.command()
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@config_options
@_yes_option
def resume(
    shards: tuple[str, ...], config: Path | None, overrides: tuple[str, ...], *, yes: bool
) -> int:
    """Let halted leases go on: the failed batch is given to the processor again.

    Nothing is skipped: mend the processor (or the record's cause) first.
    """
    return moves.resume(_aws(config, overrides), shards, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@config_options
@_wait_option
@_yes_option
def release(
    shard: str, config: Path | None, overrides: tuple[str, ...], wait: Duration, *, yes: bool
) -> int:
    """Ask the owner of a lease to give it away, to whichever owner takes it first.

    The owner finishes its batch and checkpoints first: nothing is lost, nothing comes twice.
    Balancing goes on: an owner that then has too few may ask for it again.
    """
    aws = _aws(config, overrides)
    return moves.give_away(aws, shard, to=None, wait_s=wait, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@click.option(
    "--to", "to", required=True, metavar="OWNER", help="An owner's id, or a part of it only it has."
)
@config_options
@_wait_option
@_yes_option
def move(
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
    aws = _aws(config, overrides)
    return moves.give_away(aws, shard, to=to, wait_s=wait, is_confirmed=yes)


@leases.command()
@config_options
@_yes_option
def add_index(config: Path | None, overrides: tuple[str, ...], *, yes: bool) -> int:
    """Add the owner index to a lease table of the Java KCL: leases then move within a second.

    \b
    kclrun leases add-index --config app.yaml          what it would do
    kclrun leases add-index --config app.yaml --yes
    """
    return _add_index(_aws(config, overrides), is_confirmed=yes)


def _aws(config: Path | None, overrides: tuple[str, ...]) -> Aws:
    from kclrun.cli.world import fleet_aws

    return fleet_aws(config, overrides)


def _add_index(aws: Aws, *, is_confirmed: bool) -> int:
    """Show the plan for the new index, or add the index and wait; returns the exit code.

    Raises: TableRefused (no such table, other keys); Unavailable if it takes longer than
    `INDEX_WAIT_S`; AccessDenied and other ServiceError leaves.
    """
    from kclrun.aws import table_setup
    from kclrun.aws.lease_table import OWNER_INDEX

    table = aws.settings.table
    state = table_setup.inspect_owner_index(aws.control.dynamodb_reads(), table)
    if state.is_active:
        click.echo(f"{table} has its index {OWNER_INDEX} already. Nothing to do.")
        return exit_codes.DRAINED
    click.echo(_plan(table, state))
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    began = time.monotonic()
    table_setup.add_owner_index(
        aws.control,
        table,
        tell=click.echo,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
    )
    click.echo(f"{OWNER_INDEX} is ACTIVE, after {time.monotonic() - began:.0f} s")
    return exit_codes.DRAINED


def _plan(table: str, state: IndexState) -> str:
    from kclrun.aws.lease_table import OWNER_INDEX
    from kclrun.aws.table_setup import INDEX_WAIT_S

    if state.status is not None:
        return f"{table}: index {OWNER_INDEX} is {state.status}; with --yes this waits for it"
    billing = "on demand, as the table is"
    if state.capacity is not None:
        read, write = state.capacity
        billing = f"provisioned as the table is: {read} read and {write} write units more to pay"
    return (
        f"{table}: add index {OWNER_INDEX} (leaseOwner, leaseKey; keys only; {billing})\n"
        "AWS needs minutes for it, 15 to 20 have been seen; the fleet runs on meanwhile.\n"
        f"This waits up to {INDEX_WAIT_S / 60:.0f} minutes; Ctrl-C stops the waiting, not the work."
    )


def _show(lines: Sequence[views.LeaseLine], by: str | None, *, as_json: bool) -> None:
    if by is not None:
        totals = views.totals(lines, by)
        if as_json:
            click.echo(json.dumps(totals, indent=2))
        else:
            views.print_totals(totals, by)
    elif as_json:
        click.echo(json.dumps([views.as_plain(line) for line in lines], indent=2))
    else:
        views.print_lines(lines)


# `--explain` runs the managers' own planner on two scans that are a failover apart. So an expired
# lease is observed and not computed. It reads the table twice and changes nothing.

# `--owner new`. This is never an owner's name: a manager's slot has more parts.
_NEW: Final = "new"


class Explanation(msgspec.Struct, frozen=True):
    """The next decisions of one owner. `leases` is the number of its leases that are not ended."""

    owner: OwnerId
    leases: int
    decisions: tuple[explaining.Explained, ...]


def explain_owners(aws: Aws, named: str | None, *, as_json: bool) -> int:
    """Show the next cycle of all live owners, of one, or of a manager that would join (`new`).

    Raises: click.UsageError for an unknown owner; a ServiceError leaf.
    """
    from kclrun.cli.streams import open_streams

    streams = tuple(open_streams(aws)) if aws.settings.streams else (ONLY_STREAM,)
    earlier = views.scan_table(aws)
    seen = time.monotonic()
    chosen = None
    if named is not None and named != _NEW:
        chosen = moves.find_owner(named, earlier.leases)
    later = views.watch_table(aws, earlier.leases)
    apart_s = time.monotonic() - seen
    if named == _NEW:
        owners: Sequence[OwnerId] = [Owner(aws.settings.leases.group, _NEW, _NEW).id]
    else:
        owners = [chosen] if chosen else owners_alive(earlier.leases, later.leases)
    explained = [
        Explanation(
            owner,
            sum(lease.owner == owner and not lease.is_ended for lease in later.leases),
            explaining.explain(
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
