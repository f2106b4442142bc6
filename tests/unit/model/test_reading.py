"""The one reader of a shard: which request comes next, also after failures."""

import contextlib
import itertools

import pytest

from kclrun.errors import (
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.model.reading import Fetch, FetchedPage, HeadWatch, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.ports import next_page
from tests.support.tables import over_rows

BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)
LATEST = StartPoint(IteratorType.LATEST)


class Shard:
    """Records 10, 11, … two a page; an iterator is the number it begins at. `errors` come first."""

    def __init__(self, count, errors=()):
        self.numbers = range(10, 10 + count)
        self.errors = list(errors)
        self.calls = []

    def iterator(self, shard_id, start):
        self.calls.append(start)
        self._fail()
        return "10" if start.sequence_number is None else str(int(start.sequence_number) + 1)

    def fetch(self, iterator, limit):
        self.calls.append(Fetch(iterator, limit))
        self._fail()
        found = [number for number in self.numbers if number >= int(iterator)][:2]
        records = [Record(b"x", "k", str(number)) for number in found]
        following = str(found[-1] + 1) if found else iterator
        return FetchedPage(records, following, 0)

    def _fail(self):
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error


def test_every_record_comes_once_and_in_order_whatever_fails():
    failures = (None, ExpiredIterator("old"), Throttled("slow"), Unavailable("away"))
    for errors in itertools.product((*failures, InvalidRequest("?"), NotFound("?")), repeat=4):
        shard, cursor, numbers = Shard(5, errors), PageCursor(BEGINNING), []
        while len(numbers) < 5:
            with contextlib.suppress(ServiceError):
                page = next_page(shard, "s", cursor)
                numbers += [int(record.sequence_number) for record in page.records]

        assert numbers == list(shard.numbers), errors


def test_a_lost_iterator_before_any_record_repeats_the_start_and_latest_the_last_answers_time():
    for start, again in (
        (BEGINNING, BEGINNING),
        (LATEST, StartPoint(IteratorType.AT_TIMESTAMP, timestamp=55.0)),
    ):
        cursor = PageCursor(start)
        cursor.opened("token")
        cursor.took(FetchedPage([], "next", 0, served_at=55.0))
        cursor.failed(ExpiredIterator("old"))
        assert cursor.request() == again


DAY_S = 24 * 3600.0
NOW = 1_000_000_000.0


def page_of(*arrivals, served=NOW, behind_ms=0, first=1):
    records = tuple(
        Record(
            partition_key="p",
            sequence_number=str(number),
            sub_sequence_number=0,
            data=b"",
            approximate_arrival_timestamp=arrived,
        )
        for number, arrived in enumerate(arrivals, first)
    )
    return FetchedPage(records, "next", behind_ms, served_at=served)


def at_the_end(seconds):
    """Pages of a reader that gets each record when it is the oldest that is left."""
    return [page_of(NOW + s - DAY_S, served=NOW + s) for s in range(0, seconds + 1, 10)]


AT_ONE = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, "1")
OLDEST = StartPoint(IteratorType.TRIM_HORIZON)
# The pages of a shard of a stream that keeps records for a day, and how often a loss is reported.
HEADS = {
    "the checkpoint's record is there": (AT_ONE, [page_of(NOW - 0.9 * DAY_S)], 0),
    "it is gone, the oldest record left is old": (
        AT_ONE,
        [page_of(behind_ms=9), page_of(NOW - 0.5 * DAY_S, first=7)],
        1,
    ),
    "it is gone, of a shard without traffic": (
        AT_ONE,
        [page_of(NOW - 0.5 * DAY_S + 1, first=7)],
        0,
    ),
    "from the oldest record on": (OLDEST, [page_of(NOW - 0.9 * DAY_S, first=7)], 0),
    "read on within the retention": (
        OLDEST,
        [page_of(NOW - DAY_S), page_of(NOW - 0.9 * DAY_S)],
        0,
    ),
    "the reader stood still behind the retention": (
        OLDEST,
        [page_of(NOW - DAY_S), page_of(NOW + 1, served=NOW + DAY_S)],
        1,
    ),
    "behind it, but the service still has the records": (
        OLDEST,
        [page_of(NOW - DAY_S), page_of(NOW - 0.9 * DAY_S, served=NOW + 0.5 * DAY_S)],
        0,
    ),
    "behind it at an empty page": (
        OLDEST,
        [page_of(behind_ms=DAY_S * 1000), page_of(NOW, served=NOW + 1)],
        1,
    ),
    "behind it, with a page that does not say how far": (
        OLDEST,
        [page_of(NOW - DAY_S), page_of(behind_ms=None), page_of(NOW + 1, served=NOW + DAY_S)],
        1,
    ),
    "at the tip of a shard without traffic": (
        OLDEST,
        [page_of(), page_of(served=NOW + 2 * DAY_S), page_of(NOW, served=NOW + 2 * DAY_S + 1)],
        0,
    ),
    "at the end of the retention for an hour": (OLDEST, at_the_end(3600), 1),
    "at the end of the retention for three hours": (OLDEST, at_the_end(3 * 3600), 3),
}


def losses(start, pages, retention_s=DAY_S):
    watch, found, asked = HeadWatch(start), [], 0
    for page in pages:
        if watch.took(page):
            asked += 1
            watch.know(retention_s)
        found.append(watch.loss())
    return [text for text in found if text], asked


@over_rows("what", HEADS)
def test_records_that_expired_unread_are_reported_and_nothing_else_is(what):
    start, pages, reported = HEADS[what]

    assert len(losses(start, pages)[0]) == reported


@over_rows(
    ("start", "pages", "is_asked"),
    [
        # The least retention is a day; a checkpoint is younger than half of it as a rule.
        (AT_ONE, [page_of(NOW - DAY_S / 2, first=7)], True),
        (AT_ONE, [page_of(NOW - DAY_S / 2 + 1, first=7)], False),
        (AT_ONE, [page_of(NOW - DAY_S)], False),
        (OLDEST, [page_of(NOW - DAY_S, first=7)], False),
        (OLDEST, [page_of(NOW - DAY_S), page_of(NOW)], False),
        (OLDEST, [page_of(NOW - DAY_S - 1), page_of(NOW)], True),
    ],
)
def test_only_what_may_be_a_loss_costs_a_call_for_the_retention(start, pages, is_asked):
    watch = HeadWatch(start)

    assert [watch.took(page) for page in pages] == [False] * (len(pages) - 1) + [is_asked]


def test_a_stream_that_keeps_records_longer_is_asked_about_once_an_hour():
    pages = [page_of(NOW - 3 * DAY_S + s, served=NOW + s) for s in range(0, 7200, 60)]

    assert losses(OLDEST, pages, retention_s=7 * DAY_S) == ([], 2)
    exactly = [pages[minute] for minute in (0, 1, 61)]
    assert losses(OLDEST, exactly, retention_s=7 * DAY_S) == ([], 2)


@pytest.mark.parametrize(("younger_s", "reported"), [(0, 1), (1, 0)])
def test_a_checkpoint_is_behind_where_half_the_retention_has_passed(younger_s, reported):
    pages = [page_of(NOW - DAY_S + younger_s, first=7)]

    assert len(losses(AT_ONE, pages, retention_s=2 * DAY_S)[0]) == reported


def test_without_the_retention_it_is_asked_for_again_after_a_minute_and_the_loss_is_not_forgotten():
    watch = HeadWatch(AT_ONE)
    asked = [
        watch.took(page_of(NOW - 0.9 * DAY_S + s, served=NOW + s, first=7)) for s in (0, 30, 60)
    ]
    assert asked == [True, False, True]
    assert watch.loss() is None

    watch.know(DAY_S)

    assert "the record of its checkpoint" in watch.loss()
    assert watch.loss() is None


def event(*numbers, continuation):
    records = [Record(b"x", "k", str(number)) for number in numbers]
    return FetchedPage(records, None, 0, continuation=continuation)


AFTER = IteratorType.AFTER_SEQUENCE_NUMBER


@pytest.mark.parametrize(
    ("start", "pages", "subscribes_at", "polls_at"),
    [
        pytest.param(BEGINNING, [], BEGINNING, BEGINNING, id="nothing came yet"),
        pytest.param(LATEST, [], None, LATEST, id="only an iterator knows where the tip was"),
        pytest.param(
            LATEST,
            [FetchedPage([], "i", 0, served_at=7.0)],
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=7.0),
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=7.0),
            id="the tip, and the time of the answer",
        ),
        pytest.param(
            BEGINNING,
            [FetchedPage([Record(b"x", "k", "10")], "i", 0)],
            StartPoint(AFTER, "10"),
            StartPoint(AFTER, "10"),
            id="after what was polled",
        ),
        pytest.param(
            BEGINNING,
            [event(10, continuation="10")],
            StartPoint(AFTER, "10"),
            StartPoint(AFTER, "10"),
            id="after the last record of an event",
        ),
        pytest.param(
            BEGINNING,
            [event(10, continuation="10"), event(continuation="15")],
            StartPoint(AFTER, "15"),
            StartPoint(AFTER, "10"),
            id="a continuation without a record is for subscriptions",
        ),
        pytest.param(
            BEGINNING,
            [event(continuation="15"), FetchedPage([], "i", 0)],
            StartPoint(AFTER, "15"),
            BEGINNING,
            id="an empty page moves nothing",
        ),
        pytest.param(
            BEGINNING,
            [event(continuation="15"), FetchedPage([Record(b"x", "k", "20")], "i", 0)],
            StartPoint(AFTER, "20"),
            StartPoint(AFTER, "20"),
            id="records that were polled are newer than a continuation",
        ),
    ],
)
def test_a_subscription_and_an_iterator_begin_after_all_that_came(
    start, pages, subscribes_at, polls_at
):
    cursor = PageCursor(start)
    for page in pages:
        cursor.took(page)

    assert cursor.subscription_start == subscribes_at
    assert cursor.start == polls_at


def test_a_cursor_that_reopens_forgets_the_continuation():
    cursor = PageCursor(BEGINNING)
    cursor.took(event(continuation="15"))

    cursor.reopen(BEGINNING)

    assert cursor.subscription_start == BEGINNING
