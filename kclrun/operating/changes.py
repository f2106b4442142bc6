"""An operator's changes of leases: what each would do, in words, and the write that does it.

The command line and the page plan by these, so both show and write the same. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kclrun.model.lease import ANYBODY, OFFERED, Lease, LeaseKey, Owner, OwnerId, Pause, Scope
from kclrun.model.stream import StreamKey, display_name, stream_of
from kclrun.model.text import sanitize
from kclrun.model.time import WallTime
from kclrun.operating.summaries import shortened
from kclrun.protocol.writes import Ask, ChangePause, ResumeLease


class CannotAsk(msgspec.Struct, frozen=True):
    """The reason why this lease cannot be requested now, and advice for the operator."""

    why: str


OperatorChange = Ask | ResumeLease | ChangePause


class LeasePlan(msgspec.Struct, frozen=True):
    """What an operator's change would do to one lease. `change` None: nothing can be done, and
    `words` say why. `basis` is what the plan rests on: a plan with the same basis does the same."""

    key: LeaseKey
    words: str
    change: OperatorChange | None = None
    basis: str = ""


def plan_ask(lease: Lease, target: OwnerId | None, now: WallTime) -> Ask | CannotAsk:
    """The handoff request to write, if this lease can be requested."""
    owner = lease.owner
    if lease.is_ended:
        return CannotAsk("has ended: everything in the shard was processed, it has no owner")
    if owner is None:
        return CannotAsk("has no owner: the next manager with room takes it by itself")
    if owner == OFFERED:
        meant = f", meant for {lease.offered_to}" if lease.offered_to else ""
        return CannotAsk(f"was given away already{meant}, and waits for its taker")
    if Owner.parse(owner) is None:
        return CannotAsk(
            f"belongs to {owner}, which is not a kclrun manager and cannot be asked\n"
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


def plan_move(lease: Lease, target: OwnerId | None, now: WallTime) -> LeasePlan:
    """Ask the owner to give the lease away: to `target`, or to its first taker."""
    ask = plan_ask(lease, target, now)
    if isinstance(ask, CannotAsk):
        return LeasePlan(lease.key, sanitize(f"{lease.key}: {ask.why}"))
    position = shortened(str(lease.checkpoint))
    words = (
        f"{lease.key}: {ask.asked} has it, at {position}\n"
        "It finishes its batch, checkpoints and gives it away;"
        f" {target or 'another owner'} takes it"
    )
    return LeasePlan(lease.key, words, ask, f"move {ask.key} from {ask.asked} to {ask.owner}")


def plan_resume(lease: Lease) -> LeasePlan:
    """Let a halted lease go on: its failed batch is given to the processor again."""
    if lease.halt is None:
        return LeasePlan(lease.key, f"{lease.key}: is not halted")
    reason = sanitize(lease.halt.reason).partition("\n")[0]
    position = shortened(str(lease.checkpoint))
    words = f"{lease.key}: goes on after {position}; it was halted because: {reason}"
    change = ResumeLease(lease.key, lease.may_forget_outputs)
    return LeasePlan(
        lease.key, words, change, f"resume {lease.key} halted at {lease.halt.halted_at}"
    )


class ChosenLeases(msgspec.Struct, frozen=True):
    """The leases that a pause, or its end, is meant for: those of `keys`, of a stream, or all."""

    scope: Scope
    keys: frozenset[LeaseKey] = frozenset()
    stream: StreamKey | None = None

    def covers(self, lease: Lease) -> bool:
        """Whether the lease is meant."""
        if self.scope is Scope.ALL:
            return True
        if self.scope is Scope.STREAM:
            return stream_of(lease.key) == self.stream
        return lease.key in self.keys


def plan_pause(
    leases: Iterable[Lease], reach: ChosenLeases, now: WallTime, for_s: float | None
) -> tuple[LeasePlan, ...]:
    """Pause these leases, in the order of their keys; `for_s` None: until they are resumed. `now`
    is the service's time. A pause that stands is replaced, unless it has the same reach and neither
    has an end."""
    until = WallTime(0.0) if for_s is None else WallTime(round(now + for_s, 3))
    pause = Pause(WallTime(round(now, 3)), until, reach.scope)
    plans = []
    for lease in _in_order(leases, reach):
        if lease.is_ended:
            if reach.scope is Scope.SHARD:
                plans.append(
                    LeasePlan(lease.key, f"{lease.key}: has ended, so nothing of it is read")
                )
            continue
        seen, words = lease.pause, f"{lease.key}: {_pausing(lease)}"
        if seen is not None and seen.stands_at(now):
            if not until and (seen.until, seen.scope) == (until, reach.scope):
                plans.append(LeasePlan(lease.key, f"{lease.key}: is {seen.in_words()} already"))
                continue
            words += f"; now it is {seen.in_words()}"
        basis = f"pause {lease.key} {reach.scope.value} {for_s} {seen}"
        plans.append(LeasePlan(lease.key, words, ChangePause(lease.key, pause, seen), basis))
    return tuple(plans)


def _pausing(lease: Lease) -> str:
    position = shortened(str(lease.checkpoint))
    if lease.halt is not None:
        return f"stays halted at {position}, and is paused when it is resumed"
    if lease.owner is None or lease.owner == OFFERED:
        return f"stands at {position}; its next owner keeps it and does not read it"
    if Owner.parse(lease.owner) is None:
        return (
            f"{sanitize(lease.owner)} is not a kclrun manager and READS ON; it is paused once a"
            " kclrun manager takes it"
        )
    return f"{lease.owner} finishes its batch, checkpoints, keeps it and reads no more"


def plan_unpause(
    leases: Iterable[Lease], reach: ChosenLeases, now: WallTime
) -> tuple[LeasePlan, ...]:
    """End the pauses of these leases. A halt stays: `plan_resume` ends it."""
    plans = []
    for lease in _in_order(leases, reach):
        if lease.pause is not None:
            plans.append(_unpaused(lease, lease.pause, now, _halted(lease)))
        elif reach.scope is Scope.SHARD:
            plans.append(LeasePlan(lease.key, f"{lease.key}: is not paused{_halted(lease)}"))
    return tuple(plans)


def plan_going_on(
    leases: Iterable[Lease], reach: ChosenLeases, now: WallTime
) -> tuple[LeasePlan, ...]:
    """End the pauses of these leases, and the halts of shards that are named: a halt has a reason
    of its own, which an operator looks at first."""
    is_named = reach.scope is Scope.SHARD
    plans = []
    for lease in _in_order(leases, reach):
        stays = "" if is_named else _halted(lease)
        if lease.halt is not None and is_named:
            plans.append(plan_resume(lease))
        if lease.pause is not None:
            plans.append(_unpaused(lease, lease.pause, now, stays))
        elif stays:
            plans.append(LeasePlan(lease.key, f"{lease.key}: is not paused{stays}"))
        elif is_named and lease.halt is None:
            plans.append(LeasePlan(lease.key, f"{lease.key}: is neither halted nor paused"))
    return tuple(plans)


def _unpaused(lease: Lease, pause: Pause, now: WallTime, stays: str) -> LeasePlan:
    is_over = lease.is_ended or not pause.stands_at(now)
    words = f"{lease.key}: goes on after {shortened(str(lease.checkpoint))}"
    if is_over:
        words = f"{lease.key}: the pause is over already, and its mark goes"
    change = ChangePause(lease.key, None, pause)
    return LeasePlan(lease.key, words + stays, change, f"unpause {lease.key} {pause}")


def _halted(lease: Lease) -> str:
    if lease.halt is None:
        return ""
    return f"; it stays halted: kclrun resume {display_name(lease.key)} ends that"


def _in_order(leases: Iterable[Lease], reach: ChosenLeases) -> Sequence[Lease]:
    return sorted(filter(reach.covers, leases), key=lambda lease: lease.key)
