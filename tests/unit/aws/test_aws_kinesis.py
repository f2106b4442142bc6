"""Reading a stream: what is asked for, and what becomes of the answers."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin, create_stream
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound, Throttled, Unavailable
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter, StreamSummary

ARN = "arn:aws:kinesis:eu-west-1:111122223333:stream/flights"
MakeClient = Callable[..., WireClient]


def asked(server: Any) -> list[Any]:
    return [msgspec.json.decode(request.body) for request in server.requests]


def encoded(answer: object) -> bytes:
    return msgspec.json.encode(answer)


def test_a_stream_is_made_once(server, make_client):
    client = make_client(server.url)
    server.reply(body=b"")
    server.refuse(400, "ResourceInUseException")
    server.refuse(400, "LimitExceededException")

    assert create_stream(client, "flights", 3) is True
    assert create_stream(client, "flights", 3) is False
    with pytest.raises(Throttled):
        create_stream(client, "flights", 3)
    assert asked(server) == [{"StreamName": "flights", "ShardCount": 3}] * 3


# Iterators and records


def test_an_iterator_is_asked_for_by_name_and_position(server, make_client):
    server.default.body = encoded({"ShardIterator": "the-iterator"})
    reader = PollingReader(make_client(server.url), "flights")

    iterator = reader.iterator("s-1", StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "42"))
    reader.iterator(
        "s-1", StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(1_700_000_000.12345))
    )

    assert iterator == "the-iterator"
    assert asked(server) == [
        {
            "StreamName": "flights",
            "ShardId": "s-1",
            "ShardIteratorType": "AFTER_SEQUENCE_NUMBER",
            "StartingSequenceNumber": "42",
        },
        {
            "StreamName": "flights",
            "ShardId": "s-1",
            "ShardIteratorType": "AT_TIMESTAMP",
            "Timestamp": 1_700_000_000.123,
        },
    ]


def test_a_stream_given_by_arn_is_named_by_arn_everywhere(server, make_client):
    server.reply(body=encoded({"ShardIterator": "i"}))
    server.reply(body=encoded({"Records": [], "NextShardIterator": "j"}))
    server.reply(body=encoded({"Shards": []}))
    client = make_client(server.url)
    reader = PollingReader(client, ARN)

    reader.fetch(reader.iterator("s", StartPoint(IteratorType.LATEST)), 10)
    WireStreamAdmin(client, ARN).list_shards()

    assert [request["StreamARN"] for request in asked(server)] == [ARN] * 3
    assert not any("StreamName" in request for request in asked(server))


def test_a_page_of_records_is_decoded(server, make_client):
    body = encoded(
        {
            "Records": [
                {
                    "Data": base64.b64encode(b"payload").decode(),
                    "PartitionKey": "k",
                    "SequenceNumber": "7",
                    "ApproximateArrivalTimestamp": 1.5,
                }
            ],
            "NextShardIterator": "next",
            "MillisBehindLatest": 1234,
        }
    )
    server.reply(body=body)

    page = PollingReader(make_client(server.url), "flights").fetch("it", 100)

    assert [record.data for record in page.records] == [b"payload"]
    assert page.next_iterator == "next"
    assert page.millis_behind_latest == 1234
    assert page.body_bytes == len(body)
    assert asked(server) == [{"ShardIterator": "it", "Limit": 100}]


def test_the_end_of_a_shard_names_its_children(server, make_client):
    child = {
        "ShardId": "s-2",
        "ParentShards": ["s-1"],
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "9"},
    }
    server.reply(body=encoded({"Records": [], "NextShardIterator": None, "ChildShards": [child]}))

    page = PollingReader(make_client(server.url), "flights").fetch("it", 100)

    assert page.next_iterator is None
    assert [(child.shard_id, child.parents) for child in page.children] == [("s-2", ("s-1",))]


def test_a_record_is_put_with_its_data_its_key_and_a_hash_key_only_if_it_has_one(
    server, make_client
):
    server.default.body = encoded({"Records": [{"SequenceNumber": "1", "ShardId": "s"}] * 2})
    putter = WirePutter(make_client(server.url), "flights")

    putter.put([PutEntry(b"a", "key"), PutEntry(b"b", "key", "7")])

    assert asked(server) == [
        {
            "StreamName": "flights",
            "Records": [
                {"Data": "YQ==", "PartitionKey": "key"},
                {"Data": "Yg==", "PartitionKey": "key", "ExplicitHashKey": "7"},
            ],
        }
    ]


def test_errors_of_reading_are_named(server, make_client):
    reader = PollingReader(make_client(server.url), "flights")
    for code, expected in [
        ("ExpiredIteratorException", ExpiredIterator),
        ("ResourceNotFoundException", NotFound),
        ("KMSAccessDeniedException", Unavailable),
    ]:
        server.refuse(400, code)
        with pytest.raises(expected):
            reader.fetch("it", 1)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        b'{"Records":5}',
        b"",
        b'{"ShardIterator":"\xff"}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_a_garbled_answer_is_asked_for_again(server, make_client, body):
    server.default.body = body
    reader = PollingReader(make_client(server.url), "flights")

    with pytest.raises(Unavailable) as raised:
        reader.fetch("it", 1)
    assert raised.value.code == "MalformedBody"
    with pytest.raises(Unavailable):
        reader.iterator("s", StartPoint(IteratorType.LATEST))


# Listings


@pytest.mark.parametrize("body", [b"{}", b'{"NextToken":"t"}', b'{"Shards":null}'])
def test_an_answer_without_shards_is_not_an_empty_listing(server, make_client, body):
    server.default.body = body

    with pytest.raises(Unavailable):
        WireStreamAdmin(make_client(server.url), "flights").list_shards()


def wire_shard(number: int, **more: object) -> dict[str, object]:
    return {
        "ShardId": f"shardId-{number:012}",
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
        "SequenceNumberRange": {"StartingSequenceNumber": "1"},
    } | more


def test_a_listing_has_all_pages(server, make_client):
    closed = wire_shard(
        0,
        SequenceNumberRange={"StartingSequenceNumber": "1", "EndingSequenceNumber": "5"},
        ParentShardId="p",
        AdjacentParentShardId="q",
    )
    server.reply(body=encoded({"Shards": [closed], "NextToken": "token"}))
    server.reply(body=encoded({"Shards": [wire_shard(1)]}))

    shards = WireStreamAdmin(make_client(server.url), "flights").list_shards(
        ShardFilter("AT_TIMESTAMP", WallTime(100.5))
    )

    everything = HashRange(0, 2**128 - 1)
    assert shards == (
        Shard("shardId-000000000000", everything, "1", "5", "p", "q"),
        Shard("shardId-000000000001", everything, "1"),
    )
    first, second = asked(server)
    assert first["StreamName"] == "flights"
    assert first["ShardFilter"]["Type"] == "AT_TIMESTAMP"
    assert float(first["ShardFilter"]["Timestamp"]) == 100.5
    assert second == {"NextToken": "token"}, "AWS refuses the stream's name beside a token"


def test_a_listing_that_breaks_off_is_an_error_and_no_part(server, make_client):
    server.reply(body=encoded({"Shards": [wire_shard(0)], "NextToken": "token"}))
    server.refuse(400, "ExpiredNextTokenException")

    with pytest.raises(Unavailable):
        WireStreamAdmin(make_client(server.url), "flights").list_shards()


def test_an_answer_torn_inside_its_head_is_no_listing_and_no_summary(server, make_client):
    server.reply(body=b"")
    server.reply(body=b"")
    admin = WireStreamAdmin(make_client(server.url), "flights")

    with pytest.raises(Unavailable):
        admin.list_shards()
    with pytest.raises(Unavailable):
        admin.summary()


def test_a_listing_without_end_is_an_error(server, make_client, monkeypatch):
    monkeypatch.setattr("kclrun.aws.kinesis.PAGES_MAX", 3)
    server.default.body = encoded({"Shards": [], "NextToken": "token"})

    with pytest.raises(InvalidRequest, match="more than 3 pages"):
        WireStreamAdmin(make_client(server.url), "flights").list_shards()


def test_a_summary_tells_what_the_stream_is(server, make_client):
    server.reply(
        body=encoded(
            {
                "StreamDescriptionSummary": {
                    "StreamName": "flights",
                    "StreamARN": ARN,
                    "StreamStatus": "ACTIVE",
                    "RetentionPeriodHours": 24,
                    "StreamCreationTimestamp": 1_700_000_000,
                    "EnhancedMonitoring": [],
                    "OpenShardCount": 4,
                }
            }
        )
    )

    assert WireStreamAdmin(make_client(server.url), "flights").summary() == StreamSummary(
        "flights", ARN, "ACTIVE", 24, 4, WallTime(1_700_000_000.0)
    )


def test_a_stream_that_is_missing_is_not_found(server, make_client):
    server.refuse(400, "ResourceNotFoundException", "Stream flights not found")

    with pytest.raises(NotFound, match="flights not found"):
        WireStreamAdmin(make_client(server.url), "flights").summary()
