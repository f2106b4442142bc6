"""Decides which shards, times and rows a batch read with filters (`where`) can leave out.

Pure; it knows PySpark's filters by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from kclrun.model.record import Record
from kclrun.spark.options import SourceSettings, Start, StartKind

# Far more than the jitter of arrival times, and only little extra data to read.
_MARGIN_MS: Final = 60_000
_HOUR_MS: Final = 3_600_000
_LATER: Final = frozenset({"GreaterThan", "GreaterThanOrEqual", "EqualTo"})
# The text columns, and the field of `Narrowing` for each.
_TEXTS: Final = {"stream": "streams", "shardId": "shard_ids", "partitionKey": "partition_keys"}
_EARLIER: Final = frozenset({"LessThan", "LessThanOrEqual", "EqualTo"})


class Narrowing(msgspec.Struct, frozen=True):
    """The values that a row must have; None is anything. Times in milliseconds, without the margin.

    Spark judges every row again, so a filter may leave out too little and never too much. Arrival
    times need not grow within a shard, so times have a margin. A partition key does not determine a
    shard: a producer may have given an explicit hash key, and an aggregate travels under the key of
    another record. So a filter on the partition key leaves out rows only.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    shard_ids: frozenset[str] | None = None
    partition_keys: frozenset[str] | None = None
    streams: frozenset[str] | None = None

    def narrowed(
        self, settings: SourceSettings, now_ms: int, created_ms: int, retention_hours: int
    ) -> SourceSettings:
        """The settings of a read that returns all matching rows.

        A start is narrowed only to times that the stream certainly holds. Other times are before
        its beginning or after its end, and the settings name these as they are.
        """
        start, end = settings.start, settings.end
        oldest_ms = max(created_ms, now_ms - retention_hours * _HOUR_MS) + _MARGIN_MS
        if self.from_ms is not None and start.kind in {StartKind.EARLIEST, StartKind.TIMESTAMP}:
            at_ms = min(self.from_ms, now_ms) - _MARGIN_MS
            is_later = start.kind is StartKind.EARLIEST or at_ms > start.timestamp_ms
            if at_ms > oldest_ms and is_later:
                start = Start(StartKind.TIMESTAMP, at_ms)
        if self.to_ms is not None and end.kind in {StartKind.LATEST, StartKind.TIMESTAMP}:
            at_ms = self.to_ms + _MARGIN_MS
            is_earlier = end.kind is StartKind.LATEST or at_ms < end.timestamp_ms
            if oldest_ms < at_ms < now_ms - _MARGIN_MS and is_earlier:
                end = Start(StartKind.TIMESTAMP, at_ms)
        return msgspec.structs.replace(settings, start=start, end=end)

    def reads(self, stream: str, shard_id: str) -> bool:
        """Whether rows of this shard of this stream can match."""
        is_of_stream = self.streams is None or stream in self.streams
        return is_of_stream and (self.shard_ids is None or shard_id in self.shard_ids)

    def left(self, records: Sequence[Record]) -> Sequence[Record]:
        """The records that can match; aggregates must be opened."""
        if self.partition_keys is None:
            return records
        return [each for each in records if each.partition_key in self.partition_keys]


def narrowing_of(filters: Iterable[Any]) -> Narrowing:
    """The narrowing by all of the filters together; an unknown filter narrows nothing."""
    found = Narrowing()
    for each in filters:
        kind = type(each).__name__
        column: tuple[str, ...] = getattr(each, "attribute", ())
        if len(column) == 1 and column[0] in _TEXTS:
            values = _texts(kind, each)
            if values is not None:
                found = _with_texts(found, _TEXTS[column[0]], values)
        elif column == ("approximateArrivalTimestamp",):
            at_ms = _instant_ms(each)
            if at_ms is not None and kind in _LATER:
                found = msgspec.structs.replace(found, from_ms=max(at_ms, found.from_ms or at_ms))
            if at_ms is not None and kind in _EARLIER:
                to_ms = at_ms if found.to_ms is None else min(at_ms, found.to_ms)
                found = msgspec.structs.replace(found, to_ms=to_ms)
    return found


def _with_texts(found: Narrowing, field: str, values: frozenset[str]) -> Narrowing:
    former: frozenset[str] | None = getattr(found, field)
    both = values if former is None else former & values
    return msgspec.structs.replace(found, **{field: both})


def _texts(kind: str, given: Any) -> frozenset[str] | None:
    if kind == "EqualTo":
        values = (given.value,)
    elif kind == "In":
        values = given.value
    else:
        return None
    if not all(isinstance(each, str) for each in values):
        return None
    return frozenset(values)


def _instant_ms(given: Any) -> int | None:
    value = getattr(given, "value", None)
    # A time without a zone is in the session's zone, which is not known here.
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return int(value.timestamp() * 1000)
