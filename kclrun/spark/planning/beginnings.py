"""Decides where a query without a checkpoint begins: which shards, at which positions [A7]. Pure.

The set of shards covers the key space and never holds a shard together with an ancestor. Where a
listing does not give such a set, the result is None: list again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation, SettingsError
from kclrun.model import sequence
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.shard import HashRange, Shard, ShardGraph
from kclrun.spark.lineage import (
    ancestors_of,
    descendants_of,
    holes,
    key_space,
    leaves,
    relatives_of,
    roots,
    tiles,
)
from kclrun.spark.options import Start, StartKind
from kclrun.spark.positions import (
    SHARD_END,
    TRIM_HORIZON,
    Position,
    PositionKind,
    after,
    at_timestamp,
)

_ANY = "*"


def time_of(start: Start) -> int | None:
    """The time for `open_then` of `beginnings`; None if the start needs no time."""
    if start.kind is StartKind.TIMESTAMP:
        return start.timestamp_ms
    other = start.positions.get(_ANY)
    if (
        start.kind is StartKind.POSITIONS
        and other is not None
        and other.kind is PositionKind.TIMESTAMP
    ):
        return other.timestamp_ms
    return None


def beginnings(
    start: Start, graph: ShardGraph, now_ms: int, open_then: Collection[str] = ()
) -> Mapping[str, Position] | None:
    """Positions by shard. `now_ms` is a time the service has just reached; `open_then` are the
    shards that were open at `time_of(start)`. Raises: SettingsError for positions of shards that
    do not exist, are related, or leave other shards out."""
    match start.kind:
        case StartKind.EARLIEST:
            return _all_at(roots(graph), TRIM_HORIZON)
        case StartKind.LATEST:
            return _all_at(leaves(graph), at_timestamp(now_ms))
        case StartKind.TIMESTAMP:
            return _all_at(_open_at(graph, open_then), at_timestamp(start.timestamp_ms))
        case StartKind.POSITIONS if start.streams:
            return _gone_on(start.positions, graph)
        case StartKind.POSITIONS:
            return _named(start.positions, graph, open_then)
        case StartKind.LEASES:
            raise InvariantViolation("rows of a lease table are read first: lease_beginnings")


def _all_at(shard_ids: Collection[str] | None, position: Position) -> Mapping[str, Position] | None:
    return None if shard_ids is None else dict.fromkeys(shard_ids, position)


def _open_at(graph: ShardGraph, open_then: Collection[str]) -> tuple[str, ...] | None:
    """The shards of `open_then`. Of a shard that ended at exactly that time the service names the
    children, too: they are left out."""
    known = [shard_id for shard_id in sorted(open_then) if shard_id in graph]
    chosen = tuple(
        shard_id for shard_id in known if not ancestors_of(graph, shard_id).intersection(known)
    )
    covers = [graph[shard_id].hash_range for shard_id in chosen]
    return chosen if tiles(covers, key_space(graph)) else None


def _named(
    positions: Mapping[str, Position], graph: ShardGraph, open_then: Collection[str]
) -> Mapping[str, Position] | None:
    named = {shard_id: position for shard_id, position in positions.items() if shard_id != _ANY}
    if unlisted := sorted(shard_id for shard_id in named if shard_id not in graph):
        raise SettingsError(f"startingOffsets: the stream has no shard {', '.join(unlisted)}")
    for named_id in sorted(named):
        if above := sorted(ancestors_of(graph, named_id).intersection(named)):
            raise SettingsError(
                f"startingOffsets: {named_id} is a descendant of {above[0]}, and is read after it:"
                " name one of the two"
            )
    related = relatives_of(graph, named)
    others = [shard.shard_id for shard in graph if shard.shard_id not in related]
    if not others:
        return named
    if _ANY not in positions:
        raise SettingsError(
            f"startingOffsets: where do {', '.join(others)} begin? They are neither ancestors nor"
            ' descendants of a shard with a position: name them, or all others as "*"'
        )
    rest = positions[_ANY]
    if rest.kind is PositionKind.TIMESTAMP:
        among: Collection[str] | None = [other for other in others if other in open_then]
    else:
        among = roots(graph, others)
    return None if among is None else {**named, **dict.fromkeys(among, rest)}


def _gone_on(positions: Mapping[str, Position], graph: ShardGraph) -> Mapping[str, Position] | None:
    """The positions of a query's own offset. A shard that it had read to the end may have expired
    since; shards of which the offset does not know begin at their oldest record."""
    begun = {
        shard_id: position for shard_id, position in positions.items() if position != SHARD_END
    }
    if gone := sorted(shard_id for shard_id in begun if shard_id not in graph):
        raise SettingsError(
            f"startingOffsets: the stream has no shard {', '.join(gone)} any more: its records"
            " expired before they were read\nTo go on without them: give positions of the shards"
            " that there are, or startingOffsets=earliest"
        )
    ended = [shard_id for shard_id in positions if shard_id not in begun and shard_id in graph]
    found = dict(begun)
    for shard_id in sorted(ended, key=lambda shard_id: _youngest_first(shard_id, graph)):
        if holes(_ranges(found, graph), graph[shard_id].hash_range):
            found[shard_id] = SHARD_END
    related = relatives_of(graph, found)
    entered = roots(graph, [shard.shard_id for shard in graph if shard.shard_id not in related])
    return None if entered is None else {**found, **dict.fromkeys(entered, TRIM_HORIZON)}


# A query that goes on from the checkpoints of a lease table [A7, P11, P12]: parents come before
# children, as everywhere.
# The largest number in a position's text; no aggregate has so many user records.
_SUB_SEQUENCE_MAX: Final = 999_999_999


class LeasedBeginnings(msgspec.Struct, frozen=True):
    """Positions by shard; `unleased` are the shards among them that no row is about."""

    positions: Mapping[str, Position]
    unleased: tuple[str, ...] = ()


def needs_time(rows: Iterable[Lease]) -> bool:
    """Whether a row begins at the tip without a stored instant: then it begins now."""
    return any(row.checkpoint == sequence.LATEST and row.latest_pinned_at is None for row in rows)


def lease_owners(rows: Iterable[Lease]) -> tuple[str, ...]:
    """The owners of the unfinished leases in the rows; an offered lease has no owner."""
    return tuple(sorted({row.owner for row in rows if not row.is_ended and row.owner} - {OFFERED}))


def lease_beginnings(
    rows: Mapping[str, Lease], graph: ShardGraph, now_ms: int
) -> LeasedBeginnings | None:
    """Positions for a query; None where the listing has gaps: list again.

        SHARD_END             the shard is done; it stays until its children hold all its keys
        a number              after that user record: it may be in the middle of an aggregate
        TRIM_HORIZON          the oldest record
        LATEST, AT_TIMESTAMP  the instant that the row was pinned to, or was started with
        no row                see below

    `rows` by shard id; `now_ms` is a time the service has just reached. A child waits for its
    parents, so it has no position while a parent is unfinished. These shards have no row:
    - children of leased shards: they enter at their first record once their parents are done;
    - ancestors of leased shards: their rows were deleted after SHARD_END, or the application began
      after them;
    - shards that are related to no leased shard: they begin at the oldest record, so no record is
      lost. The fleet would begin at its `start`, which is not known here.

    Raises: SettingsError for a table that a query cannot continue from.
    """
    lineage = _with_rows(graph, rows)
    begun = _unfinished(rows, lineage, now_ms)
    found = _with_ended(begun, rows, lineage)
    related = relatives_of(lineage, rows.keys())
    others = [shard.shard_id for shard in graph if shard.shard_id not in related]
    unleased = roots(graph, others)
    if unleased is None:
        return None
    found |= dict.fromkeys(unleased, TRIM_HORIZON)
    below = descendants_of(lineage, found)
    covers = (lineage[shard_id].hash_range for shard_id in {*found, *below} if shard_id in lineage)
    if holes(covers, key_space(graph)):
        return None
    return LeasedBeginnings(found, unleased)


def _with_rows(graph: ShardGraph, rows: Mapping[str, Lease]) -> ShardGraph:
    """The listing, with the rows' facts about shards that have expired from it."""
    expired = [
        Shard(key, row.hash_range, "0", "0", *sorted(row.parents)[:2])
        for key, row in rows.items()
        if key not in graph and row.hash_range is not None
    ]
    return ShardGraph([*graph, *expired])


def _unfinished(rows: Mapping[str, Lease], lineage: ShardGraph, now_ms: int) -> dict[str, Position]:
    unfinished = {shard_id: row for shard_id, row in rows.items() if not row.is_ended}
    begun = {}
    for shard_id, row in unfinished.items():
        above = sorted(ancestors_of(lineage, shard_id).intersection(unfinished))
        if not above:
            begun[shard_id] = position_of_row(row, now_ms)
        elif not row.checkpoint.is_sentinel:
            raise SettingsError(
                f"startingLeases: {shard_id} is at {row.checkpoint}, and {above[0]}, from which it"
                " descends, is not read to its end: a query reads parents first\n"
                "To go on: let the fleet end that shard, or give positions in startingOffsets"
            )
    return begun


def _with_ended(
    begun: Mapping[str, Position], rows: Mapping[str, Lease], lineage: ShardGraph
) -> dict[str, Position]:
    """Adds the ended shards with keys that no shard in `begun` has: their children will enter."""
    found = dict(begun)
    ended = [shard_id for shard_id, row in rows.items() if row.is_ended and shard_id in lineage]
    for shard_id in sorted(ended, key=lambda shard_id: _youngest_first(shard_id, lineage)):
        if holes(_ranges(found, lineage), lineage[shard_id].hash_range):
            found[shard_id] = SHARD_END
    return found


def _youngest_first(shard_id: str, lineage: ShardGraph) -> tuple[int, str]:
    return (-len(ancestors_of(lineage, shard_id)), shard_id)


def _ranges(shard_ids: Collection[str], lineage: ShardGraph) -> list[HashRange]:
    return [lineage[shard_id].hash_range for shard_id in shard_ids if shard_id in lineage]


def position_of_row(row: Lease, now_ms: int) -> Position:
    """The position after a row's checkpoint; `now_ms` is for LATEST without an instant."""
    checkpoint = row.checkpoint
    match checkpoint.sequence_number:
        case sequence.TRIM_HORIZON.sequence_number:
            return TRIM_HORIZON
        case sequence.LATEST.sequence_number:
            pinned_at = row.latest_pinned_at
            return at_timestamp(now_ms if pinned_at is None else round(pinned_at * 1000))
        case sequence.AT_TIMESTAMP.sequence_number:
            return at_timestamp(_instant_ms(row))
        case number:
            # Also 0: the record may be the first of an aggregate. In a record that is not an
            # aggregate, no user record follows user record 0, as it should be.
            return after(number, min(checkpoint.sub_sequence_number, _SUB_SEQUENCE_MAX))


def _instant_ms(row: Lease) -> int:
    # kcl-rust keeps the instant, in milliseconds, where the sub-sequence number belongs.
    if row.checkpoint.sub_sequence_number:
        return row.checkpoint.sub_sequence_number
    try:
        return round(datetime.fromisoformat(row.start or "").timestamp() * 1000)
    except ValueError:
        raise SettingsError(
            f"startingLeases: lease {row.key} is to be read from an instant (AT_TIMESTAMP), and"
            " its row does not say which\nTo go on: give that instant as startingTimestamp"
        ) from None
