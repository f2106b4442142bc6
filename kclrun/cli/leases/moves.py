"""`kclrun leases release`, `move` and `resume`: writes of an operator to a lease row.

An operator's handoff request is like a manager's [P16]. It is written to the row, changes neither
owner nor counter, and the owner answers it after its present batch. No lease is taken by force, so
no record is lost or processed twice. A lease without a live owner needs no request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.leases.views import failover_of, scan_leases, scan_table, shortened
from kclrun.cli.messages import naming_table
from kclrun.errors import NotFound
from kclrun.model.lease import (
    ANYBODY,
    OFFERED,
    OWNER_PREFIX,
    Handoff,
    Lease,
    LeaseKey,
    Owner,
    OwnerId,
)
from kclrun.model.stream import called, shard_id_of, spelled_out
from kclrun.model.text import harmless
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Applied,
    Ask,
    ConditionFailed,
    OutcomeUnknown,
    Refused,
    ResumeLease,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    from kclrun.cli.world import Aws


def resume(aws: Aws, shards: Sequence[str], *, is_confirmed: bool) -> int:
    """Show the plan for resuming these leases, or resume them; returns the exit code.

    Raises: NotFound for a shard without a lease (before anything is written); a ServiceError leaf.
    """
    # By lease key: the operator may name both `2` and the full id.
    rows = {lease.key: lease for lease in (lease_of(aws, shard) for shard in shards)}.values()
    halted = [lease for lease in rows if lease.halt is not None]
    for lease in rows:
        click.echo(_plan(lease))
    if not halted:
        click.echo("Nothing to do.")
        return exit_codes.DRAINED
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    codes = [_write(aws, lease) for lease in halted]
    return next((code for code in codes if code), exit_codes.DRAINED)


def _plan(lease: Lease) -> str:
    if lease.halt is None:
        return f"{lease.key}: is not halted"
    reason = harmless(lease.halt.reason).split("\n", 1)[0]
    position = shortened(str(lease.checkpoint))
    return f"{lease.key}: goes on after {position}; it was halted because: {reason}"


def _write(aws: Aws, lease: Lease) -> int:
    outcome = aws.table.write(ResumeLease(lease.key))
    match outcome:
        case Applied():
            click.echo(f"{lease.key}: resumed")
            return exit_codes.DRAINED
        case ConditionFailed():
            click.echo(f"{lease.key}: was not halted any more")
            return exit_codes.DRAINED
        case _:
            return tell_failure(lease.key, outcome)


# The owner sees the request in the answer to its next renewal, within some three seconds.
_LOOK_EVERY_S: Final = 0.5
_NAMED_MAX: Final = 20


class CannotAsk(msgspec.Struct, frozen=True):
    """The reason why this lease cannot be requested now, and advice for the operator."""

    why: str


def give_away(aws: Aws, shard: str, *, to: str | None, wait_s: float, is_confirmed: bool) -> int:
    """Show the plan, or write the handoff request and wait for the new owner; the exit code.

    `to` None releases: the first taker gets the lease.
    Raises: NotFound for a shard without a lease; click.UsageError for an unknown owner; a
    ServiceError leaf.
    """
    lease = lease_of(aws, shard)
    leases = scan_leases(aws)
    target = None if to is None else find_owner(to, leases)
    planned = plan_ask(lease, target, _now())
    if isinstance(planned, CannotAsk):
        click.echo(harmless(f"{lease.key}: {planned.why}"), err=True)
        return exit_codes.UNMET
    position = shortened(str(lease.checkpoint))
    click.echo(f"{lease.key}: {planned.asked} has it, at {position}")
    taker = target or "another owner"
    click.echo(f"It finishes its batch, checkpoints and gives it away; {taker} takes it")
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    if target is not None and not _renews(aws, target, leases):
        return exit_codes.UNMET
    return _ask(aws, planned, wait_s)


def plan_ask(lease: Lease, target: OwnerId | None, now: WallTime) -> Ask | CannotAsk:
    """The handoff request to write, if this lease can be requested. Pure."""
    owner = lease.owner
    if lease.is_ended:
        return CannotAsk("has ended: everything in the shard was processed, nobody holds it")
    if owner is None:
        return CannotAsk("has no owner: the next manager with room takes it by itself")
    if owner == OFFERED:
        meant = f", meant for {lease.offered_to}" if lease.offered_to else ""
        return CannotAsk(f"was given away already{meant}, and waits for its taker")
    if Owner.parse(owner) is None:
        return CannotAsk(
            f"belongs to {owner}, which is no kclrun manager and cannot be asked\n"
            "kclrun managers take from it by themselves while it has more than its share"
        )
    if owner == target:
        return CannotAsk(f"is with {owner} already")
    if lease.handoff is not None:
        asker = "an operator" if lease.handoff.to == ANYBODY else lease.handoff.to
        return CannotAsk(
            f"was asked for by {asker} already; {owner} answers or drops that within 30 s"
        )
    return Ask(lease.key, target or ANYBODY, asked=owner, asked_at=now)


def find_owner(named: str, leases: Iterable[Lease]) -> OwnerId:
    """The kclrun owner with this id, or with this part of it if only one matches, such as its host.

    Raises: click.UsageError with the known owners. An owner without a lease is not known.
    """
    held = Counter(
        lease.owner
        for lease in leases
        if lease.owner is not None and not lease.is_ended and Owner.parse(lease.owner) is not None
    )
    if named in held:
        return OwnerId(named)
    alike = [owner for owner in held if named.removeprefix(OWNER_PREFIX) in owner]
    if len(alike) == 1:
        return alike[0]
    problem = "is a part of several owners" if alike else "is no kclrun owner in the table"
    shown = sorted(alike or held)
    lines = [f"{owner}  (leases: {held[owner]})" for owner in shown[:_NAMED_MAX]]
    more = [f"… {len(shown)} in all"] if len(shown) > _NAMED_MAX else []
    known = "\n  ".join(["There are:", *lines, *more]) if shown else "There is none."
    raise click.UsageError(harmless(f"--to {named} {problem}. {known}"))


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
    click.echo(
        f"{target} has renewed nothing for {failover_s:g} s: it seems to be dead. Nothing changed",
        err=True,
    )
    return False


def _ask(aws: Aws, ask: Ask, wait_s: float) -> int:
    outcome = aws.table.write(ask)
    match outcome:
        case Applied():
            click.echo(f"{ask.key}: asked {ask.asked}")
            return _await_taker(aws, ask, wait_s)
        case ConditionFailed(row=row):
            holder = row.owner if row is not None else "nobody: the row is gone"
            click.echo(f"{ask.key}: changed hands or was asked for just now ({holder})", err=True)
            return exit_codes.UNMET
        case _:
            return tell_failure(ask.key, outcome)


def _await_taker(aws: Aws, ask: Ask, wait_s: float) -> int:
    """Read the row until it has a new owner, and print the result of the request."""
    over = time.monotonic() + wait_s
    is_told = False
    while True:
        lease = lease_of(aws, ask.key)
        if lease.owner == OFFERED and not is_told:
            is_told = True
            click.echo(f"{ask.key}: given away, waits for its taker")
        code = _verdict(lease, ask)
        if code is not None:
            return code
        if time.monotonic() >= over:
            return _gave_up(lease, ask, wait_s)
        time.sleep(_LOOK_EVERY_S)


def _verdict(lease: Lease, ask: Ask) -> int | None:
    """The exit code, once the result of the request is known."""
    if lease.is_ended:
        click.echo(f"{lease.key}: the shard ended meanwhile; its children are leases of their own")
        return exit_codes.DRAINED
    if lease.owner == OFFERED:
        return None
    if lease.owner == ask.asked:
        if lease.handoff == Handoff(ask.owner, ask.asked_at):
            return None
        # An offer that stands for 2 s goes back to its giver (DESIGN P17); between two looks at the
        # row that reads the same as a request that was dropped.
        why = "it dropped the request, or nobody else took the lease within 2 s"
        click.echo(f"{lease.key}: {ask.asked} still has it: {why}", err=True)
        return exit_codes.UNMET
    if lease.owner is None:
        click.echo(f"{lease.key}: released; it has no owner, for none was in sight to take it")
        return exit_codes.DRAINED if ask.owner == ANYBODY else exit_codes.UNMET
    click.echo(f"{lease.key}: {lease.owner} has it now")
    return exit_codes.DRAINED if ask.owner in (ANYBODY, lease.owner) else exit_codes.UNMET


def _gave_up(lease: Lease, ask: Ask, wait_s: float) -> int:
    if lease.owner == OFFERED:
        told = "given away, and nobody has taken it yet; see  kclrun leases --age"
    else:
        told = (
            f"still with {ask.asked} after {wait_s:g} s: it is in a long batch, or dead\n"
            "The ask stays for 30 s; see  kclrun leases --age"
        )
    click.echo(f"{ask.key}: {told}", err=True)
    return exit_codes.UNMET


def _now() -> WallTime:
    """To the millisecond, as the row keeps it, so that our own request is recognized."""
    return WallTime(round(time.time(), 3))


def lease_of(aws: Aws, shard: str) -> Lease:
    """The row of a shard, read consistently. It is found by its lease key or its number (`2`). With
    several streams it is also found by `stream:shard`, or by a shard that only one stream has.

    Raises: NotFound; click.UsageError for a shard of several streams; a ServiceError leaf.
    """
    named = spelled_out(shard)
    with naming_table(aws.settings.table):
        lease = aws.table.read(LeaseKey(named))
    if lease is None and aws.settings.streams:
        lease = _meant(named, scan_table(aws).leases)
    if lease is None:
        raise NotFound(
            f"table {aws.settings.table} has no lease for {named}\nThose it has:  kclrun leases"
        )
    return lease


def _meant(shard: str, leases: Iterable[Lease]) -> Lease | None:
    """The only lease with this part of a key."""
    found = [lease for lease in leases if shard in (called(lease.key), shard_id_of(lease.key))]
    if len(found) > 1:
        # The same name twice: the stream was deleted and created again, and its old rows remain.
        names = {called(lease.key) for lease in found}
        exact = sorted(names if len(names) == len(found) else (lease.key for lease in found))
        raise click.UsageError(f"Several streams have a shard {shard}: say {' or '.join(exact)}.")
    return found[0] if found else None


Failure = OutcomeUnknown | Throttled | Unavailable | Refused


def tell_failure(key: LeaseKey, outcome: Failure) -> int:
    """Print why a write did not apply, for every reason except its condition; the exit code."""
    match outcome:
        case OutcomeUnknown(message=message):
            click.echo(f"{key}: no answer; look again before repeating ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case Throttled(message=message) | Unavailable(message=message):
            click.echo(f"{key}: nothing happened, try again ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case Refused(message=message):
            click.echo(f"{key}: refused: {message}", err=True)
            return exit_codes.PERMISSION
