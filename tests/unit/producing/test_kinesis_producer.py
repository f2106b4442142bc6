"""The producer over the model of Kinesis, in virtual time: what is flushed is there, in order."""

import itertools
import queue
import random
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from kclrun.errors import (
    AccessDenied,
    LimitExceeded,
    NotFound,
    OutcomeUnknown,
    Throttled,
    Unavailable,
)
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.producing.flow_control import Flow, ProducerSettings
from kclrun.producing.kinesis_producer import (
    HURRIED_RELIST_PERIOD_S,
    RELIST_PERIOD_S,
    KinesisProducer,
    _Answered,
)
from kclrun.producing.packing import Request
from tests.patience import HUNG_S

FIRST = "shardId-000000000000"


class Faulty:
    """Between the producer and the stream: `fault` may put, fail, or both."""

    def __init__(self, stream, fault):
        self._stream = stream
        self._fault = fault
        self.requests = 0

    def put(self, entries):
        self.requests += 1
        return self._fault(self._stream, entries)


def producer(stream, putter=None, *, flow=None, relist=None, **settings):
    """One request at a time, so that virtual time is exact."""
    if settings.get("aggregates"):
        relist = relist or stream.shards
    return KinesisProducer(
        putter or stream,
        stream.shards(),
        ProducerSettings(concurrency=1, **settings),
        flow=flow,
        relist=relist,
        clock=stream.clock,
        wait=stream.wait,
        chance=random.Random(1).random,
    )


def records_of(read):
    return [record for records in read.values() for record in records]


def assert_in_order(read, count, *, exactly=True):
    """Payloads are counters: every one is there, and each key's ascend, repeats left out."""
    last = {}
    found = Counter()
    for record in records_of(read):
        number = int(record.data)
        found[number] += 1
        if found[number] == 1:
            assert number > last.get(record.partition_key, -1)
            last[record.partition_key] = number
    assert sorted(found) == list(range(count))
    if exactly:
        assert set(found.values()) <= {1}


@pytest.fixture
def stream(virtual_stream):
    """One shard, without the limits of the service."""
    return virtual_stream(1, limits=False)


@pytest.mark.seconds
@pytest.mark.parametrize("aggregates", [False, True])
def test_a_hot_shard_loses_nothing_and_each_key_keeps_its_order(virtual_stream, aggregates):
    """Ten seconds at 2,500 records/s for the hot shard, 600/s for each of three others."""
    stream = virtual_stream(4, limits=True)
    sending = producer(stream, aggregates=aggregates)
    chance = random.Random(3)
    hot = [f"{2**126 - 1 - n}" for n in range(3000)]
    began, count = stream.now, 0
    while stream.now < began + 10:
        due = int((stream.now - began + 0.01) * 4300)
        while count < due:
            # Keys by explicit hash: most for the first quarter of the hash range.
            is_hot = chance.random() < 2500 / 4300
            hash_key = chance.choice(hot) if is_hot else str(chance.randrange(2**126, 2**128))
            name = f"hot{hash_key}" if is_hot else f"key{chance.randrange(2000)}"
            sending.add(PutEntry(b"%d" % count, name, hash_key))
            count += 1
        stream.wait(0.01)
    sending.flush()

    metrics = sending.metrics()
    # Aggregates of all keys of the shard keep below its 1,000 records a second.
    assert (metrics.shards[FIRST].refusals > 0) != aggregates
    assert metrics.user_records == count
    assert all(
        shard.refusals == 0 for shard_id, shard in metrics.shards.items() if shard_id != FIRST
    )
    read = stream.read()
    found = sorted(int(record.data) for record in records_of(read))
    assert found == list(range(count))
    for records in read.values():
        last = {}
        for record in records:
            assert int(record.data) > last.get(record.partition_key, -1)
            last[record.partition_key] = int(record.data)


@pytest.mark.seconds
def test_aggregates_bring_in_what_the_shards_take_and_are_hardly_ever_refused(virtual_stream):
    """A minute and a half of more than two shards take, of 1 MiB a second and one in reserve."""
    stream = virtual_stream(2, limits=True)
    sending = producer(stream, aggregates=True)
    began = stream.now
    for number in range(40_000):
        sending.add(PutEntry(b"x" * 5000, f"key{number % 500}", str((number % 2) * (2**128 - 1))))
    sending.flush()

    metrics = sending.metrics()
    taken = 2 * 2**20 * (stream.now - began + 1)
    assert metrics.bytes / taken >= 0.95
    assert 0 < metrics.refused_records / metrics.records <= 0.01


def test_nothing_is_held_longer_than_it_may_linger(stream):
    putter = Faulty(stream, lambda stream, entries: stream.put(entries))
    sending = producer(stream, putter)
    sending.add(PutEntry(b"0", "a"))
    stream.wait(0.09)
    sending.add(PutEntry(b"1", "b"))
    assert putter.requests == 0

    stream.wait(0.02)
    sending.add(PutEntry(b"2", "c"))

    assert putter.requests == 1
    assert len(records_of(stream.read())) == 3


def test_a_full_buffer_holds_add_until_there_is_room(stream):
    held = []

    def count(stream, entries):
        held.append(sending.metrics().waiting_records)
        return stream.put(entries)

    sending = producer(stream, Faulty(stream, count), buffer_records_max=50)
    for number in range(500):
        sending.add(PutEntry(b"%d" % number, "one key"))
    sending.flush()

    assert max(held) == 50
    assert_in_order(stream.read(), 500)


def test_a_request_of_unknown_fate_is_sent_again_before_anything_later(virtual_stream):
    stream = virtual_stream(2, limits=False)
    chance = random.Random(5)

    def lose_answers(stream, entries):
        results = stream.put(entries)
        if chance.random() < 0.4:
            raise OutcomeUnknown("no answer", operation="PutRecords")
        return results

    sending = producer(
        stream, Faulty(stream, lose_answers), aggregates=True, buffer_records_max=100
    )
    for number in range(3000):
        sending.add(PutEntry(b"%d" % number, f"key{number % 5}"))
    sending.flush()

    assert sending.metrics().failed_requests > 10
    assert len(records_of(stream.read())) > 3000  # what was lost was the answer
    assert_in_order(stream.read(), 3000, exactly=False)


@pytest.mark.parametrize("leaf", [Throttled, Unavailable, OutcomeUnknown])
def test_it_raises_when_the_service_is_away_for_too_long_and_goes_on_raising(stream, leaf):
    def refuse(stream, entries):
        stream.wait(0.02)
        raise leaf("away", operation="PutRecords", code="Away")

    sending = producer(stream, Faulty(stream, refuse), give_up_after_s=20.0)
    sending.add(PutEntry(b"0", "secret"))
    began = stream.now
    with pytest.raises(leaf, match="1 records are not acknowledged"):
        sending.flush()

    assert 20.0 <= stream.now - began <= 24.0  # one more of the three-second back-offs at most
    with pytest.raises(leaf):
        sending.add(PutEntry(b"1", "a"))
    with pytest.raises(leaf):
        sending.flush()
    sending.close()


@pytest.mark.parametrize("leaf", [AccessDenied, NotFound])
def test_what_does_not_repair_itself_is_raised_at_once(stream, leaf):
    def refuse(stream, entries):
        raise leaf("no", operation="PutRecords")

    putter = Faulty(stream, refuse)
    sending = producer(stream, putter)
    sending.add(PutEntry(b"0", "a"))
    with pytest.raises(leaf):
        sending.flush()

    assert putter.requests == 1


def test_an_impossible_record_is_refused_and_the_others_go_on(stream):
    sending = producer(stream)
    sending.add(PutEntry(b"0", "a"))
    with pytest.raises(LimitExceeded):
        sending.add(PutEntry(b"x" * 2**20, "a"))
    sending.add(PutEntry(b"1", "a"))
    sending.flush()

    assert_in_order(stream.read(), 2)


@pytest.mark.parametrize(
    ("aggregates", "is_listed_again"), [(False, True), (False, False), (True, True)]
)
def test_a_split_while_sending_keeps_the_order_with_a_stale_map_too(
    virtual_stream, aggregates, is_listed_again
):
    """Read as the KCL reads: a user record outside of its shard's hash keys does not count. So what
    an aggregate brought into the wrong child is in the right one, too."""
    stream = virtual_stream(2, limits=True)
    listings = []

    def relist():
        listings.append(stream.now)
        return stream.shards()

    sending = producer(stream, relist=relist if is_listed_again else None, aggregates=aggregates)
    for number in range(6000):
        sending.add(PutEntry(b"%d" % number, f"key{number % 900}"))
        if number in {2000, 4000}:
            stream.split(FIRST if number == 2000 else "shardId-000000000002")
    sending.flush()

    everything, read = records_of(stream.read()), stream.read_as_the_kcl()
    assert len([shard for shard in read.values() if shard]) >= 5
    assert_in_order(read, 6000)
    assert (len(everything) > 6000) == aggregates, "records went to the wrong child"
    if is_listed_again:
        gaps = [later - earlier for earlier, later in itertools.pairwise(listings)]
        period_s = HURRIED_RELIST_PERIOD_S if aggregates else RELIST_PERIOD_S
        assert listings
        assert all(gap >= period_s for gap in gaps)
        assert FIRST not in sending.metrics().shards


def test_a_listing_that_fails_does_no_harm(stream):
    def relist():
        raise Throttled("not now", operation="ListShards")

    sending = producer(stream, relist=relist)
    stream.split(FIRST)
    for number in range(2000):
        sending.add(PutEntry(b"%d" % number, f"key{number}"))
    sending.flush()

    assert_in_order(stream.read(), 2000)


def test_an_interrupt_ends_the_producer_and_does_not_hang_it(stream):
    def interrupt(stream, entries):
        raise KeyboardInterrupt

    sending = producer(stream, Faulty(stream, interrupt))
    sending.add(PutEntry(b"0", "a"))
    with pytest.raises(KeyboardInterrupt):
        sending.flush()
    with pytest.raises(Unavailable, match="interrupted"):
        sending.flush()


def test_the_metrics_count_what_was_done(virtual_stream):
    stream = virtual_stream(1, limits=True)
    sending = producer(stream)
    for number in range(3000):
        sending.add(PutEntry(b"12345", f"{number:05}"))
    sending.flush()
    while sending.metrics().shards[FIRST].pause_s:
        stream.wait(1.0)
        sending.add(PutEntry(b"12345", "later"))
        sending.flush()

    metrics = sending.metrics()
    assert metrics.records == metrics.user_records
    assert metrics.bytes == 10 * metrics.records
    assert metrics.refused_records > 0
    assert 0 < metrics.full_batch_share < 1
    assert 0.1 <= metrics.pause_max_s <= 10
    assert metrics.recovery_max_s > 0
    assert metrics.shards[FIRST].slow_s >= metrics.recovery_max_s


class Held:
    """A stream of one shard, `shard_id`, whose requests wait until `go` is set; `started` counts
    those that have begun, `most` is the largest number of them at once."""

    def __init__(self, shard_id=FIRST):
        self.go = threading.Event()
        self.started = threading.Semaphore(0)
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._shard_id = shard_id

    def put(self, entries):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.started.release()
        assert self.go.wait(HUNG_S)
        with self._lock:
            self._now -= 1
        return tuple(PutResult("1", self._shard_id) for _ in entries)


class Waits(queue.SimpleQueue):
    """The answers of a producer; notes how long it would wait for one."""

    def __init__(self, put):
        super().__init__()
        self.noted = []
        self._at_wait = put

    def get(self, block=True, timeout=None):
        if timeout is not None or self.empty():
            self.noted.append(timeout)
            self._at_wait()
        return super().get(block, timeout)


ONE_SHARD = (Shard(FIRST, HashRange(0, HASH_KEY_MAX), "1"),)


def test_as_many_requests_as_it_may_are_under_way_at_once_and_close_waits_for_them():
    held = Held()
    sending = KinesisProducer(held, ONE_SHARD, ProducerSettings(linger_s=0.0), clock=lambda: 0.0)
    answers = sending._news = Waits(held.go.set)
    for number in range(6):
        sending.add(PutEntry(b"", f"key{number}"))
    for _ in range(4):
        assert held.started.acquire(timeout=HUNG_S)

    sending.flush()

    assert answers.noted[0] is None, "no further request may be sent before an answer"
    assert (held.most, sending.metrics().records) == (4, 6)
    held.go.clear()
    sending.add(PutEntry(b"", "not flushed"))
    assert any(each.name.startswith("kinesis-producer") for each in threading.enumerate())
    held.go.set()
    sending.close()
    sending.close()
    assert not any(each.name.startswith("kinesis-producer") for each in threading.enumerate())


def test_while_a_request_is_under_way_it_waits_no_longer_than_until_the_next_is_due():
    held, flow = Held(), Flow()
    flow.of(FIRST).refused(sent_at=0.0, now=0.0)  # by an earlier producer: rests until 0.1
    upper = Shard("upper", HashRange(2**127, HASH_KEY_MAX), "1")
    lower = Shard(FIRST, HashRange(0, 2**127 - 1), "1")
    sending = KinesisProducer(held, [lower, upper], flow=flow, clock=lambda: 0.0)
    sending.add(PutEntry(b"", "at rest", "0"))
    sending.add(PutEntry(b"", "sent", str(HASH_KEY_MAX)))
    sending._work(hurried=True)
    assert held.started.acquire(timeout=HUNG_S)  # its answer never comes
    refused = _Answered(Request(0.0, 0), AccessDenied("enough"))
    answers = sending._news = Waits(lambda: answers.put(refused))

    with pytest.raises(AccessDenied, match="enough"):
        sending.flush()

    assert answers.noted == [0.1]
    held.go.set()
    sending.close()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_a_request_raises_in_its_thread_is_raised_by_the_producer(concurrency):
    def put(_entries):
        raise NotFound("no such stream", operation="PutRecords")

    putter = SimpleNamespace(put=put)
    sending = KinesisProducer(putter, ONE_SHARD, ProducerSettings(concurrency=concurrency))
    sending.add(PutEntry(b"", "a"))

    for _ in range(2):
        with pytest.raises(NotFound, match="no such stream"):
            sending.flush()
    sending.close()


def test_while_answers_name_unknown_shards_they_are_listed_each_half_minute():
    held, now, listed = Held("shardId-000000000009"), 0.0, []
    held.go.set()

    def relist():
        listed.append(now)
        return ONE_SHARD

    settings = ProducerSettings(concurrency=1, linger_s=0.0)
    sending = KinesisProducer(held, ONE_SHARD, settings, relist=relist, clock=lambda: now)
    for now in (0.0, 1.0, 29.9, 30.0, 31.0, 59.9, 60.0):  # noqa: B007 - the clock and the list
        sending.add(PutEntry(b"", "a"))
        sending.flush()

    assert listed == [0.0, 30.0, 60.0]
