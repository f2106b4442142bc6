"""The shards that a reading begins with, and where it begins in each of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kclrun.config.units import StartPosition, parse_time
from kclrun.errors import LimitExceeded, NotFound, SettingsError
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard, ShardGraph
from kclrun.model.text import some_of
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter

_OLDEST: Final = StartPoint(IteratorType.TRIM_HORIZON)
_POSITION: Final = re.compile(r"([0-9]+)(?:/([0-9]{1,9}))?\Z")


class ShardStart(msgspec.Struct, frozen=True):
    """A shard to read: its parents and its start point.

    `after` is a position inside the first record, if that record is an aggregate: user records at
    or below it are not wanted.
    """

    parents: tuple[str, ...]
    start: StartPoint
    after: ExtendedSequenceNumber | None = None


def parse_from(text: str, now: WallTime, name: str) -> StartPoint:
    """Read a time as each verb takes it, TRIM_HORIZON or LATEST; `name` is the keyword, for errors.
    Raises: SettingsError."""
    try:
        return start_point(parse_time(text, now, (TRIM_HORIZON, LATEST)))
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def start_point(start: StartPosition) -> StartPoint:
    """The first record that a reading asks for."""
    if start.at is None:
        return StartPoint(IteratorType(start.sentinel.sequence_number))
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=start.at)


def first_listing(start: StartPoint) -> ShardFilter | None:
    """The filter for shards that can hold a record from `start` on. None: all shards."""
    match start.kind:
        case IteratorType.LATEST:
            return ShardFilter("AT_LATEST")
        case IteratorType.AT_TIMESTAMP:
            return ShardFilter("FROM_TIMESTAMP", start.timestamp)
        case _:
            return None


def shard_starts(
    shards: Sequence[Shard], named: Sequence[str], start: StartPoint
) -> Mapping[str, ShardStart]:
    """The shards to begin with. `named` narrows them to these ids; empty means all.

    If a shard's parent is read too, the shard is read from its beginning, because all its records
    are later.
    Raises: NotFound for an unknown id.
    """
    chosen = _chosen(shards, named)
    ids = {shard.shard_id for shard in chosen}
    return {
        shard.shard_id: ShardStart(shard.parents, _OLDEST if ids & set(shard.parents) else start)
        for shard in chosen
    }


def _chosen(shards: Iterable[Shard], named: Sequence[str]) -> list[Shard]:
    listed = {shard.shard_id: shard for shard in shards}
    if not named:
        return list(listed.values())
    for shard_id in named:
        if shard_id not in listed:
            raise NotFound(
                f"the stream has no shard {shard_id} with records from there on\n"
                f"It has: {some_of(sorted(listed))}"
            )
    return [listed[shard_id] for shard_id in dict.fromkeys(named)]


# Where a reading goes on in a shard: after a record, or at a start point.
Begin = StartPoint | ExtendedSequenceNumber


def parse_position(text: str, now: WallTime, name: str) -> Begin:
    """A position as `str(record.position)` writes it, SHARD_END, or what `parse_from` reads.

    Raises: SettingsError.
    """
    if text == SHARD_END.sequence_number:
        return SHARD_END
    match = _POSITION.match(text)
    if match is None:
        return parse_from(text, now, name)
    try:
        return ExtendedSequenceNumber(match[1], int(match[2] or 0))
    except LimitExceeded as error:
        raise SettingsError(f"{name}: {error}") from None


def position_starts(shards: Sequence[Shard], begins: Mapping[str, Begin]) -> dict[str, ShardStart]:
    """The shards to begin with, where a reading goes on after positions, by shard id.

    A shard without a position is read from its oldest record; it is left out if a child of it has
    a position, because then it was read to its end. So is a shard at SHARD_END.
    Raises: NotFound for a position of a shard that is not there, unless a child of it has one.
    """
    graph = ShardGraph(shards)
    is_read: dict[str, bool] = {}

    def was_read(shard_id: str) -> bool:
        # Ids grow from parents to children, so this goes as deep as the shard was resharded.
        if shard_id not in is_read:
            is_read[shard_id] = any(
                child in begins or was_read(child) for child in graph.children_naming(shard_id)
            )
        return is_read[shard_id]

    for shard_id, begin in begins.items():
        if shard_id not in graph and begin != SHARD_END and not was_read(shard_id):
            raise NotFound(
                f"start: the stream has no shard {shard_id} (any more): if it had one, what came"
                " after that position is gone\nLeave it out to read what the stream has. It has:"
                f" {some_of(sorted(shard.shard_id for shard in graph))}"
            )
    return {
        shard.shard_id: _started(shard, begins.get(shard.shard_id, _OLDEST))
        for shard in graph
        if begins.get(shard.shard_id) != SHARD_END
        and (shard.shard_id in begins or not was_read(shard.shard_id))
    }


def _started(shard: Shard, begin: Begin) -> ShardStart:
    if isinstance(begin, StartPoint):
        return ShardStart(shard.parents, begin)
    # From its record on: it may be an aggregate with user records after the position.
    start = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=begin.sequence_number)
    return ShardStart(shard.parents, start, after=begin)
