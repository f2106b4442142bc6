"""Where reading a shard begins, as GetShardIterator takes it."""

from __future__ import annotations

import enum

import msgspec

from kclrun.model.time import WallTime

__all__ = ["IteratorType", "StartPoint"]


class IteratorType(enum.Enum):
    """The five starts that GetShardIterator knows."""

    TRIM_HORIZON = "TRIM_HORIZON"
    LATEST = "LATEST"
    AT_TIMESTAMP = "AT_TIMESTAMP"
    AT_SEQUENCE_NUMBER = "AT_SEQUENCE_NUMBER"
    AFTER_SEQUENCE_NUMBER = "AFTER_SEQUENCE_NUMBER"


class StartPoint(msgspec.Struct, frozen=True):
    """A type, and the sequence number or time that it needs."""

    kind: IteratorType
    sequence_number: str | None = None
    timestamp: WallTime | None = None
