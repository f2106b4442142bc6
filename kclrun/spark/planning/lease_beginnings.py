"""Decides where a query begins that continues from the checkpoints of a lease table [A7, P11, P12].

Parents come before children, as everywhere. Missing shards of a listing are listed again. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.shard import HashRange, Shard, ShardGraph
from kclrun.spark import positions
from kclrun.spark.lineage import ancestors_of, descendants_of, holes, key_space, relatives_of, roots
from kclrun.spark.positions import Position, after, at_timestamp

# The largest number in a position's text; no aggregate has so many user records.
_SUB_SEQUENCE_MAX: Final = 999_999_999


class LeasedBeginnings(msgspec.Struct, frozen=True):
    """Positions by shard; `unleased` are the shards among them that no row is about."""

    positions: Mapping[str, Position]
    unleased: tuple[str, ...] = ()


def needs_time(rows: Iterable[Lease]) -> bool:
    """Whether a row begins at the tip without a stored instant: then it begins now."""
    return any(row.checkpoint == LATEST and row.latest_pinned_at is None for row in rows)


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
        no row                as the fleet would: see below

    `rows` by shard id; `now_ms` is a time the service has just reached. A child waits for its
    parents, so it has no position of its own while one is unfinished. These shards have no row:
    - children of leased shards: they enter at their first record once their parents are done;
    - ancestors of leased shards: their rows were deleted when they were done, or they never
      belonged to this application;
    - shards related to no lease at all: they begin at the oldest record. The fleet would take its
      `start`, which is not known here; no record is lost this way.

    Raises: SettingsError for a table that a query cannot continue from.
    """
    lineage = _with_rows(graph, rows)
    begun = _unfinished(rows, lineage, now_ms)
    found = _with_ended(begun, rows, lineage)
    speaking = relatives_of(lineage, rows.keys())
    others = [shard.shard_id for shard in graph if shard.shard_id not in speaking]
    unleased = roots(graph, others)
    if unleased is None:
        return None
    found |= dict.fromkeys(unleased, positions.TRIM_HORIZON)
    below = descendants_of(lineage, found)
    covers = (lineage[each].hash_range for each in {*found, *below} if each in lineage)
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
            begun[shard_id] = _position_of(row, now_ms)
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
    """Adds the ended shards with keys that no shard has yet: their children come from them."""
    found = dict(begun)
    ended = [each for each, row in rows.items() if row.is_ended and each in lineage]
    for shard_id in sorted(ended, key=lambda each: _youngest_first(each, lineage)):
        if holes(_ranges(found, lineage), lineage[shard_id].hash_range):
            found[shard_id] = positions.SHARD_END
    return found


def _youngest_first(shard_id: str, lineage: ShardGraph) -> tuple[int, str]:
    return (-len(ancestors_of(lineage, shard_id)), shard_id)


def _ranges(shard_ids: Collection[str], lineage: ShardGraph) -> list[HashRange]:
    return [lineage[each].hash_range for each in shard_ids if each in lineage]


def _position_of(row: Lease, now_ms: int) -> Position:
    checkpoint = row.checkpoint
    match checkpoint.sequence_number:
        case TRIM_HORIZON.sequence_number:
            return positions.TRIM_HORIZON
        case LATEST.sequence_number:
            pinned_at = row.latest_pinned_at
            return at_timestamp(now_ms if pinned_at is None else round(pinned_at * 1000))
        case AT_TIMESTAMP.sequence_number:
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
