"""Which writes mend a row, and which findings may be mended at all.

Rule: a row whose owner is alive is that owner's; of several findings about one row the gravest
mends it, for each write moves the counter that the next would name.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kclrun.leases.doctor.findings import Finding, MendingChange, most_serious_first
from kclrun.leases.doctor.looks import Circumstances, Pair, StreamFacts
from kclrun.leases.unresolved import keys_of
from kclrun.model.changes import (
    Claim,
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    Release,
    Take,
)
from kclrun.model.lease import Lease
from kclrun.model.stream_key import stream_of

__all__ = ["freed", "remade", "settled"]


def freed(lease: Lease, circumstances: Circumstances) -> tuple[MendingChange, ...]:
    """Take the row and let it go: without owner, ask, offer, `takenFrom` and `checkpointOwner`.

    The looks were a failover apart, so who was taken from by force has stopped by now [P18].
    """
    me, key = circumstances.me, lease.key
    facts = circumstances.streams.get(stream_of(key), StreamFacts())
    take = Take(
        key,
        me,
        lease.owner,
        lease.counter,
        lease.failover_s or circumstances.failover_s,
        lease.start or facts.start_text,
    )
    counter = lease.counter + 1
    waited: tuple[MendingChange, ...] = ()
    if lease.taken_from is not None:
        waited = (Claim(key, me, counter, has_waited=True),)
        counter += 1
    position = lease.checkpoint
    return (take, *waited, Release(key, me, counter, position, last=position))


def remade(lease: Lease, parents: Iterable[str]) -> tuple[MendingChange, ...]:
    """Delete a row that has not begun and make it again with the right parents.

    Whoever stops between the two leaves a shard without a lease, which every manager creates.
    """
    fresh = msgspec.structs.replace(
        lease,
        parents=frozenset(parents),
        counter=lease.counter + 1,
        owner=None,
        checkpoint_owner=None,
        handoff=None,
        offered_to=None,
        offered_by=None,
    )
    return DeleteTrimmed(lease.key, lease.owner, lease.counter), CreateLease(fresh)


def settled(findings: Iterable[Finding], pair: Pair) -> tuple[Finding, ...]:
    """In the order of their gravity, and each with the mend that it may have."""
    mended: set[str] = set()
    settled: list[Finding] = []
    for finding in sorted(findings, key=most_serious_first):
        allowed = _allowed(finding, pair, mended)
        mended.update(key for change in allowed.mend for key in keys_of(change))
        settled.append(allowed)
    return tuple(settled)


def _allowed(finding: Finding, pair: Pair, mended: set[str]) -> Finding:
    touched = {
        key
        for change in finding.mend
        if not isinstance(change, CreateLease | CreateChildren)
        for key in keys_of(change)
    }
    for key in sorted(touched):
        row = pair.view.rows[key]
        owner = next((o for o in (row.owner, row.checkpoint_owner) if o in pair.alive), None)
        if owner is not None:
            advice = f"{owner} is alive and has this row, so it is not touched: stop it, look again"
            return msgspec.structs.replace(finding, mend=(), advice=advice)
    if mended.intersection(key for change in finding.mend for key in keys_of(change)):
        advice = "what is told of this row above comes first; then look again"
        return msgspec.structs.replace(finding, mend=(), advice=advice)
    return finding
