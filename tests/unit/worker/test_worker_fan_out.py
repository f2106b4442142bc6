"""The fetch thread with a subscription: polling until it stands, and whenever it breaks."""

import threading

import pytest

from kclrun.aws.fan_out import FanOut
from kclrun.errors import AccessDenied, MalformedBody, NotFound, Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from kclrun.model.subscribing import SILENCE_MAX_S
from kclrun.worker.delivery_queue import Exhausted
from tests.patience import HUNG_S
from tests.unit.worker.one_shard import BEGINNING, FIRST, Fetching

AFTER = IteratorType.AFTER_SEQUENCE_NUMBER
IN_USE = Unavailable("another subscription exists")
END = object()


def event(*numbers, continuation=None, children=(), behind_ms=0):
    records = [Record(str(number).encode(), "k", str(number)) for number in numbers]
    after = continuation or (str(numbers[-1]) if numbers and not children else None)
    return FetchedPage(records, None, behind_ms, children, continuation=after)


class Clock:
    def __init__(self):
        self.at = 1_000.0

    def __call__(self):
        return self.at


class Subscription:
    """Gives the events of its script in order; END is the end; an error is raised; a number is so
    many seconds of silence."""

    def __init__(self, script, clock):
        self.script = list(script)
        self.clock = clock
        self.is_over = self.is_closed = False

    def next_page(self, timeout_s):
        step = self.script.pop(0) if self.script else 0.0
        if isinstance(step, Exception):
            raise step
        if step is END:
            self.is_over = True
            return None
        if isinstance(step, float):
            self.clock.at += step
            return None
        return step

    def close(self):
        self.is_closed = True


class Subscriber:
    """The answers to the next subscriptions: a script, or an error."""

    def __init__(self, *answers, clock=None):
        self.clock = clock or Clock()
        self.answers = list(answers)
        self.starts = []
        self.made = []

    def subscribe(self, shard_id, start):
        assert shard_id == FIRST
        self.starts.append(start)
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        self.made.append(Subscription(answer, self.clock))
        return self.made[-1]


class Reader:
    """Records 1, 2, … `ready` of a shard by polling; and its admin."""

    def __init__(self, ready=0):
        self.ready = ready
        self.polls = 0

    def iterator(self, shard_id, start):
        return start.sequence_number or "0"

    def fetch(self, iterator, limit):
        self.polls += 1
        numbers = range(int(iterator) + 1, self.ready + 1)
        records = [Record(str(number).encode(), "k", str(number)) for number in numbers]
        return FetchedPage(records, str(max(int(iterator), self.ready)), 0)


# FanOut, by its own clock.


def fan_out(*answers):
    subscriber = Subscriber(*answers)
    warnings = []
    return (
        FanOut(subscriber, FIRST, now=subscriber.clock, warn=warnings.append),
        subscriber,
        warnings,
    )


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param([IN_USE], id="the service broke it off"),
        pytest.param([MalformedBody("no event")], id="what came is no event"),
        pytest.param([SILENCE_MAX_S], id="silence"),
        pytest.param([END], id="it ended at once"),
        pytest.param(IN_USE, id="it was refused"),
    ],
)
def test_whatever_breaks_a_subscription_polling_goes_on_and_it_is_tried_again(trouble):
    fan, subscriber, warnings = fan_out(trouble, [event(1)])
    fan.polled()
    if fan.takes_over(BEGINNING):
        assert fan.next_page() is None
        assert subscriber.made[0].is_closed

    assert not fan.takes_over(BEGINNING)
    pause_s = fan.pause_s(60.0)
    assert 1.0 <= pause_s <= 5.0
    assert fan.pause_s(0.2) == 0.2
    subscriber.clock.at += pause_s
    assert fan.takes_over(StartPoint(AFTER, "7"))
    assert subscriber.starts == [BEGINNING, StartPoint(AFTER, "7")]
    assert fan.next_page() == event(1)
    assert bool(warnings) == (trouble == [SILENCE_MAX_S])  # which has lasted long enough to tell


def test_a_subscription_whose_events_drip_is_left_for_polling_with_a_word():
    late = [SILENCE_MAX_S / 2, event(1, behind_ms=30_000), SILENCE_MAX_S / 2]
    fan, subscriber, warnings = fan_out([*late, event(2, behind_ms=35_000)], [event(3)])
    fan.polled()

    found = []
    while fan.takes_over(BEGINNING):
        found.append(fan.next_page())

    assert [page for page in found if page] == [
        event(1, behind_ms=30_000),
        event(2, behind_ms=35_000),
    ]
    assert subscriber.made[0].is_closed
    assert "35 s behind and does not catch up" in warnings[0]
    subscriber.clock.at += fan.pause_s(60.0)
    assert fan.takes_over(StartPoint(AFTER, "2"))


def test_after_five_minutes_it_subscribes_again_at_once_where_it_stands():
    fan, subscriber, _ = fan_out([event(1), END], [event(2)])
    fan.polled()
    assert fan.takes_over(BEGINNING)
    fan.next_page()
    subscriber.clock.at += 240.0
    fan.next_page()

    assert fan.takes_over(StartPoint(AFTER, "1"))
    assert subscriber.starts[1] == StartPoint(AFTER, "1")
    assert subscriber.made[0].is_closed


def test_a_subscription_is_replaced_before_the_service_ends_it():
    fan, subscriber, _ = fan_out([event(1)], [event(2)])
    fan.polled()
    assert fan.takes_over(BEGINNING)
    fan.next_page()
    subscriber.clock.at += 299.0

    assert fan.takes_over(StartPoint(AFTER, "1"))

    assert subscriber.made[0].is_closed
    assert not subscriber.made[1].is_closed
    assert fan.next_page() == event(2)


def test_a_refusal_that_an_operator_must_end_is_reported_at_once():
    """The next try comes after a minute: until then nothing else would say that it polls."""
    fan, _, warnings = fan_out(AccessDenied("SubscribeToShard: no permission"))
    fan.polled()

    assert not fan.takes_over(BEGINNING)

    (warning,) = warnings
    assert "no permission" in warning


# The whole thread.


def test_records_come_once_and_in_order_by_polling_events_and_polling_again():
    reader = Reader(ready=3)
    subscriber = Subscriber([event(4, 5), event(6), NotFound("the consumer was removed")], [])

    with Fetching(reader, subscriber=subscriber) as run:
        assert run.payloads(6) == [b"1", b"2", b"3", b"4", b"5", b"6"]
        reader.ready = 9
        assert run.payloads(3) == [b"7", b"8", b"9"]

    assert subscriber.starts == [StartPoint(AFTER, "3")]
    assert run.broken == []


def test_a_shard_that_ends_in_its_subscription_ends_with_its_children():
    child = ChildShard("shardId-000000000001", (FIRST,), HashRange(0, HASH_KEY_MAX))
    subscriber = Subscriber([event(1), event(2, children=(child,))])

    with Fetching(Reader(), subscriber=subscriber) as run:
        assert run.payloads(2) == [b"1", b"2"]
        end = run.queue.next_task()
        assert isinstance(end, Exhausted)
        assert end.children == (child,)

    assert subscriber.made[0].is_closed
    assert run.broken == []


def test_a_queue_that_closes_ends_the_subscription():
    subscriber = Subscriber([event(1)])
    with Fetching(Reader(), subscriber=subscriber) as run:
        run.payloads(1)

    assert subscriber.made[0].is_closed
    assert run.broken == []


def test_a_full_queue_stops_the_reading_of_events_and_loses_none():
    """Back-pressure: no event is asked for while there is no room; the peer waits."""
    big = [Record(bytes(2**19), "k", str(number)) for number in range(1, 9)]
    pages = [FetchedPage([record], None, 0, continuation=record.sequence_number) for record in big]
    asked = threading.Semaphore(0)

    class Counting(Subscription):
        def next_page(self, timeout_s):
            asked.release()
            return super().next_page(timeout_s)

    class Counted(Subscriber):
        def subscribe(self, shard_id, start):
            return Counting(pages, self.clock)

    with Fetching(Reader(), subscriber=Counted()) as run:
        for _ in range(3):  # the two that have room, and the one that waits for it
            assert asked.acquire(timeout=HUNG_S)
        assert not asked.acquire(timeout=0.05)
        numbers = []
        while len(numbers) < 8:
            numbers += [int(each.sequence_number) for each in run.queue.next_task().records]

    assert numbers == list(range(1, 9))
    assert run.broken == []
