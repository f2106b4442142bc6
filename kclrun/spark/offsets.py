"""Spark's offset of one Kinesis source: what its checkpoint holds [A2].

Canonical JSON, so that equal offsets are equal texts: Spark compares them as text. An end offset
carries in `from` where each range begins whose beginning the start offset does not say exactly
(the first batch, LATEST, timestamps, TRIM_HORIZON, children), so that the rows of a batch are a
function of (start, end) and nobody's memory. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import OffsetRefused
from kclrun.spark.positions import Position, parse_position

__all__ = ["VERSION", "Offset", "decode_offset", "encode_offset"]

VERSION: Final = 1


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """Where the query stands in every shard it knows.

    `stream` is the ARN and `created_ms` the creation time, which tells a re-created stream.
    `shards` are the bounds; `began` says where the range of the batch that ends here begins,
    for shards whose beginning is not the bound in the batch's start (JSON: `from`).
    `aligned_ms` is the service time up to which all shards were read together: it never falls
    (JSON: `t`). `as_of_ms` says, for shards that were seen at their tip, when: all that had
    arrived by then is covered by the bound (JSON: `asOf`).
    """

    stream: str
    created_ms: int
    shards: Mapping[str, Position]
    began: Mapping[str, Position] = {}
    aligned_ms: int = 0
    as_of_ms: Mapping[str, int] = {}


class _Wire(msgspec.Struct, forbid_unknown_fields=False):
    v: int
    stream: str
    created: int
    shards: dict[str, str]
    began: dict[str, str] = msgspec.field(name="from", default_factory=dict)
    t: int = 0
    as_of: dict[str, int] = msgspec.field(name="asOf", default_factory=dict)


def encode_offset(offset: Offset) -> dict[str, Any]:
    """As the plain dict that PySpark makes JSON of, its keys in a fixed order."""
    return {
        "asOf": dict(sorted(offset.as_of_ms.items())),
        "created": offset.created_ms,
        "from": _texts(offset.began),
        "shards": _texts(offset.shards),
        "stream": offset.stream,
        "t": offset.aligned_ms,
        "v": VERSION,
    }


def decode_offset(value: object) -> Offset:
    """From that dict. Raises: OffsetRefused for a newer version, or what is no offset of ours."""
    if isinstance(value, Mapping) and isinstance(value.get("v"), int) and value["v"] > VERSION:
        raise OffsetRefused(
            f"the checkpoint is of version {value['v']}, written by a newer kclrun; this one knows"
            f" {VERSION}\nTo go on: install that kclrun again, or start with a new checkpoint"
        )
    try:
        wire = msgspec.convert(value, _Wire)
    except msgspec.ValidationError as error:
        raise OffsetRefused(
            f"the checkpoint does not hold an offset of the kclrun source ({error})\n"
            "Checkpoints of other connectors cannot be continued: use a new checkpoint location"
        ) from None
    return Offset(
        stream=wire.stream,
        created_ms=wire.created,
        shards=_positions(wire.shards),
        began=_positions(wire.began),
        aligned_ms=wire.t,
        as_of_ms=wire.as_of,
    )


def _texts(positions: Mapping[str, Position]) -> dict[str, str]:
    return {shard_id: str(positions[shard_id]) for shard_id in sorted(positions)}


def _positions(texts: Mapping[str, str]) -> dict[str, Position]:
    return {shard_id: parse_position(text) for shard_id, text in texts.items()}
