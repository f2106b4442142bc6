"""The time of a test: when its records arrive, and what is said of times that do not fit it."""

import time
import warnings
from datetime import UTC, datetime

import pytest

from kclrun.state.event_times import AHEAD_S, EventTimes
from kclrun.testing import (
    EventTimeWarning,
    Faults,
    assert_idempotent,
    assert_order_independent,
    make_aggregate,
    make_record,
    make_records,
    replay,
    run_processor,
)
from tests.support.dated import ROWS, TIMES, Dated, DatedSingly
from tests.support.tables import over_rows

DAY_S = 86_400


def payloads(times=TIMES):
    return [("k", str(at)) for at in times]


@over_rows(
    ("kind", "given"),
    [
        (Dated, {}),
        (Dated, {"fetch": {"batch_max": 1}}),
        (Dated, {"checkpoint": {"every": "batch"}, "fetch": {"batch_max": 2}}),
        (DatedSingly, {}),
        (DatedSingly, {"concurrency": {"records": 4}}),
    ],
)
def test_windows_of_old_records_close_by_event_time_and_a_late_one_is_counted(kind, given):
    run = run_processor(kind, payloads(), settings=given)

    assert run.rows == ROWS
    assert (run.late, run.ahead) == (1, 0)


def test_a_crash_counts_a_late_record_again_and_changes_no_window():
    run = replay(
        Dated,
        payloads(),
        settings={"checkpoint": {"every": "batch"}, "fetch": {"batch_max": 2}},
        faults=Faults(crash_after=5),
    )

    assert run.rows == ROWS
    assert run.late >= 1


def test_windows_by_arrival_stay_so_without_an_event_time():
    class Plain(Dated):
        event_time = Dated.__mro__[1].event_time

    run = run_processor(Plain, make_records(payloads(range(180)), first_arrival_s=0.0))

    assert run.rows == [{"from": 0.0, "count": 60}, {"from": 60.0, "count": 60}]


def test_a_time_of_the_windows_is_theirs_alone_and_what_it_makes_late_is_counted():
    class Own(Dated):
        def initialize(self, context):
            super().initialize(context)
            self.minutes._time_of = lambda record: self.event_time(record) - 3600

    run = run_processor(Own, payloads())

    # The first record comes before there is a watermark.
    assert run.rows == [{"from": TIMES[0] - 3600, "count": 1}]
    assert run.late == len(TIMES) - 1


def test_a_time_that_raises_raises_in_the_call_that_adds_the_record():
    with pytest.raises(ValueError, match="could not convert"):
        run_processor(Dated, payloads(["no time"]))


def test_records_arrive_after_events_of_today_at_a_midnight_and_one_more_each_second():
    first, *more = make_records(["a", "b", ("k", "c"), {"data": "d", "ordinal": 9}])
    at = first.approximate_arrival_timestamp

    assert DAY_S - 60 < at - time.time() <= 2 * DAY_S
    assert datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S") == "00:00:00"
    assert [each.approximate_arrival_timestamp - at for each in more] == [1, 2, 9]
    assert make_record(ordinal=2).approximate_arrival_timestamp == at + 2
    assert make_aggregate(["a"], ordinal=3)[0].approximate_arrival_timestamp == at + 3


def test_a_test_with_events_of_today_closes_its_windows():
    now = time.time() // 60 * 60

    run = run_processor(Dated, payloads(now + 30 * number for number in range(20)))

    assert [row["from"] for row in run.rows] == [now + 60 * number for number in range(9)]


def test_arrivals_can_be_given():
    first_s, own = 1_000.0, {"data": "d", "arrived_at_s": 5.0}
    at = [each.approximate_arrival_timestamp for each in make_records(["a", own, "c"])]
    given = make_records(["a", own, "c", make_record(arrived_at_s=7.0)], first_arrival_s=first_s)

    assert at[1] == 5.0
    assert [each.approximate_arrival_timestamp for each in given] == [1_000.0, 5.0, 1_002.0, 7.0]
    assert make_aggregate(["a"], arrived_at_s=4.0)[0].approximate_arrival_timestamp == 4.0


@pytest.mark.parametrize(
    "run",
    [
        lambda records: run_processor(Dated, records),
        lambda records: replay(Dated, records, faults=Faults(crash_after=1)),
        lambda records: assert_idempotent(Dated, records),
        lambda records: assert_order_independent(Dated, records),
    ],
)
def test_an_event_after_its_arrival_is_a_warning_at_the_line_of_the_test(run):
    with pytest.warns(EventTimeWarning, match="after the arrival, by up to 60 s") as warned:
        run(list(make_records(payloads([1_060.0, 1_061.0]), first_arrival_s=1_000.0)))

    assert {each.filename for each in warned} == {__file__}


def test_a_clock_that_differs_by_less_than_a_second_is_not_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = run_processor(Dated, make_records(payloads([100.0 + AHEAD_S]), first_arrival_s=100.0))

    assert run.ahead == 0


@pytest.mark.parametrize("time_of", [lambda _: None, lambda _: 1 / 0, lambda _: float("nan")])
def test_times_that_are_none_are_a_warning_where_no_record_has_a_usable_one(time_of):
    class Timeless(Dated):
        def process_records(self, batch, checkpointer):
            pass

        def event_time(self, record):
            return time_of(record) if record.partition_key == "k" else 1.0

    with pytest.warns(EventTimeWarning, match="event_time of 2 records raised, or was not a time"):
        run_processor(Timeless, [("k", "a"), ("k", "b")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_processor(Timeless, [("k", "a"), ("other", "b")])


def test_the_log_has_a_line_for_the_first_and_for_each_tenfold_number():
    said = []
    times = EventTimes(report=said.append)

    for _ in range(1_234):
        times.note_late("w")

    assert times.late == 1_234
    numbers = [int(words.split(" ", 1)[0]) for words in said]
    assert numbers == [1, 10, 100, 1_000]
