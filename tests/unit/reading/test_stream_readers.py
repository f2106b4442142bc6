"""The readers of a stream, turn by turn on a clock of the test; and once with their threads."""

import queue
import threading
import time
from collections import deque
from itertools import pairwise
from typing import Any

import pytest

from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    LimitExceeded,
    NotFound,
    RecordError,
    Throttled,
    Unavailable,
)
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard
from kclrun.model.time import Instant, WallTime
from kclrun.ports import StreamSummary
from kclrun.reading import readers
from kclrun.reading.ends import SETTLED_S, ReadingEnd
from kclrun.reading.readers import (
    Arrived,
    Ended,
    EveryShardBegan,
    Expired,
    Passed,
    StreamReaders,
    Trouble,
)
from kclrun.reading.starts import ShardStart
from tests.patience import HUNG_S, until
from tests.unit.cli.memory_site import BEGUN, Clock

LATEST = StartPoint(IteratorType.LATEST)
OLDEST = StartPoint(IteratorType.TRIM_HORIZON)
ALL = HashRange(0, HASH_KEY_MAX)
IDLE = FetchedPage([], "i", 0)
OVER = FetchedPage([], None, None)


def records(*numbers: str, behind_ms: int = 5) -> FetchedPage:
    return FetchedPage([Record(b"x", "k", number, 1.0) for number in numbers], "i", behind_ms)


def ended(*children: str, parents: tuple[str, ...] = ("a",)) -> FetchedPage:
    return FetchedPage(
        [], None, None, children=tuple(ChildShard(c, parents, ALL) for c in children)
    )


def shard(name: str, *parents: str, is_open: bool = True) -> Shard:
    first, second = [*parents, None, None][:2]
    return Shard(name, ALL, "1", None if is_open else "9", first, second)


class Stream:
    """Answers of each shard, one after the other, the last one for good; and a listing."""

    def __init__(self, *listed: Shard, **answers: Any) -> None:
        self.listed = listed
        self.answers = {name: deque(each) for name, each in answers.items()}
        self.opened: list[tuple[str, IteratorType]] = []
        self.lists: Exception | None = None

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        self.opened.append((shard_id, start.kind))
        self.shard_id = shard_id
        answers = self.answers[shard_id]
        if answers[0] is NotFound:
            raise NotFound("no such shard")
        return shard_id

    def fetch(self, iterator: str, _: int = 0) -> FetchedPage:
        answers = self.answers[self.reading]
        answer = answers.popleft() if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, FetchedPage)
        return answer

    def list_shards(self) -> tuple[Shard, ...]:
        if isinstance(self.lists, Exception):
            raise self.lists
        return self.listed

    def summary(self) -> StreamSummary:
        return StreamSummary("s", "arn", "ACTIVE", 24, 1, WallTime(0.0))


class Turns:
    """In place of the condition: who waits lets the time pass."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reported = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def notify(self) -> None:
        self.reported += 1

    notify_all = notify

    def wait(self, wait_s: float | None) -> None:
        assert wait_s is not None, "nothing is due and nothing is over"
        assert wait_s > 0
        self.clock.now += wait_s


class Driven:
    """A tail whose threads are the test: `turn` is one visit of a shard."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stream: Stream,
        *,
        follows: bool = True,
        start: StartPoint = LATEST,
        **more: Any,
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(readers, "time", self.clock)
        monkeypatch.setattr(readers, "_THREADS", 0)
        monkeypatch.setattr(readers.random, "random", lambda: 0.5)
        starts = {name: ShardStart((), start) for name in stream.answers if name in "ab"}
        self.stream = stream
        self.tail = StreamReaders(
            starts,
            stream,
            stream,
            follows=follows,
            patience_s=5.0,
            **more,
        )
        self.turns = Turns(self.clock)
        self.tail._changed = self.turns
        self.tail._events = queue.Queue()
        self.tail.__enter__()

    def turns_until_it_fails(self, reported: list[Any]) -> None:
        """So many that the test, not its time limit, says if it does not."""
        for _ in range(100):
            reported += self.turn()[2]

    def turn(self) -> tuple[str, float, list[Any]]:
        """The shard that was visited, when, and what it told."""
        due = self.tail._next_due()
        assert due is not None
        at, self.stream.reading = self.clock.now - BEGUN, due.shard_id
        self.tail._visit(due)
        reported = []
        while not self.tail._events.empty():
            reported.append(self.tail._events.get())
        return due.shard_id, round(at, 3), reported


@pytest.fixture
def driven(monkeypatch):
    def made(stream: Stream, **more: Any) -> Driven:
        return Driven(monkeypatch, stream, **more)

    return made


def test_each_shard_is_begun_and_then_read_at_its_pace(driven):
    tail = driven(Stream(a=[records("1"), records("2", behind_ms=9), IDLE], b=[IDLE]))

    said = [tail.turn() for _ in range(6)]

    first, second = records("1").records, records("2").records
    assert said == [
        ("a", 0.0, [Arrived("a", first)]),
        ("b", 0.0, [EveryShardBegan()]),
        ("a", 0.4, [Arrived("a", second)]),
        ("a", 0.8, []),
        ("b", 1.0, []),
        ("a", 1.8, []),
    ]
    assert tail.stream.opened == [("a", IteratorType.LATEST), ("b", IteratorType.LATEST)]


def test_children_that_a_shard_names_follow_it_from_their_beginning(driven):
    tail = driven(Stream(a=[ended("d", "c")], c=[ended()], d=[IDLE]))
    tail.stream.listed = (shard("c", "a", is_open=False), shard("d", "a"))

    assert tail.turn()[2] == [EveryShardBegan(), Ended("a", ("c", "d"))]
    assert sorted(tail.turn()[0] for _ in range(2)) == ["c", "d"]
    assert tail.stream.opened[1:] == [
        ("c", IteratorType.TRIM_HORIZON),
        ("d", IteratorType.TRIM_HORIZON),
    ]
    assert not tail.tail._lineage.is_over
    assert tail.turns.reported >= 2


def test_without_following_the_tail_ends_with_its_shards(driven):
    tail = driven(Stream(a=[ended("c")]), follows=False)

    assert tail.turn()[2] == [EveryShardBegan(), Ended("a", ("c",))]
    assert tail.tail._lineage.is_over
    assert tail.tail._next_due() is None


def test_of_a_merge_the_child_waits_for_both_and_a_trimmed_parent_for_none(driven):
    both = ("a", "b")
    tail = driven(Stream(a=[ended("c", parents=both)], b=[IDLE, OVER], c=[IDLE]))
    tail.stream.listed = (shard("b", is_open=False), shard("c", *both))

    assert tail.turn()[2] == [Ended("a", ("c",))]
    assert tail.turn()[:2] == ("b", 0.0)
    assert tail.turn() == ("b", 1.0, [Ended("b", ("c",))])
    assert tail.turn()[:2] == ("c", 1.0)

    gone = driven(Stream(a=[ended("c", parents=("a", "z"))], b=[OVER], c=[IDLE]))
    gone.stream.listed = (shard("c", "a", "z"),)
    gone.turn()
    gone.turn()
    assert gone.turn()[0] == "c"


def test_where_the_service_has_lost_its_position_an_open_shard_goes_on(driven):
    tail = driven(Stream(shard("a"), a=[OVER, records("7"), OVER]))

    assert tail.turn()[2] == [EveryShardBegan()]
    again = tail.turn()
    assert again[2] == [Arrived("a", records("7").records)]
    tail.stream.listed = (shard("a", is_open=False), shard("c", "a"), shard("d", "b"))
    assert tail.turn()[2] == [Ended("a", ("c",))]


def test_a_shard_that_is_not_there_is_asked_for_again_or_over(driven):
    tail = driven(Stream(shard("a"), a=[NotFound, NotFound]))
    assert tail.turn() == ("a", 0.0, [])
    tail.stream.listed = (shard("c", "a"),)
    assert turns_to_the_end(tail) == (6.0, [EveryShardBegan(), Ended("a", ("c",))])


def turns_to_the_end(reading):
    """When the next shard ends, and what is told then."""
    for _ in range(20):
        _, at, told = reading.turn()
        if any(isinstance(each, Ended) for each in told):
            return at, told
    raise AssertionError("no shard has ended")


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param((shard("a"), shard("b")), id="the listing shows its parent alone"),
        pytest.param((), id="an empty listing"),
        pytest.param((shard("z"),), id="nothing of its keys that came after it"),
        pytest.param((shard("a", is_open=False), shard("c", "a")), id="it is listed, and closed"),
    ],
)
def test_a_child_that_is_not_found_and_not_proven_to_be_trimmed_is_read_later(driven, listed):
    page = records("7")
    reading = driven(Stream(a=[ended("c")], c=[NotFound]), start=OLDEST)
    reading.turn()
    reading.stream.listed = listed
    for _ in range(20):
        assert not any(isinstance(each, Ended) for each in reading.turn()[2])
        reading.tail._failing_since.clear()  # the patience is for another test

    reading.stream.answers["c"] = deque([page])

    assert reading.turn()[2] == [Arrived("c", page.records)]


def test_trouble_is_reported_after_a_second_once_and_its_end_when_all_is_well(driven):
    slow = [Throttled("slow")] * 6
    tail = driven(Stream(a=[*slow, IDLE], b=[IDLE, *slow, IDLE]))

    said: list[tuple[str, str]] = []
    for _ in range(40):
        name, at, reported = tail.turn()
        said += [(name, each.text) for each in reported if isinstance(each, Trouble)]
        assert at >= 1.0 or not any(isinstance(each, Trouble) for each in reported)
    assert [text for _, text in said] == [
        f"Reading {said[0][0]} fails and is tried again: slow",
        "Reading works again",
    ]
    assert not tail.tail._failing_since


def test_an_expired_iterator_is_replaced_at_once_and_is_no_trouble(driven):
    tail = driven(Stream(a=[records("1", behind_ms=0), ExpiredIterator("old"), records("2")]))

    assert tail.turn()[1] == 0.0
    assert tail.turn()[1:] == (0.4, [])
    name, at, reported = tail.turn()
    assert (name, at, reported) == ("a", 0.4, [Arrived("a", records("2").records)])
    assert tail.stream.opened[1] == ("a", IteratorType.AFTER_SEQUENCE_NUMBER)


def test_a_service_that_answers_nothing_ends_it_after_its_patience(driven):
    tail = driven(Stream(a=[Unavailable("503")], b=[IDLE, IDLE, IDLE, Unavailable("504")]))
    reported: list[Any] = []
    with pytest.raises(Unavailable) as away:
        tail.turns_until_it_fails(reported)
    assert str(away.value).splitlines()[0] == "nothing was answered for 5 s (aws.start_timeout)"
    assert "The last attempt: 50" in str(away.value)
    # b's last answer came at 2.0.
    assert 7.0 <= tail.clock.now - BEGUN < 11.0
    assert reported == [EveryShardBegan(), Trouble("Reading a fails and is tried again: 503")]


@pytest.mark.parametrize("answer", [Throttled("slow"), ExpiredIterator("old")])
def test_a_refusal_is_an_answer_and_a_broken_page_is_none(driven, answer):
    tail = driven(Stream(a=[answer]))
    for _ in range(30):
        tail.turn()
    broken = driven(Stream(a=[RecordError("not a page")]))
    with pytest.raises(Unavailable, match="not a page"):
        broken.turns_until_it_fails([])


def test_time_in_which_nothing_was_asked_is_not_silence(driven):
    """While a pager blocks the threads, they send nothing."""
    tail = driven(Stream(a=[IDLE, Unavailable("503"), IDLE]))
    tail.turn()
    tail.clock.now += 60.0
    assert tail.turn()[2] == []
    assert tail.turn()[2] == []


def test_what_is_refused_for_good_ends_it(driven):
    tail = driven(Stream(a=[AccessDenied("no")]))
    tail.stream.reading = "a"
    tail.tail._work()
    with pytest.raises(AccessDenied):
        list(tail.tail.events())


def test_events_come_in_order_then_none_and_end_with_the_shards(driven, monkeypatch):
    monkeypatch.setattr(readers, "_NOTICE_S", 0.001)
    tail = driven(Stream(a=[ended()]))
    tail.stream.reading = "a"
    events = tail.tail.events()
    assert next(events) is None
    tail.tail._work()
    assert list(events) == [EveryShardBegan(), Ended("a", ())]


def test_a_full_queue_is_waited_for_until_the_tail_is_closed(driven, monkeypatch):
    monkeypatch.setattr(readers, "_NOTICE_S", 0.001)
    tail = driven(Stream(a=[IDLE])).tail
    tail._events = queue.Queue(1)
    tail._publish(EveryShardBegan())
    waiting = threading.Thread(target=tail._publish, args=(EveryShardBegan(),))
    waiting.start()
    time.sleep(0.02)
    assert waiting.is_alive()
    tail.__exit__(None, None, None)
    waiting.join(HUNG_S)
    assert tail._events.qsize() == 1
    assert tail._next_due() is None


# Where a reading gives up, and where it ends


@pytest.mark.parametrize("error", [Throttled("slow"), Unavailable("503"), LimitExceeded("long")])
def test_one_shard_that_cannot_be_read_ends_a_reading_that_gives_up_on_each(driven, error):
    reading = driven(Stream(a=[records("1"), error], b=[IDLE]), gives_up="each")
    reported: list[Any] = []
    with pytest.raises(type(error)) as failed:
        reading.turns_until_it_fails(reported)
    assert str(failed.value) == f"a could not be read for 5 s\nThe last attempt: {error}"
    assert 5.0 <= reading.clock.now - BEGUN < 11.0


def test_the_end_of_a_shard_that_cannot_be_proven_is_an_error_and_not_the_end(driven):
    """Its last page comes again and again, and the listing that shows its children does not."""
    reading = driven(Stream(a=[OVER], b=[IDLE]), gives_up="each")
    reading.stream.lists = Throttled("slow")
    with pytest.raises(Throttled, match="a could not be read for 5 s"):
        reading.turns_until_it_fails([])


def test_a_shard_that_is_listed_as_open_and_never_found_is_an_error(driven):
    stream = Stream(shard("a"), a=[NotFound], b=[IDLE])
    with pytest.raises(NotFound, match=r"a could not be read for 5 s\n.*listed as open"):
        driven(stream, gives_up="each").turns_until_it_fails([])


def test_iterators_that_expire_again_and_again_are_asked_for_at_a_pace(driven):
    reading = driven(Stream(a=[ExpiredIterator("old")]))
    at = [reading.turn()[1] for _ in range(6)]
    assert at[:2] == [0.0, 0.0]
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(at[1:]))


def test_a_shard_that_is_trimmed_with_unread_records_is_not_one_that_ended(driven):
    begun = driven(Stream(a=[records("1"), NotFound("gone")]), start=OLDEST)
    begun.turn()
    begun.stream.listed = (shard("c", "a"),)
    assert turns_to_the_end(begun)[1] == [Ended("a", ("c",), is_trimmed=True)]

    waited = driven(Stream(a=[ended("c")], c=[NotFound]), start=OLDEST)
    assert waited.turn()[2] == [EveryShardBegan(), Ended("a", ("c",))]
    waited.stream.listed = (shard("d", "c"),)
    assert turns_to_the_end(waited)[1] == [Ended("c", ("d",), is_trimmed=True)]

    # Between the listing and the first request, the horizon moved on.
    at_once = driven(Stream(a=[NotFound]), start=OLDEST)
    at_once.stream.listed = (shard("c", "a"),)
    assert turns_to_the_end(at_once)[1] == [EveryShardBegan(), Ended("a", ("c",))]


def test_records_that_expired_while_an_open_shard_was_read_are_reported_before_the_next(driven):
    day = 86_400.0
    old = FetchedPage([Record(b"x", "k", "1", 1.0)], "i", 9, served_at=WallTime(100.0))
    left = FetchedPage([Record(b"x", "k", "9", 50.0)], "i", 9, served_at=WallTime(30.0 + day))
    reading = driven(Stream(a=[old, left]), start=OLDEST)
    reading.turn()
    first, second = reading.turn()[2]
    assert isinstance(first, Expired)
    assert "records may have expired before they were read" in first.text
    assert second == Arrived("a", left.records)


def test_up_to_an_instant_later_records_are_left_out_and_no_child_is_read(driven):
    early, late = Record(b"x", "k", "1", 10.0), Record(b"x", "k", "2", 20.0)
    page = FetchedPage([early, late], None, None, children=(ChildShard("c", ("a",), ALL),))
    reading = driven(Stream(a=[page]), end=ReadingEnd(until_at=WallTime(20.0)))
    assert reading.turn()[2] == [EveryShardBegan(), Arrived("a", [early]), Passed("a")]
    assert reading.tail._next_due() is None


@pytest.mark.parametrize("is_open", [True, False])
def test_at_the_tip_an_open_shard_ends_and_a_closed_one_is_read_to_its_end(driven, is_open):
    end = ReadingEnd(began_instant=Instant(BEGUN))
    stream = Stream(shard("a", is_open=is_open), a=[records("1", behind_ms=0), IDLE, IDLE, IDLE])
    reading = driven(stream, end=end, start=OLDEST)
    assert reading.turn()[2] == [EveryShardBegan(), Arrived("a", records("1").records)]
    assert reading.turn()[1:] == (0.4, [])
    # The pause at the tip is such that this page is asked for when it decides.
    _, at, reported = reading.turn()
    assert (at, reported) == (SETTLED_S, [Passed("a")] if is_open else [])
    assert reading.tail._lineage.is_over == is_open


def test_where_a_listing_fails_the_tip_is_asked_for_again(driven):
    stream = Stream(shard("a"), a=[IDLE])
    reading = driven(stream, end=ReadingEnd(began_instant=Instant(BEGUN - SETTLED_S)))
    stream.lists = Throttled("slow")
    assert reading.turn()[2] == [EveryShardBegan()]
    stream.lists = None
    assert reading.turn()[2] == [Passed("a")]


@pytest.mark.seconds
def test_with_their_threads_each_record_comes_once_and_all_threads_end():
    class Live(Stream):
        lock = threading.Lock()

        def iterator(self, shard_id: str, _: StartPoint) -> str:
            return shard_id

        def fetch(self, iterator: str, _: int = 0) -> FetchedPage:
            with self.lock:
                answers = self.answers[iterator]
                return answers.popleft() if len(answers) > 1 else answers[0]

    def at(name: str, page: FetchedPage) -> FetchedPage:
        return FetchedPage(page.records, name, page.millis_behind_latest)

    stream = Live(
        shard("c", "a", is_open=False),
        a=[at("a", records("1")), ended("c")],
        b=[at("b", IDLE)],
        c=[at("c", records("2")), ended()],
    )
    starts = {name: ShardStart((), LATEST) for name in "ab"}
    seen: list[Any] = []
    with StreamReaders(starts, stream, stream, follows=True, patience_s=5.0) as tail:
        mine = [each for each in threading.enumerate() if each.name.startswith("kclrun-read-")]
        assert (len(mine), all(each.daemon for each in mine)) == (8, True)
        for event in tail.events():
            seen.append(event)
            if isinstance(event, Ended) and event.shard_id == "c":
                break
    arrived = [each.records[0].sequence_number for each in seen if isinstance(each, Arrived)]
    assert arrived == ["1", "2"]
    assert seen.count(EveryShardBegan()) == 1
    until(lambda: not any(each.is_alive() for each in mine))
