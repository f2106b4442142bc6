"""The parts of the planner that count and estimate: time, calls, windows, what a stretch holds."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.errors import NotFound, Throttled, Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.time import backoff_s
from kclrun.spark.options import SourceSettings, StreamAddress
from kclrun.spark.planning.batch_target import TargetSearch, Window, admitted_s
from kclrun.spark.planning.bound_search import BatchTarget, find_bound
from kclrun.spark.planning.read_budget import ReadBudget, Tick
from kclrun.spark.planning.service_time import ServiceTime
from kclrun.spark.planning.shard_cursor import (
    Delayed,
    Density,
    Expired,
    Finding,
    Gone,
    Paged,
    PageRun,
    Read,
    ShardCursor,
    Slowed,
)
from kclrun.spark.planning.shard_search import AnswerTimes, ShardSearch
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before
from tests.support.tables import over_rows

SETTINGS = SourceSettings(address=StreamAddress(stream="s"), retry_attempts=3)


def record(number, at=0.0):
    return Record(b"x" * 100, "k", str(number), at)


def paged(*records, following="next", behind_ms=0, token="used", at=0.0):
    return Paged(token, FetchedPage(list(records), following, behind_ms), at, at)


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
        service.add_sample(float(int(served_at + ahead_s)), sent_at, now)
        now += pause_s

    assert service.surely_past_ms(now) <= (now + ahead_s) * 1000 <= service.surely_ahead_ms(now)


def estimate(service, now=0.0):
    """The service's time less the local time, from below and from above, in milliseconds."""
    return service.surely_past_ms(now) - now * 1000, service.surely_ahead_ms(now) - now * 1000


def test_an_answer_counts_for_ten_minutes_and_those_of_five_seconds_count_as_one():
    service = ServiceTime(0.0)
    service.add_sample(110.0, 100.0, 100.0)
    service.add_sample(104.0, 104.0, 104.9)  # with the first
    service.add_sample(106.0, 105.0, 105.0)
    assert estimate(service) == (10_000, 1_001)
    service.add_sample(700.0, 700.0, 700.0)
    assert estimate(service) == (10_000, 1_001)
    service.add_sample(701.0, 701.0, 701.0)  # the first and the second are forgotten together
    assert estimate(service) == (1_000, 1_001)


def test_each_time_that_the_service_refuses_makes_the_estimate_more_careful_to_a_minute():
    service = ServiceTime(0.0)
    margins = []
    for _ in range(8):
        service.was_ahead()
        margins.append(-1_000 - estimate(service)[0])

    assert margins == [1_000, 3_000, 7_000, 15_000, 31_000, 60_000, 60_000, 60_000]
    assert estimate(service)[1] == 1_001, "what is surely ahead stays"


@pytest.mark.parametrize(
    ("took_s", "width_s"), [(14.9, 120.0), (15.0, 60.0), (30.0, 60.0), (30.1, 30.0)]
)
def test_a_window_doubles_after_a_quick_batch_and_halves_after_a_slow_one(took_s, width_s):
    window = Window(30.0)
    assert window.until_ms(1_000, 100.0) == 61_000, "the first is a minute"

    window.took(took_s)

    assert window.width_s == width_s
    assert window.until_ms(1_000, 5.0) == 6_000, "a limit of the trigger is shorter"
    assert window.until_ms(1_000, 0.0) == 1_001, "it advances always"


def test_a_window_is_a_millisecond_at_the_least_and_a_year_at_the_most():
    narrow, wide = Window(30.0), Window(30.0)
    for _ in range(40):
        narrow.took(31.0)
        wide.took(1.0)

    assert (narrow.width_s, wide.width_s) == (0.001, 365 * 86_400)


@over_rows(
    ("records_max", "bytes_max", "span_s"),
    [
        (600, None, 2.0),
        (None, 3_000.0, 0.1),
        (600, 3_000.0, 0.1),
        (None, None, 365 * 86_400.0),
        (0, None, 0.001),
    ],
)
def test_limits_of_a_trigger_are_times_at_the_density_of_all_shards(records_max, bytes_max, span_s):
    dense = [Density(100.0, 10_000.0, 100.0)] * 3

    assert admitted_s(records_max, bytes_max, dense) == pytest.approx(span_s)
    assert admitted_s(records_max or 1, bytes_max, []) == 365 * 86_400.0


@over_rows(
    ("shards", "throttled", "pauses"),
    [
        (1, 0, [1.0, 1.0]),
        (500, 0, [1.0, 1.0]),
        (1000, 0, [2.0, 2.0]),
        (1, 1, [1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 1.0]),
        (1, 2, [1.5, 2.25, 2.15]),
        (1000, 1, [3.0, 2.9]),
        (1, 9, [1.5, 2.25, 3.375, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 4.9]),
        (5000, 1, [10.0, 10.0]),
    ],
)
def test_ticks_lengthen_by_half_after_throttles_and_shorten_by_a_tenth_of_a_second(
    shards, throttled, pauses
):
    tick, seen = Tick(1.0), []
    for number in range(len(pauses)):
        if number < throttled:
            tick.throttled()
        seen.append(tick.next_s(shards))

    assert seen == pytest.approx(pauses)


def test_a_shard_rests_for_bytes_read_twice_and_after_failures_whatever_is_longer():
    budget = ReadBudget(2.5, 0.0)
    budget.waste(400_000, 0.0)
    assert budget.ready_at(0.0) == 2.0
    budget.waste(200_000, 1.0)
    assert budget.ready_at(1.0) == 3.0, "one after the other"
    budget.waste(10**9, 1.0)
    assert budget.ready_at(1.0) == 6.0, "five seconds at the most"
    budget.rest(5.0)
    assert budget.ready_at(1.0) == 6.0
    budget.rest(7.0)
    assert budget.ready_at(1.0) == 7.0
    budget.waste(200_000, 8.0)
    assert budget.ready_at(8.0) == 9.0


def cursor_at(head_ms=None, *, at_tip=False, shard_id="s"):
    made = ShardCursor(shard_id, TRIM_HORIZON, 10_000)
    if head_ms is not None:
        made.kept.absorb(paged(record(1, head_ms / 1000), behind_ms=5), 0)
    if at_tip:
        made.kept.tip_ms = 1
    return made


def known(now_ms):
    """The service's time of local time 0: surely past is `now_ms` then."""
    service = ServiceTime(0.0)
    service.add_sample(now_ms / 1000, 0.0, 0.0)
    return service


def test_the_time_stands_still_for_children_as_long_as_a_batch_should_take():
    search = TargetSearch(SETTINGS)
    search.reach(1_000_000)
    behind, service = [cursor_at(1_000_000)], known(10_000_000)
    seen = [
        search.next(behind, service, now, waits=waits).until_ms
        for now, waits in (
            (0.0, True),
            (29.9, True),
            (30.0, True),  # 30 s: as long as a batch should take
            (31.0, False),
            (32.0, True),
            (61.9, True),
            (62.0, True),
        )
    ]
    held, goes_on = 1_000_000, 1_060_000

    assert seen == [held, held, goes_on, goes_on, held, held, goes_on]
    again = TargetSearch(SETTINGS)
    again.reach(1_000_000)
    for now, cursors, until_ms in (
        (0.0, behind, held),
        (20.0, [cursor_at(at_tip=True)], 10_019_800),  # the tip is reached: the wait is over
        (40.0, behind, held),
    ):
        assert again.next(cursors, service, now, waits=True).until_ms == until_ms
    assert TargetSearch(SETTINGS).next(behind, service, 0.0, waits=True).until_ms == 1
    apart = TargetSearch(replace(SETTINGS, aligns_shards=False))
    assert apart.next(behind, service, 0.0, waits=True).until_ms == goes_on


def test_the_limits_of_a_trigger_shorten_the_window_64_mib_a_shard_without_any():
    dense = cursor_at(1_000_000)
    dense.density = Density(10.0, 2 * 2**20, 100.0)
    for limits, cursors, span_ms in (
        ({}, [dense], 32_000),
        ({}, [dense, cursor_at(1_000_000)], 60_000),
        ({"bytes_per_trigger_max": 2**20}, [dense], 500),
        ({"records_per_trigger_max": 20}, [dense], 2_000),
    ):
        search = TargetSearch(replace(SETTINGS, **limits))
        aim = search.next(cursors, known(10_000_000), 0.0, waits=False)
        assert aim.until_ms == 1_000_000 + span_ms


def test_an_iterator_is_used_for_four_and_a_half_minutes_and_then_made_anew():
    page_run = PageRun(TRIM_HORIZON, 10_000, "given", 100.0)
    assert page_run.read(10, 369.9) == Read(10, "given")
    page_run.hold("later", 200.0)
    assert page_run.read(10, 369.9) == Read(10, "given"), "the first one is still good"
    assert page_run.read(10, 370.0) == Read(10, None, StartPoint(IteratorType.TRIM_HORIZON))
    page_run.hold("later", 370.0)
    assert page_run.read(10, 371.0) == Read(10, "later")
    page_run.forget_token()
    page_run.hold(None, 200.0)
    assert page_run.read(10, 200.0).token is None
    page_run.hold("made", 200.0)
    assert page_run.read(10, 469.9) == Read(10, "made")
    assert page_run.read(10, 470.0).token is None


# The pages of a stretch: the records, the iterator after them, the lag. What is known then: the
# tip, the end, the iterator at the base, the records that are kept.
@over_rows(
    ("base", "pages", "known_then"),
    [
        (TRIM_HORIZON, [("", "a", 0)], (7, False, "t0", [])),
        (TRIM_HORIZON, [("", "a", 5)], (None, False, "t0", [])),
        (TRIM_HORIZON, [("1 2", "a", None)], (None, False, "t0", [1, 2])),
        (TRIM_HORIZON, [("1 2", None, 0)], (None, True, "t0", [1, 2])),
        (TRIM_HORIZON, [("1", "a", 0), ("2", "b", 5)], (None, False, "t0", [1, 2])),
        (TRIM_HORIZON, [("1", "a", 5), ("2", "b", 0)], (7, False, "t0", [1, 2])),
        (before("7"), [("7 8", "a", 0)], (7, False, "t0", [7, 8])),
        (after("7"), [("7 8", "a", 0)], (7, False, None, [8])),
        (after("7"), [("7", "a", 0)], (7, False, "a", [])),
        (after("7"), [("7", "a", 5), ("8", "b", 0)], (7, False, "a", [8])),
        (after("7"), [("", "a", 5), ("7 8", "b", 0)], (7, False, None, [8])),
        (after("7"), [("7", None, 0)], (None, True, None, [])),
        (after("7"), [("8", "a", 0)], (7, False, None, None)),
        (before("7"), [("8", "a", 0)], (7, False, None, None)),
    ],
)
def test_what_the_pages_of_a_stretch_show(base, pages, known_then):
    page_run = PageRun(base, 10_000)
    numbers = []
    for turn, (rows, following, behind_ms) in enumerate(pages):
        page_run.read(10, 0.0)
        given = paged(
            *map(record, rows.split()),
            following=following,
            behind_ms=behind_ms,
            token=f"t{turn}",
            at=100.0 + turn,
        )
        numbers += [int(each.sequence_number) for each in page_run.absorb(given, 7)]

    kept = None if page_run.rows is None else [int(each.sequence_number) for each in page_run.rows]
    shown = (page_run.tip_ms, page_run.is_ended, page_run.base_token, kept)
    assert shown == known_then
    assert page_run.at_tip == (known_then[0] is not None)
    assert page_run.is_whole == (kept is not None)
    assert page_run.base_token in {None, "a"} or page_run.base_token_at == 100.0
    assert page_run.count == len(numbers)
    assert page_run.size_bytes == 200 * len(numbers)
    assert page_run.reached == (after(str(numbers[-1])) if numbers else base)
    if numbers:
        assert page_run.first.sequence_number == str(numbers[0])
        page_run.begin_at(before(str(numbers[-1])))
        at = (page_run.base_token, page_run.base_token_at)
        assert at == (f"t{len(pages) - 1}", 100.0 + len(pages) - 1)


@over_rows(
    ("bound", "rows", "token"),
    [
        (after("3"), [], "next"),
        (before("2"), [2, 3], None),
        (before("3"), [3], None),
        (before("1"), None, None),  # nothing is left out
        (after("1"), None, None),  # the record that follows is not named
        (before("4"), None, None),
        (SHARD_END, None, None),
    ],
)
def test_the_rest_of_a_stretch_is_known_from_a_record_of_it_on(bound, rows, token):
    page_run = PageRun(TRIM_HORIZON, 10_000)
    page_run.absorb(paged(record(1), record(2), record(3), at=40.0), 5)
    rest = page_run.rest_after(bound)

    if rows is None:
        assert rest is None
    else:
        assert [int(each.sequence_number) for each in rest.rows] == rows
        assert (rest.base, rest.base_token, rest.tip_ms) == (bound, token, 5)
        assert rest.reached == (after("3") if rows else bound)
        assert rest.read(10, 309.9) == Read(10, "next")
        assert rest.read(10, 310.0).token is None
    page_run.forget_token()
    assert page_run.rest_after(bound) is None, "it could not be read on"


def test_of_a_stretch_above_its_bytes_only_the_ends_are_known_and_without_their_data():
    page_run = PageRun(TRIM_HORIZON, 400)
    page_run.absorb(paged(record(1), record(2)), 5)
    assert (page_run.size_bytes, len(page_run.rows)) == (400, 2)
    page_run.absorb(paged(record(3)), 5)

    assert page_run.rows is page_run.rows_to(after("1")) is None
    assert (page_run.first, page_run.last) == (
        Record(b"", "k", "1", 0.0),
        Record(b"", "k", "3", 0.0),
    )
    one = PageRun(TRIM_HORIZON, 199)
    one.absorb(paged(record(1)), 5)
    assert one.first is one.last
    assert one.first.data == b""


@over_rows(
    ("record_bytes", "is_counted", "sample", "pages"),
    [
        (None, False, 64, (64, 64, 512, 10_000)),
        (None, True, 256, (64, 64, 512, 10_000)),
        (200.0, False, 100, (327, 327, 2_621, 10_000)),
        (200.0, True, 1_000, (327, 327, 2_621, 10_000)),
        (655.36, False, 100, (100, 100, 800, 10_000)),
        (10.0**6, False, 1, (1, 1, 1, 1_073)),
        (10.0**6, True, 1, (1, 1, 1, 1_073)),
    ],
)
def test_as_many_records_are_wanted_as_have_the_bytes(record_bytes, is_counted, sample, pages):
    cursor = ShardCursor("s", TRIM_HORIZON, 10_000, is_counted=is_counted)
    if record_bytes is not None:
        cursor.density = Density(1.0, record_bytes, record_bytes)

    assert cursor.sample_limit == sample
    assert tuple(cursor.page_limit(each) for each in (0, 2**16, 2**19, 2**30)) == pages


def test_a_later_bound_is_kept_and_of_the_same_one_what_shows_the_tip():
    cursor = ShardCursor("s", after("5"), 10_000)
    assert (cursor.bound, cursor.tip_at_bound_ms, cursor.is_short_of_tip) == (
        after("5"),
        None,
        False,
    )
    for bound, tip_ms, kept in (
        (after("4"), 1, None),
        (after("5"), None, None),
        (after("5"), 2, Finding(after("5"), None, 2)),
        (after("7"), None, Finding(after("7"))),
        (after("7"), 3, Finding(after("7"), None, 3)),
        (after("7"), None, Finding(after("7"), None, 3)),
        (after("6"), 4, Finding(after("7"), None, 3)),
    ):
        cursor.find(bound, tip_ms=tip_ms)
        assert cursor.finding == kept
        assert cursor.is_short_of_tip == (kept is not None and kept.tip_ms is None)
    cursor.find(before("9"), at=record(9, 1.5))
    assert cursor.finding == Finding(before("9"), 1_500)
    cursor.lose()
    assert (cursor.bound, cursor.began(), cursor.is_lost) == (SHARD_END, SHARD_END, True)


@over_rows(
    ("density", "until_ms", "expected"),
    [
        (None, 3_000, None),
        (10.0, None, None),
        (10.0, 1_000, None),
        (10.0, 1_001, 1),
        (10.0, 3_000, 20),
        (10.0, 1_150, 2),
    ],
)
def test_the_number_of_records_is_expected_from_their_density_and_the_time_between(
    density, until_ms, expected
):
    cursor = cursor_at(1_000)
    cursor.density = None if density is None else Density(density, 1.0, 1.0)
    cursor.finding = Finding(before("9"), until_ms)
    assert cursor.hint(0.0, 0.0).records_expected == expected
    cursor.finding = Finding(SHARD_END, until_ms)
    assert cursor.hint(0.0, 0.0).records_expected is None


def test_a_search_waits_for_its_answer_then_for_its_budget_and_for_ever_if_the_shard_is_gone():
    shard = running()
    assert (shard.is_searching, shard.is_held(0.0), shard.wakes_at(0.0)) == (True, False, 0.0)
    ask = shard.ask(0.0)
    assert shard.ask(0.0) is None
    assert (shard.is_held(0.0), shard.wakes_at(0.0)) == (False, inf)
    shard.begin(BatchTarget(9, 9))
    assert shard.target == BatchTarget(1, 1_000, is_tip=True), "one search after the other"

    shard.take(ask.turn, Slowed("made", Throttled("slow")), AnswerTimes(1.0, 0, 0.5), SETTINGS)
    assert (shard.throttles, shard.failures) == (1, 1)
    assert shard.is_held(1.0)
    assert shard.wakes_at(1.0) == 1.0 + backoff_s(1, 0.5)
    assert not shard.is_held(1.0 + backoff_s(1, 0.5))
    again = shard.ask(2.0)
    assert again.read.token == "made"
    assert again.turn == ask.turn + 1
    shard.take(again.turn, Delayed(None, Unavailable("down")), AnswerTimes(2.0, 0, 0.5), SETTINGS)
    assert (shard.throttles, shard.failures) == (1, 2), "a delay is not a throttle"

    ask = shard.ask(9.0)
    shard.take(ask.turn, Gone(NotFound("gone"), 9.0), AnswerTimes(9.0, 0, 0.5), SETTINGS)
    assert (shard.ready_at(99.0), shard.is_held(99.0), shard.wakes_at(99.0)) == (inf, True, inf)
    shard.stop()
    shard.begin(BatchTarget(9, 9))
    assert (shard.is_searching, shard.target) == (False, None)


def test_a_page_ends_the_row_of_failures_and_a_stopped_search_begins_anew():
    shard = running()
    shard.failures = 2
    shard.take(
        shard.ask(0.0).turn, paged(record(2), behind_ms=5), AnswerTimes(0.0, 0, 0.5), SETTINGS
    )
    assert shard.failures == 0
    shard.stop()
    assert (shard.is_searching, shard.target, shard.ask(9.0)) == (False, None, None)
    shard.begin(BatchTarget(9, 9))
    assert shard.is_searching
    assert shard.ask(9.0) is not None


def running():
    made = ShardSearch(ShardCursor("s", after("1"), 10_000), ReadBudget(2.5, 0.0))
    made.begin(BatchTarget(1, 1_000, is_tip=True))
    return made


@pytest.mark.parametrize(("position", "head_ms"), [(before("5"), 60_000), (after("5", 3), None)])
def test_before_the_tip_the_record_a_time_leads_to_is_where_the_batch_ends(position, head_ms):
    cursor = ShardCursor("s", position, 10_000)
    looking = find_bound(cursor, BatchTarget(1_000, 1_000))
    next(looking).page_run.read(10, 0.0)

    with pytest.raises(StopIteration):
        looking.send((paged(record(5, 60.0), behind_ms=5), 0))

    assert cursor.bound == cursor.position
    assert cursor.head_ms == head_ms, "it is the first record, or a part of it is before the batch"


def pushed(*records, behind_ms=0, following="next"):
    page = FetchedPage(list(records), following, behind_ms, continuation="1")
    return Paged("used", page, 0.0, 0.0)


def wants(position, target, *answers, is_busy=False, kept=None):
    """The runs of pages that a search asks for, with these answers to its first requests."""
    cursor = ShardCursor("s", position, 10_000)
    cursor.is_busy = is_busy
    if kept is not None:
        cursor.kept.is_pushed = kept
    looking, found = find_bound(cursor, target), []
    try:
        want = next(looking)
        for answer in (*answers, None):
            found.append("pushed on" if want.page_run is cursor.kept else "by time")
            if answer is None:
                break
            want = looking.send((answer, 0))
    except StopIteration:
        found.append("over")
    return found


@over_rows(
    ("claim", "position", "is_tip", "is_busy", "kept", "answers", "found"),
    [
        (
            "at the tip pushed pages are read on",
            *(after("1"), True, False, None),
            [pushed(record(2), behind_ms=5)],
            ["pushed on", "pushed on"],
        ),
        (
            "short of the tip the bound is looked up by its time",
            *(TRIM_HORIZON, False, False, None),
            [pushed(record(2), behind_ms=5)],
            ["pushed on", "by time"],
        ),
        (
            "what was pushed before the search is not news",
            *(after("1"), True, True, True),
            [],
            ["by time"],
        ),
        (
            "a polled page is not read on",
            *(after("1"), True, False, None),
            [paged(record(2), behind_ms=5)],
            ["pushed on", "by time"],
        ),
        (
            "at the end of what was pushed the bound is found",
            *(after("1"), True, False, None),
            [pushed(record(2))],
            ["pushed on", "over"],
        ),
        (
            "and at the end of the shard",
            *(after("1"), True, False, None),
            [pushed(record(2), following=None)],
            ["pushed on", "over"],
        ),
    ],
)
def test_only_fresh_pushed_pages_at_the_tip_are_read_on(
    claim, position, is_tip, is_busy, kept, answers, found
):
    target = BatchTarget(1_000, 1_000, is_tip=is_tip)
    assert wants(position, target, *answers, is_busy=is_busy, kept=kept) == found, claim


def test_an_expired_iterator_is_made_anew():
    shard = running()
    shard.take(shard.ask(0.0).turn, paged(behind_ms=5), AnswerTimes(0.0, 0, 0.5), SETTINGS)
    jump = shard.ask(0.0)
    shard.take(jump.turn, paged(behind_ms=5, following="old"), AnswerTimes(0.0, 0, 0.5), SETTINGS)
    ask = shard.ask(0.0)
    assert ask.read.token == "old"
    shard.take(ask.turn, Expired(), AnswerTimes(0.0, 0, 0.5), SETTINGS)

    assert shard.ask(0.0).read.opening.kind is IteratorType.AT_TIMESTAMP


def test_failures_in_a_row_are_waited_out_and_counted():
    shard = running()
    error = Unavailable("down", operation="GetRecords")
    now = 0.0
    for _ in range(2):
        now = shard.ready_at(now)
        shard.take(shard.ask(now).turn, Delayed(None, error), AnswerTimes(now, 0, 0.5), SETTINGS)
        assert shard.ask(now) is None
    now = shard.ready_at(now)

    with pytest.raises(Unavailable, match="down"):
        shard.take(shard.ask(now).turn, Delayed(None, error), AnswerTimes(now, 0, 0.5), SETTINGS)


def test_an_answer_to_an_older_question_is_ignored():
    shard = running()
    turn = shard.ask(0.0).turn
    shard.stop()
    for _ in range(2):
        shard.take(turn, paged(record(1)), AnswerTimes(0.0, 0, 0.5), SETTINGS)
        shard.begin(BatchTarget(1, 1_000, is_tip=True))
        shard.ask(0.0)

    assert shard.cursor.finding is None


def test_the_next_batch_keeps_of_what_was_read_only_what_begins_with_it():
    cursor = cursor_at(1_000)
    cursor.move(TRIM_HORIZON)
    assert cursor.head_ms == 1_000
    cursor.ahead, cursor.finding = PageRun(before("9"), 10_000), Finding(before("9"))
    ahead = cursor.ahead
    cursor.move(before("9"))
    assert cursor.kept is ahead
    assert (cursor.position, cursor.ahead, cursor.finding) == (before("9"), None, None)
    cursor.move(after("77"))
    assert (cursor.kept.base, cursor.kept.first, cursor.bound) == (after("77"), None, after("77"))
