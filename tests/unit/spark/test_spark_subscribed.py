"""The reader by fan-out: when a page comes from a subscription, and when it is polled."""

import logging

import pytest

from kclrun.errors import AccessDenied, MalformedBody, NotFound, Throttled, Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from kclrun.model.subscribing import REFUSED_FOR_GOOD_S, SETTLED_AFTER_S
from kclrun.spark import subscribed
from kclrun.spark.stream_set import StreamsSubscriber
from kclrun.spark.subscribed import FULL_MAX_S, PushedRecords, SubscribedReader, iterator_in

SHARD = "shardId-000000000000"
HORIZON = StartPoint(IteratorType.TRIM_HORIZON)
CHILD = ChildShard("shardId-000000000001", (SHARD,), HashRange(0, HASH_KEY_MAX))
END = object()


def record(number, size=1):
    return Record(str(number).encode().ljust(size), "k", str(number), 1_000.0 + number)


def after(number):
    return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, str(number))


def event(*numbers, lag_ms=0, continuation="9000", children=(), size=1):
    records = [record(number, size) for number in numbers]
    after_them = None if children else continuation
    return FetchedPage(records, None, lag_ms, children, continuation=after_them)


class Subscription:
    """Gives the steps that the test adds: an event, an error, or its end."""

    def __init__(self):
        self.steps = []
        self.is_over = self.is_closed = False

    def next_page(self, timeout_s):
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, Exception):
            raise step
        if step is END:
            self.is_over = True
            return None
        return step

    def close(self):
        self.is_closed = True


class World:
    """One shard by polling, records 1 to `last`; its subscriptions as the test says; one clock."""

    def __init__(self, last=0):
        self.at = 100.0
        self.last = last
        self.calls = []
        self.lag_ms = 0
        self.starts = []
        self.made = []
        self.refusals = []
        self.woken = 0
        self.reader = SubscribedReader(
            self,
            self,
            now=lambda: self.at,
            service_time=lambda: 1_000.0 + self.at,
            came=self.wake,
            has_threads=False,
        )

    def wake(self):
        self.woken += 1

    def iterator(self, shard_id, start):
        self.calls.append("GetShardIterator")
        return f"it-{start.sequence_number or 0}"

    def fetch(self, iterator, limit):
        self.calls.append("GetRecords")
        first = int(iterator.removeprefix("it-")) + 1
        numbers = range(first, min(first + limit, self.last + 1))
        following = f"it-{numbers[-1] if numbers else first - 1}"
        return FetchedPage(
            [record(number) for number in numbers], following, self.lag_ms, served_at=7.0
        )

    def subscribe(self, shard_id, start):
        assert shard_id == SHARD
        self.starts.append(start)
        if self.refusals:
            raise self.refusals.pop(0)
        self.made.append(Subscription())
        return self.made[-1]

    @property
    def subscription(self):
        return self.made[-1]

    def push(self, *steps):
        """Steps of the present subscription, and so many turns of its thread."""
        self.subscription.steps += steps
        for _ in steps:
            self.reader.step()

    def polls(self):
        """The calls since it was last asked."""
        calls, self.calls = self.calls, []
        return calls

    def token(self, start=HORIZON):
        return self.reader.iterator(SHARD, start)


def numbers(page):
    return [int(each.sequence_number) for each in page.records]


def subscribed_world(last=3):
    """A world whose reader is at the tip, with a subscription that has sent its first event; and
    the token of the place."""
    world = World(last)
    page = world.reader.fetch(world.token(), 10_000)
    world.reader.step()
    world.push(event())
    world.polls()
    return world, page.next_iterator


def test_a_subscription_begins_where_a_polled_page_ended_at_the_tip():
    world = World(last=3)
    world.lag_ms = 5

    first = world.reader.fetch(world.token(), 2)
    world.reader.step()
    assert world.starts == []  # behind the tip
    world.lag_ms = 0
    world.reader.fetch(first.next_iterator, 1)
    world.reader.step()
    assert world.starts == []  # a full page: nothing was looked for behind it
    world.reader.fetch(first.next_iterator, 2)
    world.reader.step()

    assert world.starts == [after(3)]


def test_pushed_records_come_without_a_call_once_and_split_at_the_limit():
    world, token = subscribed_world()
    world.push(event(4, 5), event(6))

    first = world.reader.fetch(token, 2)
    second = world.reader.fetch(first.next_iterator, 2)
    third = world.reader.fetch(second.next_iterator, 2)

    assert [numbers(each) for each in (first, second, third)] == [[4, 5], [6], []]
    assert [each.millis_behind_latest for each in (first, second, third)] == [1, 0, 0]
    assert all(each.is_pushed for each in (first, second, third))
    assert world.polls() == []


def test_a_pushed_page_says_when_its_subscription_was_requested_and_not_when_it_came():
    world, token = subscribed_world()
    world.at += 200.0
    world.push(event(4))

    page = world.reader.fetch(token, 10)

    assert page.served_at == 1_100.0  # the service's time at 100.0


def test_an_event_without_records_that_says_there_are_more_is_no_page_the_shard_is_polled():
    world, token = subscribed_world()
    world.push(event(4), event(lag_ms=40))
    first = world.reader.fetch(token, 10_000)
    world.last = 5

    second = world.reader.fetch(first.next_iterator, 10_000)
    world.push(event(5))
    third = world.reader.fetch(second.next_iterator, 10_000)

    assert [numbers(each) for each in (first, second, third)] == [[4], [5], []]
    assert world.polls() == ["GetShardIterator", "GetRecords"]


def test_until_the_first_event_the_shard_is_polled():
    world = World(last=3)
    token = world.reader.fetch(world.token(), 10_000).next_iterator
    world.reader.step()
    world.polls()

    page = world.reader.fetch(token, 10_000)

    assert world.polls() == ["GetRecords"]
    assert not page.is_pushed


def test_records_that_were_polled_meanwhile_are_left_out_of_the_events():
    world, token = subscribed_world()
    world.last = 5
    world.reader.subscribes = False  # as for a trigger that takes all
    token = world.reader.fetch(token, 10_000).next_iterator
    world.reader.subscribes = True
    world.push(event(4))
    world.polls()

    behind = world.reader.fetch(token, 10_000)
    assert (numbers(behind), world.polls()) == ([], ["GetRecords"])
    world.push(event(5, 6), event(7))
    there = world.reader.fetch(behind.next_iterator, 10_000)

    assert (numbers(there), world.polls()) == ([6, 7], [])


def test_a_place_before_the_events_is_polled():
    world, token = subscribed_world()
    world.push(event(4, 5))
    world.reader.fetch(token, 1)
    world.last = 5

    again = world.reader.fetch(token, 10_000)  # another look at the same batch

    assert numbers(again) == [4, 5]
    assert world.polls() == ["GetRecords"]


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(Unavailable("cut", operation="SubscribeToShard"), id="broken"),
        pytest.param(NotFound("no consumer", operation="SubscribeToShard"), id="removed"),
        pytest.param(MalformedBody("no event"), id="malformed"),
    ],
)
def test_a_subscription_that_breaks_drops_its_records_and_polling_goes_on_without_a_gap(trouble):
    world, token = subscribed_world()
    world.push(event(4), trouble)
    world.last = 6

    page = world.reader.fetch(token, 10_000)

    assert numbers(page) == [4, 5, 6]
    assert world.polls() == ["GetRecords"]
    assert world.subscription.is_closed
    reported = world.reader.report()
    assert (reported["shardsSubscribed"], reported["subscriptionTrouble"]) == (0, str(trouble))


def test_after_a_break_it_subscribes_where_the_last_event_said_the_shard_is_empty():
    world, token = subscribed_world()
    world.push(event(continuation="3999"), Unavailable("cut", operation="SubscribeToShard"))
    world.reader.fetch(token, 10_000)  # nothing new: the place is the same
    world.at += SETTLED_AFTER_S
    world.reader.step()
    world.push(event(4))

    assert world.starts[1:] == [StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "3999")]
    assert numbers(world.reader.fetch(token, 10_000)) == [4]


@pytest.mark.parametrize(
    ("refusal", "pause_s"),
    [
        (Throttled("slow", operation="SubscribeToShard"), 2.0),
        (Unavailable("in use", operation="SubscribeToShard"), 2.0),
        (AccessDenied("no", operation="SubscribeToShard"), REFUSED_FOR_GOOD_S),
    ],
)
def test_a_refused_subscription_is_tried_again_while_the_shard_is_polled(refusal, pause_s):
    world = World(last=3)
    world.refusals = [refusal]
    token = world.reader.fetch(world.token(), 10_000).next_iterator
    world.reader.step()
    world.polls()

    for _ in range(3):
        token = world.reader.fetch(token, 10_000).next_iterator
        world.reader.step()
        assert len(world.starts) == 1
    assert world.polls() == ["GetRecords"] * 3
    world.at += pause_s
    world.reader.fetch(token, 10_000)
    world.reader.step()

    assert world.starts == [after(3), after(3)]


def test_a_planner_that_does_not_read_fills_the_buffer_and_ends_the_subscription(monkeypatch):
    monkeypatch.setattr(subscribed, "BUFFER_BYTES_TOTAL", 1_000)
    world, token = subscribed_world()
    world.push(event(4, size=2_000))
    world.subscription.steps.append(event(5))

    world.reader.step()
    world.at += FULL_MAX_S / 2
    world.reader.step()
    assert world.subscription.steps != []  # no room: TCP makes the service wait
    assert world.reader.report()["shardsSubscribed"] == 1
    world.at += FULL_MAX_S / 2
    world.reader.step()

    assert world.subscription.is_closed
    assert world.reader.report()["shardsSubscribed"] == 0
    world.last = 9
    assert numbers(world.reader.fetch(token, 10_000)) == [4, 5, 6, 7, 8, 9]


def test_a_full_buffer_that_is_read_in_time_goes_on(monkeypatch):
    monkeypatch.setattr(subscribed, "BUFFER_BYTES_TOTAL", 1_000)
    world, token = subscribed_world()
    world.push(event(4, size=2_000))
    world.reader.step()
    world.at += FULL_MAX_S / 2

    page = world.reader.fetch(token, 10_000)
    world.at += FULL_MAX_S / 2
    world.push(event(5))

    assert numbers(page) == [4]
    assert numbers(world.reader.fetch(page.next_iterator, 10_000)) == [5]
    assert world.polls() == []


def test_a_subscription_that_ends_after_five_minutes_is_made_anew_and_keeps_its_records():
    world, token = subscribed_world()
    world.push(event(4, continuation="4500"))
    world.at += 300.0
    world.push(END)
    world.reader.step()
    world.push(event(5))

    assert world.starts[1:] == [StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "4500")]
    page = world.reader.fetch(token, 10_000)
    assert numbers(page) == [4, 5]
    assert page.served_at == 1_400.0
    assert world.polls() == []


def test_a_pushed_end_of_a_shard_ends_it_with_its_children_and_is_the_last_subscription():
    world, token = subscribed_world()
    world.push(event(4, 5), event(6, children=(CHILD,)))
    first = world.reader.fetch(token, 2)
    last = world.reader.fetch(first.next_iterator, 2)

    assert (first.is_end, first.children, numbers(first)) == (False, (), [4, 5])
    assert (last.is_end, last.children, numbers(last)) == (True, (CHILD,), [6])
    assert last.served_at is None  # it would be taken for the time of an answer
    world.at += 60.0
    world.reader.step()
    assert len(world.starts) == 1
    assert world.subscription.is_closed


def test_an_end_without_children_is_not_believed():
    world, token = subscribed_world()
    world.subscription.steps.append(FetchedPage([record(4)], None, 0))
    world.reader.step()
    world.last = 4

    page = world.reader.fetch(token, 10_000)

    assert (numbers(page), page.is_end) == ([4], False)
    assert world.polls() == ["GetRecords"]


def test_a_shard_whose_place_is_a_time_is_polled_until_its_first_record():
    world = World(last=0)
    token = world.token(StartPoint(IteratorType.LATEST))

    token = world.reader.fetch(token, 10_000).next_iterator
    world.reader.step()
    assert world.starts == []
    world.last = 1
    world.reader.fetch(token, 10_000)
    world.reader.step()

    assert world.starts == [after(1)]


def test_an_executor_gets_the_services_iterator_or_none():
    world, token = subscribed_world()
    world.push(event(4))
    pushed = world.reader.fetch(token, 10_000)

    assert iterator_in(token) == "it-3"
    assert iterator_in(pushed.next_iterator) is None
    assert iterator_in("AAAA") is None


def test_a_place_that_a_subscription_is_at_needs_no_iterator():
    world, _ = subscribed_world()
    world.push(event(4))

    page = world.reader.fetch(world.token(after(3)), 10_000)

    assert numbers(page) == [4]
    assert world.polls() == []


def test_news_wake_once_until_they_are_taken():
    world, token = subscribed_world()
    assert (set(world.reader.news()), world.woken) == (set(), 0)

    world.push(event(4), event(5), event())
    assert world.woken == 1
    assert set(world.reader.news()) == {SHARD}
    world.reader.fetch(token, 10_000)
    world.push(event(6, lag_ms=40))
    world.push(event(lag_ms=0))  # no record, and now the tip

    assert world.woken == 2
    assert set(world.reader.news()) == {SHARD}


def test_shards_that_are_not_read_any_more_and_all_at_the_end_are_unsubscribed():
    world, _ = subscribed_world()
    thread = world.reader._shards[SHARD]

    world.reader.retain([SHARD])
    assert not thread._is_closed
    world.reader.retain([])
    thread.run()  # what its thread does then

    assert world.subscription.is_closed
    assert world.reader.report()["shardsSubscribed"] == 0


def test_beyond_the_most_subscriptions_shards_are_polled_and_it_is_reported_once(
    monkeypatch, caplog
):
    monkeypatch.setattr(subscribed, "SUBSCRIPTIONS_MAX", 0)
    world = World(last=1)
    with caplog.at_level(logging.WARNING):
        token = world.token()
        for _ in range(3):
            token = world.reader.fetch(token, 10_000).next_iterator
            world.reader.step()

    assert world.starts == []
    [reported] = caplog.messages
    assert reported.startswith("more than 0 shards: the others are polled")


def test_a_subscription_that_another_reader_takes_over_is_reported_once_a_minute(caplog):
    taken = Unavailable("x", operation="SubscribeToShard", code="ResourceInUseException")
    world, token = subscribed_world()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.push(taken)
            token = world.reader.fetch(token, 10_000).next_iterator
            world.at += SETTLED_AFTER_S + 1
            world.reader.step()
            world.push(event())

    [reported] = caplog.messages
    assert "another reader took the subscription over" in reported
    assert "consumerName" in reported
    assert reported.startswith(SHARD)


def test_a_bug_in_the_thread_is_logged_and_the_shard_is_polled(caplog):
    world, token = subscribed_world()
    world.subscription.steps.append(event(4))
    world.subscription.next_page = None  # not callable

    with caplog.at_level(logging.ERROR):
        world.reader._shards[SHARD].run()
    world.last = 4

    assert "is polled from now on" in caplog.text
    assert numbers(world.reader.fetch(token, 10_000)) == [4]
    assert world.polls() == ["GetRecords"]


def test_records_of_the_horizon_follow_it_until_some_were_read():
    pushed = PushedRecords(HORIZON)
    assert not pushed.is_at(HORIZON)
    pushed.put(event(1, 2), 5.0)

    assert pushed.is_at(HORIZON)
    assert pushed.is_at(after(1))
    assert not pushed.is_at(HORIZON)  # its first record was left out
    page, place = pushed.take(10)
    assert (numbers(page), place) == ([2], after(2))
    assert pushed.size_bytes == 0


def test_several_streams_subscribe_to_the_shard_of_the_stream_and_place_its_children():
    class Of:
        def __init__(self):
            self.asked = []

        def subscribe(self, shard_id, start):
            self.asked.append((shard_id, start))
            made = Subscription()
            made.steps = [event(1), event(2, children=(CHILD,)), END]
            return made

    orders, returns = Of(), Of()
    found = StreamsSubscriber({"orders": orders, "returns": returns}).subscribe(
        f"returns:{SHARD}", HORIZON
    )

    assert (orders.asked, returns.asked) == ([], [(SHARD, HORIZON)])
    assert found.next_page(1.0) == event(1)
    [child] = found.next_page(1.0).children
    assert (child.shard_id, child.parents) == (f"returns:{CHILD.shard_id}", (f"returns:{SHARD}",))
    assert child.hash_range.start == HASH_KEY_MAX + 1
    assert not found.is_over
    assert found.next_page(1.0) is None
    assert found.is_over
