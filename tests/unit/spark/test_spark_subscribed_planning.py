"""The planner over a reader by fan-out: pushed records are in the next batch, at once and free."""

import queue
import threading
import time

import pytest

from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.spark.offset_planner import DriverClock, OffsetPlanner
from kclrun.spark.offsets import ranges_between
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.positions import SHARD_END, after
from kclrun.spark.subscribed import SubscribedReader
from tests.patience import HUNG_S
from tests.support.stream_ports import ModelStream, ModelSubscriber

EPOCH = 1_700_000_000.0
FIRST = "shardId-000000000000"
EARLIEST = Start(StartKind.EARLIEST)


class World:
    """A stream in virtual time, and how often its shards were polled. A pushed record comes as
    soon as it was put."""

    def __init__(self, shards=1, beside=None, **settings):
        self.elapsed = 0.0
        self.polls = 0
        self.at_next_wait = []
        if beside is None:
            self.kinesis = Kinesis(KinesisSettings(), b"pushed batches".ljust(32))
            self.kinesis.create_stream("s", shards, EPOCH)
            self.subscriber = ModelSubscriber(self.kinesis, "s", self.now)
        else:
            self.kinesis, self.subscriber = beside.kinesis, beside.subscriber
        self.model = ModelStream(self.kinesis, "s", self.now)
        self.reader = SubscribedReader(
            self,
            self.subscriber,
            now=lambda: self.elapsed,
            service_time=self.now,
            has_threads=False,
        )
        self.query = OffsetPlanner(
            self.reader,
            self.model,
            SourceSettings(address=StreamAddress(stream="s"), start=EARLIEST, **settings),
            clock=DriverClock(lambda: self.elapsed, self.now, self.wait),
            chance=lambda: 0.5,
            calls_at_once=0,
        )

    def now(self):
        return EPOCH + self.elapsed

    def wait(self, pause_s):
        """A new record ends it, as it ends the wait for answers."""
        if self.at_next_wait:
            self.at_next_wait.pop(0)()
        else:
            self.elapsed += pause_s
        self.reader.step()

    def iterator(self, shard_id, start):
        return self.model.iterator(shard_id, start)

    def fetch(self, iterator, limit):
        self.polls += 1
        self.elapsed += 0.015
        return self.model.fetch(iterator, limit)

    @property
    def stream(self):
        return self.kinesis.stream("s", None, self.now())

    def put(self, data=b"x", shard=0):
        low = self.stream.open_shards()[shard].hash_range.start
        entry = PutEntry(data, "k", str(low))
        return self.kinesis.put(self.stream, entry, self.now()).sequence_number

    def news(self, start):
        for _ in range(100):
            end = self.query.latest_offset(start)
            if end is not start:
                return end
        raise AssertionError("no news")

    def subscribed(self, shards=1):
        """The offset of a query that has read one record of each shard, and is subscribed."""
        for shard in range(shards):
            self.put(shard=shard)
        start = self.query.initial_offset()
        for _ in range(100):
            start = self.query.latest_offset(start)
            self.reader.step()
            if self.query.report()["shardsSubscribed"] == shards:
                self.reader.step()
                return self.query.latest_offset(start)
        raise AssertionError("not subscribed")


def test_a_pushed_record_is_in_a_batch_at_once_and_travels_with_it():
    world = World(poll_interval_s=60.0)
    start = world.subscribed()
    world.polls, began = 0, world.elapsed
    put = []
    world.at_next_wait.append(lambda: put.append(world.put(b"new")))

    end = world.query.latest_offset(start)

    assert end.shards == {FIRST: after(put[0])}
    assert world.elapsed - began < 1.0  # a tick of polling is a minute
    hints = world.query.hints(start, end)
    assert [row.data for row in hints[FIRST].rows] == [b"new"]
    assert world.polls == 0


def test_only_shards_with_news_are_looked_at_between_two_ticks():
    world = World(shards=4, poll_interval_s=1.0)
    start = world.subscribed(shards=4)
    world.reader.retain([FIRST])  # the others are polled, as beyond the most subscriptions
    world.query.latest_offset(start)
    world.polls = 0

    number = world.put()
    world.reader.step()
    end = world.news(start)

    assert end.shards[FIRST] == after(number)
    assert world.polls == 0


def test_rows_too_large_to_travel_are_read_again_by_an_executor_from_the_position():
    world = World(poll_interval_s=60.0, inline_bytes_max=1_000)
    start = world.subscribed()
    world.polls = 0
    for _ in range(3):
        world.put(bytes(1_000))
    world.reader.step()

    end = world.news(start)

    [found] = ranges_between(start, end, world.query.hints(start, end))
    assert found.hint.rows is None
    assert found.hint.iterator is not None
    first = world.model.fetch(found.hint.iterator, 1).records[0]  # as an executor does
    assert (first.data, found.begin.covers(first.sequence_number)) == (bytes(1_000), False)
    assert world.polls == 0


def test_available_now_asks_the_service_although_subscriptions_stand():
    world = World(poll_interval_s=60.0)
    start = world.subscribed()
    number = world.put()
    world.polls = 0

    world.query.prepare_available_now()
    end = world.query.latest_offset(start)

    assert end.shards == {FIRST: after(number)}
    assert world.polls > 0
    assert world.query.latest_offset(end) is end


def test_an_idle_subscribed_shard_makes_one_batch_an_hour_as_a_polled_one_does():
    world = World(poll_interval_s=60.0)
    start = world.subscribed()
    world.polls = 0

    ends = []
    while world.elapsed < 4 * 3600:
        end = world.query.latest_offset(start)
        ends += [end] if end is not start else []
        start = end
        world.wait(5.0)

    assert 3 <= len(ends) <= 4
    assert start.as_of_ms[FIRST] > (EPOCH + 2 * 3600) * 1000
    assert world.polls == 0


def test_children_of_a_pushed_end_enter_and_are_subscribed_in_their_turn():
    world = World(poll_interval_s=1.0)
    start = world.subscribed()
    shard = world.stream.open_shards()[0]
    middle = shard.hash_range.end // 2
    world.stream.split(FIRST, middle, world.now())
    numbers = [world.put(shard=each) for each in (0, 1)]

    ends = []
    while not ends or not {after(each) for each in numbers} <= set(ends[-1].shards.values()):
        ends.append(world.news(start))
        start = ends[-1]
        assert len(ends) < 10

    assert ends[0].shards == {FIRST: SHARD_END}
    for _ in range(10):
        world.query.latest_offset(start)
        world.wait(1.0)
    assert world.query.report()["shardsSubscribed"] == 2


def test_two_queries_of_one_consumer_take_turns_lose_nothing_and_say_so(caplog):
    one = World(poll_interval_s=1.0)
    other = World(poll_interval_s=1.0, beside=one)
    one.put()
    starts = [one.query.initial_offset(), other.query.initial_offset()]

    number = ""
    for _ in range(60):
        number = one.put()
        for at, world in enumerate((one, other)):
            starts[at] = world.query.latest_offset(starts[at])
        one.wait(1.0)
        other.elapsed = one.elapsed
        other.reader.step()

    for _ in range(5):
        for at, world in enumerate((one, other)):
            starts[at] = world.query.latest_offset(starts[at])
    assert [start.shards for start in starts] == [{FIRST: after(number)}] * 2
    assert "another reader took the subscription over" in caplog.text


class Pushing:
    """A subscriber whose one subscription really waits for events."""

    def __init__(self):
        self.events = queue.SimpleQueue()
        self.is_closed = threading.Event()
        self.is_over = False

    def subscribe(self, shard_id, start):
        return self

    def push(self, *records):
        number = records[-1].sequence_number if records else "0"
        self.events.put(FetchedPage(records, None, 0, continuation=number))

    def next_page(self, timeout_s):
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self):
        self.is_closed.set()


@pytest.mark.seconds
def test_a_thread_wakes_the_planner_that_waits_and_ends_with_it():
    kinesis = Kinesis(KinesisSettings(), b"pushed batches".ljust(32))
    kinesis.create_stream("s", 1, time.time())
    model, pushing = ModelStream(kinesis, "s", time.time), Pushing()
    reader = SubscribedReader(model, pushing, now=time.monotonic, service_time=time.time)
    settings = SourceSettings(
        address=StreamAddress(stream="s"), start=EARLIEST, poll_interval_s=60.0
    )
    query = OffsetPlanner(reader, model, settings)
    start, deadline = query.initial_offset(), time.monotonic() + HUNG_S
    pushing.push()
    while not query.report()["shardsSubscribed"]:
        assert time.monotonic() < deadline
        start = query.latest_offset(start)

    # In the stream there is none: it can only come from the subscription.
    pushing.push(Record(b"pushed", "k", "49000000000000000000001", time.time()))
    while start.shards[FIRST] != after("49000000000000000000001"):
        assert time.monotonic() < deadline
        start = query.latest_offset(start)
    query.close()

    assert pushing.is_closed.wait(HUNG_S)
