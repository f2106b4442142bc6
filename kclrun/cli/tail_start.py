"""Where `kclrun tail` begins, and which shards that concerns. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kclrun.config.start_position import parse_start
from kclrun.config.units import Duration
from kclrun.errors import NotFound, SettingsError
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.shard import Shard
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter

__all__ = ["ShardStart", "first_listing", "parse_from", "shard_id_of", "shard_starts"]

_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,128})\Z")
# What is worth spelling out of a stream of thousands of shards.
_NAMED_MAX: Final = 8


class ShardStart(msgspec.Struct, frozen=True):
    """A shard to be read: its parents, and where reading it begins."""

    parents: tuple[str, ...]
    start: StartPoint


def parse_from(text: str, now: WallTime) -> StartPoint:
    """Read TRIM_HORIZON, LATEST, an instant, `10m` for ten minutes ago, or a sequence number.

    Raises: SettingsError.
    """
    if text.upper() in {"TRIM_HORIZON", "LATEST"}:
        return StartPoint(IteratorType(text.upper()))
    if _NUMBER.match(text):
        return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=text)
    try:
        ago_s = Duration.parse(text)
    except ValueError:
        return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=_instant(text, now))
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(now - ago_s))


def _instant(text: str, now: WallTime) -> WallTime | None:
    try:
        return parse_start(text, now).at
    except SettingsError as error:
        why = str(error).removeprefix("start: ")
        raise SettingsError(
            f"--from: {why}\n"
            "Also possible: 10m (ten minutes ago), and with --shard a sequence number"
        ) from None


def first_listing(start: StartPoint) -> ShardFilter | None:
    """Which shards to list: those that can hold a record from there on. None is all of them."""
    match start.kind:
        case IteratorType.LATEST:
            return ShardFilter("AT_LATEST")
        case IteratorType.AT_TIMESTAMP:
            return ShardFilter("FROM_TIMESTAMP", start.timestamp)
        case _:
            return None


def shard_id_of(text: str) -> str:
    """A shard id in full: `7` is the eighth shard of the stream, `shardId-000000000007`."""
    return f"shardId-{int(text):012d}" if text.isascii() and text.isdecimal() else text


def shard_starts(
    shards: Sequence[Shard], named: Sequence[str], start: StartPoint
) -> Mapping[str, ShardStart]:
    """The shards to begin with. `named` narrows them to these ids; empty means all.

    A shard whose parent is read, too, begins at its own beginning: all its records are later.
    Raises: SettingsError for a sequence number without its one shard; NotFound for an unknown id.
    """
    if start.kind is IteratorType.AT_SEQUENCE_NUMBER and len(set(named)) != 1:
        raise SettingsError("--from with a sequence number is of one shard: name it with --shard")
    chosen = _chosen(shards, named)
    ids = {shard.shard_id for shard in chosen}
    at_its_beginning = StartPoint(IteratorType.TRIM_HORIZON)
    return {
        shard.shard_id: ShardStart(
            shard.parents, at_its_beginning if ids & set(shard.parents) else start
        )
        for shard in chosen
    }


def _chosen(shards: Iterable[Shard], named: Sequence[str]) -> list[Shard]:
    listed = {shard.shard_id: shard for shard in shards}
    if not named:
        return list(listed.values())
    for shard_id in named:
        if shard_id not in listed:
            known = sorted(listed)
            more = f", … {len(known)} in all" if len(known) > _NAMED_MAX else ""
            raise NotFound(
                f"the stream has no shard {shard_id} with records from there on\n"
                f"It has: {', '.join(known[:_NAMED_MAX])}{more}"
            )
    return [listed[shard_id] for shard_id in dict.fromkeys(named)]
