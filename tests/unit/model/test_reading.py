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
from kclrun.model.reading import Fetch, FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.ports import next_page

BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)
LATEST = StartPoint(IteratorType.LATEST)


class Shard:
    """Records 10, 11, … two a page; an iterator is the number it begins at. `errors` come first."""

    def __init__(self, count, errors=()):
        self.numbers = range(10, 10 + count)
        self.errors = list(errors)
        self.calls = []

    def iterator(self, shard_id, kind, *, sequence_number=None, timestamp=None):
        self.calls.append(StartPoint(kind, sequence_number, timestamp))
        self._fail()
        return "10" if sequence_number is None else str(int(sequence_number) + 1)

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


@pytest.mark.parametrize(
    ("error", "following"),
    [
        (ExpiredIterator("old"), StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "11")),
        (InvalidRequest("not one of mine"), StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "11")),
        (NotFound("gone"), StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "11")),
        (Throttled("slow down"), Fetch("12", 10_000)),
        (Unavailable("away"), Fetch("12", 10_000)),
    ],
)
def test_an_iterator_is_used_again_unless_the_service_refuses_it(error, following):
    shard, cursor = Shard(5), PageCursor(BEGINNING)
    next_page(shard, "s", cursor)
    shard.errors = [error]

    with pytest.raises(type(error)):
        next_page(shard, "s", cursor)

    assert cursor.request() == following


def test_a_page_costs_one_call_and_the_first_one_an_iterator_more():
    shard, cursor = Shard(3), PageCursor(BEGINNING)
    next_page(shard, "s", cursor, 7)
    next_page(shard, "s", cursor, 7)

    assert shard.calls == [BEGINNING, Fetch("10", 7), Fetch("12", 7)]


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


@pytest.mark.parametrize(
    ("records", "behind_ms", "is_tip"),
    [(0, 0, True), (0, None, True), (0, 1_000, False), (1, 0, False)],
)
def test_the_tip_is_an_empty_page_without_lag(records, behind_ms, is_tip):
    page = FetchedPage([Record(b"x", "k", "10")] * records, "next", behind_ms)

    assert page.is_empty_tip is is_tip
