"""`kclrun leases`: the owner, position and state of each lease, and the verbs that change a lease.

It shows only values of the lease table. The table has no time of a checkpoint or a heartbeat, so an
age is never computed: `--age` watches the counters for a while. `kclrun lag` reads the stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigGroup,
    RenamedOption,
    config_options,
    ends_with_plan,
    yes_option,
)
from kclrun.cli.leases import views
from kclrun.cli.leases.pause import pause, resume
from kclrun.cli.leases.rows import aws_of, lease_of, print_failure
from kclrun.cli.leases.views import failover_of, scan_leases
from kclrun.cli.messages import command_of, echo
from kclrun.cli.reports import print_report
from kclrun.cli.times import DURATION
from kclrun.config.units import Duration
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import (
    ANYBODY,
    OFFERED,
    OWNER_PREFIX,
    Handoff,
    Lease,
    Owner,
    OwnerId,
)
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.operating import explaining
from kclrun.operating.changes import plan_move
from kclrun.operating.summaries import LeaseSummary
from kclrun.protocol import writes

if TYPE_CHECKING:
    from kclrun.aws.table_setup import IndexState
    from kclrun.cli.services import Aws
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
_OWNER_HELP = "With --explain: only this owner (or a part of its id); `new` for one that joins."


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """The options that choose what `kclrun leases` shows."""

    by: str | None
    owner: str | None
    endpoints: tuple[str, ...]
    with_age: bool
    explain: bool
    hot: bool
    show_keys: bool


@click.group(cls=ConfigGroup, invoke_without_command=True)
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON array, positions in full.")
@click.option("--by", type=click.Choice(["owner", "group"]), help="Totals by owner or group.")
@click.option(
    "--age",
    "with_age",
    is_flag=True,
    help="Watch the counters for one failover: who renews.",
)
@click.option(
    "--explain", is_flag=True, help="Show what each owner would do next, and why; changes nothing."
)
@click.option("--owner", metavar="ID", help=_OWNER_HELP)
@click.option(
    "--hot", is_flag=True, help="The traffic of each shard, its heaviest keys, and what to do."
)
@click.option(
    "--manager",
    "endpoints",
    cls=RenamedOption,
    older="--endpoint",
    multiple=True,
    metavar="URL",
    help="With --hot: ask this manager, not the one of this host; may be repeated.",
)
@click.option(
    "--show-keys",
    is_flag=True,
    help="With --hot: look up the partition keys in the stream, and print them.",
)
@click.pass_context
def leases(context: click.Context, /, config: ConfigChoice, *, as_json: bool, **said: Any) -> int:
    """Show every lease: owner, state, checkpoint, counter, owner switches.

    \b
    kclrun leases --config app.yaml                   a table
    kclrun leases --config app.yaml --age             with who has stopped renewing (takes 10 s)
    kclrun leases --config app.yaml --by group        totals by availability zone
    kclrun leases --config app.yaml --explain         what each owner would do next, and why
    kclrun leases --config app.yaml --hot             which shards are hot, and what would help
    kclrun leases --config app.yaml resume SHARD      as `kclrun resume`
    kclrun leases --config app.yaml move SHARD --to OWNER --yes
    """
    if context.invoked_subcommand is not None:
        return exit_codes.DRAINED
    view = _View(**said)
    if view.owner is not None and not view.explain:
        raise click.UsageError("--owner goes with --explain.")
    if (view.endpoints or view.show_keys) and not view.hot:
        raise click.UsageError("--manager and --show-keys go with --hot.")
    aws = aws_of(config)
    if view.hot:
        from kclrun.cli.leases.hot import show_hot

        return show_hot(aws, view.endpoints, as_json=as_json, with_keys=view.show_keys)
    if view.explain:
        return explain_owners(aws, view.owner, as_json=as_json)
    lines = views.lease_summaries(aws, with_age=view.with_age)
    _show(lines, view.by, as_json=as_json)
    if view.by is None and not as_json:
        views.print_remedy(lines, command_of("leases", config.file, config.overrides))
    return exit_codes.DRAINED


@leases.command()
@click.argument("shard", metavar="SHARD")
@config_options
@_wait_option
@yes_option
def release(shard: str, config: ConfigChoice, wait: Duration, *, yes: bool) -> int:
    """Ask the owner of a lease to give it away, to whichever owner takes it first.

    The owner finishes its batch and checkpoints first: no record is lost, and none comes twice.
    Balancing goes on: an owner that then has too few may ask for it again.
    """
    aws = aws_of(config)
    return give_away(aws, shard, to=None, wait_s=wait, is_confirmed=yes)


@leases.command()
@click.argument("shard", metavar="SHARD")
@click.option(
    "--to", "to", required=True, metavar="OWNER", help="An owner's id, or a part of it only it has."
)
@config_options
@_wait_option
@yes_option
def move(
    *,
    shard: str,
    to: str,
    config: ConfigChoice,
    wait: Duration,
    yes: bool,
) -> int:
    """Ask the owner of a lease to give it to another owner.

    As `release`, but OWNER may take it first. OWNER must hold a lease already: an owner is known
    by its leases.
    """
    aws = aws_of(config)
    return give_away(aws, shard, to=to, wait_s=wait, is_confirmed=yes)


# The same verbs as without `leases`.
leases.add_command(pause)
leases.add_command(resume)


@leases.command()
@config_options
@yes_option
def add_index(config: ConfigChoice, *, yes: bool) -> int:
    """Add the owner index to a lease table of the Java KCL: leases then move within a second.

    \b
    kclrun leases add-index --config app.yaml          what it would do
    kclrun leases add-index --config app.yaml --yes
    """
    return _add_index(aws_of(config), is_confirmed=yes)


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
        echo(f"{table} has its index {OWNER_INDEX} already. Nothing to do.")
        return exit_codes.DRAINED
    echo(_index_plan(table, state))
    if ends_with_plan(is_confirmed=is_confirmed):
        return exit_codes.DRAINED
    began = time.monotonic()
    table_setup.add_owner_index(
        aws.control,
        table,
        report=echo,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
    )
    echo(f"{OWNER_INDEX} is ACTIVE, after {time.monotonic() - began:.0f} s")
    return exit_codes.DRAINED


def _index_plan(table: str, state: IndexState) -> str:
    from kclrun.aws.lease_table import OWNER_INDEX
    from kclrun.aws.table_setup import INDEX_WAIT_S
    from kclrun.model.statuses import DELETING

    if state.status is not None:
        then = " to be gone, and adds it again" if state.status == DELETING else ""
        return f"{table}: index {OWNER_INDEX} is {state.status}; with --yes this waits for it{then}"
    billing = "on demand, as the table is"
    if state.capacity is not None:
        read, write = state.capacity
        billing = f"provisioned as the table is: {read} read and {write} write units more to pay"
    return (
        f"{table}: add index {OWNER_INDEX} (leaseOwner, leaseKey; keys only; {billing})\n"
        "AWS needs minutes for it, 15 to 20 have been seen; the fleet runs on meanwhile.\n"
        f"This waits up to {INDEX_WAIT_S / 60:.0f} minutes; Ctrl-C stops the waiting, not the work."
    )


def _show(lines: Sequence[LeaseSummary], by: str | None, *, as_json: bool) -> None:
    if by is not None:
        totals = views.totals(lines, by)
        print_report(totals, partial(views.print_totals, by=by), as_json=as_json)
    else:
        print_report(lines, views.print_lines, as_json=as_json)


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
    from kclrun.cli.services import open_streams

    streams = tuple(open_streams(aws)) if aws.settings.streams else (ONLY_STREAM,)
    earlier = views.scan_table(aws)
    seen = time.monotonic()
    chosen = None
    if named is not None and named != _NEW:
        chosen = find_owner(named, earlier.leases, "--owner")
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
    print_report(explained, print_explanations, as_json=as_json)
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
        echo("No kclrun owner renews a lease now. What one that starts would do:  --owner new")
    for number, explanation in enumerate(explained):
        if number:
            echo("")
        held = "1 lease" if explanation.leases == 1 else f"{explanation.leases} leases"
        echo(f"{explanation.owner} ({held})")
        for decision in explanation.decisions:
            echo(f"  {decision.sentence}")


def _policy(owner: OwnerId, settings: Settings, streams: tuple[StreamKey, ...]) -> ManagerPolicy:
    """The owner's policy, if its settings are those of this file."""
    return ManagerPolicy(
        me=owner,
        failover_s=float(settings.leases.failover),
        leases_max=settings.leases.max,
        moves_per_cycle=settings.leases.moves_per_cycle,
        balance=settings.leases.balance,
        streams=streams,
    )


# The owner sees the request in the answer to its next renewal, within some three seconds.
_LOOK_EVERY_S: Final = 0.5
_NAMED_MAX: Final = 20


def give_away(aws: Aws, shard: str, *, to: str | None, wait_s: float, is_confirmed: bool) -> int:
    """Show the plan, or write the handoff request and wait for the new owner; the exit code.

    `to` None releases: the first taker gets the lease.
    Raises: NotFound for a shard without a lease; click.UsageError for an unknown owner; a
    ServiceError leaf.
    """
    lease = lease_of(aws, shard)
    leases = scan_leases(aws)
    target = None if to is None else find_owner(to, leases, "--to")
    planned = plan_move(lease, target, _now())
    ask = planned.change
    echo(planned.words, err=ask is None)
    if not isinstance(ask, writes.Ask):
        return exit_codes.UNMET
    if ends_with_plan(is_confirmed=is_confirmed):
        return exit_codes.DRAINED
    if target is not None and not _renews(aws, target, leases):
        return exit_codes.UNMET
    return _ask(aws, ask, wait_s)


def find_owner(named: str, leases: Iterable[Lease], option: str) -> OwnerId:
    """The kclrun owner with this id, or with this part of it if only one matches, such as its host.
    `option` is that of the command line.

    Raises: click.UsageError with the known owners. An owner without a lease is not known.
    """
    held = Counter(
        lease.owner
        for lease in leases
        if lease.owner is not None and not lease.is_ended and Owner.parse(lease.owner) is not None
    )
    if named in held:
        return OwnerId(named)
    part = named.removeprefix(OWNER_PREFIX)
    alike = [owner for owner in held if part and part in owner]
    if len(alike) == 1:
        return alike[0]
    problem = "is a part of several owners" if alike else "is not a kclrun owner in the table"
    shown = sorted(alike or held)
    lines = [f"{owner}  (leases: {held[owner]})" for owner in shown[:_NAMED_MAX]]
    more = [f"… {len(shown)} in all"] if len(shown) > _NAMED_MAX else []
    known = "\n  ".join(["There are:", *lines, *more]) if shown else "There is none."
    raise click.UsageError(f"{option} {named} {problem}. {known}")


def _renews(aws: Aws, target: OwnerId, leases: Iterable[Lease]) -> bool:
    """Whether the target renews a lease within one failover: a live owner renews three times."""
    seen = {lease.key: lease.counter for lease in leases if lease.owner == target}
    failover_s = failover_of(aws, tuple(leases))
    over = time.monotonic() + failover_s
    while True:
        now = {lease.key: lease.counter for lease in scan_leases(aws) if lease.owner == target}
        if now != seen:
            return True
        if time.monotonic() >= over:
            break
        time.sleep(_LOOK_EVERY_S)
    echo(
        f"{target} has renewed nothing for {failover_s:g} s: it seems to be gone. Nothing changed",
        err=True,
    )
    return False


def _ask(aws: Aws, ask: writes.Ask, wait_s: float) -> int:
    outcome = aws.table.write(ask)
    match outcome:
        case writes.Applied():
            echo(f"{ask.key}: asked {ask.asked}")
            return _await_taker(aws, ask, wait_s)
        case writes.ConditionFailed(row=row):
            holder = row.owner if row is not None else "no owner: the row is gone"
            echo(f"{ask.key}: has just got another owner or request ({holder})", err=True)
            return exit_codes.UNMET
        case _:
            return print_failure(ask.key, outcome)


def _await_taker(aws: Aws, ask: writes.Ask, wait_s: float) -> int:
    """Read the row until it has a new owner, and print the result of the request."""
    over = time.monotonic() + wait_s
    is_shown = False
    while True:
        lease = lease_of(aws, ask.key)
        if lease.owner == OFFERED and not is_shown:
            is_shown = True
            echo(f"{ask.key}: given away, waits for its taker")
        code = _verdict(lease, ask)
        if code is not None:
            return code
        if time.monotonic() >= over:
            return _gave_up(lease, ask, wait_s)
        time.sleep(_LOOK_EVERY_S)


def _verdict(lease: Lease, ask: writes.Ask) -> int | None:
    """The exit code, once the result of the request is known."""
    if lease.is_ended:
        echo(f"{lease.key}: the shard ended meanwhile; its children are leases of their own")
        return exit_codes.DRAINED
    if lease.owner == OFFERED:
        return None
    if lease.owner == ask.asked:
        if lease.handoff == Handoff(ask.owner, ask.asked_at):
            return None
        # An offer that stands for 2 s goes back to its giver [P17]; between two looks at the
        # row that reads the same as a request that was dropped.
        why = "it dropped the request, or no other owner took the lease within 2 s"
        echo(f"{lease.key}: {ask.asked} still has it: {why}", err=True)
        return exit_codes.UNMET
    if lease.owner is None:
        echo(f"{lease.key}: released; it has no owner, for none was in sight to take it")
        return exit_codes.DRAINED if ask.owner == ANYBODY else exit_codes.UNMET
    echo(f"{lease.key}: {lease.owner} has it now")
    return exit_codes.DRAINED if ask.owner in (ANYBODY, lease.owner) else exit_codes.UNMET


def _gave_up(lease: Lease, ask: writes.Ask, wait_s: float) -> int:
    if lease.owner == OFFERED:
        state = "given away, and not taken yet; see  kclrun leases --age"
    else:
        state = (
            f"still with {ask.asked} after {wait_s:g} s: it is in a long batch, or has ended\n"
            "The ask stays for 30 s; see  kclrun leases --age"
        )
    echo(f"{ask.key}: {state}", err=True)
    return exit_codes.UNMET


def _now() -> WallTime:
    """To the millisecond, as the row keeps it, so that our own request is recognized."""
    return WallTime(round(time.time(), 3))
