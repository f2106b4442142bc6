"""`kclrun.Producer` against the embedded stream."""

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
            producer.put(f"key {number % 50}", str(number) if number % 2 else b"%d" % number)
        producer.flush()
        assert producer.waiting_records == 0
        producer.put("last", "5000")

    raw, records = read(kinesis, stream)
    assert (len(raw) < 1_000) == aggregates
    by_key = collections.defaultdict(list)
    for record in records:
        by_key[record.partition_key].append(int(record.data))
    assert sorted(int(record.data) for record in records) == list(range(5_001))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_a_record_that_is_refused_for_good_concerns_no_other(kinesis):
    with kclrun.Producer("errors", endpoint_url=kinesis.url) as producer:
        producer.put("a", "1")
        for key, data, kind in (
            ("", "x", LimitExceeded),
            ("k" * 257, "x", LimitExceeded),
            ("a", "secret" * 200_000, LimitExceeded),
            ("a", 17, TypeError),
            (17, "x", TypeError),
        ):
            with pytest.raises(kind) as refused:
                producer.put(key, data)
            assert "secret" not in str(refused.value)
        producer.put("a", "2")
    assert [record.data for record in read(kinesis, "errors")[1]] == [b"1", b"2"]
    with pytest.raises(SinkError, match="the producer of the stream errors is closed"):
        producer.put("a", "3")
    producer.close()


def test_an_error_names_the_rest_and_flush_sends_it_again(kinesis, monkeypatch):
    producer = kclrun.Producer("errors", endpoint_url=kinesis.url, give_up_after_s=0.0)
    inner = producer._producer._putter
    monkeypatch.setattr(
        producer._producer, "_putter", type("Away", (), {"put": lambda _self, _: _throttled()})()
    )
    producer.put("b", "10")
    producer.put("b", "11")
    with pytest.raises(Throttled, match="2 records are not acknowledged"):
        producer.flush()
    with pytest.raises(Throttled):
        producer.put("b", "12")
    assert producer.waiting_records == 3
    producer._producer._putter = inner
    producer.flush()
    producer.close()
    found = [r.data for r in read(kinesis, "errors")[1] if r.partition_key == "b"]
    assert found == [b"10", b"11", b"12"]


def _throttled():
    raise Throttled("PutRecords: throttled", operation="PutRecords")


def test_a_block_that_raises_does_not_wait_for_its_records(kinesis):
    with (
        pytest.raises(ZeroDivisionError),
        kclrun.Producer("errors", endpoint_url=kinesis.url) as producer,
    ):
        producer.put("z", str(1 / 0))
    assert producer.waiting_records == 0


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
