"""Decides where a query without a checkpoint begins: which shards, at which positions [A7]. Pure.

The set covers the key space and never holds a shard together with an ancestor. Where a listing does
not give such a set, the result is None: list again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kclrun.errors import InvariantViolation, SettingsError
from kclrun.model.shard import ShardGraph
from kclrun.spark.lineage import ancestors_of, key_space, leaves, relatives_of, roots, tiles
from kclrun.spark.options import Start, StartKind
from kclrun.spark.positions import TRIM_HORIZON, Place, Position, at_timestamp

_ANY = "*"


def time_of(start: Start) -> int | None:
    """The time whose open shards `beginnings` needs; None if it needs none."""
    if start.kind is StartKind.TIMESTAMP:
        return start.timestamp_ms
    other = start.positions.get(_ANY)
    if start.kind is StartKind.POSITIONS and other is not None and other.place is Place.TIMESTAMP:
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
        case StartKind.POSITIONS:
            return _named(start.positions, graph, open_then)
        case StartKind.LEASES:
            raise InvariantViolation("rows of a lease table are read first: lease_beginnings.py")


def _all_at(shard_ids: Collection[str] | None, position: Position) -> Mapping[str, Position] | None:
    return None if shard_ids is None else dict.fromkeys(shard_ids, position)


def _open_at(graph: ShardGraph, open_then: Collection[str]) -> tuple[str, ...] | None:
    """If a shard ended at exactly that time, it and its children were open then: take the shard."""
    known = [each for each in sorted(open_then) if each in graph]
    chosen = tuple(each for each in known if not ancestors_of(graph, each).intersection(known))
    covers = [graph[each].hash_range for each in chosen]
    return chosen if tiles(covers, key_space(graph)) else None


def _named(
    positions: Mapping[str, Position], graph: ShardGraph, open_then: Collection[str]
) -> Mapping[str, Position] | None:
    named = {each: position for each, position in positions.items() if each != _ANY}
    if unlisted := sorted(each for each in named if each not in graph):
        raise SettingsError(f"startingOffsets: the stream has no shard {', '.join(unlisted)}")
    for each in sorted(named):
        if above := sorted(ancestors_of(graph, each).intersection(named)):
            raise SettingsError(
                f"startingOffsets: {each} is a descendant of {above[0]}, and is read after it:"
                " name one of the two"
            )
    speaking = relatives_of(graph, named)
    others = [shard.shard_id for shard in graph if shard.shard_id not in speaking]
    if not others:
        return named
    if _ANY not in positions:
        raise SettingsError(
            f"startingOffsets: where do {', '.join(others)} begin? They are neither ancestors nor"
            ' descendants of a shard with a position: name them, or all others as "*"'
        )
    rest = positions[_ANY]
    if rest.place is Place.TIMESTAMP:
        among: Collection[str] | None = [each for each in others if each in open_then]
    else:
        among = roots(graph, others)
    return None if among is None else {**named, **dict.fromkeys(among, rest)}
