"""Which times move the watermark, and of which records a sentence is written."""

import datetime
import math

import pytest

from kclrun.model.record import Record
from kclrun.state.event_times import EventTimes

YEAR_1 = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC).timestamp()
LAST_SECOND = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC).timestamp()
FAR = 10.0**12


def seen(at, arrival=FAR):
    said = []
    times = EventTimes(lambda _: at, said.append)
    return times.seen_at(Record(b"x", "k", "1", arrival)), times, said


@pytest.mark.parametrize("at", [YEAR_1, 0.0, LAST_SECOND])
def test_a_time_of_the_years_1_to_9999_is_one_of_the_watermark(at):
    found, times, said = seen(at)
    assert (found, times.unusable, said) == (at, 0, [])


@pytest.mark.parametrize("at", [YEAR_1 - 1, LAST_SECOND + 1, math.inf, -math.inf, math.nan])
def test_any_other_time_moves_no_watermark_and_is_said(at):
    found, times, said = seen(at)
    assert (found, times.unusable) == (-math.inf, 1)
    assert "year 1 to 9999" in said[-1]


@pytest.mark.parametrize(("ahead_s", "is_said"), [(-5.0, 0), (0.0, 0), (1.0, 0), (1.5, 1)])
def test_a_time_after_the_arrival_counts_as_the_arrival_and_is_said_above_a_second(
    ahead_s, is_said
):
    found, times, said = seen(100.0 + ahead_s, 100.0)
    assert found == min(100.0, 100.0 + ahead_s)
    assert (times.ahead, len(said)) == (is_said, is_said)
    assert times.ahead_s_max == (ahead_s if is_said else 0.0)


def test_the_first_the_tenth_and_the_hundredth_of_a_kind_are_said_and_all_are_counted():
    said = []
    times = EventTimes(report=said.append)
    for _ in range(120):
        times.note_late("minutes")
    assert times.late == 120
    assert [words.split(" late")[0] for words in said] == [
        "1 record was",
        "10 records were",
        "100 records were",
    ]
