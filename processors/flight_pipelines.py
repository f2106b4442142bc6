"""Delays by airport and hour on Spark: a watermarked aggregation, in append mode.

Holds: `hourly_delay`, the pipeline; `expected_hourly`, the same straight from the file; `summary`.
`demo_records` is the source it is shown with.
Rule: an hour is written once, complete, when the watermark has passed its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's own documents

from . import flights
from .flight_stream import demo_records, flight_rows, scheduled_at

__all__ = [
    "DELAY",
    "HourlyDelay",
    "demo_records",
    "expected_hourly",
    "hourly_delay",
    "hours",
    "summary",
]

# How far the shards may be apart in event time. In the demo a year passes in some 20 s, so a
# second of arrivals is 18 days. Records of one request, and the 100 a shard that may wait to be
# packed, are a day or two. What resharding adds is a batch: a child's first records are read one
# batch after the other shards' records of the same seconds. 60 days are 55,000 flights;
# `maxRecordsPerTrigger` keeps a batch well below that (it counts an aggregate as one record).
DELAY: Final = "60 days"

_FLIGHT: Final = {name: number for number, name in enumerate(flights.FIELDS)}
_MISSING: Final = "NA"
_SHOWN: Final = 10
_WRITTEN: Final = (
    "hour TIMESTAMP, origin STRING, flights LONG, departed LONG, cancelled LONG, delay_sum LONG"
)

Key = tuple[str, str]  # start of the hour (ISO 8601, UTC), airport


class HourlyDelay(NamedTuple):
    """Flights of an airport scheduled for one hour; delays in minutes, early ones below zero."""

    flights: int = 0
    departed: int = 0
    cancelled: int = 0
    delay_sum: int = 0

    def plus(self, other: HourlyDelay) -> HourlyDelay:
        return HourlyDelay(*(mine + its for mine, its in zip(self, other, strict=True)))


def hourly_delay(records: DataFrame, options: Mapping[str, Any]) -> DataFrame:
    """The delays of each airport and hour of scheduled departure, for append mode.

    Options: `delay` of the watermark (default `DELAY`; a record older than the watermark is left
    out, and counted by Spark as `numRowsDroppedByWatermark`); `malformed` as in `flight_rows`.
    Columns: `hour` timestamp (its start), `origin`, and, as long, `flights`, `departed`,
    `cancelled`, `delay_sum` (minutes; no row without flights). Raises: ValueError for `malformed`.
    """
    totals = (
        flight_rows(records, options)
        .withWatermark("scheduled", options.get("delay", DELAY))
        .groupBy(F.window("scheduled", "1 hour"), "origin")
        .agg(
            F.count("origin").alias("flights"),
            F.count("dep_delay").alias("departed"),
            F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("delay_sum"),
        )
    )
    return (
        # A heartbeat has no origin and counts for nothing. A filter on `origin` would not do: Spark
        # moves it below the watermark, which then never sees a heartbeat.
        totals.where(F.col("flights") > 0).select(
            F.col("window.start").alias("hour"),
            *("origin", "flights", "departed"),
            (F.col("flights") - F.col("departed")).alias("cancelled"),
            "delay_sum",
        )
    )


def expected_hourly(records: Iterable[tuple[str, bytes]] | None = None) -> dict[Key, HourlyDelay]:
    """The result that `hourly_delay` must have for these records (all flights), computed from their
    lines."""
    sums: defaultdict[Key, HourlyDelay] = defaultdict(HourlyDelay)
    for _, data in flights.demo_records() if records is None else records:
        line = data.decode()
        fields = line.split(",")
        hour = scheduled_at(line).strftime("%Y-%m-%dT%H:00:00Z")
        key = (hour, fields[_FLIGHT["origin"]])
        delay = fields[_FLIGHT["dep_delay"]]
        flight = HourlyDelay(1, 0, 1, 0) if delay == _MISSING else HourlyDelay(1, 1, 0, int(delay))
        sums[key] = sums[key].plus(flight)
    return dict(sums)


def hours(output_folder: Path) -> dict[Key, HourlyDelay]:
    """Each hour and airport, from the Parquet in a folder, by the active Spark session.

    Raises: ValueError if an hour is there twice, which append mode rules out.
    """
    written = SparkSession.active().read.schema(_WRITTEN).parquet(str(output_folder))
    rows = written.select(F.unix_seconds("hour"), "origin", *HourlyDelay._fields).collect()
    found = {(_hour(row[0]), row[1]): HourlyDelay(*row[2:]) for row in rows}
    if len(found) != len(rows):
        raise ValueError(f"{output_folder}: {len(rows)} rows for {len(found)} hours and airports")
    return found


def summary(output_folder: Path) -> str:
    """The ten hours that cost most, and each airport's year, for the end of the demo."""
    found = hours(output_folder)
    worst = sorted(found.items(), key=lambda item: (-item[1].delay_sum, item[0]))[:_SHOWN]
    airports: defaultdict[str, HourlyDelay] = defaultdict(HourlyDelay)
    for (_, origin), delay in found.items():
        airports[origin] = airports[origin].plus(delay)
    count = sum(delay.flights for delay in airports.values())
    return "\n".join(
        [
            f"Departure delays by airport and hour; {count:,} flights, {len(found):,} rows.",
            "The ten hours with the most minutes lost, then each airport:",
            "",
            "Airport  Hour (UTC)        Mean (min)  Departed  Cancelled",
            "-------  ----------------  ----------  --------  ---------",
            *(_line(origin, hour[:16].replace("T", " "), d) for (hour, origin), d in worst),
            "",
            *(_line(origin, "the whole stream", d) for origin, d in sorted(airports.items())),
        ]
    )


def _hour(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:00:00Z")


def _line(origin: str, hour: str, delay: HourlyDelay) -> str:
    mean_min = delay.delay_sum / delay.departed if delay.departed else 0.0
    return (
        f"{origin:<7}  {hour:<16}  {mean_min:>10.1f}  {delay.departed:>8,}  {delay.cancelled:>9,}"
    )
