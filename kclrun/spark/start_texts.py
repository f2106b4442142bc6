"""The texts of options that say where a query begins or a batch read ends: positions by shard, the
offset of a query of ours, and instants. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from kclrun.errors import OffsetRefused
from kclrun.spark.offsets import Offset, decode_offset
from kclrun.spark.positions import TRIM_HORIZON, Position, parse_position
from kclrun.spark.stream_set import parted

_SHARD_ID: Final = re.compile(r"shardId-[0-9]{12}\Z")
# 9999-12-31T23:59:59Z: the last second of `datetime`.
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_000
_EXAMPLE: Final = '{"shardId-000000000000": "TRIM_HORIZON"}'


def positions_of(text: str) -> Offset:
    """Positions by shard, as JSON. `streams` is empty, unless the text is the offset of a query of
    ours, as its progress and its checkpoint have it. Raises: ValueError."""
    try:
        plain = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"expected JSON such as {_EXAMPLE} ({error})") from None
    if not plain:
        raise ValueError('expected at least one shard, or "*" for every shard')
    if isinstance(plain.get("v"), int):
        return _own_offset(plain)
    _refuse_others(plain)
    for shard in plain:
        if shard != "*" and not _SHARD_ID.match(parted(shard)[1]):
            raise ValueError(f'expected shard ids and "*", not {shard[:40]!r}')
    shards = {shard_id: _position(shard_id, place) for shard_id, place in plain.items()}
    return Offset(streams={}, shards=shards)


def _own_offset(plain: Mapping[str, Any]) -> Offset:
    """Raises: ValueError."""
    try:
        return decode_offset(plain)
    except OffsetRefused as error:
        raise ValueError(f"this offset cannot be read: {error}") from None


def _refuse_others(plain: Mapping[str, Any]) -> None:
    """Raises: ValueError for positions as other connectors write them, with what they are here."""
    if any(name.lower() == "at_timestamp" for name in plain):
        raise ValueError(
            "a time is given in startingTimestamp, with its zone: 2026-03-01T06:00:00Z"
        )
    theirs = {
        shard: value
        for shard, value in plain.items()
        if isinstance(value, Mapping) and "iteratorType" in value
    }
    if not theirs:
        return
    ours = {shard: _translated(value) for shard, value in theirs.items()}
    if any(position is None for position in ours.values()):
        raise ValueError(
            "these are positions of another connector. Here, AFTER_SEQUENCE_NUMBER n is"
            ' "n", AT_SEQUENCE_NUMBER n is "@n", AT_TIMESTAMP is "TS:" and milliseconds; LATEST is'
            " for all shards alone, without JSON"
        )
    shown = msgspec.json.encode(ours).decode()
    raise ValueError(f"these are positions of another connector: here they are {shown}")


def _translated(value: Mapping[str, Any]) -> str | None:
    """The position that an iterator type and its value are here; None if there is none."""
    at = str(value.get("iteratorPosition", "")).strip()
    match str(value["iteratorType"]).upper():
        case "AFTER_SEQUENCE_NUMBER" if at.isdecimal():
            return at
        case "AT_SEQUENCE_NUMBER" if at.isdecimal():
            return f"@{at}"
        case "AT_TIMESTAMP" if at.isdecimal():
            return f"TS:{at}"
        case "TRIM_HORIZON" | "SHARD_END" as word:
            return word
        case _:
            return None


def _position(shard_id: str, text: object) -> Position:
    if not isinstance(text, str):
        raise ValueError(  # noqa: TRY004 - of the text as a whole
            f"{shard_id}: expected a position as a text, as in {_EXAMPLE}"
        )
    if text.lower() in {"earliest", "trim_horizon"}:
        return TRIM_HORIZON
    try:
        return parse_position(text)
    except OffsetRefused as error:
        raise ValueError(f"{shard_id}: {error}") from None


def instant_ms(text: str) -> int:
    """Milliseconds since the epoch, from a text of them or an instant. Raises: ValueError."""
    stripped = text.strip()
    at_ms = int(stripped) if stripped.isdecimal() else _moment_ms(stripped)
    if not 0 <= at_ms <= _TIMESTAMP_MS_MAX:
        raise ValueError("expected a time between the years 1970 and 9999")
    return at_ms


def _moment_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "expected an instant such as 2026-03-01T06:00:00Z, or milliseconds since the epoch"
        ) from None
    if moment.tzinfo is None:
        raise ValueError("the time zone is missing; add Z for UTC, or +01:00")
    return round(moment.timestamp() * 1000)
