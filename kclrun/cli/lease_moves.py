"""`kclrun leases release` and `leases move`: ask the owner to give a lease away, and see it go.

An operator's ask is like a manager's [P16]: it is written on the row beside owner and counter,
touches neither, and the owner answers it after the batch it is in. Nothing is taken by force, so
no record is lost or doubled; and what has no living owner needs no asking.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.lease_views import failover_of, scan_leases, shortened
from kclrun.cli.lease_writes import lease_of, tell_failure
from kclrun.cli.messages import harmless
from kclrun.model.changes import Ask
from kclrun.model.lease import ANYBODY, OFFERED, OWNER_PREFIX, Handoff, Lease, Owner, OwnerId
from kclrun.model.outcomes import Applied, ConditionFailed
from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["CannotAsk", "find_owner", "give_away", "plan_ask"]

# The owner sees the ask in the answer to its next renewal, some three seconds away.
_LOOK_EVERY_S: Final = 0.5
_NAMED_MAX: Final = 20


class CannotAsk(msgspec.Struct, frozen=True):
    """Why nobody can be asked for this lease now, and what to do instead."""

    why: str


def give_away(aws: Aws, shard: str, *, to: str | None, wait_s: float, is_confirmed: bool) -> int:
    """Show what asking would do, or ask and wait for the new owner; the exit code.

    `to` None releases: whichever owner comes first takes the lease.
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
    """The ask to write, if this lease can be asked for. Pure."""
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
    """The kclrun owner meant by its id or by a part of it that no other has, such as its host.

    Raises: click.UsageError, naming the owners there are. One without a lease is not among them.
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
    """Whether the target is seen to renew a lease, within one failover: it renews three times."""
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
    """Look at the row until it has a new owner, and say what became of the ask."""
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
    """The exit code, once it is clear what became of the ask."""
    if lease.is_ended:
        click.echo(f"{lease.key}: the shard ended meanwhile; its children are leases of their own")
        return exit_codes.DRAINED
    if lease.owner == OFFERED:
        return None
    if lease.owner == ask.asked:
        if lease.handoff == Handoff(ask.owner, ask.asked_at):
            return None
        click.echo(f"{lease.key}: {ask.asked} dropped the ask and keeps it", err=True)
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
    """To the millisecond, as the row keeps it, so that our own ask is known again."""
    return WallTime(round(time.time(), 3))
