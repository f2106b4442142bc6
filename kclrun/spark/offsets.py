"""Spark's offset of one Kinesis source, as its checkpoint stores it [A2]. Pure.

An offset is canonical JSON, so that equal offsets are equal texts: Spark compares them as text.
`encode_offset` describes the three versions of the format.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Final, TypeVar

import msgspec

from kclrun.errors import InvariantViolation, OffsetRefused
from kclrun.model.record import Record
from kclrun.spark.positions import (
    TRIM_HORIZON,
    Position,
    PositionKind,
    at_timestamp,
    parse_position,
)
from kclrun.spark.stream_set import parted, shard_name

T = TypeVar("T")

VERSION: Final = 3
_PACKED: Final = 2
_PLAIN: Final = 1
# Fifty shards of 120 bytes are 6 kB, still readable for a person.
PLAIN_SHARDS_MAX: Final = 50
_SHARD_ID: Final = re.compile(r"shardId-([0-9]{12})\Z")
# Ten thousand shards are 300 kB before they are deflated; a text that inflates to more is foreign.
_INFLATED_BYTES_MAX: Final = 64 * 2**20


class StreamIs(msgspec.Struct, frozen=True):
    """The identity of a stream: ARN and creation time; a re-created stream has another time."""

    arn: str
    created_ms: int


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a query in each of its shards.

    `streams` are the streams of the query. One stream has an empty name, and shards have their own
    ids. Several streams have their names, and a shard's name has both:
    `orders:shardId-000000000000`.
    `shards` are the bounds.
    `began` has the beginning of the range of the batch that ends here, for shards whose beginning
    is not the bound in the batch's start (JSON: `from`).
    `aligned_ms` is the service time up to which all shards were read together: it never falls
    (JSON: `t`).
    `as_of_ms` has, for shards that were seen at their tip, the time of that look: the bound covers
    all records that had arrived by then (JSON: `asOf`).
    `parents` names, for shards that entered within this same batch, the parents that it also reads:
    a task reads the parents first. It is used only where Spark asks once for everything (PySpark
    4.0 and 4.1 under AvailableNow); otherwise children wait for the next batch, and it is empty.

    `began` is needed where the start offset does not name the beginning exactly: in the first
    batch, at LATEST, timestamps and TRIM_HORIZON, and for children. With it the rows of a batch are
    a function of (start, end) and of no other state.
    """

    streams: Mapping[str, StreamIs]
    shards: Mapping[str, Position]
    began: Mapping[str, Position] = {}
    aligned_ms: int = 0
    as_of_ms: Mapping[str, int] = {}
    parents: Mapping[str, tuple[str, ...]] = {}


def parts_of(offset: Offset) -> Mapping[str, Offset]:
    """Of several streams, the offset of each stream by itself, shards by their own ids."""
    return {
        stream: Offset(
            streams={"": which},
            shards=_of(stream, offset.shards),
            began=_of(stream, offset.began),
            aligned_ms=offset.aligned_ms,
            as_of_ms=_of(stream, offset.as_of_ms),
            parents={
                child: tuple(parted(parent)[1] for parent in above)
                for child, above in _of(stream, offset.parents).items()
            },
        )
        for stream, which in offset.streams.items()
    }


def together(parts: Mapping[str, Offset], aligned_ms: int) -> Offset:
    """One offset from the offsets of several streams, by name."""
    parents = {
        shard_name(stream, child): tuple(shard_name(stream, parent) for parent in above)
        for stream, part in parts.items()
        for child, above in part.parents.items()
    }
    return Offset(
        streams={stream: part.streams[""] for stream, part in parts.items()},
        shards=_named({stream: part.shards for stream, part in parts.items()}),
        began=_named({stream: part.began for stream, part in parts.items()}),
        aligned_ms=aligned_ms,
        as_of_ms=_named({stream: part.as_of_ms for stream, part in parts.items()}),
        parents=parents,
    )


def _of(stream: str, by_shard: Mapping[str, T]) -> dict[str, T]:
    named = ((parted(shard), value) for shard, value in by_shard.items())
    return {shard_id: value for (of, shard_id), value in named if of == stream}


def _named(by_stream: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {
        shard_name(stream, shard_id): value
        for stream, by_shard in by_stream.items()
        for shard_id, value in by_shard.items()
    }


class _Wire(msgspec.Struct, forbid_unknown_fields=False):
    v: int
    stream: str
    created: int
    shards: dict[str, str] | str
    began: dict[str, str] | str = msgspec.field(name="from", default_factory=dict)
    t: int = 0
    as_of: dict[str, int] | str = msgspec.field(name="asOf", default_factory=dict)
    parents: dict[str, tuple[str, ...]] | str = {}


class _Several(msgspec.Struct, forbid_unknown_fields=False):
    v: int
    streams: dict[str, _Wire]
    t: int = 0


def encode_offset(offset: Offset) -> dict[str, Any]:
    """The plain dict that PySpark turns into JSON, its keys in a fixed order.

    Version 1, up to PLAIN_SHARDS_MAX shards: a position is a text under its shard. Version 2, above
    that: each mapping is one text, because Spark keeps the offsets of a hundred batches in memory
    and writes two into every progress event. The text is deflated columns, so that similar values
    of the shards are next to each other. A reader of version 2 reads both.

    Version 3, of several streams: each stream has such an offset under its name, with its own shard
    ids. Only the time up to which all were read together is stored beside them. So the meaning of
    one stream's offset does not depend on the other streams or on their order in the option.
    """
    if "" in offset.streams:
        return _encode_one(offset)
    parts = parts_of(offset)
    streams = {stream: _encode_one(parts[stream]) for stream in sorted(parts)}
    for encoded in streams.values():
        del encoded["t"]
    return {"streams": streams, "t": offset.aligned_ms, "v": VERSION}


def _encode_one(offset: Offset) -> dict[str, Any]:
    which = offset.streams[""]
    is_packed = len(offset.shards) > PLAIN_SHARDS_MAX and all(
        _SHARD_ID.match(shard_id)
        for shard_id in (
            *offset.shards,
            *offset.began,
            *offset.as_of_ms,
            *offset.parents,
            *chain.from_iterable(offset.parents.values()),
        )
    )
    as_of: object = dict(sorted(offset.as_of_ms.items()))
    if is_packed:
        as_of = _packed(
            {shard_id: at_timestamp(at_ms) for shard_id, at_ms in offset.as_of_ms.items()}
        )
    texts = _packed if is_packed else _texts
    parents: object = {parent: list(offset.parents[parent]) for parent in sorted(offset.parents)}
    if is_packed and parents:
        parents = _packed_parents(offset.parents)
    return {
        "asOf": as_of,
        "created": which.created_ms,
        "from": texts(offset.began),
        **({"parents": parents} if parents else {}),
        "shards": texts(offset.shards),
        "stream": which.arn,
        "t": offset.aligned_ms,
        "v": _PACKED if is_packed else _PLAIN,
    }


def decode_offset(value: object) -> Offset:
    """From that dict. Raises: OffsetRefused for a newer version, or for a foreign offset."""
    if isinstance(value, Mapping) and isinstance(value.get("v"), int) and value["v"] > VERSION:
        raise OffsetRefused(
            f"the checkpoint is of version {value['v']}, written by a newer kclrun; this one knows"
            f" {VERSION}\nTo go on: install that kclrun again, or start with a new checkpoint"
        )
    try:
        if isinstance(value, Mapping) and "streams" in value:
            wires = msgspec.convert(value, _Several)
            parts = {stream: _decoded(wire) for stream, wire in wires.streams.items()}
            return together(parts, wires.t)
        return _decoded(msgspec.convert(value, _Wire))
    except (msgspec.DecodeError, zlib.error, ValueError) as error:
        raise OffsetRefused(
            f"the checkpoint does not hold an offset of the kclrun source ({error})\n"
            "Checkpoints of other connectors cannot be continued: use a new checkpoint location"
        ) from None


def _decoded(wire: _Wire) -> Offset:
    """Raises: ValueError, zlib.error or msgspec.DecodeError for invalid positions."""
    as_of = wire.as_of
    if isinstance(as_of, str):
        as_of = {shard_id: at.timestamp_ms for shard_id, at in _unpacked(as_of).items()}
    parents = wire.parents
    return Offset(
        streams={"": StreamIs(wire.stream, wire.created)},
        shards=_positions(wire.shards),
        began=_positions(wire.began),
        aligned_ms=wire.t,
        as_of_ms=as_of,
        parents=_unpacked_parents(parents) if isinstance(parents, str) else parents,
    )


def _texts(positions: Mapping[str, Position]) -> dict[str, str]:
    return {shard_id: str(positions[shard_id]) for shard_id in sorted(positions)}


def _positions(texts: Mapping[str, str] | str) -> dict[str, Position]:
    if isinstance(texts, str):
        return _unpacked(texts)
    return {shard_id: parse_position(text) for shard_id, text in texts.items()}


class _Columns(msgspec.Struct, array_like=True):
    """Positions of many shards by column, so that similar values are next to each other.

    `ids` are the gaps between the shards' numbers, `kinds` a byte a shard: its place, plus 8 where
    the position is before the record. Of positions at a record: `numbers`, the first bytes of all,
    then the second …, `width` of them; `subs`, one more than the sub-sequence number, or 0. Of
    positions at a time: `times`, the gaps between them.
    """

    ids: list[int]
    kinds: bytes
    width: int
    numbers: bytes
    subs: list[int]
    times: list[int]


_BEFORE: Final = 8


def _packed(positions: Mapping[str, Position]) -> str:
    ordered = [positions[position] for position in sorted(positions)]
    at_records = [position for position in ordered if position.kind is PositionKind.RECORD]
    numbers = [int(record.number) for record in at_records]
    width = (max(numbers, default=0).bit_length() + 7) // 8
    rows = [number.to_bytes(width, "big") for number in numbers]
    at_times = [
        position.timestamp_ms for position in ordered if position.kind is PositionKind.TIMESTAMP
    ]
    columns = _Columns(
        ids=_gaps([_number(shard_id) for shard_id in sorted(positions)]),
        kinds=bytes(position.kind + _BEFORE * position.is_before for position in ordered),
        width=width,
        numbers=bytes(row[at] for at in range(width) for row in rows),
        subs=[
            0 if at_record.sub_sequence_number is None else at_record.sub_sequence_number + 1
            for at_record in at_records
        ],
        times=_gaps(at_times),
    )
    return _deflated(columns)


def _deflated(columns: msgspec.Struct) -> str:
    return base64.b85encode(zlib.compress(msgspec.msgpack.encode(columns), 9)).decode()


def _inflated(text: str) -> bytes:
    inflating = zlib.decompressobj()
    plain = inflating.decompress(base64.b85decode(text), _INFLATED_BYTES_MAX)
    if not inflating.eof:
        raise ValueError("the positions of its shards are cut short")
    return plain


def _unpacked(text: str) -> dict[str, Position]:
    """Raises: ValueError, zlib.error or msgspec.DecodeError for a text of another origin."""
    columns = msgspec.msgpack.decode(_inflated(text), type=_Columns)
    count = len(columns.subs)
    places = [kind % _BEFORE for kind in columns.kinds]
    if (places.count(PositionKind.RECORD), places.count(PositionKind.TIMESTAMP)) != (
        count,
        len(columns.times),
    ):
        raise ValueError("the positions of its shards do not match their kinds")
    rows = (columns.numbers[at::count] for at in range(count))
    records = (
        (str(int.from_bytes(row, "big")), sub) for row, sub in zip(rows, columns.subs, strict=True)
    )
    times = accumulate(columns.times)
    found = {}
    for number, kind in zip(accumulate(columns.ids), columns.kinds, strict=True):
        place = PositionKind(kind % _BEFORE)
        if place is PositionKind.RECORD:
            text, sub = next(records)
            position = Position(place, text, kind >= _BEFORE, sub - 1 if sub else None)
        elif place is PositionKind.TIMESTAMP:
            position = at_timestamp(next(times))
        else:
            position = Position(place)
        found[_shard_id(number)] = position
    return found


class _ParentColumns(msgspec.Struct, array_like=True):
    """The parents of many children: the gaps between the children's numbers, how many parents each
    has, and the gaps between the parents' numbers, one child after the other."""

    ids: list[int]
    counts: bytes
    above: list[int]


def _packed_parents(parents: Mapping[str, tuple[str, ...]]) -> str:
    children = sorted(parents)
    columns = _ParentColumns(
        ids=_gaps([_number(child) for child in children]),
        counts=bytes(len(parents[child]) for child in children),
        above=_gaps([_number(parent) for child in children for parent in parents[child]]),
    )
    return _deflated(columns)


def _unpacked_parents(text: str) -> dict[str, tuple[str, ...]]:
    """Raises: ValueError, zlib.error or msgspec.DecodeError for a text of another origin."""
    columns = msgspec.msgpack.decode(_inflated(text), type=_ParentColumns)
    if sum(columns.counts) != len(columns.above):
        raise ValueError("the parents of its shards are cut short")
    above = iter([_shard_id(number) for number in accumulate(columns.above)])
    numbered = zip(accumulate(columns.ids), columns.counts, strict=True)
    return {_shard_id(number): tuple(islice(above, count)) for number, count in numbered}


def _number(shard_id: str) -> int:
    return int(shard_id[len("shardId-") :])


def _shard_id(number: int) -> str:
    return f"shardId-{number:012d}"


def _gaps(values: list[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *values])]


# The ranges of one batch: one for each shard, as a function of (start, end) [A2], packed into
# tasks. Pure.
class Hint(msgspec.Struct, frozen=True):
    """A short cut for one range [A4], from the driver's own reading. It never changes a row.

    `iterator` is exactly at the range's beginning and was made at `iterator_at` (seconds since
    the epoch, this host's clock): tokens live five minutes. `rows` are all Kinesis records of the
    range, in order, aggregates not opened; None where the driver has not read them all.
    `records_expected` is an estimate from the shard's density, for the Limit of a read.
    """

    iterator: str | None = None
    iterator_at: float = 0.0
    rows: tuple[Record, ...] | None = None
    records_expected: int | None = None


class ShardRange(msgspec.Struct, frozen=True):
    """The records of one shard in one batch: those after `begin` and not after `end`.

    `as_of_ms`: `begin` covers all records that had arrived by then; None if that was never seen.
    `is_from_horizon`: the query began at the oldest record, so earlier records were not promised.
    `line` is the same for the ranges of parents and children within one batch; one task reads them
    in the order of `generation`. It is empty for all other ranges.
    """

    shard_id: str
    begin: Position
    end: Position
    as_of_ms: int | None = None
    hint: Hint = Hint()
    is_from_horizon: bool = False
    generation: int = 0
    line: str = ""


def ranges_between(
    start: Offset, end: Offset, hints: Mapping[str, Hint] | None = None
) -> tuple[ShardRange, ...]:
    """The ranges of the batch (start, end], by shard id; shards without new records have none.

    Raises: InvariantViolation where an offset does not name a range's beginning, or goes back.
    """
    ranges = []
    generations, lines = _generations(end.parents), _lines(end.parents)
    for shard_id, bound in sorted(end.shards.items()):
        begin = end.began.get(shard_id) or start.shards.get(shard_id)
        if begin is None:
            raise InvariantViolation(f"no offset says where {shard_id} begins")
        if begin == bound:
            continue
        if begin > bound:
            raise InvariantViolation(f"{shard_id} would be read backwards: {begin} to {bound}")
        hint = (hints or {}).get(shard_id, Hint())
        ranges.append(
            ShardRange(
                shard_id,
                begin,
                bound,
                start.as_of_ms.get(shard_id),
                hint,
                is_from_horizon=start.shards.get(shard_id) == TRIM_HORIZON,
                generation=generations.get(shard_id, 0),
                line=lines.get(shard_id, ""),
            )
        )
    return tuple(ranges)


def pack(
    ranges: Sequence[ShardRange], shards_per_task: int, partitions_max: int | None
) -> tuple[tuple[ShardRange, ...], ...]:
    """Ranges distributed to tasks: at most `shards_per_task` in each, but at most `partitions_max`
    tasks where that is given; a function of its arguments. Ranges of one line stay together,
    however many they are."""
    if not ranges:
        return ()
    together: dict[str, list[ShardRange]] = {}
    for shard_range in ranges:
        together.setdefault(shard_range.line or shard_range.shard_id, []).append(shard_range)
    units = list(together.values())
    tasks = min(-(-len(ranges) // shards_per_task), len(units))
    if partitions_max is not None:
        tasks = min(tasks, partitions_max)
    return tuple(
        tuple(shard_range for unit in units[index::tasks] for shard_range in unit)
        for index in range(tasks)
    )


def _generations(parents: Mapping[str, Sequence[str]]) -> Mapping[str, int]:
    """The number of generations in the same batch that are read before a child."""
    found: dict[str, int] = {}
    ahead = list(parents)
    while ahead:
        shard_id = ahead[-1]
        unknown = [
            parent for parent in parents[shard_id] if parent in parents and parent not in found
        ]
        if unknown:
            ahead += unknown
            continue
        ahead.pop()
        found[shard_id] = 1 + max(
            (found.get(parent, 0) for parent in parents[shard_id]), default=-1
        )
    return found


def _lines(parents: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """Shards that descend from each other within a batch, each with the same line name."""
    related: dict[str, set[str]] = {}
    for child, above in parents.items():
        for parent in above:
            related.setdefault(child, set()).add(parent)
            related.setdefault(parent, set()).add(child)
    found: dict[str, str] = {}
    for name in sorted(related):
        ahead = [name]
        while ahead:
            shard_id = ahead.pop()
            if shard_id not in found:
                found[shard_id] = name
                ahead += related[shard_id]
    return found
