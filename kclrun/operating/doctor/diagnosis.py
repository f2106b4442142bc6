"""The diagnosis of a lease table: from two looks to findings, each with its repair if it has one.

Pure: `kclrun doctor` looks and writes. Here are the findings about the table, its rows and their
owners; `lineage.py` has those between rows and shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kclrun.leases.stream_rows import near_misses
from kclrun.leases.table_view import is_unowned
from kclrun.model.lease import (
    ANYBODY,
    ASK_STALE_AFTER_S,
    HOPPING_SWITCHES,
    KCL3_MODE_KEY,
    OFFERED,
    OWNER_PREFIX,
    Lease,
    Owner,
    is_native,
    mode_advice,
)
from kclrun.model.sequence import LATEST
from kclrun.model.stream import ONLY_STREAM, display_name, shard_id_of, stream_name_of, stream_of
from kclrun.operating.doctor.findings import (
    Circumstances,
    Finding,
    Gravity,
    Kind,
    Look,
    Pair,
    StreamFacts,
    deleted,
    with_allowed_repairs,
)
from kclrun.operating.doctor.lineage import lineage_findings
from kclrun.protocol.writes import ResumeLease

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
            + f": {display_name(mixed[0])}",
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
        f" is gone. The same as  kclrun leases resume {display_name(lease.key)} --yes",
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
        advice=f"to end the pause:  kclrun resume {display_name(lease.key)} --yes",
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
        )
    if lease.pending is not None and pair.stood_still(lease):
        yield Finding(
            kind=Kind.PENDING_LEFT,
            keys=(lease.key,),
            evidence=f"pendingCheckpoint {lease.pending.position}",
            advice="the next owner gets it in `initialize`, and the first checkpoint removes it",
        )


def _unserved(pair: Pair) -> Iterator[Finding]:
    """Work that is not read although live kclrun managers could read it; offers are named so."""
    if not pair.managers:
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
        )
    elif _offer_of(lease) != (None, None) and _offer_of(lease) == _offer_of(before):
        yield Finding(
            kind=Kind.OFFER_LEFT,
            keys=(lease.key,),
            evidence=f"its owner is {lease.owner or '(none)'}, and offeredTo or offeredBy stand on"
            " it: the owner that took the offer is not kclrun",
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
    )


def diagnose(first: Look, second: Look, circumstances: Circumstances) -> tuple[Finding, ...]:
    """All findings, the gravest first. `second` was taken `watched_s` after `first`."""
    pair = Pair(first, second, circumstances)
    found = (
        *lineage_findings(pair),
        *table_findings(pair),
        *row_findings(pair),
        *handoff_findings(pair),
    )
    return with_allowed_repairs(found, pair)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether all findings are notes."""
    return all(finding.gravity == Gravity.NOTE for finding in findings)
