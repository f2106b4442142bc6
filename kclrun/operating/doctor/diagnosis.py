"""The diagnosis of a lease table: from two looks to findings, each with its repair if it has one.

Pure: `kclrun doctor` looks and writes. Rule: an error between rows and shards counts only if both
looks show it, because a manager heals most of them within one of its cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kclrun.leases import shard_sync
from kclrun.leases.auditing import HOW_TO_GO_ON, rows_of_another_stream, why_another_stream
from kclrun.leases.stream_rows import near_misses
from kclrun.leases.table_view import TableView, is_unowned
from kclrun.model.lease import (
    ANYBODY,
    ASK_STALE_AFTER_S,
    HOPPING_SWITCHES,
    KCL3_MODE_KEY,
    OFFERED,
    OWNER_PREFIX,
    Lease,
    LeaseKey,
    Owner,
    highest_generation,
    is_native,
    mode_advice,
    pause_of_stream,
)
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream import ONLY_STREAM, called, shard_id_of, stream_name_of, stream_of
from kclrun.operating.doctor.findings import (
    Circumstances,
    Finding,
    Gravity,
    Kind,
    Look,
    Pair,
    RepairingChange,
    StreamFacts,
    deleted,
    freed,
    settled,
)
from kclrun.protocol.writes import CreateLease, DeleteTrimmed, ResumeLease

_NAMED_MAX: Final = 5


def table_findings(pair: Pair) -> Iterator[Finding]:
    """Findings about the whole table: foreign rows, and settings on which owners disagree."""
    for key, why in pair.second.broken.items():
        if key in pair.first.broken:
            yield Finding(
                kind=Kind.BROKEN_ROW,
                keys=(key,),
                evidence=why,
                advice="put the attribute right by hand; or delete the row: its shard then begins"
                " where its lineage or `start` says",
            )
    mode = pair.second.kcl3_mode
    if mode is not None and is_native(mode):
        yield Finding(
            kind=Kind.KCL3_NATIVE,
            evidence=f"{KCL3_MODE_KEY} says {mode}: a leader assigns the leases",
            advice=mode_advice(mode, has_java=_has_java(pair)),
        )
    if pair.second.foreign:
        mode_words = (
            f" {KCL3_MODE_KEY} says {mode}: {mode_advice(mode)}" if mode is not None else ""
        )
        yield Finding(
            kind=Kind.FOREIGN_ROWS,
            evidence=f"rows of another entityType: {pair.second.foreign}",
            advice="leave them alone"
            + ("." + mode_words if mode_words and not is_native(mode) else ""),
        )
    yield from _kinds_of_keys(pair)
    yield from _failovers(pair)
    if pair.view.unended and not pair.alive:
        yield Finding(
            kind=Kind.NO_LIVE_OWNER,
            evidence=f"no counter moved within {pair.circumstances.watched_s:g} s",
        )


def _has_java(pair: Pair) -> bool:
    """Whether a Java worker may be alive. Without any live owner nothing is known."""
    return not pair.alive or not all(owner.startswith(OWNER_PREFIX) for owner in pair.alive)


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
            repair=() if _are_read(mixed, pair) else deleted(pair.rows_of(mixed)),
            advice="no manager starts on such a table. If these rows are the wrong kind they can"
            " go; else give one of the two applications a table of its own",
        )
    near = near_misses(configured, map(stream_of, strange))
    if near:
        alike = tuple(key for key in strange if stream_of(key) in near)
        yield Finding(
            kind=Kind.OTHER_STREAM,
            keys=alike,
            evidence="; ".join(sorted(near.values())),
            advice="they may hold the positions of a stream that you read: look at them before"
            " anything else. doctor does not delete them",
        )
    other = [key for key in strange if key not in mixed and stream_of(key) not in near]
    if other:
        streams = sorted({stream_of(key) for key in other})
        names = ", ".join(stream_name_of(stream) for stream in streams[:_NAMED_MAX])
        yield Finding(
            kind=Kind.OTHER_STREAM,
            keys=tuple(other),
            evidence=f"rows of streams that the configuration does not name: {names}",
            repair=deleted(pair.rows_of(other)),
            advice="they can go once you are sure that the stream will not come back",
        )


def _are_read(keys: Iterable[str], pair: Pair) -> bool:
    """Whether one of these rows has a position in a shard of the application that has no row of
    its own: it may be the only position of that shard, under the name of the other kind."""
    listings = pair.second.listings.items()
    listed = {shard.shard_id for _, listing in listings for shard in listing.shards}
    without = {shard_id_of(key) for key in listed if not pair.view.has_row(key)}
    rows = pair.rows_of(keys)
    return any(row.has_begun and shard_id_of(row.key) in without for row in rows)


def _failovers(pair: Pair) -> Iterator[Finding]:
    published = {
        lease.failover_s: lease.owner
        for lease in pair.view.unended
        if lease.failover_s is not None and lease.owner in pair.alive
    }
    if len(published) > 1:
        shown = ", ".join(
            f"{failover_s:g} s ({published[failover_s]})" for failover_s in sorted(published)
        )
        yield Finding(
            kind=Kind.FAILOVER_DIFFERS,
            evidence=f"live owners published {shown}",
            advice="give `leases.failover` one value in the whole fleet",
        )


def row_findings(pair: Pair) -> Iterator[Finding]:
    """Findings about each row by itself, compared with the look before."""
    for lease in pair.view.rows.values():
        before = pair.before(lease.key)
        if before is not None:
            yield from _went_back(lease, before)
        if not lease.is_ended:
            yield from _halted(lease, pair)
            yield from _paused(lease, pair)
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
            advice="if this was not done on purpose, find the other program that writes this table",
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
        repair=(ResumeLease(lease.key, lease.may_forget_outputs),),
        advice="fix the processor first: else it halts at the same record again; what has expired"
        f" is gone. The same as  kclrun leases resume {called(lease.key)} --yes",
    )


def _paused(lease: Lease, pair: Pair) -> Iterator[Finding]:
    now, pause = pair.circumstances.now, lease.pause
    if pause is None or not pause.stands_at(now):
        return
    facts = pair.circumstances.streams.get(stream_of(lease.key), StreamFacts())
    heeds = lease.owner is None or Owner.parse(lease.owner) is not None
    reads_on = "" if heeds else f"; {lease.owner} is not a kclrun manager, and reads on"
    yield Finding(
        # Half of the time is left to react.
        kind=Kind.PAUSED_LONG if now - pause.paused_at > facts.retention_s / 2 else Kind.PAUSED,
        keys=(lease.key,),
        evidence=f"{pause.in_words()}; records are kept for {facts.retention_s / 3600:g}"
        f" h{reads_on}",
        advice=f"to end the pause:  kclrun resume {called(lease.key)} --yes",
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
            repair=_pinned(lease, pair),
            advice="rows that the KCL or another tool made are so; a kclrun manager that takes one"
            " notes the instant, and the first checkpoint ends it",
        )
    if lease.pending is not None and pair.stood_still(lease):
        yield Finding(
            kind=Kind.PENDING_LEFT,
            keys=(lease.key,),
            evidence=f"pendingCheckpoint {lease.pending.position}",
            advice="the next owner gets it in `initialize`, and the first checkpoint removes it",
        )


def _pinned(lease: Lease, pair: Pair) -> tuple[RepairingChange, ...]:
    """Pin LATEST to the time of the next start, and no later than any start after it [P14]."""
    listing = pair.second.listings.get(stream_of(lease.key))
    shard = listing.graph.get(lease.key) if listing is not None else None
    if shard is None:
        return ()
    return freed(lease, pair.circumstances, listed=shard, pinned_at=pair.circumstances.now)


def _unserved(pair: Pair) -> Iterator[Finding]:
    """Work that is not read although live kclrun managers could read it; offers are named so."""
    if not any(Owner.parse(owner) is not None for owner in pair.alive):
        return
    for lease in pair.view.work:
        is_idle = is_unowned(lease.owner) or lease.key in pair.view.expired
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


def handoff_findings(pair: Pair) -> Iterator[Finding]:
    """Remains of unfinished handoffs on all unended rows: an end removes asks and offers [P16, P17,
    P18, R8].

    Rule: only marks that stood on the row at both looks count; a handoff under way takes less time.
    """
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
    kind = "" if ask.to == ANYBODY else f", which is {state}"
    yield Finding(
        kind=Kind.STUCK_ASK,
        keys=(lease.key,),
        evidence=f"{asker}{kind}, asks {lease.owner or '(none)'} for it and got no answer within"
        f" {watched_s:g} s",
        repair=freed(lease, pair.circumstances),
    )


def _offer(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    if lease.owner == OFFERED:
        if not pair.stood_still(lease):
            return
        meant = ""
        if lease.offered_to is not None:
            state = "alive" if lease.offered_to in pair.alive else "not alive"
            meant = f" to {lease.offered_to}, which is {state}"
        yield Finding(
            kind=Kind.STUCK_OFFER,
            keys=(lease.key,),
            evidence=f"offered by {lease.offered_by or 'an unknown owner'}{meant}; no owner took it"
            f" within {pair.circumstances.watched_s:g} s",
            repair=freed(lease, pair.circumstances),
        )
    elif _offer_of(lease) != (None, None) and _offer_of(lease) == _offer_of(before):
        yield Finding(
            kind=Kind.OFFER_LEFT,
            keys=(lease.key,),
            evidence=f"its owner is {lease.owner or '(none)'}, and offeredTo or offeredBy stand on"
            " it: the owner that took the offer is not kclrun",
            repair=freed(lease, pair.circumstances),
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
        evidence=f"{former} should give it to {lease.owner or '(none)'}; no owner wrote the row"
        f" within {pair.circumstances.watched_s:g} s",
        repair=freed(lease, pair.circumstances),
    )


def _taken_from(lease: Lease, before: Lease, pair: Pair) -> Iterator[Finding]:
    """A live kclrun owner removes it after its failover; so does the next owner of the row."""
    if lease.taken_from is None or lease.taken_from != before.taken_from:
        return
    if lease.owner in pair.alive and lease.owner and Owner.parse(lease.owner) is not None:
        return
    yield Finding(
        kind=Kind.TAKEN_FROM_LEFT,
        keys=(lease.key,),
        evidence=f"taken by force from {lease.taken_from}; its owner {lease.owner or '(none)'}"
        " never claimed it",
        repair=freed(lease, pair.circumstances),
    )


_GO_ON = "let it go on: the records before it cannot be put in order any more"
_ANEW = "all that the service still has of this shard comes again"
_TURN = (
    "nothing is lost: the parent is read to its end, too. For the right order the child's"
    " checkpoint goes back to TRIM_HORIZON: all of the child then comes again"
)


def lineage_findings(
    view: TableView,
    listing: shard_sync.Listing,
    facts: StreamFacts,
    circumstances: Circumstances,
) -> Iterator[Finding]:
    """Errors between rows and shards: holes, missing children, orphans, rows out of order.

    All findings of one look at one stream, in no order; `diagnose` keeps those on which two looks
    agree. Rule: the leases to create are those that every manager would create (`shard_sync.py`),
    with one exception: `_beside_others`. An empty listing is not evidence of anything.

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
            yield from _orphan(row, view, listing)
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
            repair=(CreateLease(lease),),
        )
    for change in shard_sync.children_to_create(view, listing):
        parents = " and ".join(parent.key for parent in change.parents)
        yield Finding(
            kind=Kind.CHILD_MISSING,
            keys=tuple(sorted(child.key for child in change.children)),
            evidence=f"child of {parents}, which was read to its end or has expired, and has no"
            " row",
            repair=(change,),
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


def _orphan(row: Lease, view: TableView, listing: shard_sync.Listing) -> Iterator[Finding]:
    if any(parent in listing for parent in row.parents):
        # A listing may lag behind a reshard; and no shard expires before its parents.
        return
    kind = Kind.ORPHAN_ENDED if row.is_ended else Kind.ORPHAN
    evidence = f"two complete listings do not show it; its row is at {row.checkpoint}"
    if all(view.has_row(child) for child in listing.children_named(row.key)):
        delete = DeleteTrimmed(row.key, row.owner, row.counter)
        yield Finding(kind=kind, keys=(row.key,), evidence=evidence, repair=(delete,))
    else:
        advice = "its children need their rows first; then look again"
        yield Finding(kind=kind, keys=(row.key,), evidence=evidence, advice=advice)


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


def diagnose(first: Look, second: Look, circumstances: Circumstances) -> tuple[Finding, ...]:
    """All findings, the gravest first. `second` was taken `watched_s` after `first`."""
    pair = Pair(first, second, circumstances)
    found = (
        *_between_rows_and_shards(pair),
        *table_findings(pair),
        *row_findings(pair),
        *handoff_findings(pair),
    )
    return settled(found, pair)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether all findings are notes."""
    return all(finding.gravity == Gravity.NOTE for finding in findings)


def _between_rows_and_shards(pair: Pair) -> Iterator[Finding]:
    for stream, facts in pair.circumstances.streams.items():
        earlier, now = pair.views_of(stream)
        seen = {
            (finding.kind, finding.keys)
            for finding in lineage_findings(
                earlier, pair.first.listings[stream], facts, pair.circumstances
            )
        }
        for finding in lineage_findings(
            now, pair.second.listings[stream], facts, pair.circumstances
        ):
            if (finding.kind, finding.keys) in seen:
                yield finding
