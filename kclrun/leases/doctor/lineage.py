"""What is wrong between rows and shards: holes, missing children, orphans, turns out of order.

Judged for one look at one stream; `diagnosis.py` keeps what two looks agree on. Rule: what to
create is what every manager would create (`shard_sync.py`, `healing.py`), with one exception that
is told where it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kclrun.leases.doctor.findings import Finding, Kind
from kclrun.leases.doctor.looks import Circumstances
from kclrun.leases.doctor.mending import deleted, freed
from kclrun.leases.healing import children_to_create
from kclrun.leases.listing import Listing
from kclrun.leases.shard_sync import child_lease, sync_table
from kclrun.leases.table_view import TableView
from kclrun.leases.totals import shards_behind
from kclrun.model.changes import CreateLease, DeleteTrimmed
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard

__all__ = ["lineage_findings"]

_GO_ON = "let it go on: what is behind it cannot be put in order any more"
_ANEW = "all that the service still has of this shard comes again"
_TURN = (
    "nothing is lost: the parent is read to its end, too. For the right order the child's"
    " checkpoint goes back to TRIM_HORIZON: all of the child then comes again"
)


def lineage_findings(
    view: TableView,
    listing: Listing,
    start: ExtendedSequenceNumber,
    circumstances: Circumstances,
) -> Iterator[Finding]:
    """All of it, in no order. An empty listing is no evidence of anything."""
    if not listing.shards:
        return
    if view.is_empty:
        yield Finding(kind=Kind.NO_LEASES, evidence="the table has no row of this stream")
        return
    if _is_of_another_stream(view, listing):
        yield Finding(
            kind=Kind.WRONG_STREAM,
            keys=tuple(sorted(view.rows)),
            evidence="the service lists none of these shards, and none of their children",
            mend=deleted(view.rows.values()),
            advice="the rows are of no use to this stream, and can go. First look whether `stream`,"
            " region and `leases.table` are those you mean. After a stop for longer than records"
            " are kept it looks the same: start a manager, it makes the leases, and look again",
        )
        return
    yield from _missing(view, listing, start)
    for row in view.rows.values():
        shard = listing.graph.get(row.key)
        yield from _turn(row, shard, view, circumstances)
        if shard is None:
            yield from _orphan(row, view, listing)
        else:
            yield from _against_shard(_Listed(row, shard, view, listing, circumstances))


def _is_of_another_stream(view: TableView, listing: Listing) -> bool:
    known = {parent for shard in listing.shards for parent in shard.parents}
    return bool(view.rows) and not any(key in listing or key in known for key in view.rows)


def _missing(view: TableView, listing: Listing, start: ExtendedSequenceNumber) -> Iterator[Finding]:
    if listing.inconsistency is not None:
        yield Finding(kind=Kind.RESHARDING, evidence=listing.inconsistency)
        return
    beside_others = _beside_others(view, listing)
    for shard in beside_others:
        yield Finding(
            kind=Kind.HOLE,
            keys=(shard.shard_id,),
            evidence="it is listed and has no row; its parent is over, for another child of it is"
            " in the table",
            mend=(CreateLease(child_lease(shard.shard_id, shard.parents, shard.hash_range)),),
        )
    known = {shard.shard_id for shard in beside_others}
    plan = sync_table(listing, lambda key: view.has_row(key) or key in known, start)
    for lease in plan.leases:
        yield Finding(
            kind=Kind.HOLE,
            keys=(lease.key,),
            evidence="it is listed, and neither it nor an ancestor has a row; the new one begins"
            f" at {lease.checkpoint}, as `start` says",
            mend=(CreateLease(lease),),
        )
    for change in children_to_create(view, listing):
        parents = " and ".join(parent.key for parent in change.parents)
        yield Finding(
            kind=Kind.CHILD_MISSING,
            keys=tuple(sorted(child.key for child in change.children)),
            evidence=f"child of {parents}, which was read to its end or has expired, and has no"
            " row",
            mend=(change,),
        )


def _beside_others(view: TableView, listing: Listing) -> tuple[Shard, ...]:
    """Holes whose parents are over: no row of theirs is left, and other children are in the table.

    The managers, like the Java KCL, would begin the parent anew where it is still listed, and all
    that its other children have read would come again; the missing child alone is enough.
    """
    behind = shards_behind(listing, view)
    return tuple(
        shard
        for shard in listing.graph
        if not view.has_row(shard.shard_id)
        and shard.shard_id not in behind
        and behind.intersection(shard.parents)
        and not any(view.has_row(parent) for parent in shard.parents)
    )


def _turn(
    row: Lease, shard: Shard | None, view: TableView, circumstances: Circumstances
) -> Iterator[Finding]:
    """A row that was read, or is read to its end, before its parents were [P11]."""
    if not (_has_begun(row) or row.is_ended):
        return
    named = row.parents.union(shard.parents if shard is not None else ())
    for key in sorted(named - {row.key}):
        parent = view.rows.get(LeaseKey(key))
        if parent is None or parent.is_ended:
            continue
        both = _has_begun(parent) and not row.is_ended
        yield Finding(
            kind=Kind.OVERLAP if both else Kind.BEGUN_EARLY,
            keys=(row.key, parent.key),
            evidence=f"{row.key} is at {row.checkpoint}, its parent {parent.key} only at"
            f" {parent.checkpoint}",
            mend=() if row.is_ended else freed(row, circumstances, position=TRIM_HORIZON),
            advice=_GO_ON if row.is_ended else _TURN,
        )


def _orphan(row: Lease, view: TableView, listing: Listing) -> Iterator[Finding]:
    if any(parent in listing for parent in row.parents):
        # A listing may lag behind a reshard; and no shard expires before its parents.
        return
    kind = Kind.ORPHAN_ENDED if row.is_ended else Kind.ORPHAN
    evidence = f"two complete listings do not show it; its row is at {row.checkpoint}"
    if all(view.has_row(child) for child in listing.children_named(row.key)):
        delete = DeleteTrimmed(row.key, row.owner, row.counter)
        yield Finding(kind=kind, keys=(row.key,), evidence=evidence, mend=(delete,))
    else:
        advice = "its children need their rows first; then look again"
        yield Finding(kind=kind, keys=(row.key,), evidence=evidence, advice=advice)


class _Listed(NamedTuple):
    """A row and its shard, with what they stand among."""

    row: Lease
    shard: Shard
    view: TableView
    listing: Listing
    circumstances: Circumstances


def _against_shard(of: _Listed) -> Iterator[Finding]:
    row, shard = of.row, of.shard
    if row.is_ended:
        yield from _ended(of)
    elif not row.checkpoint.is_sentinel:
        yield from _outside(of)
    yield from _parents(of)
    if row.hash_range is not None and row.hash_range != shard.hash_range:
        yield Finding(
            kind=Kind.RANGE_DIFFERS,
            keys=(row.key,),
            evidence=f"the row says {row.hash_range.start} to {row.hash_range.end}, the service"
            f" {shard.hash_range.start} to {shard.hash_range.end}",
            mend=freed(row, of.circumstances, listed=shard),
        )


def _ended(of: _Listed) -> Iterator[Finding]:
    row = of.row
    if of.shard.is_open:
        yield Finding(
            kind=Kind.ENDED_OPEN,
            keys=(row.key,),
            evidence="its row is at SHARD_END, and the service lists it as open",
            mend=freed(row, of.circumstances, position=TRIM_HORIZON),
            advice=f"{_ANEW}. Put its checkpoint to a number by hand instead if you know how far"
            " it was read",
        )
        return
    # One that is listed is told as missing, with its mend.
    unknown = sorted(
        child for child in row.children if not of.view.has_row(child) and child not in of.listing
    )
    known = (row.children - set(unknown)).union(of.listing.children_named(row.key))
    for child in unknown:
        yield Finding(
            kind=Kind.CHILD_UNKNOWN,
            keys=(row.key, child),
            evidence=f"{row.key} has ended and names a child {child} that has no row",
            mend=freed(row, of.circumstances, children=known) if known else (),
            advice="a wrong name harms nobody, but keeps the row from being cleaned up; if it was"
            " a shard, nobody will read it any more. The right names are written instead, where"
            " the service still lists a child",
        )


def _outside(of: _Listed) -> Iterator[Finding]:
    row, shard = of.row, of.shard
    number = ExtendedSequenceNumber(row.checkpoint.sequence_number)
    ending = shard.ending_sequence_number
    if number < ExtendedSequenceNumber(shard.starting_sequence_number):
        yield Finding(
            kind=Kind.BEFORE_START,
            keys=(row.key,),
            evidence=f"its row is at {number}, the shard begins at"
            f" {shard.starting_sequence_number}",
            mend=freed(row, of.circumstances, position=TRIM_HORIZON),
            advice="a stream that was deleted and made again has new numbers under old names:"
            f" {_ANEW}",
        )
    elif ending is not None and number > ExtendedSequenceNumber(ending):
        yield Finding(
            kind=Kind.BEYOND_END,
            keys=(row.key,),
            evidence=f"its row is at {number}, the shard ended at {ending}",
            mend=freed(row, of.circumstances, position=TRIM_HORIZON),
            advice=f"it is the position of another shard: {_ANEW}. Put its checkpoint by hand to"
            " what was really read instead if you know it",
        )


def _parents(of: _Listed) -> Iterator[Finding]:
    """Parents that the row does not name and must wait for, or names and waits for in vain."""
    row, view = of.row, of.view
    if row.is_ended:
        return
    listed = frozenset(of.shard.parents)
    unnamed = sorted(key for key in listed - row.parents if _is_unended(key, view))
    foreign = sorted(key for key in row.parents - listed if _is_unended(key, view))
    if not unnamed and not foreign:
        return
    named = ", ".join(sorted(row.parents)) or "none"
    yield Finding(
        kind=Kind.PARENTS_WRONG,
        keys=(row.key,),
        evidence=f"the row names as parents: {named}; the service:"
        f" {', '.join(sorted(listed)) or 'none'}",
        mend=freed(row, of.circumstances, listed=of.shard),
    )


def _is_unended(key: str, view: TableView) -> bool:
    row = view.rows.get(LeaseKey(key))
    return key in view.broken or (row is not None and not row.is_ended)


def _has_begun(row: Lease) -> bool:
    return not row.checkpoint.is_sentinel
