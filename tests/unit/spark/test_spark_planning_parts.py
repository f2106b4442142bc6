"""The parts of the planner that count and estimate: time, calls, windows, what a stretch holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.errors import Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record
from kclrun.spark.options import Reached, SourceSettings
from kclrun.spark.planning.batch_target import Admission, ServiceTime, Window
from kclrun.spark.planning.bound_search import BatchTarget, find_bound
from kclrun.spark.planning.shard_cursor import (
    Delayed,
    Density,
    Expired,
    Paged,
    PageRun,
    ShardCursor,
    density_of,
)
from kclrun.spark.planning.shard_search import Moment, ReadBudget, ShardSearch, Tick
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before

SETTINGS = SourceSettings(reached=Reached(stream="s"), retry_attempts=2)


def record(number, at=0.0):
    return Record(b"x" * 100, "k", str(number), at)


def paged(*records, following="next", behind_ms=0, token="used"):
    return Paged(token, FetchedPage(list(records), following, behind_ms), 0.0, 0.0)


@given(
    st.floats(min_value=-1e4, max_value=1e4),
    st.lists(
        st.tuples(
            st.floats(min_value=0, max_value=300),
            st.floats(min_value=0, max_value=2),
            st.floats(min_value=0, max_value=2),
        ),
        min_size=1,
    ),
)
def test_the_services_time_lies_between_its_bounds(ahead_s, answers):
    service = ServiceTime(0.0)
    now = 1_700_000_000.0
    for pause_s, out_s, back_s in answers:
        sent_at, served_at = now, now + out_s
        now = served_at + back_s
        service.hear(float(int(served_at + ahead_s)), sent_at, now)
        now += pause_s

    assert service.surely_past_ms(now) <= (now + ahead_s) * 1000 <= service.surely_ahead_ms(now)


def test_many_answers_tell_the_time_to_a_fraction_of_a_second():
    service = ServiceTime(0.0)
    for n in range(20):
        at = 1_700_000_000.0 + n * 1.07
        service.hear(float(int(at)), at - 0.01, at)

    assert at * 1000 - service.surely_past_ms(at) < 100
    assert service.surely_ahead_ms(at) - at * 1000 < 100


def test_a_time_that_the_service_refused_is_not_sent_again():
    service = ServiceTime(5.0)
    first = service.surely_past_ms(10.0)
    service.was_ahead()
    service.was_ahead()

    assert service.surely_past_ms(10.0) <= first - 3000


def test_a_shards_calls_keep_to_their_rate():
    budget = ReadBudget(2.5, 0.0)
    now, calls = 0.0, 0
    while now < 20.0:
        budget.spend(now)
        calls += 1
        now = max(now + 0.001, budget.ready_at(now))

    assert 2.5 * 20 <= calls <= 2.5 * 20 + 6


def test_bytes_that_are_read_twice_keep_to_a_tenth_of_the_shards_rate():
    budget = ReadBudget(2.5, 0.0)
    budget.waste(400_000, 0.0)

    assert budget.ready_at(0.0) == 2.0
    budget.waste(10**9, 0.0)
    assert budget.ready_at(0.0) == 5.0


def test_a_thousand_shards_are_looked_at_every_two_seconds():
    assert Tick(1.0).next_s(100) == 1.0
    assert Tick(1.0).next_s(1000) == 2.0


def test_ticks_lengthen_by_half_and_shorten_by_a_tenth_of_a_second():
    tick = Tick(1.0)
    tick.throttled()

    assert [round(tick.next_s(1), 3) for _ in range(4)] == [1.5, 1.4, 1.3, 1.2]
    for _ in range(20):
        tick.throttled()
        longest = tick.next_s(1)
    assert longest == 5.0


def test_a_window_doubles_after_quick_batches_and_halves_after_slow_ones():
    window = Window(30.0)
    widths = []
    for took_s in (1.0, 1.0, 20.0, 40.0):
        window.took(took_s)
        widths.append(window.width_s)

    assert widths == [120.0, 240.0, 240.0, 120.0]
    assert window.until_ms(1_000, 5.0) == 6_000


def test_limits_of_a_trigger_are_times_at_the_shards_density():
    dense = [Density(100.0, 10_000.0, 100.0)] * 3

    assert Admission(600, None).span_s(dense) == 2.0
    assert Admission(600, 3_000.0).span_s(dense) == pytest.approx(0.1)
    assert Admission(None, None).span_s(dense) > 1e6


def test_a_density_needs_two_records_or_a_span():
    assert density_of([record(1)]) is None
    assert density_of([record(1, 5.0), record(2, 7.0)]).records_per_second == 0.5
    assert density_of([record(1, 5.0)], 4.0).records_per_second == 0.25


def test_a_stretch_knows_its_rows_up_to_every_bound_inside():
    page_run = PageRun(TRIM_HORIZON, 10_000)
    page_run.read(10, 0.0)
    page_run.absorb(paged(record(1), record(2), record(3)), 5)

    assert [row.sequence_number for row in page_run.rows_to(before("3"))] == ["1", "2"]
    assert len(page_run.rows_to(after("3"))) == 3
    assert page_run.rows_to(before("4")) is None
    assert page_run.rows_to(SHARD_END) is None
    assert page_run.rest_after(before("2")).rows_to(after("3")) == page_run.rows_to(after("3"))[1:]
    assert page_run.rest_after(after("3")).base_token == "next"


def test_an_iterator_made_by_number_is_trusted_once_that_record_came():
    there, gone = PageRun(after("7"), 10_000), PageRun(after("7"), 10_000)
    for page_run in (there, gone):
        opening = page_run.read(10, 0.0).opening
        assert (opening.kind, opening.sequence_number) == (IteratorType.AT_SEQUENCE_NUMBER, "7")
    there.absorb(paged(record(7), record(8)), 5)
    gone.absorb(paged(record(8)), 5)

    assert [row.sequence_number for row in there.rows_to(after("8"))] == ["8"]
    assert gone.rows_to(after("8")) is None
    assert gone.base_token is None


def test_rows_beyond_what_may_be_kept_are_dropped_all():
    page_run = PageRun(TRIM_HORIZON, 300)
    page_run.absorb(paged(record(1)), 5)
    assert page_run.rows_to(after("1")) is not None
    page_run.absorb(paged(record(2)), 5)

    assert page_run.rows_to(after("2")) is None
    assert page_run.rows_to(after("1")) is None


def running():
    made = ShardSearch(ShardCursor("s", after("1"), 10_000), ReadBudget(2.5, 0.0))
    made.begin(BatchTarget(1, 1_000, is_tip=True))
    return made


@pytest.mark.parametrize("first", [4, 5])
def test_a_time_that_leads_back_to_the_position_is_no_answer_at_the_tip(first):
    # Hole 5: record `first` is stamped ahead, and what follows it is not; only reading on helps.
    cursor = ShardCursor("s", before("5"), 10_000)
    cursor.is_busy = True
    looking = find_bound(cursor, BatchTarget(1_000, 1_000, is_tip=True))
    ahead = next(looking).page_run
    assert ahead.read(10, 0.0).opening.kind is IteratorType.AT_TIMESTAMP

    wanted = looking.send((paged(record(first, 60.0), behind_ms=5), 0))
    opening = wanted.page_run.read(10, 0.0).opening
    assert (opening.kind, opening.sequence_number) == (IteratorType.AT_SEQUENCE_NUMBER, "5")
    with pytest.raises(StopIteration):
        looking.send((paged(record(5, 60.0), record(6, 0.5)), 0))

    assert cursor.bound == after("6")


def test_before_the_tip_the_record_a_time_leads_to_is_where_the_batch_ends():
    cursor = ShardCursor("s", before("5"), 10_000)
    looking = find_bound(cursor, BatchTarget(1_000, 1_000))
    next(looking).page_run.read(10, 0.0)

    with pytest.raises(StopIteration):
        looking.send((paged(record(5, 60.0), behind_ms=5), 0))

    assert cursor.bound == cursor.position


def test_executors_get_an_iterator_while_it_lives_and_only_where_no_record_is_missing():
    cursor = ShardCursor("s", TRIM_HORIZON, 10_000)
    cursor.kept = PageRun(TRIM_HORIZON, 10_000, token="begins here", token_at=100.0)

    hint = cursor.hint(369.0, 5.0)
    assert (hint.iterator, hint.iterator_at) == ("begins here", 105.0)
    assert cursor.hint(371.0, 5.0).iterator is None
    cursor.kept.is_whole = False
    assert cursor.hint(101.0, 5.0).iterator is None


def test_an_expired_iterator_is_made_anew():
    shard = running()
    shard.take(shard.ask(0.0).turn, paged(behind_ms=5), Moment(0.0, 0, 0.5), SETTINGS)
    jump = shard.ask(0.0)
    shard.take(jump.turn, paged(behind_ms=5, following="old"), Moment(0.0, 0, 0.5), SETTINGS)
    ask = shard.ask(0.0)
    assert ask.read.token == "old"
    shard.take(ask.turn, Expired(), Moment(0.0, 0, 0.5), SETTINGS)

    assert shard.ask(0.0).read.opening.kind is IteratorType.AT_TIMESTAMP


def test_failures_in_a_row_are_waited_out_and_counted():
    shard = running()
    error = Unavailable("down", operation="GetRecords")
    now = 0.0
    for _ in range(2):
        now = shard.ready_at(now)
        shard.take(shard.ask(now).turn, Delayed(None, error), Moment(now, 0, 0.5), SETTINGS)
        assert shard.ask(now) is None
    now = shard.ready_at(now)

    with pytest.raises(Unavailable, match="down"):
        shard.take(shard.ask(now).turn, Delayed(None, error), Moment(now, 0, 0.5), SETTINGS)


def test_an_answer_to_an_older_question_is_ignored():
    shard = running()
    turn = shard.ask(0.0).turn
    shard.stop()
    shard.take(turn, paged(record(1)), Moment(0.0, 0, 0.5), SETTINGS)

    assert shard.cursor.finding is None
