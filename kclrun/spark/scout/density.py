"""How densely a shard's records lie, from pages of them: counts a second of arrival time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kclrun.model.record import Record
from kclrun.spark.scout.stretch import RECORD_OVERHEAD_BYTES

__all__ = ["Density", "arrival_ms", "density_of"]

# Arrival times have milliseconds: records of one instant count as of one millisecond.
_SPAN_MIN_S: Final = 0.001


class Density(msgspec.Struct, frozen=True):
    """Records and bytes a second, and the mean size of a record."""

    records_per_second: float
    bytes_per_second: float
    record_bytes: float


def arrival_ms(record: Record) -> int:
    """A record's arrival in whole milliseconds, as timestamps of positions are."""
    return round(record.approximate_arrival_timestamp * 1000)


def density_of(records: Sequence[Record], span_s: float | None = None) -> Density | None:
    """The density of one page, over its own span or the one given; None where one record says
    nothing about a rate."""
    if not records:
        return None
    size = sum(len(record.data) + RECORD_OVERHEAD_BYTES for record in records)
    steps = len(records)
    if span_s is None:
        steps -= 1
        span_s = (arrival_ms(records[-1]) - arrival_ms(records[0])) / 1000
    if steps < 1:
        return None
    mean = size / len(records)
    rate = steps / max(_SPAN_MIN_S, span_s)
    return Density(rate, rate * mean, mean)
