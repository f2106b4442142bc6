"""The flights as a stream, and what the Spark pipelines are measured against: plain Python."""

import csv
import io
import itertools
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest

from processors import flight_pipelines, flight_stream, flights, late_chains
from processors.flight_pipelines import HourlyDelay
from processors.late_chains import Chain

pytestmark = pytest.mark.seconds

LINE = "2013,1,1,517,515,{delay},830,819,11,UA,1545,{tail},{origin},IAH,227,1400,5,{minute},{hour}"
SIX = int(datetime(2013, 1, 1, 6, tzinfo=UTC).timestamp())


def flight(
    minute: int = 0, delay: str = "0", tail: str = "N1", origin: str = "EWR", hour: str = "06"
) -> tuple[str, bytes]:
    when = f"2013-01-01T{hour}:00:00Z"
    line = LINE.format(delay=delay, tail=tail, origin=origin, minute=minute, hour=when)
    return tail, line.encode()


def delays(*minutes: str) -> Iterable[tuple[str, bytes]]:
    return [flight(minute, delay) for minute, delay in enumerate(minutes)]


def test_the_demo_gives_all_flights_by_scheduled_departure_and_tells_the_time_with_the_last():
    *records, pause, (key, data) = flight_stream.demo_records()
    last, heartbeat = data.split(b"\n")
    records.append((key, last))

    scheduled = [flight_stream.scheduled_at(data.decode()) for _, data in records]
    assert len(records) == 336_776
    assert records == flight_stream.scheduled_flights()
    assert scheduled[0] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)
    assert all(earlier <= later for earlier, later in itertools.pairwise(scheduled))
    assert isinstance(pause, timedelta)
    assert heartbeat == b"heartbeat,2015-01-01T00:00:00Z"
    # Room for the delay of the watermark after the last hour.
    assert datetime.fromisoformat(flight_stream.HEARTBEAT_AT) - scheduled[-1] > timedelta(days=350)


def test_expected_hours_count_left_and_cancelled_flights_by_airport_and_scheduled_hour():
    records = [
        flight(delay="5"),
        flight(59, "-7"),
        flight(30, "NA"),
        flight(0, "1", hour="07"),
        flight(0, "NA", origin="JFK"),
    ]

    assert flight_pipelines.expected_hourly(records) == {
        ("2013-01-01T06:00:00Z", "EWR"): HourlyDelay(3, 2, 1, -2),
        ("2013-01-01T07:00:00Z", "EWR"): HourlyDelay(1, 1, 0, 1),
        ("2013-01-01T06:00:00Z", "JFK"): HourlyDelay(1, 0, 1, 0),
    }


@pytest.mark.long
def test_expected_hours_add_up_to_what_the_columns_of_the_file_say():
    found = flight_pipelines.expected_hourly().values()

    with zipfile.ZipFile(flights._data_folder() / "flights.csv.zip") as packed:
        rows = list(csv.DictReader(io.StringIO(packed.read("flights.csv").decode())))
    left = [int(row["dep_delay"]) for row in rows if row["dep_delay"] != "NA"]
    assert sum(hour.flights for hour in found) == len(rows) == 336_776
    assert sum(hour.departed for hour in found) == len(left)
    assert sum(hour.delay_sum for hour in found) == sum(left)


def test_a_chain_is_broken_by_a_flight_on_time_and_not_by_a_cancelled_one():
    records = delays("16", "NA", "20", "15", "99")

    assert late_chains.expected_chains(records) == {"N1": Chain(2, SIX, SIX + 120, 36)}


def test_of_chains_as_long_the_first_counts():
    records = delays("20", "30", "0", "40", "50")

    assert late_chains.expected_chains(records)["N1"] == Chain(2, SIX, SIX + 60, 50)


def test_late_is_later_than_the_given_minutes():
    records = delays("30", "31", "32", "30")

    chain = Chain(2, SIX + 60, SIX + 120, 63)
    assert late_chains.expected_chains(records, 30) == {"N1": chain}


def test_aircraft_never_late_and_flights_without_an_aircraft_have_no_chain():
    records = [flight(delay="15"), flight(delay="99", tail="NA")]

    assert late_chains.expected_chains(records) == {}


@pytest.mark.parametrize("late_minutes", [-1, "soon"])
def test_minutes_out_of_range_are_refused_before_anything_is_planned(late_minutes):
    with pytest.raises(ValueError):
        late_chains.late_chains(None, {"late_minutes": late_minutes})


def test_another_way_with_malformed_records_is_refused_before_anything_is_planned():
    with pytest.raises(ValueError, match=r"options\.malformed: expected fail or count"):
        flight_pipelines.hourly_delay(None, {"malformed": "drop"})
