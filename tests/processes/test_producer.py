"""`kclrun.Producer` against the embedded stream."""

import asyncio
import collections
import subprocess
import sys

import pytest

import kclrun
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates
from kclrun.errors import LimitExceeded, NotFound, SinkError, Throttled
from kclrun.local.filling import make_stream
from kclrun.local.server import start_embedded
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S
from tests.support.programs import run_to_end


@pytest.fixture(scope="module")
def kinesis():
    with start_embedded() as embedded:
        endpoint = WireEndpoint(embedded.kinesis_endpoint, "us-east-1", "us-east-1")
        for name in ("orders", "aggregated", "errors"):
            make_stream(endpoint, name, 2)
        yield endpoint


@pytest.fixture(autouse=True)
def no_identity(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


def read(kinesis, stream):
    client = WireClient(kinesis, lambda: WireCredentials("key", "secret"), service="kinesis")
    reader = PollingReader(client, stream)
    raw = []
    for shard in WireStreamAdmin(client, stream).list_shards():
        iterator = reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        while iterator is not None:
            page = reader.fetch(iterator, 10_000)
            raw += page.records
            iterator = None if page.millis_behind_latest == 0 else page.next_iterator
    client.close()
    return raw, list(open_aggregates(raw))


@pytest.mark.parametrize(("stream", "aggregates"), [("orders", False), ("aggregated", True)])
def test_all_records_are_there_in_order_per_key(kinesis, stream, aggregates):
    with kclrun.Producer(stream, endpoint_url=kinesis.url, aggregates=aggregates) as producer:
        for number in range(5_000):
            producer.put(str(number) if number % 2 else b"%d" % number, f"key {number % 50}")
        producer.flush()
        assert producer.waiting_records == 0
        last = producer.put("5000", "last")

    raw, records = read(kinesis, stream)
    assert (len(raw) < 1_000) == aggregates
    where = last.result(0)
    assert [r.partition_key for r in raw if r.sequence_number == where.sequence_number] == ["last"]
    by_key = collections.defaultdict(list)
    for record in records:
        by_key[record.partition_key].append(int(record.data))
    assert sorted(int(record.data) for record in records) == list(range(5_001))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_a_record_that_is_refused_for_good_concerns_no_other(kinesis):
    with kclrun.Producer("errors", endpoint_url=kinesis.url) as producer:
        producer.put("1", "a")
        for key, data, kind in (
            ("", "x", LimitExceeded),
            ("k" * 257, "x", LimitExceeded),
            ("a", "secret" * 200_000, LimitExceeded),
            ("a", 17, TypeError),
            (17, "x", TypeError),
        ):
            with pytest.raises(kind) as refused:
                producer.put(data, key)
            assert "secret" not in str(refused.value)
        producer.put("2", "a")
    assert [record.data for record in read(kinesis, "errors")[1]] == [b"1", b"2"]
    with pytest.raises(SinkError, match="the producer of the stream errors is closed"):
        producer.put("3", "a")
    producer.close()


def test_records_that_are_not_taken_in_time_fail_and_the_next_are_sent(kinesis, monkeypatch):
    producer = kclrun.Producer("errors", endpoint_url=kinesis.url, give_up_after_s=0.5)
    putter = producer._sender._engine._putter
    monkeypatch.setattr(putter, "put", _throttled)
    failed = [producer.put(data, "b") for data in ("10", "11")]
    assert {type(delivery.exception(HUNG_S)) for delivery in failed} == {Throttled}
    monkeypatch.undo()
    producer._sender._give_up_after_s = HUNG_S
    delivery = producer.put("12", "b")
    assert delivery.result(HUNG_S).shard_id.startswith("shardId-")
    with pytest.raises(Throttled, match="2 records are not in the stream"):
        producer.close()
    found = [r.data for r in read(kinesis, "errors")[1] if r.partition_key == "b"]
    assert found == [b"12"]


def _throttled(_entries):
    raise Throttled("PutRecords: throttled", operation="PutRecords")


def test_a_block_that_raises_does_not_wait_for_its_records(kinesis):
    producer = kclrun.Producer("errors", endpoint_url=kinesis.url, linger_s=HUNG_S)
    delivery = producer.put("1", "z")
    with pytest.raises(ZeroDivisionError), producer:
        producer.put(str(1 / 0), "z")
    with pytest.raises(SinkError, match="was left by ZeroDivisionError"):
        delivery.result(HUNG_S)


def test_a_program_that_ends_without_close_says_how_many_records_it_left(kinesis):
    program = (
        "import kclrun, sys\n"
        "producer = kclrun.Producer('errors', endpoint_url=sys.argv[1], linger_s=600)\n"
        "producer.put('1', 'a')\n"
    )
    ended = run_to_end([sys.executable, "-c", program, kinesis.url], check=True)
    assert "the program ends while 1 records of Producer('errors') wait" in ended.stderr


FORKING = """
import os, sys, kclrun
from kclrun.errors import SinkError
with kclrun.Producer("errors", endpoint_url=sys.argv[1], linger_s=0.0) as producer:
    producer._sender._lock.acquire()  # as any thread of the parent may hold it
    if os.fork() == 0:
        for call in (lambda: producer.put("2", "child"), producer.flush, producer.metrics):
            try:
                call()
            except SinkError as error:
                assert "before this process was forked" in str(error)
            else:
                os._exit(1)
        producer.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    producer._sender._lock.release()
    producer.put("1", "parent").result(60)
"""


def test_a_child_of_a_fork_is_refused_and_the_parent_goes_on(kinesis):
    program = [sys.executable, "-c", FORKING, kinesis.url]
    subprocess.run(program, check=True, timeout=HUNG_S)

    keys = {record.partition_key for record in read(kinesis, "errors")[1]}
    assert "parent" in keys
    assert "child" not in keys


def test_a_producer_of_asyncio_waits_for_room_without_the_loop(kinesis):
    async def put_all():
        async with kclrun.AsyncProducer(
            "aggregated", endpoint_url=kinesis.url, buffer_records_max=10, aggregates=True
        ) as producer:
            deliveries = [await producer.put(str(n), f"async {n % 7}") for n in range(100)]
            await producer.flush()
            return [await delivery for delivery in deliveries]

    places = asyncio.run(put_all())
    assert len({(place.sequence_number, place.sub_sequence_number) for place in places}) == 100
    found = [r for r in read(kinesis, "aggregated")[1] if r.partition_key.startswith("async")]
    assert sorted(int(record.data) for record in found) == list(range(100))

    with pytest.raises(SinkError, match="opened by `async with`"):
        kclrun.AsyncProducer("aggregated").metrics()


def test_a_stream_that_is_not_there_is_named(kinesis):
    with pytest.raises(NotFound, match="missing"):
        kclrun.Producer("missing", endpoint_url=kinesis.url)
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/missing"
    with pytest.raises(NotFound):
        kclrun.Producer(arn, endpoint_url=kinesis.url)


def test_the_import_of_kclrun_loads_no_client():
    program = (
        "import sys, kclrun\n"
        "heavy = {'botocore', 'boto3', 'urllib3', 'kclrun.aws', 'kclrun.producer'}\n"
        "assert not heavy & set(sys.modules)\n"
        "assert kclrun.Producer.__name__ == 'Producer'\n"
        "assert 'botocore' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
