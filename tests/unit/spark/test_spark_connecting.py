"""From where a stream is to clients that reach it: once a process, and over a real endpoint."""

import os
import random
import socket
import time

import pytest

from kclrun.errors import SettingsError, Unavailable
from kclrun.model.record import IteratorType, StartPoint
from kclrun.spark import requests
from kclrun.spark.executor.reading import read_ranges, record_batches
from kclrun.spark.offsets import Hint, ShardRange
from kclrun.spark.options import LeasesAt, SourceSettings, StreamAddress
from kclrun.spark.positions import TRIM_HORIZON, after
from kclrun.spark.requests import Connected, Kept, connected
from kclrun.spark.stream_set import StreamsAdmin, StreamsReader
from tests.support.clients import client_of

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def reached(endpoint, stream="orders"):
    return StreamAddress(stream=stream, region="us-east-1", endpoint_url=endpoint)


def test_a_region_is_needed():
    with pytest.raises(SettingsError, match="region"):
        connected(StreamAddress(stream="orders"))


def test_several_streams_are_reached_over_one_client():
    several = connected(StreamAddress(stream="a,b", region="us-east-1"))

    assert (type(several.reader), type(several.admin)) == (StreamsReader, StreamsAdmin)


@pytest.mark.parametrize(
    ("stream_url", "table_url", "found"),
    [
        (None, None, "https://dynamodb.us-east-1.amazonaws.com"),
        ("https://kinesis.example", None, "https://dynamodb.us-east-1.amazonaws.com"),
        ("http://127.0.0.1:1", None, "http://127.0.0.1:1"),
        ("http://127.0.0.1:1", "https://other.example", "https://other.example"),
    ],
)
def test_a_lease_table_is_in_aws_unless_the_stream_is_in_an_emulator(
    monkeypatch, stream_url, table_url, found
):
    monkeypatch.setattr(requests, "WireClient", lambda endpoint, *_, **named: (endpoint, named))
    monkeypatch.setattr(requests, "DynamoLeaseTable", lambda *made: made)

    (endpoint, named), table = Connected(reached(stream_url)).lease_table(LeasesAt("t", table_url))

    assert (endpoint.url.rstrip("/"), named["service"], table) == (found, "dynamodb", "t")


def test_a_process_connects_once_to_what_is_reached_the_same_way():
    here = connected(reached("http://127.0.0.1:1"))

    assert connected(reached("http://127.0.0.1:1")) is here
    assert connected(reached("http://127.0.0.1:2")) is not here
    assert connected(reached("http://127.0.0.1:1", "other")) is not here


def test_connections_are_kept_within_a_bound_and_the_longest_unused_leaves_first():
    made = []
    kept = Kept(lambda *wanted: made.append(wanted) or len(made), count_max=3)
    a, b, c, d = (reached("https://kinesis.example", stream) for stream in "abcd")

    assert [kept.get(each) for each in (a, b, c, a, d)] == [1, 2, 3, 1, 4]
    assert [kept.get(each) for each in (a, c, d)] == [1, 3, 4]
    assert kept.get(b) == 5


@pytest.mark.seconds
def test_a_forked_worker_makes_its_own_connection(endpoint):
    made_here(endpoint, "forked")
    mine = connected(reached(endpoint, "forked"))
    assert mine.admin.summary().name == "forked"
    read_end, write_end = os.pipe()

    child = os.fork()
    if child == 0:
        reported = b"failed"
        try:
            own = connected(reached(endpoint, "forked"))
            reported = (
                b"own" if own is not mine and own.admin.summary().name == "forked" else b"shared"
            )
        finally:
            os.write(write_end, reported)
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    reported = os.read(read_end, 100)
    os.close(read_end)

    assert reported == b"own"
    assert mine.admin.summary().name == "forked"


def test_an_endpoint_where_nobody_answers_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    unanswered = connected(reached(f"http://127.0.0.1:{port}"))

    with pytest.raises(Unavailable, match=rf"DescribeStreamSummary: .* 127\.0\.0\.1:{port}"):
        unanswered.admin.summary()
    settings = SourceSettings(address=reached(f"http://127.0.0.1:{port}"), retry_attempts=2)
    wanted = ShardRange("shardId-000000000000", TRIM_HORIZON, after("5"))
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        list(read_ranges(unanswered.reader, [wanted], settings, admin=unanswered.admin))


def test_ranges_become_rows_over_http(endpoint):
    sent = made_here(endpoint, "rows", shards=3, records=600)
    source = connected(reached(endpoint, "rows"))
    ranges, expected = [], []
    for shard in source.admin.list_shards():
        token = source.reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        page = source.reader.fetch(token, 10_000)
        n = [record.sequence_number for record in page.records]
        after_first = IteratorType.AFTER_SEQUENCE_NUMBER
        token = source.reader.iterator(shard.shard_id, StartPoint(after_first, n[0]))
        ranges.append(
            ShardRange(shard.shard_id, after(n[0]), after(n[-2]), hint=Hint(token, time.time()))
        )
        expected += [(shard.shard_id, *sent[each]) for each in n[1:-1]]

    rows = [
        (row["shardId"], row["data"], row["partitionKey"])
        for page in read_ranges(
            source.reader, ranges, SourceSettings(address=reached(endpoint)), admin=source.admin
        )
        for batch in record_batches(page.records, "rows", page.range.shard_id)
        for row in batch.to_pylist()
    ]

    assert len(rows) > 500
    assert sorted(rows) == sorted(expected)
    for shard_id in {row[0] for row in rows}:
        assert [row for row in rows if row[0] == shard_id] == [
            row for row in expected if row[0] == shard_id
        ]


def made_here(endpoint, stream, *, shards=1, records=0):
    """A stream with random records: what was put, by sequence number."""
    client = client_of("kinesis", endpoint)
    client.create_stream(StreamName=stream, ShardCount=shards)
    chance = random.Random(7)
    sent = {}
    for first in range(0, records, 300):
        entries = [
            {"Data": chance.randbytes(50), "PartitionKey": f"key-{index}"}
            for index in range(first, first + 300)
        ]
        answer = client.put_records(StreamName=stream, Records=entries)
        for entry, result in zip(entries, answer["Records"], strict=True):
            sent[result["SequenceNumber"]] = (entry["Data"], entry["PartitionKey"])
    client.close()
    return sent
