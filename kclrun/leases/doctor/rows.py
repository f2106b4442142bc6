"""What is wrong with single rows, and with who owns them: halts, counters, hopping, no owner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kclrun.leases.doctor.findings import Finding, Kind, MendingChange
from kclrun.leases.doctor.looks import Pair, StreamFacts
from kclrun.leases.doctor.mending import deleted, freed
from kclrun.leases.observation import is_nobody
from kclrun.model.changes import ResumeLease
from kclrun.model.lease import HOPPING_SWITCHES, OFFERED, Lease, Owner
from kclrun.model.sequence import LATEST
from kclrun.model.stream_key import ONLY_STREAM, called, stream_name_of, stream_of

__all__ = ["row_findings", "table_findings"]

_NAMED_MAX: Final = 5


def table_findings(pair: Pair) -> Iterator[Finding]:
    """Of the table as a whole: rows that are no leases of ours, and what owners disagree on."""
    for key, why in pair.second.broken.items():
        if key in pair.first.broken:
            yield Finding(
                kind=Kind.BROKEN_ROW,
                keys=(key,),
                evidence=why,
                advice="put the attribute right by hand; or delete the row: its shard then begins"
                " where its lineage or `start` says",
            )
    if pair.second.foreign:
        yield Finding(
            kind=Kind.FOREIGN_ROWS,
            evidence=f"rows of another entityType: {pair.second.foreign}",
            advice="leave them alone",
        )
    yield from _kinds_of_keys(pair)
    yield from _failovers(pair)
    if pair.view.unended and not pair.alive:
        yield Finding(
            kind=Kind.NOBODY_ALIVE,
            evidence=f"no counter moved within {pair.circumstances.watched_s:g} s",
        )


def _kinds_of_keys(pair: Pair) -> Iterator[Finding]:
    configured = pair.circumstances.streams.keys()
    keys = [*pair.view.rows, *pair.view.broken]
    strange = sorted(key for key in keys if stream_of(key) not in configured)
    mixed = [k for k in strange if (stream_of(k) == ONLY_STREAM) != (ONLY_STREAM in configured)]
    if mixed:
        yield Finding(
            kind=Kind.MIXED_KEYS,
            keys=tuple(mixed),
            evidence="they are named as in an application of"
            + (" several streams, this one has one" if ONLY_STREAM in configured else " one stream")
            + f": {called(mixed[0])}",
            mend=deleted(pair.rows_of(mixed)),
            advice="no manager starts on such a table. If these rows are the wrong kind they can"
            " go; else give one of the two applications a table of its own",
        )
    other = [key for key in strange if key not in mixed]
    if other:
        streams = sorted({stream_of(key) for key in other})
        names = ", ".join(stream_name_of(stream) for stream in streams[:_NAMED_MAX])
        yield Finding(
            kind=Kind.OTHER_STREAM,
            keys=tuple(other),
            evidence=f"rows of streams that the configuration does not name: {names}",
            mend=deleted(pair.rows_of(other)),
            advice="they can go once you are sure that the stream will not come back",
        )


def _failovers(pair: Pair) -> Iterator[Finding]:
    published = {
        lease.failover_s: lease.owner
        for lease in pair.view.unended
        if lease.failover_s is not None and lease.owner in pair.alive
    }
    if len(published) > 1:
        shown = ", ".join(f"{each:g} s ({published[each]})" for each in sorted(published))
        yield Finding(
            kind=Kind.FAILOVER_DIFFERS,
            evidence=f"live owners published {shown}",
            advice="give `leases.failover` one value in the whole fleet",
        )


def row_findings(pair: Pair) -> Iterator[Finding]:
    """Of each row by itself, compared with the look before."""
    for lease in pair.view.rows.values():
        before = pair.before(lease.key)
        if before is not None:
            yield from _went_back(lease, before)
        if not lease.is_ended:
            yield from _halted(lease, pair)
            yield from _start(lease, pair)
    yield from _unserved(pair)


def _went_back(lease: Lease, before: Lease) -> Iterator[Finding]:
    if lease.counter < before.counter:
        yield Finding(
            kind=Kind.COUNTER_BACK,
            keys=(lease.key,),
            evidence=f"leaseCounter went from {before.counter} ({before.owner}) back to"
            f" {lease.counter} ({lease.owner})",
            advice="KCL and kclrun only count up: find out what else writes here, and stop it",
        )
    if lease.checkpoint < before.checkpoint:
        yield Finding(
            kind=Kind.POSITION_BACK,
            keys=(lease.key,),
            evidence=f"its checkpoint went from {before.checkpoint} back to {lease.checkpoint}",
            advice="if nobody did that on purpose, find out what else writes this table",
        )


def _halted(lease: Lease, pair: Pair) -> Iterator[Finding]:
    if lease.halt is None:
        return
    facts = pair.circumstances.streams.get(stream_of(lease.key), StreamFacts())
    for_s = max(0.0, pair.circumstances.now - lease.halt.halted_at)
    yield Finding(
        kind=Kind.HALT_EXPIRED if for_s > facts.retention_s else Kind.HALTED,
        keys=(lease.key,),
        evidence=f"halted for {for_s / 3600:.1f} h of the {facts.retention_s / 3600:g} h that"
        f" records are kept: {lease.halt.reason}",
        mend=(ResumeLease(lease.key),),
        advice="mend the processor first: else it halts at the same record again; what has expired"
        f" is gone. The same as  kclrun leases resume {called(lease.key)} --yes",
    )


def _start(lease: Lease, pair: Pair) -> Iterator[Finding]:
    if lease.owner_switches >= HOPPING_SWITCHES:
        yield Finding(
            kind=Kind.HOPPING,
            keys=(lease.key,),
            evidence=f"{lease.owner_switches} owners since its last checkpoint",
            advice="a record that kills its process, or batches longer than owners live: see the"
            " log of its owners",
        )
    if lease.checkpoint.sequence_number == LATEST.sequence_number and not lease.latest_pinned_at:
        yield Finding(
            kind=Kind.LATEST_UNPINNED,
            keys=(lease.key,),
            evidence="it begins at LATEST, and the row does not say at which instant that was",
            mend=_pinned(lease, pair),
            advice="rows that the KCL or another tool made are so; the first checkpoint ends it",
        )
    if lease.pending is not None and pair.stood_still(lease):
        yield Finding(
            kind=Kind.PENDING_LEFT,
            keys=(lease.key,),
            evidence=f"pendingCheckpoint {lease.pending.position}",
            advice="it is given to whoever initializes next, and the first checkpoint removes it",
        )


def _pinned(lease: Lease, pair: Pair) -> tuple[MendingChange, ...]:
    """From now on, as its next start would; and no later than that at any start after it [P14]."""
    listing = pair.second.listings.get(stream_of(lease.key))
    shard = listing.graph.get(lease.key) if listing is not None else None
    if shard is None:
        return ()
    return freed(lease, pair.circumstances, listed=shard, pinned_at=pair.circumstances.now)


def _unserved(pair: Pair) -> Iterator[Finding]:
    """Work that nobody reads while live kclrun managers could; offers are told as such."""
    if not any(Owner.parse(owner) is not None for owner in pair.alive):
        return
    for lease in pair.view.work:
        is_idle = is_nobody(lease.owner) or lease.key in pair.view.expired
        if not is_idle or lease.owner == OFFERED or not pair.stood_still(lease):
            continue
        if lease.checkpoint_owner is not None or not _is_listed(lease, pair):
            continue
        who = "it has no owner" if lease.owner is None else f"its owner {lease.owner} is silent"
        yield Finding(
            kind=Kind.UNSERVED,
            keys=(lease.key,),
            evidence=f"{who}, and no live manager took it within"
            f" {pair.circumstances.watched_s:g} s",
            advice="if it stays so the managers are full: add machines or raise `leases.max`;"
            "  kclrun leases --explain  says what each would do",
        )


def _is_listed(lease: Lease, pair: Pair) -> bool:
    listing = pair.second.listings.get(stream_of(lease.key))
    return listing is not None and lease.key in listing
