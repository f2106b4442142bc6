"""Which writes mend a row, and which findings may be mended at all.

Rule: a row whose owner is alive is that owner's; of several findings about one row the gravest
mends it, for each write moves the counter that the next would name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from kclrun.leases.doctor.findings import Finding, MendingChange, most_serious_first
from kclrun.leases.doctor.looks import Circumstances, Pair, StreamFacts
from kclrun.model.changes import (
    Amend,
    Claim,
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    NameChildren,
    Release,
    ResumeLease,
    Take,
    keys_of,
)
from kclrun.model.lease import Lease
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream_key import stream_of
from kclrun.model.time import WallTime

__all__ = ["deleted", "freed", "settled"]

# Writes that are no owner's: they may be made beside one.
_NOBODYS: Final = (CreateLease, CreateChildren, ResumeLease)


def freed(
    lease: Lease,
    circumstances: Circumstances,
    *,
    position: ExtendedSequenceNumber | None = None,
    children: Iterable[str] = (),
    listed: Shard | None = None,
    pinned_at: WallTime | None = None,
) -> tuple[MendingChange, ...]:
    """Take the row, put it right, and let it go: without owner, ask, offer, `takenFrom` and
    `checkpointOwner`; at `position`, if given; with these children, if any; with parents and range
    of the shard `listed`, and LATEST pinned, if given.

    The looks were a failover apart, so who was taken from by force has stopped by now [P18].
    """
    me, key = circumstances.me, lease.key
    counters = itertools.count(lease.counter + 1)
    facts = circumstances.streams.get(stream_of(key), StreamFacts())
    failover_s = lease.failover_s or circumstances.failover_s
    start = lease.start or facts.start_text
    writes: list[MendingChange] = [
        Take(key, me, lease.owner, lease.counter, failover_s, start),
    ]
    if lease.taken_from is not None:
        writes.append(Claim(key, me, next(counters), has_waited=True))
    if names := frozenset(children):
        writes.append(NameChildren(key, me, next(counters), names))
    if listed is not None:
        parents = frozenset(listed.parents)
        writes.append(Amend(key, me, next(counters), parents, listed.hash_range, pinned_at))
    last = lease.checkpoint
    writes.append(Release(key, me, next(counters), position or last, last=last))
    return tuple(writes)


def deleted(leases: Iterable[Lease]) -> tuple[MendingChange, ...]:
    """Rows that are of no use here; the backup has them."""
    return tuple(DeleteTrimmed(lease.key, lease.owner, lease.counter) for lease in leases)


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
        if not isinstance(change, _NOBODYS)
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
