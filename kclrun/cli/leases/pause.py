"""`kclrun pause` and `kclrun resume`: leases that are kept and renewed, and not read for a while;
and the end of a pause or a halt. `kclrun leases` has the same two verbs.

A pause is kept on the rows, so that it survives restarts and moves. `operating/changes.py` plans
the writes, and this module sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigCommand,
    config_options,
    ends_with_plan,
    stream_option,
    yes_option,
)
from kclrun.cli.leases import views
from kclrun.cli.leases.rows import RowOutcome, aws_of, lease_of, print_failures, write_rows
from kclrun.cli.messages import echo
from kclrun.cli.tables import most_on_terminal
from kclrun.cli.times import DURATION
from kclrun.config.schema import is_named, stream_name, why_not_named
from kclrun.config.units import Duration
from kclrun.model.lease import Lease, LeaseKey, Scope
from kclrun.model.stream import ONLY_STREAM, StreamKey, display_name, stream_name_of, stream_of
from kclrun.model.text import some_of
from kclrun.model.time import WallTime
from kclrun.operating.changes import (
    ChosenLeases,
    LeasePlan,
    OperatorChange,
    plan_going_on,
    plan_pause,
)
from kclrun.protocol.fence import renew_interval_s
from kclrun.protocol.writes import Applied, ConditionFailed

if TYPE_CHECKING:
    from kclrun.cli.services import Aws

# Rows that appear while the others are written are found by another scan; children inherit the
# pause of their parents, so that a second one finds nothing unless shards are created all the time.
_PASSES_MAX: Final = 5
# A fleet's plan in the terminal; --all of 1,000 shards would fill 20 screens.
_PLANS_SHOWN_MAX: Final = 20

_shards = click.argument("shards", nargs=-1, metavar="[SHARD]...")
_all = click.option("--all", "is_all", is_flag=True, help="Every shard of the application.")


@click.command(cls=ConfigCommand)
@_shards
@config_options
@stream_option
@_all
@click.option(
    "--for", "lasting", type=DURATION, metavar="DURATION", help="Ends by itself after so long."
)
@yes_option
def pause(
    shards: tuple[str, ...],
    config: ConfigChoice,
    *,
    stream: str | None,
    is_all: bool,
    lasting: Duration | None,
    yes: bool,
) -> int:
    """Stop reading a shard, a stream or everything, and keep the leases.

    An owner finishes its batch, checkpoints, goes on renewing, and fetches nothing. Records wait in
    the stream, and expire there: `kclrun lag` shows the time that is left.

    \b
    kclrun pause --config app.yaml --all --for 30m           what would happen
    kclrun pause --config app.yaml --all --for 30m --yes
    kclrun pause --config app.yaml 2 --yes                   one shard, until it is resumed
    """
    if lasting is not None and lasting <= 0:
        raise click.UsageError("--for is more than 0s.")

    plan = partial(plan_pause, for_s=lasting)
    aws = aws_of(config)
    reach = reach_of(aws, shards, stream, is_all=is_all)
    return _change(aws, reach, plan, is_confirmed=yes)


@click.command(cls=ConfigCommand)
@_shards
@config_options
@stream_option
@_all
@yes_option
def resume(
    shards: tuple[str, ...],
    config: ConfigChoice,
    *,
    stream: str | None,
    is_all: bool,
    yes: bool,
) -> int:
    """Let leases go on that are paused or halted: after the checkpoint; nothing is skipped.

    A shard that is named goes on, whatever stopped it: after a halt, the failed batch is given to
    the processor again, so fix the processor (or the record's cause) first. --stream and --all
    end pauses alone, and show which leases stay halted.

    \b
    kclrun resume --config app.yaml 2                        what would happen
    kclrun resume --config app.yaml 2 --yes                  one shard, halted or paused
    kclrun resume --config app.yaml --all --yes              every shard that is paused
    """
    aws = aws_of(config)
    reach = reach_of(aws, shards, stream, is_all=is_all)
    return _change(aws, reach, plan_going_on, is_confirmed=yes)


def resume_shards(aws: Aws, shards: Sequence[str]) -> int:
    """Resume these leases now; the exit code. Raises: NotFound for a shard without a lease; a
    ServiceError leaf."""
    reach = reach_of(aws, shards, None, is_all=False)
    return _change(aws, reach, plan_going_on, is_confirmed=True)


def reach_of(aws: Aws, shards: Sequence[str], stream: str | None, *, is_all: bool) -> ChosenLeases:
    """The leases that are meant.

    Raises: click.UsageError unless exactly one of the three is given, or for an unknown stream;
    NotFound for a shard without a lease; a ServiceError leaf.
    """
    if [bool(shards), stream is not None, is_all].count(True) != 1:
        raise click.UsageError("Name shards, or give --stream NAME, or --all.")
    if is_all:
        return ChosenLeases(Scope.ALL)
    if stream is None:
        return ChosenLeases(Scope.SHARD, frozenset(lease_of(aws, shard).key for shard in shards))
    return ChosenLeases(Scope.STREAM, stream=_stream_named(aws, stream))


def _stream_named(aws: Aws, name: str) -> StreamKey:
    """By the rows, whose keys name their streams; an application of one stream has bare keys."""
    ours = [source.name for source in aws.settings.sources]
    if name.startswith("arn:") and not any(is_named(stream, name) for stream in ours):
        raise click.UsageError(f"--stream: {why_not_named(ours, name)}")
    name = stream_name(name)
    if not aws.settings.streams:
        if name != aws.settings.stream_names:
            raise click.UsageError(f"--stream: the stream is {aws.settings.stream_names}.")
        return ONLY_STREAM
    keys = {stream_of(lease.key) for lease in views.scan_leases(aws)}
    named = [key for key in keys if name in (key, stream_name_of(key))]
    if len(named) != 1:
        known = ", ".join(sorted(stream_name_of(key) or key for key in keys)) or "none"
        raise click.UsageError(f"--stream: {name} is not one stream of the table: {known}.")
    return named[0]


def _change(
    aws: Aws,
    reach: ChosenLeases,
    plan: Callable[[Sequence[Lease], ChosenLeases, WallTime], tuple[LeasePlan, ...]],
    *,
    is_confirmed: bool,
) -> int:
    def planned() -> tuple[LeasePlan, ...]:
        return plan(views.scan_leases(aws), reach, aws.dynamodb_client.service_time())

    plans = planned()
    shown = plans[: most_on_terminal(_PLANS_SHOWN_MAX)]
    for plan_of_lease in shown:
        echo(plan_of_lease.words)
    if len(shown) < len(plans):
        echo(f"… and {len(plans) - len(shown)} more leases")
    if ends_with_plan(
        is_confirmed=is_confirmed, has_changes=any(plan.change is not None for plan in plans)
    ):
        return exit_codes.DRAINED
    written: Written = {}
    for _ in range(_PASSES_MAX):
        if not (due := _due(plans, written)):
            break
        written |= write_all(aws, due)
        plans = planned()
    return _print_written(aws, written, [plan.key for plan in _due(plans, written)])


# A lease may be halted and paused: these are two changes of its row.
Written = dict[tuple[LeaseKey, type[OperatorChange]], RowOutcome]


def _due(
    plans: Sequence[LeasePlan], written: Container[tuple[LeaseKey, type[OperatorChange]]]
) -> list[LeasePlan]:
    return [
        plan
        for plan in plans
        if plan.change is not None and (plan.key, type(plan.change)) not in written
    ]


def write_all(aws: Aws, plans: Sequence[LeasePlan]) -> Written:
    """Write the changes of these plans; the outcome of each."""
    changes = [plan.change for plan in plans if plan.change is not None]
    outcomes = write_rows(changes, aws.table.write)
    return {(change.key, type(change)): outcome for change, outcome in outcomes}


def _print_written(aws: Aws, written: Written, unwritten: Sequence[LeaseKey]) -> int:
    done = {key for (key, _), outcome in written.items() if isinstance(outcome, Applied)}
    seen_s = renew_interval_s(float(aws.settings.leases.failover))
    if done:
        leases = "1 lease" if len(done) == 1 else f"{len(done)} leases"
        echo(f"{leases} changed. Owners see it with their next renewal, within {seen_s:.1f} s")
    moved = [
        display_name(key)
        for (key, _), outcome in written.items()
        if isinstance(outcome, ConditionFailed)
    ]
    if moved:
        echo(
            f"Changed by another operator just now, or gone, and left alone: {some_of(moved)}",
            err=True,
        )
    if unwritten:
        names = some_of([display_name(key) for key in unwritten])
        echo(f"Not changed, because they appeared meanwhile: {names}. Run it again", err=True)
    failed = [
        (key, outcome)
        for (key, _), outcome in written.items()
        if not isinstance(outcome, Applied | ConditionFailed)
    ]
    unmet = exit_codes.UNMET if moved or unwritten else exit_codes.DRAINED
    return max(unmet, print_failures(failed))
