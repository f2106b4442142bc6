"""Sessions of aircraft, and the delay that one flight passes on to the next: state by tail number.

Holds: `AircraftSessions`, the processor; `flights_in_order`, its records; `expected_sessions`, the
same straight from the records.
Rule: the rows follow from the records of each key in their order, whatever the sizes of batches: no
clock, no timer, no random number. So it may run on a fleet and on Spark, and be run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from kclrun import Checkpointer, Context, Record, RecordBatch, RecordProcessor

from . import flights

__all__ = ["GAP_S", "AircraftSessions", "Session", "expected_sessions", "flights_in_order"]

# An aircraft that stood for six hours has rested: an earlier delay does not reach its next flight.
GAP_S: Final = 6 * 3600
_MISSING: Final = "NA"
_FIELD: Final = {name: number for number, name in enumerate(flights.FIELDS)}


class Session(msgspec.Struct, frozen=True):
    """Flights of one aircraft with less than `GAP_S` between two scheduled departures.

    Times are in seconds since 1970, delays in minutes. `late_min` adds up the late departures, and
    `carried_min` the part of them that the flight before had already. `last_min` is the delay of
    the last departure.
    """

    since_s: int
    until_s: int
    flights: int = 1
    late_min: int = 0
    carried_min: int = 0
    last_min: int = 0

    def followed_by(self, at_s: int, delay_min: int) -> Session:
        """The session with one more departure."""
        late = max(0, delay_min)
        return Session(
            self.since_s,
            at_s,
            self.flights + 1,
            self.late_min + late,
            self.carried_min + min(self.last_min, late),
            late,
        )

    def row(self, tail: str) -> dict[str, Any]:
        """The row of a session that is over."""
        return {"tailnum": tail, **msgspec.structs.asdict(self)}


class AircraftSessions(RecordProcessor):
    """Keeps the session of each aircraft, and emits it when the next one begins.

    Data: one line of flights.csv; the partition key is the aircraft. Cancelled flights, and those
    without a tail number, count in no session. Rows: `{tailnum, since_s, until_s, flights,
    late_min, carried_min, last_min}`. Needs `state`.

    >>> from kclrun.testing import run_processor
    >>> line = "2013,1,{},517,515,{},830,819,11,UA,1545,N14228,EWR,IAH,227,1400,{},15,"
    >>> def flight(day: int, delay: int, hour: int) -> tuple[str, str]:
    ...     return "N14228", line.format(day, delay, hour) + f"2013-01-0{day}T{hour:02}:00:00Z"
    >>> run = run_processor(AircraftSessions, [flight(1, 30, 5), flight(1, 20, 9), flight(2, 0, 5)])
    >>> [(row["flights"], row["late_min"], row["carried_min"]) for row in run.rows]
    [(2, 50, 20)]
    """

    def initialize(self, context: Context) -> None:
        self._context = context
        self._sessions = context.table("session", Session)

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for record in batch:
            departure = _departure(record)
            if departure is None:
                continue
            at_s, delay_min = departure
            session = self._sessions.get(record)
            if session is not None and session.until_s <= at_s < session.until_s + GAP_S:
                self._sessions[record] = session.followed_by(at_s, delay_min)
                continue
            if session is not None:
                self._context.emit(session.row(record.partition_key))
            late = max(0, delay_min)
            self._sessions[record] = Session(at_s, at_s, 1, late, 0, late)


def _departure(record: Record) -> tuple[int, int] | None:
    """When the flight was to leave, and how late it was; None for one that counts in no session.
    Raises: ValueError that names the record, never its content."""
    fields = record.data.decode().rstrip("\r\n").split(",")
    if len(fields) != len(flights.FIELDS):
        raise ValueError(
            f"record {record.position}: {len(fields)} fields; a flight has {len(flights.FIELDS)}"
        )
    if _MISSING in (fields[_FIELD["tailnum"]], fields[_FIELD["dep_delay"]]):
        return None
    return _scheduled_s(fields), int(fields[_FIELD["dep_delay"]])


def _scheduled_s(fields: list[str]) -> int:
    hour = datetime.fromisoformat(fields[_FIELD["time_hour"]])
    return int(hour.timestamp()) + 60 * int(fields[_FIELD["minute"]])


def flights_in_order(count: int, copies: int = 1) -> Iterator[tuple[str, bytes]]:
    """The first `count` flights by scheduled departure: (partition key, data). Each flight appears
    `copies` times, with the keys of different aircraft."""
    read = sorted(
        (
            (_scheduled_s(data.decode().split(",")), key, data)
            for key, data in flights.demo_records()
        ),
        key=lambda each: each[0],
    )
    for _, key, data in itertools.islice(read, count):
        for copy in range(copies):
            yield (f"{key}/{copy}" if copy else key), data


def expected_sessions(
    records: Iterable[tuple[str, bytes]],
) -> tuple[list[dict[str, Any]], dict[str, Session]]:
    """The rows that these records must leave, in any order, and the sessions that are still open.

    Computed without kclrun: each aircraft's departures are cut at the gaps, and each part is summed
    up as a whole.
    """
    departures: dict[str, list[tuple[int, int]]] = {}
    for key, data in records:
        fields = data.decode().split(",")
        if _MISSING not in (fields[_FIELD["tailnum"]], fields[_FIELD["dep_delay"]]):
            departure = (_scheduled_s(fields), max(0, int(fields[_FIELD["dep_delay"]])))
            departures.setdefault(key, []).append(departure)
    rows, still_open = [], {}
    for tail, flown in departures.items():
        cuts = [
            number
            for number, (one, other) in enumerate(itertools.pairwise(flown), 1)
            if not 0 <= other[0] - one[0] < GAP_S
        ]
        parts = [flown[a:b] for a, b in itertools.pairwise((0, *cuts, len(flown)))]
        sessions = [_summed(part) for part in parts]
        rows += [each.row(tail) for each in sessions[:-1]]
        still_open[tail] = sessions[-1]
    return rows, still_open


def _summed(flown: list[tuple[int, int]]) -> Session:
    delays = [delay for _, delay in flown]
    carried = sum(min(pair) for pair in itertools.pairwise(delays))
    return Session(flown[0][0], flown[-1][0], len(flown), sum(delays), carried, delays[-1])
