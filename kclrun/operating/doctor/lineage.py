"""Errors between the rows of a stream and its shards, each with its repair if it has one. Pure.

Rule: such an error counts only if both looks show it, because a manager heals most of them within
one of its cycles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kclrun.leases import shard_sync
from kclrun.leases.auditing import HOW_TO_GO_ON, rows_of_another_stream, why_another_stream
from kclrun.leases.table_view import TableView
from kclrun.model.lease import (
    Lease,
    LeaseKey,
    highest_generation,
    pause_of_stream,
)
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.operating.doctor.findings import (
    Circumstances,
    Finding,
    Kind,
    Pair,
    StreamFacts,
    deleted,
    freed,
)
from kclrun.protocol.writes import CreateLease

_GO_ON = "let it go on: the records before it cannot be put in order any more"
_ANEW = "all that the service still has of this shard comes again"
_TURN = (
    "nothing is lost: the parent is read to its end, too. For the right order the child's"
    " checkpoint goes back to TRIM_HORIZON: all of the child then comes again"
)


def lineage_findings(pair: Pair) -> Iterator[Finding]:
    """The errors between rows and shards that both looks show."""
    for stream, facts in pair.circumstances.streams.items():
        earlier, now = pair.views_of(stream)
        seen = {
            (finding.kind, finding.keys)
            for finding in _of_one_look(
                earlier, pair.first.listings[stream], facts, pair.circumstances
            )
        }
        for finding in _of_one_look(now, pair.second.listings[stream], facts, pair.circumstances):
            if (finding.kind, finding.keys) in seen:
                yield finding


def _of_one_look(
    view: TableView,
    listing: shard_sync.Listing,
    facts: StreamFacts,
    circumstances: Circumstances,
) -> Iterator[Finding]:
    """Errors between rows and shards: holes, missing children, orphans, rows out of order.

    All findings of one look at one stream, in no order; `lineage_findings` keeps those on which two
    looks agree. Rule: the leases to create are those that every manager would create
    (`shard_sync.py`), with one exception: `_beside_others`. An empty listing is not evidence of
    anything.

    Rows of a stream that was deleted and made again get only this finding [P13]: a repair of one of
    them by the shards of the new stream would put an old checkpoint into it.
    """
    if (recreated := _recreated(view, facts)) is not None:
        yield recreated
        return
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
            repair=deleted(view.rows.values()),
            advice="the rows are of no use to this stream, and can go. First look whether `stream`,"
            " region and `leases.table` are those you mean. After a stop for longer than records"
            " are kept it looks the same: start a manager, it makes the leases, and look again",
        )
        return
    yield from _missing(view, listing, facts.start)
    for row in view.rows.values():
        shard = listing.graph.get(row.key)
        yield from _turn(row, shard, view, circumstances)
        if shard is None:
            yield from _orphan(row, listing)
        else:
            yield from _against_shard(_Listed(row, shard, view, listing, circumstances))


def _recreated(view: TableView, facts: StreamFacts) -> Finding | None:
    created_at = facts.created_at
    if created_at is None:
        return None
    rows = sorted(rows_of_another_stream(view.rows.values(), created_at), key=lambda row: row.key)
    why = why_another_stream(rows, created_at)
    if why is None:
        return None
    keys = tuple(row.key for row in rows)
    evidence, _, _ = why.partition("\n")
    return Finding(kind=Kind.RECREATED, keys=keys, evidence=evidence, advice=HOW_TO_GO_ON)


def _is_of_another_stream(view: TableView, listing: shard_sync.Listing) -> bool:
    known = {parent for shard in listing.shards for parent in shard.parents}
    return bool(view.rows) and not any(key in listing or key in known for key in view.rows)


def _missing(
    view: TableView, listing: shard_sync.Listing, start: ExtendedSequenceNumber
) -> Iterator[Finding]:
    if listing.inconsistency is not None:
        yield Finding(kind=Kind.RESHARDING, evidence=listing.inconsistency)
        return
    beside_others = _beside_others(view, listing)
    generation = highest_generation(view.rows.values())
    pause = pause_of_stream(view.rows.values())
    for shard in beside_others:
        yield Finding(
            kind=Kind.HOLE,
            keys=(shard.shard_id,),
            evidence="it is listed and has no row; its parent is over, for another child of it is"
            " in the table",
            repair=(
                CreateLease(
                    shard_sync.child_lease(
                        shard.shard_id,
                        shard.parents,
                        shard.hash_range,
                        generation,
                        pause=pause,
                    )
                ),
            ),
        )
    known = {shard.shard_id for shard in beside_others}
    plan = shard_sync.sync_table(
        listing, lambda key: view.has_row(key) or key in known, start, generation, pause
    )
    for lease in plan.leases:
        yield Finding(
            kind=Kind.HOLE,
            keys=(lease.key,),
            evidence="it is listed, and neither it nor an ancestor has a row; the new one begins"
            f" at {lease.checkpoint}, as `start` says",
        )
    for change in shard_sync.children_to_create(view, listing):
        parents = " and ".join(parent.key for parent in change.parents)
        yield Finding(
            kind=Kind.CHILD_MISSING,
            keys=tuple(sorted(child.key for child in change.children)),
            evidence=f"child of {parents}, which was read to its end or has expired, and has no"
            " row",
        )


def _beside_others(view: TableView, listing: shard_sync.Listing) -> tuple[Shard, ...]:
    """Holes whose parents are over: their rows are gone, and other children are in the table.

    The managers, like the Java KCL, would begin the parent anew where it is still listed, and
    repeat all records that its other children have read. Here the missing child alone is created.
    """
    behind = shard_sync.shards_behind(listing, view)
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
    if not row.has_begun:
        return
    named = row.parents.union(shard.parents if shard is not None else ())
    for key in sorted(named - {row.key}):
        parent = view.rows.get(LeaseKey(key))
        if parent is None or parent.is_ended:
            continue
        both = parent.has_begun and not row.is_ended
        yield Finding(
            kind=Kind.OVERLAP if both else Kind.BEGUN_EARLY,
            keys=(row.key, parent.key),
            evidence=f"{row.key} is at {row.checkpoint}, its parent {parent.key} only at"
            f" {parent.checkpoint}",
            repair=() if row.is_ended else freed(row, circumstances, position=TRIM_HORIZON),
            advice=_GO_ON if row.is_ended else _TURN,
        )


def _orphan(row: Lease, listing: shard_sync.Listing) -> Iterator[Finding]:
    if any(parent in listing for parent in row.parents):
        # A listing may lag behind a reshard; and no shard expires before its parents.
        return
    kind = Kind.ORPHAN_ENDED if row.is_ended else Kind.ORPHAN
    evidence = f"two complete listings do not show it; its row is at {row.checkpoint}"
    yield Finding(kind=kind, keys=(row.key,), evidence=evidence)


class _Listed(NamedTuple):
    """A row and its shard, with their surroundings."""

    row: Lease
    shard: Shard
    view: TableView
    listing: shard_sync.Listing
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
            repair=freed(row, of.circumstances, listed=shard),
        )


def _ended(of: _Listed) -> Iterator[Finding]:
    row = of.row
    if of.shard.is_open:
        yield Finding(
            kind=Kind.ENDED_OPEN,
            keys=(row.key,),
            evidence="its row is at SHARD_END, and the service lists it as open",
            repair=freed(row, of.circumstances, position=TRIM_HORIZON),
            advice=f"{_ANEW}. Put its checkpoint to a number by hand instead if you know how far"
            " it was read",
        )
        return
    # A listed one is reported as missing, with its repair.
    unknown = sorted(
        child for child in row.children if not of.view.has_row(child) and child not in of.listing
    )
    known = (row.children - set(unknown)).union(of.listing.children_named(row.key))
    for child in unknown:
        yield Finding(
            kind=Kind.CHILD_UNKNOWN,
            keys=(row.key, child),
            evidence=f"{row.key} has ended and names a child {child} that has no row",
            repair=freed(row, of.circumstances, children=known) if known else (),
            advice="a wrong name does no harm, but keeps the row from being cleaned up; if it was"
            " a shard, no owner will read it any more. The right names are written instead, where"
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
            repair=freed(row, of.circumstances, position=TRIM_HORIZON),
            advice="a stream that was deleted and made again has new numbers under old names:"
            f" {_ANEW}",
        )
    elif ending is not None and number > ExtendedSequenceNumber(ending):
        yield Finding(
            kind=Kind.BEYOND_END,
            keys=(row.key,),
            evidence=f"its row is at {number}, the shard ended at {ending}",
            repair=freed(row, of.circumstances, position=TRIM_HORIZON),
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
        repair=freed(row, of.circumstances, listed=of.shard),
    )


def _is_unended(key: str, view: TableView) -> bool:
    row = view.rows.get(LeaseKey(key))
    return key in view.broken or (row is not None and not row.is_ended)
