"""Positions kept as `kclrun leases --json` prints them, and the reset to them [K4]. Pure.

They are of one moment. Shards may have been split and merged since, rows cleaned up or reset.
Must not know: where the text was kept, and whether the stream still has the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded, SettingsError, TableRefused
from kclrun.leases.shard_sync import Listing, child_lease
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import Shard
from kclrun.model.stream import display_name
from kclrun.model.text import sanitize
from kclrun.model.time import WALL_TIME_MAX, WallTime
from kclrun.operating.reset import ResetPlan, ResetStart, begun_descendant, reset_plan
from kclrun.operating.summaries import unended_parents

# A line of `leases --json` is below 2 KiB; a table of 10,000 shards makes 20 MiB.
KEPT_BYTES_MAX: Final = 64 * 2**20
_SENTINELS: Final = {sentinel.sequence_number: sentinel for sentinel in (TRIM_HORIZON, SHARD_END)}


class KeptPosition(msgspec.Struct, frozen=True):
    """One kept position. `pinned_at` is the instant that a LATEST stands for."""

    position: ExtendedSequenceNumber
    pinned_at: WallTime | None = None

    @property
    def is_ended(self) -> bool:
        return self.position == SHARD_END

    @property
    def has_begun(self) -> bool:
        return self.is_ended or not self.position.is_sentinel


KeptPositions = Mapping[LeaseKey, KeptPosition]


class _LeaseLine(msgspec.Struct, frozen=True):
    """What counts of a line of `leases --json`."""

    shard: str
    checkpoint: str
    starts_at: float | None = None


def parse_kept(text: bytes, name: str) -> KeptPositions:
    """The positions by lease, from what `kclrun leases --json` printed.

    Raises: SettingsError, which names the file and the shard, for anything else.
    """
    try:
        lines = msgspec.json.decode(text, type=list[_LeaseLine])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{name} is not what  kclrun leases --json  prints: {sanitize(str(error))}"
        ) from None
    kept: dict[LeaseKey, KeptPosition] = {}
    for line in lines:
        key = LeaseKey(line.shard)
        if key in kept:
            raise SettingsError(f"{name}: {sanitize(display_name(key))} is there twice")
        kept[key] = _kept(line, name)
    if not kept:
        raise SettingsError(f"{name} has no position")
    return kept


def _kept(line: _LeaseLine, name: str) -> KeptPosition:
    text, at = line.checkpoint, line.starts_at
    where = f"{name}: {sanitize(display_name(line.shard))}"
    if at is not None and not 0 <= at < WALL_TIME_MAX:
        raise SettingsError(f"{where}: `starts_at` is not a time, in seconds since 1970")
    if text == LATEST.sequence_number:
        if at is None:
            raise SettingsError(
                f"{where} is at LATEST, and `starts_at` does not say of which instant\nGive the"
                " line one, in seconds since 1970, or let `checkpoint` be TRIM_HORIZON"
            )
        return KeptPosition(LATEST, WallTime(at))
    if text == AT_TIMESTAMP.sequence_number:
        # Without one it is the instant of `start:`, as on the row.
        return KeptPosition(ExtendedSequenceNumber(text, round((at or 0.0) * 1000)))
    if text in _SENTINELS:
        return KeptPosition(_SENTINELS[text])
    try:
        # A tick counts timers, which a reset lets fire again: the position is that of the record.
        return KeptPosition(Cursor.parse(text).position)
    except LimitExceeded:
        raise SettingsError(f"{where}: {sanitize(text[:40])!r} is not a checkpoint") from None


def plan_positions(
    rows: Sequence[Lease], listing: Listing, kept: KeptPositions, start: ResetStart
) -> ResetPlan:
    """Reset a whole stream to kept positions. `rows` are its rows, `listing` all its shards.

    The rows become those that were kept: each shard is moved to its position, one that had ended to
    its end, and all others are removed. Those that came of unended shards come again when their
    parents end [P12].

    Raises: TableRefused for a shard that is not listed any more, positions of another stream or of
    several moments, and positions that would leave a shard out.
    """
    problem = listing.inconsistency or listing.contradiction(rows)
    if problem is not None:
        raise TableRefused(f"the shards are changing: {problem}\nRepeat this in a minute")
    known = {row.key: row for row in rows}
    targets = {key: entry for key, entry in kept.items() if not entry.is_ended}
    for key, entry in sorted(targets.items()):
        _refuse_position(key, entry, listing)
    later = _descendants(targets, listing)
    _refuse_moments(targets, later, kept, listing)
    _refuse_gaps(targets, later, kept, listing)
    leases = [
        _lease(key, entry, listing)
        for key, entry in sorted(kept.items())
        if not entry.is_ended or _is_to_end(key, known.get(key), listing)
    ]
    put = {lease.key for lease in leases}
    others = [
        row
        for row in sorted(rows, key=lambda row: row.key)
        if row.key not in put and not (row.is_ended and row.key in kept and row.key not in later)
    ]
    return reset_plan(rows, leases, others, start)


def plan_kept_shards(
    rows: Sequence[Lease],
    listing: Listing,
    kept: KeptPositions,
    keys: Collection[LeaseKey],
    start: ResetStart,
) -> ResetPlan:
    """Reset these shards alone to their kept positions. Each has a row.

    Raises: TableRefused, as `plan_positions` for one shard, and where its parents have not ended or
    a descendant has begun.
    """
    known: dict[str, Lease] = {row.key: row for row in rows}
    leases = []
    for key in sorted(keys):
        entry = kept.get(key)
        if entry is None:
            raise TableRefused(f"the kept positions do not have {display_name(key)}")
        if entry.is_ended:
            raise TableRefused(
                f"{display_name(key)} had ended when its position was kept: its children go on"
                " from it"
            )
        _refuse_position(key, entry, listing)
        waiting = unended_parents(known[key], known)
        if entry.has_begun and waiting:
            raise TableRefused(
                f"{display_name(key)} had begun, and its parent {display_name(waiting[0])} has not"
                " ended: its records would come before those of its parent"
            )
        begun = begun_descendant(known[key], rows, listing, keys)
        if begun is not None:
            raise TableRefused(
                f"{display_name(begun)} descends from {display_name(key)} and has begun: the"
                " records of the parent would come after those of its child\nReset the whole"
                " stream: leave --shard out"
            )
        leases.append(_lease(key, entry, listing))
    return reset_plan(rows, leases, (), start)


def _is_to_end(key: LeaseKey, row: Lease | None, listing: Listing) -> bool:
    """Whether an ended row is written: there is none, or it has not ended, or has the halt of a
    reset that was cut. No process reads a shard that is not listed any more."""
    is_there = row is not None and row.is_ended and row.halt is None
    return not is_there and key in listing and bool(listing.children_named(key))


def _refuse_position(key: LeaseKey, entry: KeptPosition, listing: Listing) -> None:
    """A shard that is gone, and a number that another stream, or a stream of this name in former
    times, gave to its record."""
    shard = listing.graph.get(key)
    if shard is None:
        raise TableRefused(
            f"{display_name(key)} is not listed any more, so its records after the kept position"
            " have expired, or the positions are of another stream\nTo read what is left:"
            "  kclrun reset --to TRIM_HORIZON"
        )
    if not entry.position.is_sentinel and not _has_number(shard, entry.position):
        raise TableRefused(
            f"{display_name(key)} never had a record {entry.position}: the position is of another"
            " stream, or of one that was deleted and created again"
        )


def _has_number(shard: Shard, position: ExtendedSequenceNumber) -> bool:
    record = ExtendedSequenceNumber(position.sequence_number)
    if record < ExtendedSequenceNumber(shard.starting_sequence_number):
        return False
    last = shard.ending_sequence_number
    return last is None or record <= ExtendedSequenceNumber(last)


def _descendants(keys: Iterable[LeaseKey], listing: Listing) -> frozenset[LeaseKey]:
    found: set[LeaseKey] = set()
    waiting = list(keys)
    while waiting:
        for child in listing.children_named(waiting.pop()):
            key = LeaseKey(child)
            if key not in found:
                found.add(key)
                waiting.append(key)
    return frozenset(found)


def _refuse_moments(
    targets: KeptPositions, later: Collection[LeaseKey], kept: KeptPositions, listing: Listing
) -> None:
    """A shard begins when its parents have ended. Rows that say otherwise are of two moments, or of
    a table that `doctor` repairs."""
    for key in sorted(later):
        entry = kept.get(key)
        if entry is not None and entry.has_begun:
            waiting = min(one for one in targets if key in _descendants([one], listing))
            raise TableRefused(
                f"{display_name(key)} had begun at the kept positions, and {display_name(waiting)},"
                " of which it comes, had not ended: they are not of one moment"
            )


def _refuse_gaps(
    targets: KeptPositions, later: Collection[LeaseKey], kept: KeptPositions, listing: Listing
) -> None:
    """Every open shard is reached, and nothing before it is left out: else records would be lost
    silently, and a manager would create the missing row somewhere else."""
    for shard in listing.graph.open_shards():
        if shard.shard_id not in targets and shard.shard_id not in later:
            raise TableRefused(
                f"the kept positions lead to no lease of {display_name(shard.shard_id)}: they have"
                " neither that shard nor an unended one that it comes of, so they are not complete"
            )
    for key in sorted(later):
        for parent in listing.graph.parents_of(key):
            one = LeaseKey(parent)
            if one not in targets and one not in later and one not in kept and key not in targets:
                raise TableRefused(
                    f"the kept positions do not say how far {display_name(one)} was read, and"
                    f" {display_name(key)} comes of it: they are not complete"
                )


def _lease(key: LeaseKey, entry: KeptPosition, listing: Listing) -> Lease:
    shard = listing.graph[key]
    children = listing.children_named(key) if entry.is_ended else ()
    return msgspec.structs.replace(
        child_lease(key, shard.parents, shard.hash_range),
        checkpoint=entry.position,
        latest_pinned_at=entry.pinned_at,
        children=frozenset(children),
    )
