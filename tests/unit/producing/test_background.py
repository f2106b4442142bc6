"""The thread of a producer: a `Delivery` for each record, whatever becomes of it."""

import asyncio
import collections
import os
import threading

import pytest

from kclrun.errors import (
    AccessDenied,
    BufferFull,
    InvalidRequest,
    InvariantViolation,
    SinkError,
    Throttled,
    Unavailable,
)
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.producing.background import BackgroundProducer
from kclrun.producing.delivery import Delivered
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer
from tests.patience import HUNG_S, until

FIRST = "shardId-000000000000"
SHARDS = (Shard(FIRST, HashRange(0, HASH_KEY_MAX), "1"),)
THROTTLED = "ProvisionedThroughputExceededException"


class Service:
    """Takes what it gets, in its order, unless a test says otherwise. `go`: it answers."""

    def __init__(self):
        self.taken = []
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Semaphore(0)
        self.fault = None
        self._lock = threading.Lock()

    def put(self, entries):
        self.asked.release()
        assert self.go.wait(HUNG_S)
        with self._lock:
            results = [self.fault(entry) if self.fault else None for entry in entries]
            for entry, result in zip(entries, results, strict=True):
                if result is None:
                    self.taken.append(entry)
            first = len(self.taken)
            return tuple(
                result or PutResult(str(first + number), FIRST)
                for number, result in enumerate(results)
            )


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def opened():
    """Makes producers; ends each."""
    made = []

    def open_one(service, *, give_up_after_s=60.0, linger_s=0.0, **settings):
        engine = KinesisProducer(
            service,
            SHARDS,
            ProducerSettings(linger_s=linger_s, fails_alone=True, **settings),
            relist=lambda: SHARDS,
        )
        made.append(BackgroundProducer(engine, name="it", give_up_after_s=give_up_after_s))
        return made[-1]

    yield open_one
    for producer in made:
        producer.stop(SinkError("the test is over"))


def put(producer, number=0, key="a", *, waits=True):
    entry = PutEntry(b"%d" % number, key)
    return producer.put(entry, entry.size_bytes, waits=waits)


def refuse(_entry):
    return PutResult(error_code=THROTTLED)


def test_a_record_that_waits_is_sent_at_its_time_without_a_further_call(service, opened):
    delivery = put(opened(service, linger_s=0.02))

    assert delivery.result(HUNG_S) == Delivered(FIRST, "1", None)
    assert delivery.exception(0) is None
    assert delivery.done()
    assert repr(delivery) == f"Delivery({FIRST}, 1)"


def test_a_record_may_be_waited_for_before_its_time_and_goes_on(service, opened):
    producer = opened(service, linger_s=10 * HUNG_S)
    delivery = put(producer)

    with pytest.raises(TimeoutError):
        delivery.result(0.01)
    assert not delivery.done()
    producer.flush(HUNG_S)
    assert delivery.done()


def test_threads_share_it_and_each_key_keeps_its_order(service, opened):
    producer = opened(service, linger_s=0.001, buffer_records_max=50)

    def put_all(thread):
        for number in range(500):
            put(producer, number, f"key {thread}-{number % 3}")

    threads = [threading.Thread(target=put_all, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_S)
    producer.flush(HUNG_S)

    by_key = collections.defaultdict(list)
    for entry in service.taken:
        by_key[entry.partition_key].append(int(entry.data))
    assert len(service.taken) == 2_000
    assert len(by_key) == 12
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert producer.metrics().records == 2_000


def test_a_full_buffer_blocks_or_raises_as_the_caller_chose(service, opened):
    service.go.clear()
    producer = opened(service, buffer_records_max=2)
    for number in range(2):
        put(producer, number)

    with pytest.raises(BufferFull, match="2 records wait"):
        put(producer, 2, waits=False)
    blocked = threading.Thread(target=put, args=(producer, 2))
    blocked.start()
    until(lambda: producer._hurrying == 1)
    service.go.set()
    blocked.join(HUNG_S)
    producer.flush(HUNG_S)

    assert [entry.data for entry in service.taken] == [b"0", b"1", b"2"]


def test_a_record_that_is_refused_for_too_long_fails_alone(service, opened):
    service.fault = lambda entry: refuse(entry) if entry.partition_key == "a" else None
    producer = opened(service, give_up_after_s=0.05)
    bad, good = put(producer, 0, "a"), put(producer, 1, "b")

    assert good.result(HUNG_S)
    with pytest.raises(Throttled, match=f"{FIRST} did not take the record in time"):
        bad.result(HUNG_S)
    with pytest.raises(Throttled):
        producer.flush(HUNG_S)
    producer.flush(HUNG_S)  # it is said once
    assert producer.metrics().failed_records == 1


def test_a_service_that_is_away_for_too_long_fails_the_records_and_those_after_it_are_sent(
    service, opened
):
    def away(_entry):
        raise Unavailable("PutRecords: 503", operation="PutRecords")

    service.fault = away
    producer = opened(service, give_up_after_s=0.05)
    failed = [put(producer, number) for number in range(3)]
    assert all(isinstance(delivery.exception(HUNG_S), Unavailable) for delivery in failed)
    service.fault = None

    assert put(producer, 3).result(HUNG_S)
    with pytest.raises(Unavailable, match=r"3 records are not in the stream; the first: .*503"):
        producer.flush(HUNG_S)


@pytest.mark.parametrize("error", [AccessDenied, InvalidRequest])
def test_what_is_refused_for_good_fails_at_once(service, opened, error):
    def refuse_for_good(_entry):
        raise error("PutRecords: no", operation="PutRecords")

    service.fault = refuse_for_good
    producer = opened(service)

    with pytest.raises(error, match="no"):
        put(producer).result(HUNG_S)


def test_flush_waits_for_the_records_before_it_and_not_for_those_after_it(service, opened):
    service.go.clear()
    producer = opened(service)
    put(producer, 0, "a")
    flushed = threading.Event()

    def flush():
        producer.flush(HUNG_S)
        flushed.set()

    flushing = threading.Thread(target=flush)
    flushing.start()
    until(lambda: len(producer._batches) == 2)
    service.fault = lambda entry: refuse(entry) if entry.partition_key == "b" else None
    put(producer, 1, "b")
    service.go.set()

    assert flushed.wait(HUNG_S), "the record of b waits for ever"
    flushing.join(HUNG_S)


def test_each_flush_waits_for_the_records_after_the_one_before(service, opened):
    producer = opened(service)
    for number in range(5):
        delivery = put(producer, number)
        producer.flush(HUNG_S)
        assert delivery.done()
    service.go.clear()
    put(producer, 5)
    with pytest.raises(TimeoutError):
        producer.flush(0.01)
    with pytest.raises(TimeoutError):
        producer.flush(0.01)
    service.go.set()


def test_a_flush_that_takes_too_long_says_so_and_the_records_go_on(service, opened):
    service.go.clear()
    producer = opened(service)
    delivery = put(producer)

    with pytest.raises(TimeoutError, match=r"records wait after 0\.01 s"):
        producer.flush(0.01)
    service.go.set()
    assert delivery.result(HUNG_S)


def test_callbacks_are_called_once_each_and_what_they_raise_is_logged(service, opened, caplog):
    service.go.clear()
    producer = opened(service)
    called = []
    delivery = put(producer)

    def fail(_delivery):
        raise ZeroDivisionError

    def wait_here(delivery):
        called.append(delivery)
        with pytest.raises(RuntimeError, match="must not wait"):
            put(producer, 1, "b").result(HUNG_S)
        with pytest.raises(RuntimeError, match="flush waits for the thread that sends"):
            producer.flush()

    delivery.add_done_callback(fail)
    delivery.add_done_callback(wait_here)
    service.go.set()
    producer.flush(HUNG_S)
    delivery.add_done_callback(called.append)

    assert called == [delivery, delivery]
    assert "ZeroDivisionError" in caplog.text


def test_a_delivery_is_awaited_in_asyncio(service, opened):
    service.go.clear()
    producer = opened(service)

    async def deliver():
        delivery = put(producer)
        asyncio.get_running_loop().call_soon(service.go.set)
        return await delivery, await delivery

    first, again = asyncio.run(deliver())
    assert first == again == Delivered(FIRST, "1", None)


def test_a_loop_that_has_ended_does_not_hurt_the_producer(service, opened, caplog):
    service.go.clear()
    producer = opened(service)

    async def give_up():
        waiting = asyncio.create_task(_awaited(put(producer)))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(give_up())
    service.go.set()
    producer.flush(HUNG_S)
    assert "failed" not in caplog.text


async def _awaited(delivery):
    await delivery


def test_records_that_are_left_behind_fail_with_the_reason(service, opened):
    service.go.clear()
    producer = opened(service)
    under_way, waiting = put(producer, 0), put(producer, 1)
    assert service.asked.acquire(timeout=HUNG_S)
    ending = threading.Thread(target=producer.stop, args=(SinkError("left by ValueError"),))
    ending.start()

    for delivery in (under_way, waiting):
        with pytest.raises(SinkError, match="left by ValueError"):
            delivery.result(HUNG_S)
    service.go.set()
    ending.join(HUNG_S)
    with pytest.raises(SinkError, match="left by ValueError"):
        put(producer)


@pytest.mark.parametrize("keeps_order", [True, False])
def test_an_error_of_the_thread_itself_fails_every_record(service, opened, keeps_order):
    def broken(_entry):
        raise InvariantViolation("a bug")

    service.go.clear()
    service.fault = broken
    producer = opened(service, keeps_order=keeps_order)
    deliveries = [put(producer, number) for number in range(3)]
    service.go.set()

    for delivery in deliveries:
        with pytest.raises(SinkError, match="a bug"):
            delivery.result(HUNG_S)
    for call in (producer.flush, lambda: put(producer)):
        with pytest.raises(SinkError, match="a bug"):
            call()


def test_close_sends_what_waits_and_may_be_called_twice(service, opened):
    producer = opened(service, linger_s=10 * HUNG_S)
    delivery = put(producer)
    producer.close()
    producer.close()

    assert delivery.done()
    assert len(service.taken) == 1
    with pytest.raises(SinkError, match="it is closed"):
        put(producer)


def test_a_forked_process_is_refused_in_words(service, opened, monkeypatch):
    producer = opened(service)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: put(producer), producer.flush):
        with pytest.raises(SinkError, match="was made before this process was forked"):
            call()
    producer.close()  # it ends nothing of the other process
    monkeypatch.undo()

    assert put(producer).result(HUNG_S)


def test_records_that_failed_are_in_the_log_once_a_minute_with_their_number(
    service, opened, caplog
):
    service.fault = refuse
    producer = opened(service, give_up_after_s=0.0)
    for number in range(3):
        assert put(producer, number).exception(HUNG_S)
    until(lambda: producer._failures == 3)

    assert [record.message for record in caplog.records] == [
        f"it: 1 records failed and are not in the stream; the last: {producer._first_failure}"
    ]
