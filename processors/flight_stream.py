"""The flights as a stream on Spark: its records, and a DataFrame of them as rows of flights.

Holds: `demo_records`, the flights in the order of their scheduled departures, the last with a
heartbeat; `flight_rows`, the same read back from a DataFrame of records.
Rule: a line that is neither fails the query or is counted: option `malformed`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's own documents

from . import flights

__all__ = ["HEARTBEAT_AT", "demo_records", "flight_rows", "scheduled_at", "scheduled_flights"]

# The last flight is scheduled for the first hours of 2014 (UTC). The year that follows is room for
# the delay of the watermark: an hour closes when the watermark has passed it, not the heartbeat.
HEARTBEAT_AT: Final = "2015-01-01T00:00:00Z"
_HEARTBEAT: Final = "heartbeat,"
# The heartbeat is a second line of a record, so each record is a flight and is counted as one.
_LINE_ENDS: Final = rf"\n(?={_HEARTBEAT})"
# No batch may hold the heartbeat and leave a flight to a later batch. While the source is behind, a
# batch ends in all shards at the same time of arrival, and that time waits for the children of
# ended shards; at the tip the shards' ends are within one poll, a second. So the last flight, with
# the heartbeat, arrives three polls after all others.
_PAUSE: Final = timedelta(seconds=3)

_FIELD: Final = {name: number for number, name in enumerate(flights.FIELDS)}
_TEXTS: Final = ("carrier", "tailnum", "origin", "dest")
# Where Spark puts a line that does not fit the columns before it.
_CORRUPT: Final = "corrupt"
_TYPES: Final = (
    dict.fromkeys(flights.FIELDS, "INT")
    | dict.fromkeys((*_TEXTS, _CORRUPT), "STRING")
    | {"time_hour": "TIMESTAMP"}
)
_SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in _TYPES.items())
_MALFORMED: Final = ("fail", "count")


def demo_records() -> Iterator[tuple[str, bytes] | timedelta]:
    """All flights by scheduled departure, for `embedded.fill.source`: the last after a pause, and
    with a heartbeat in the same record.

    The file has them by month (1, 10, 11, 12, 2 …), an order that no producer sends. Only a
    later record moves a watermark, so a stream that has ended never closes its last windows. A
    producer that goes on to send heartbeats closes them.
    """
    *flown, (key, last) = scheduled_flights()
    yield from flown
    yield _PAUSE
    yield key, b"%s\n%s" % (last.rstrip(), f"{_HEARTBEAT}{HEARTBEAT_AT}".encode())


def scheduled_flights() -> list[tuple[str, bytes]]:
    """The records of `flights.demo_records`, by scheduled departure, then in their order there."""
    return sorted(flights.demo_records(), key=lambda record: scheduled_at(record[1].decode()))


def scheduled_at(line: str) -> datetime:
    """When the flight of a line was to leave; `time_hour` is the hour of it, in UTC."""
    fields = line.split(",")
    hour = _hour(fields[_FIELD["time_hour"]])
    return hour + timedelta(minutes=int(fields[_FIELD["minute"]]))


def flight_rows(records: DataFrame, options: Mapping[str, Any]) -> DataFrame:
    """The flights and heartbeats of `records` as rows: a record is a flight, a heartbeat, or a
    flight and in its next line a heartbeat.

    Columns: `scheduled` (timestamp; of a heartbeat, the time in its line), `origin`, `tailnum`,
    `dep_delay` (minutes, null for a cancelled flight); all but `scheduled` null in a heartbeat;
    `sequenceNumber`, `subSequenceNumber`. Option `malformed`, for a line that is neither: `fail`
    (the default) fails the query with its position, never its content; `count` leaves it out. Each
    progress of the query holds, as `observedMetrics.records`, the numbers of `flights`, of those
    without a tail number (`no_tailnum`), of `heartbeats` and of `malformed` records.

    Raises: ValueError for another value of `malformed`.
    """
    malformed = options.get("malformed", _MALFORMED[0])
    if malformed not in _MALFORMED:
        raise ValueError(f"options.malformed: expected fail or count, got {malformed!r}")
    rows = _read(records)
    if malformed == "fail":
        rows = rows.withColumn("scheduled", F.coalesce("scheduled", _refusal()))
    is_flight = F.col("scheduled").isNotNull() & F.col("origin").isNotNull()
    counts = {
        "flights": is_flight,
        "no_tailnum": is_flight & F.col("tailnum").isNull(),
        "heartbeats": F.col("scheduled").isNotNull() & F.col("origin").isNull(),
        "malformed": F.col("scheduled").isNull(),
    }
    observed = [F.count_if(condition).alias(name) for name, condition in counts.items()]
    return (
        rows.observe("records", *observed)
        .where(F.col("scheduled").isNotNull())
        .select(
            *("scheduled", "origin", "tailnum", "dep_delay"),
            *("sequenceNumber", "subSequenceNumber"),
        )
    )


def _read(records: DataFrame) -> DataFrame:
    """Each line with the columns of a flight; `scheduled` is null where it is malformed."""
    text = F.regexp_replace(F.col("data").cast("string"), r"[\r\n]+$", "")
    line = F.explode(F.split(text, _LINE_ENDS))
    csv = {"nullValue": "NA", "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    lines = records.select("*", line.alias("line"))
    rows = lines.select("*", F.from_csv("line", _SCHEMA, csv).alias("flight"))
    # from_csv reads the first of several lines and ignores the others.
    is_flight = F.col(f"flight.{_CORRUPT}").isNull() & ~F.contains("line", F.lit("\n"))
    is_flight &= F.col("flight.origin").isNotNull()
    departs_at_s = F.unix_seconds("flight.time_hour") + 60 * F.col("flight.minute")
    beat = F.regexp_replace("line", f"^{_HEARTBEAT}", "")
    beats_at = F.try_to_timestamp(beat)
    scheduled = F.when(F.startswith("line", F.lit(_HEARTBEAT)), beats_at).when(
        is_flight, F.timestamp_seconds(departs_at_s)
    )
    flight = [
        F.when(is_flight, F.col(f"flight.{name}")).alias(name)
        for name in ("origin", "tailnum", "dep_delay")
    ]
    return rows.select(
        scheduled.alias("scheduled"), *flight, "shardId", "sequenceNumber", "subSequenceNumber"
    )


def _refusal() -> Column:
    """Fails the query where it is evaluated, which is at a record without `scheduled` only."""
    position = F.concat_ws("/", "shardId", "sequenceNumber", "subSequenceNumber")
    message = F.concat(F.lit("record "), position, F.lit(" is neither a flight nor a heartbeat"))
    return F.raise_error(message).cast("timestamp")


# Flights come hour by hour.
@functools.lru_cache(maxsize=24)
def _hour(text: str) -> datetime:
    return datetime.fromisoformat(text)
