"""The longest chain of late departures of each aircraft on Spark: state by key, in RocksDB.

Holds: `late_chains`, the pipeline; `expected_chains`, the same straight from the file; `summary`.
Rule: an aircraft's flights are taken in the order of the stream, however batches cut it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name it has in Spark's own documents
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from . import flights
from .flight_stream import demo_records, flight_rows, scheduled_at, scheduled_flights

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LATE_MINUTES",
    "Chain",
    "Departure",
    "demo_records",
    "expected_chains",
    "late_chains",
    "longest_chains",
    "summary",
]

# The airlines' own measure: a flight counts as on time up to a quarter of an hour.
LATE_MINUTES: Final = 15
_SHOWN: Final = 10
_MISSING: Final = "NA"
_FLIGHT: Final = {name: number for number, name in enumerate(flights.FIELDS)}
_STATE: Final = "late_flights INT, since_s LONG, delay_sum LONG, longest INT"
_WRITTEN: Final = (
    "tailnum STRING, late_flights INT, since TIMESTAMP, until TIMESTAMP, delay_sum LONG"
)
_ROWS: Final = "tailnum STRING, late_flights INT, since_s LONG, until_s LONG, delay_sum LONG"


class Departure(NamedTuple):
    """A flight that left: when it was to, in seconds since 1970, and how late it was."""

    scheduled_s: int
    delay_min: int


class Chain(NamedTuple):
    """Late departures in a row: how many, scheduled from when to when, and their delays' sum.

    Of chains as long as each other, an aircraft's first counts. Times are seconds since 1970.
    """

    late_flights: int
    since_s: int
    until_s: int
    delay_sum: int


class _Progress(NamedTuple):
    """An aircraft between two flights: its chain now (of none, if 0), and its longest so far."""

    late_flights: int = 0
    since_s: int = 0
    delay_sum: int = 0
    longest: int = 0

    def after(self, departure: Departure, late_min: int) -> _Progress:
        if departure.delay_min <= late_min:
            return _Progress(longest=self.longest)
        count = self.late_flights + 1
        return _Progress(
            count,
            self.since_s if self.late_flights else departure.scheduled_s,
            self.delay_sum + departure.delay_min,
            max(self.longest, count),
        )


def late_chains(records: DataFrame, options: Mapping[str, Any]) -> DataFrame:
    """A row whenever an aircraft's longest chain of late departures grows, for append mode.

    Options: `late_minutes`, a departure delayed by more is late (default `LATE_MINUTES`);
    `malformed` as in `flight_rows`. Columns: `tailnum`, `late_flights` int, `since` and `until`
    timestamp (scheduled departures of its first and last flight), `delay_sum` long (minutes). The
    answer for an aircraft is its row with the most `late_flights`; each number comes once.

    A cancelled flight does not depart: it neither ends a chain nor adds to it. Flights without a
    tail number, in this data all cancelled, belong to no aircraft; each progress of the query
    counts them (`no_tailnum`). Raises: ValueError for options out of range.
    """
    late_min = int(options.get("late_minutes", LATE_MINUTES))
    if late_min < 0:
        raise ValueError(f"options.late_minutes: at least 0, got {late_min}")
    departures = (
        flight_rows(records, options)
        .where("tailnum IS NOT NULL AND dep_delay IS NOT NULL")
        .select(
            "tailnum",
            F.unix_seconds("scheduled").alias("scheduled_s"),
            *("dep_delay", "sequenceNumber", "subSequenceNumber"),
        )
    )
    # Rows instead of pandas would be a quarter faster, but came with Spark 4.1 only.
    growths = departures.groupBy("tailnum").transformWithStateInPandas(
        _LateChains(late_min), _ROWS, outputMode="Append", timeMode="None"
    )
    return growths.select(
        "tailnum",
        "late_flights",
        F.timestamp_seconds("since_s").alias("since"),
        F.timestamp_seconds("until_s").alias("until"),
        "delay_sum",
    )


class _LateChains(StatefulProcessor):
    """Keeps one `_Progress` an aircraft. Spark makes a copy for each task."""

    def __init__(self, late_min: int) -> None:
        self._late_min = late_min

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("progress", _STATE)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803 - Spark's name
    ) -> Iterator[pd.DataFrame]:
        """Called once a batch with all rows of an aircraft in it, in any order."""
        import pandas as pd

        progress = _Progress(*(self._state.get() or ()))
        grown: list[Chain] = []
        for departure in _in_order(rows):
            former, progress = progress, progress.after(departure, self._late_min)
            if progress.longest > former.longest:
                grown.append(_chain(progress, departure))
        self._state.update(tuple(progress))
        if grown:
            yield pd.DataFrame([(key[0], *chain) for chain in grown], columns=_columns())

    def close(self) -> None:
        """Nothing is held but the state, which is Spark's."""


def _in_order(frames: Iterable[pd.DataFrame]) -> list[Departure]:
    """The departures in the order of the stream, by sequence number: Spark's shuffle keeps no
    order."""
    rows = [
        (len(number), number, sub, Departure(int(scheduled_s), int(delay_min)))
        for frame in frames
        for number, sub, scheduled_s, delay_min in zip(
            frame["sequenceNumber"],
            frame["subSequenceNumber"],
            frame["scheduled_s"],
            frame["dep_delay"],
            strict=True,
        )
    ]
    return [departure for *_, departure in sorted(rows)]


def _chain(progress: _Progress, last: Departure) -> Chain:
    return Chain(progress.late_flights, progress.since_s, last.scheduled_s, progress.delay_sum)


def _columns() -> list[str]:
    return ["tailnum", *Chain._fields]


def expected_chains(
    records: Iterable[tuple[str, bytes]] | None = None, late_minutes: int = LATE_MINUTES
) -> dict[str, Chain]:
    """The result that `longest_chains` must have for these records in their order (all flights).

    Computed from their lines. An aircraft that was never late is not in it.
    """
    departures: dict[str, list[Departure]] = {}
    for _, data in scheduled_flights() if records is None else records:
        line = data.decode()
        fields = line.split(",")
        tail, delay = fields[_FLIGHT["tailnum"]], fields[_FLIGHT["dep_delay"]]
        if _MISSING not in (tail, delay):
            departure = Departure(int(scheduled_at(line).timestamp()), int(delay))
            departures.setdefault(tail, []).append(departure)
    longest: dict[str, Chain] = {}
    for tail, flown in departures.items():
        chains = _runs(flown, late_minutes)
        if chains:
            longest[tail] = max(chains, key=lambda chain: chain.late_flights)
    return longest


def longest_chains(output_folder: Path) -> dict[str, Chain]:
    """Each aircraft's longest chain, from the Parquet in a folder, by the active Spark session."""
    chain = F.struct(
        "late_flights",
        F.unix_seconds("since").alias("since_s"),
        F.unix_seconds("until").alias("until_s"),
        "delay_sum",
    )
    written = SparkSession.active().read.schema(_WRITTEN).parquet(str(output_folder))
    longest = written.groupBy("tailnum").agg(F.max_by(chain, "late_flights").alias("chain"))
    return {row["tailnum"]: Chain(*row["chain"]) for row in longest.collect()}


def summary(output_folder: Path) -> str:
    """The ten longest chains as a table, for the end of the demo."""
    chains = longest_chains(output_folder)
    first = sorted(chains.items(), key=lambda item: (-item[1].late_flights, item[0]))[:_SHOWN]
    lines = [
        f"{tail:<8}  {chain.late_flights:>13}  {_time(chain.since_s):<16}"
        f"  {_time(chain.until_s):<16}  {chain.delay_sum / chain.late_flights:>10.1f}"
        for tail, chain in first
    ]
    return "\n".join(
        [
            f"Longest chains of late departures; {len(chains):,} aircraft were late at all.",
            "",
            "Aircraft  Late in a row  From (UTC)        To (UTC)          Mean (min)",
            "--------  -------------  ----------------  ----------------  ----------",
            *lines,
        ]
    )


def _runs(flown: Sequence[Departure], late_min: int) -> list[Chain]:
    """All chains in a row of departures: another way to them than flight by flight."""
    runs = itertools.groupby(flown, key=lambda departure: departure.delay_min > late_min)
    late = [list(run) for is_late, run in runs if is_late]
    return [
        Chain(len(run), run[0].scheduled_s, run[-1].scheduled_s, sum(d.delay_min for d in run))
        for run in late
    ]


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
