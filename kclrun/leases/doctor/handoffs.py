"""What was left behind on rows by hand-offs that nobody finished [P16, P17, P18, R8].

Rule: only what stood on the row at both looks; a hand-off under way takes less than that.
"""

from __future__ import annotations

from collections.abc import Iterator

from kclrun.leases.doctor.findings import Finding, Kind
from kclrun.leases.doctor.looks import Pair
from kclrun.leases.doctor.mending import freed
from kclrun.model.lease import ANYBODY, ASK_STALE_AFTER_S, OFFERED, Lease, Owner

__all__ = ["handoff_findings"]


def handoff_findings(pair: Pair) -> Iterator[Finding]:
    """Of all rows that have not ended: an end removes asks and offers."""
    for lease in pair.view.unended:
        before = pair.before(lease.key)
        if before is None:
            continue
        yield from _ask(lease, before, pair)
        yield from _offer(lease, before, pair)
        yield from _checkpoint_owner(lease, before, pair)
        yield from _taken_from(lease, before, pair)


def _ask(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    ask = lease.handoff
    watched_s = pair.circumstances.watched_s
    if ask is None or ask != before.handoff or watched_s <= ASK_STALE_AFTER_S:
        return
    asker = "an operator" if ask.to == ANYBODY else ask.to
    state = "alive" if ask.to in pair.alive else "not alive"
    kind = "" if ask.to == ANYBODY else f", who is {state}"
    yield Finding(
        kind=Kind.STUCK_ASK,
        keys=(lease.key,),
        evidence=f"{asker}{kind}, asks {lease.owner or 'nobody'} for it and got no answer within"
        f" {watched_s:g} s",
        mend=freed(lease, pair.circumstances),
    )


def _offer(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    if lease.owner == OFFERED:
        if not pair.stood_still(lease):
            return
        meant = ""
        if lease.offered_to is not None:
            state = "alive" if lease.offered_to in pair.alive else "not alive"
            meant = f" to {lease.offered_to}, who is {state}"
        yield Finding(
            kind=Kind.STUCK_OFFER,
            keys=(lease.key,),
            evidence=f"offered by {lease.offered_by or 'somebody'}{meant}; nobody took it within"
            f" {pair.circumstances.watched_s:g} s",
            mend=freed(lease, pair.circumstances),
        )
    elif _offer_of(lease) != (None, None) and _offer_of(lease) == _offer_of(before):
        yield Finding(
            kind=Kind.OFFER_LEFT,
            keys=(lease.key,),
            evidence=f"its owner is {lease.owner or 'nobody'}, and offeredTo or offeredBy stand on"
            " it: whoever took the offer was no kclrun",
            mend=freed(lease, pair.circumstances),
        )


def _offer_of(lease: Lease) -> tuple[str | None, str | None]:
    return lease.offered_to, lease.offered_by


def _checkpoint_owner(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    former = lease.checkpoint_owner
    if former is None or former != before.checkpoint_owner or not pair.stood_still(lease):
        return
    yield Finding(
        kind=Kind.CHECKPOINT_OWNER_LEFT,
        keys=(lease.key,),
        evidence=f"{former} should hand it to {lease.owner or 'nobody'}; nobody wrote the row"
        f" within {pair.circumstances.watched_s:g} s",
        mend=freed(lease, pair.circumstances),
    )


def _taken_from(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    """A live kclrun owner waits its failover and removes it; so does whoever takes the row next."""
    if lease.taken_from is None or lease.taken_from != before.taken_from:
        return
    if lease.owner in pair.alive and lease.owner and Owner.parse(lease.owner) is not None:
        return
    yield Finding(
        kind=Kind.TAKEN_FROM_LEFT,
        keys=(lease.key,),
        evidence=f"taken by force from {lease.taken_from}; its owner {lease.owner or '(none)'}"
        " never claimed it",
        mend=freed(lease, pair.circumstances),
    )
