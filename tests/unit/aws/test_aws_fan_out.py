"""Subscriptions over a scripted server: what is asked, what events mean, how a stream breaks."""

import base64
import json
import socket
from typing import Any

import pytest

from kclrun.aws.fan_out import (
    Consumer,
    EventStreamSubscription,
    FanOutReader,
    StreamConsumers,
    consumer_name,
    consumer_of,
)
from kclrun.codec.event_stream import encode_message
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NothingListens,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from kclrun.model.time import WallTime
from kclrun.ports import StreamSummary
from tests.patience import HUNG_S

STREAM = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
ARN = f"{STREAM}/consumer/shop:1700000000"
SHARD = "shardId-000000000000"
BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)
INITIAL = encode_message({":event-type": "initial-response", ":message-type": "event"}, b"{}")


def event(*numbers: int, continuation: str | None = "9", **more: Any) -> bytes:
    body = {
        "Records": [
            {
                "Data": base64.b64encode(b"x").decode(),
                "PartitionKey": "k",
                "SequenceNumber": str(number),
                "ApproximateArrivalTimestamp": 1.5,
            }
            for number in numbers
        ],
        "ContinuationSequenceNumber": continuation,
        "MillisBehindLatest": 7,
        **more,
    }
    headers = {":event-type": "SubscribeToShardEvent", ":message-type": "event"}
    return encode_message(headers, json.dumps(body).encode())


def failure(code: str, kind: str = "exception") -> bytes:
    named = {"exception": ":exception-type", "error": ":error-code"}[kind]
    payload = json.dumps({"message": "says the service"}).encode()
    return encode_message({":message-type": kind, named: code}, payload)


def chunks(*parts: bytes, ends: bool = True) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return body + (b"0\r\n\r\n" if ends else b"")


@pytest.fixture
def subscribed(server, make_client):
    """A subscription whose answer is these bytes, chunked unless `raw`."""
    opened = []

    def subscribe(*parts: bytes, raw: bytes | None = None, ends: bool = True, **reply: Any) -> Any:
        server.reply(
            body=chunks(*parts, ends=ends) if raw is None else raw,
            headers={"Transfer-Encoding": "chunked", "Date": "Tue, 14 Nov 2023 22:13:20 GMT"},
            declare_length=False,
            **reply,
        )
        reader = FanOutReader(make_client(server.url, clock=lambda: 1_700_000_100.0), ARN)
        opened.append(reader.subscribe(SHARD, BEGINNING))
        return opened[-1]

    yield subscribe
    for each in opened:
        each.close()


def pages(subscription: Any) -> list[Any]:
    found = []
    while not subscription.is_over:
        page = subscription.next_page(HUNG_S)
        if page is not None:
            found.append(page)
    return found


@pytest.mark.parametrize(
    ("start", "position"),
    [
        (BEGINNING, {"Type": "TRIM_HORIZON"}),
        (
            StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "77"),
            {"Type": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": "77"},
        ),
        (
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=1.23456),
            {"Type": "AT_TIMESTAMP", "Timestamp": 1.235},
        ),
    ],
)
def test_a_subscription_names_consumer_shard_and_position(server, make_client, start, position):
    server.reply(
        body=chunks(INITIAL), headers={"Transfer-Encoding": "chunked"}, declare_length=False
    )

    FanOutReader(make_client(server.url), ARN).subscribe(SHARD, start).close()

    (request,) = server.requests
    assert request.headers["x-amz-target"] == "Kinesis_20131202.SubscribeToShard"
    assert json.loads(request.body) == {
        "ConsumerARN": ARN,
        "ShardId": SHARD,
        "StartingPosition": position,
    }


def test_events_are_pages_and_the_last_one_names_the_children(subscribed):
    child = {
        "ShardId": "shardId-1",
        "ParentShards": [SHARD],
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(HASH_KEY_MAX)},
    }
    subscription = subscribed(
        INITIAL,
        event(1, 2, continuation="2"),
        event(),
        event(continuation=None, ChildShards=[child]),
    )

    first, second, last = pages(subscription)

    assert [record.sequence_number for record in first.records] == ["1", "2"]
    assert (first.continuation, first.millis_behind_latest, first.is_end) == ("2", 7, False)
    assert first.served_at == 1_700_000_000.0, "by the clock of the service"
    assert first.body_bytes > 100
    assert (second.records, second.continuation) == ([], "9")
    assert last.is_end
    assert last.children == (ChildShard("shardId-1", (SHARD,), HashRange(0, HASH_KEY_MAX)),)
    assert subscription.next_page(0.01) is None


def test_messages_may_come_in_any_pieces(subscribed):
    whole = INITIAL + event(1, continuation="1") + event(2, continuation="2")

    subscription = subscribed(*(whole[at : at + 7] for at in range(0, len(whole), 7)))

    assert [page.continuation for page in pages(subscription)] == ["1", "2"]


def test_a_message_whose_bytes_drip_does_not_hold_its_reader():
    """Each byte comes in time, and no event does."""
    message = INITIAL + event(1, continuation="1")
    now = [0.0]

    left = [message[at : at + 1] for at in range(len(message))]

    class Dripping:
        def piece(self, timeout_s):
            now[0] += min(0.4, timeout_s)
            return left.pop(0) if timeout_s >= 0.4 else None

    subscription = EventStreamSubscription(Dripping(), lambda: 5.0, lambda: now[0])

    assert subscription.next_page(1.0) is None
    assert now[0] == pytest.approx(1.0)
    while (page := subscription.next_page(1.0)) is None:
        assert now[0] < len(message)
    assert page.continuation == "1", "nothing of it is lost"


def test_silence_is_none_and_loses_nothing_of_a_message_that_has_begun(subscribed):
    message = INITIAL + event(1)
    subscription = subscribed(raw=chunks(message[:-5])[: -len(b"\r\n0\r\n\r\n")], ends=False)

    assert subscription.next_page(0.01) is None
    assert subscription.next_page(0.01) is None
    assert not subscription.is_over


@pytest.mark.parametrize(
    ("code", "kind", "error"),
    [
        ("ResourceInUseException", "exception", Unavailable),
        ("ResourceNotFoundException", "exception", NotFound),
        ("InternalFailureException", "exception", Unavailable),
        ("KMSThrottlingException", "exception", Throttled),
        ("KMSDisabledException", "exception", Unavailable),
        ("LimitExceededException", "exception", Throttled),
        ("AccessDeniedException", "exception", AccessDenied),
        ("SomethingNewException", "exception", InvalidRequest),
        ("InternalFailure", "error", Unavailable),
    ],
)
def test_a_failure_in_the_stream_is_the_error_that_a_call_would_raise(
    subscribed, code, kind, error
):
    subscription = subscribed(INITIAL, event(1), failure(code, kind))
    assert subscription.next_page(HUNG_S) is not None

    with pytest.raises(error) as raised:
        subscription.next_page(HUNG_S)

    assert raised.value.operation == "SubscribeToShard"
    assert raised.value.code == code


def test_an_event_of_a_kind_to_come_is_passed_over(subscribed):
    unknown = encode_message({":event-type": "Greeting", ":message-type": "event"}, b"?")

    assert [page.continuation for page in pages(subscribed(INITIAL, unknown, event()))] == ["9"]


WRONG_CRC = event(1)[:-1] + b"\0"
OVERSIZED = (2**31).to_bytes(4, "big") + event(1)[4:]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(chunks(event(1)[:-1]), "ended inside a message", id="a message is cut"),
        pytest.param(chunks(WRONG_CRC), "checksum", id="a wrong checksum"),
        pytest.param(chunks(OVERSIZED), "checksum", id="a length that was changed"),
        pytest.param(b"5\r\nhello", "cut short", id="a chunk is cut"),
        pytest.param(b"hello\r\n", "no size", id="no chunk"),
        pytest.param(b"2\r\nhello\r\n", "longer than its size", id="a chunk of another size"),
        pytest.param(
            chunks(encode_message({":event-type": "SubscribeToShardEvent"}, b"[]")),
            "does not parse",
            id="an event that is none",
        ),
        pytest.param(chunks(event(2, 1)), "not in ascending order", id="records out of order"),
        pytest.param(chunks(event(1, continuation="")), "does not parse", id="no continuation"),
        pytest.param(
            chunks(event(1, continuation="9" * 200)), "does not parse", id="too long a number"
        ),
    ],
)
def test_a_broken_stream_is_an_outage_that_names_what_broke(subscribed, raw, words):
    subscription = subscribed(raw=raw, then_close=True)

    with pytest.raises(Unavailable, match=words) as raised:
        pages(subscription)

    assert str(raised.value).startswith("SubscribeToShard: ")


def test_more_records_than_the_service_sends_are_refused(subscribed):
    with pytest.raises(LimitExceeded):
        pages(subscribed(event(*range(1, 10_002))))


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "ResourceInUseException", Unavailable),
        (400, "LimitExceededException", Throttled),
        (400, "ResourceNotFoundException", NotFound),
        (403, "AccessDeniedException", AccessDenied),
        (500, "InternalFailure", Unavailable),
    ],
)
def test_a_refused_subscription_is_an_error_of_its_kind(server, make_client, status, code, error):
    server.refuse(status, code)

    with pytest.raises(error):
        FanOutReader(make_client(server.url), ARN).subscribe(SHARD, BEGINNING)


def test_a_subscription_refused_for_its_date_is_sent_again_with_the_services_clock(
    server, make_client
):
    server.reply(
        403,
        b'{"__type":"RequestExpired"}',
        headers={"Date": "Tue, 14 Nov 2023 22:13:20 GMT"},
    )
    server.reply(
        body=chunks(INITIAL), headers={"Transfer-Encoding": "chunked"}, declare_length=False
    )
    client = make_client(server.url, clock=lambda: 1_700_009_000.0)

    FanOutReader(client, ARN).subscribe(SHARD, BEGINNING).close()

    dates = [request.headers["x-amz-date"] for request in server.requests]
    assert dates == ["20231115T004320Z", "20231114T221320Z"]


def test_an_answer_that_is_no_stream_and_a_service_that_is_not_there_are_outages(
    server, make_client
):
    server.reply(body=b"{}")
    server.hang_up()
    reader = FanOutReader(make_client(server.url), ARN)

    with pytest.raises(Unavailable, match="in chunks"):
        reader.subscribe(SHARD, BEGINNING)
    with pytest.raises(Unavailable, match="closed unanswered"):
        reader.subscribe(SHARD, BEGINNING)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    reader = FanOutReader(make_client(f"http://127.0.0.1:{closed}"), ARN)
    with pytest.raises(NothingListens, match=f"at 127.0.0.1:{closed}"):
        reader.subscribe(SHARD, BEGINNING)


# Consumers


def wire_consumer(name: str, status: str = "ACTIVE") -> dict[str, Any]:
    return {
        "ConsumerName": name,
        "ConsumerARN": f"{STREAM}/consumer/{name}:1",
        "ConsumerStatus": status,
        "ConsumerCreationTimestamp": 1.0,
    }


def test_consumers_are_found_registered_listed_and_removed(server, make_client):
    shop = Consumer("shop", f"{STREAM}/consumer/shop:1", "ACTIVE", 1.0)
    for answer in (
        {"ConsumerDescription": wire_consumer("shop")},
        {"Consumer": wire_consumer("shop", "CREATING")},
        {"Consumers": [wire_consumer("a")], "NextToken": "t"},
        {"Consumers": [wire_consumer("shop")]},
        {},
    ):
        server.reply(body=json.dumps(answer).encode())
    consumers = StreamConsumers(make_client(server.url), STREAM)

    assert consumers.find("shop") == shop
    assert consumers.register("shop").status == "CREATING"
    assert [each.name for each in consumers.listed()] == ["a", "shop"]
    consumers.deregister(shop.arn)

    asked = [
        (request.headers["x-amz-target"].rpartition(".")[2], json.loads(request.body))
        for request in server.requests
    ]
    assert asked == [
        ("DescribeStreamConsumer", {"StreamARN": STREAM, "ConsumerName": "shop"}),
        ("RegisterStreamConsumer", {"StreamARN": STREAM, "ConsumerName": "shop"}),
        ("ListStreamConsumers", {"StreamARN": STREAM}),
        ("ListStreamConsumers", {"StreamARN": STREAM, "NextToken": "t"}),
        ("DeregisterStreamConsumer", {"ConsumerARN": shop.arn}),
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"__type": "ExpiredNextTokenException"}, Unavailable),
        ({"__type": "AccessDeniedException"}, AccessDenied),
    ],
)
def test_a_listing_of_consumers_is_complete_or_an_error(server, make_client, answer, error):
    page = {"Consumers": [wire_consumer("a")], "NextToken": "t"}
    server.reply(body=json.dumps(page).encode())
    server.reply(400, json.dumps(answer).encode())

    with pytest.raises(error):
        StreamConsumers(make_client(server.url), STREAM).listed()


def test_a_consumer_that_is_not_there_is_none(server, make_client):
    server.refuse(400, "ResourceNotFoundException")

    assert StreamConsumers(make_client(server.url), STREAM).find("shop") is None


@pytest.mark.parametrize("named", ["shop", ARN])
def test_a_consumer_is_named_by_its_name_or_its_arn(named):
    assert consumer_name(named) == "shop"


@pytest.mark.parametrize(
    ("part", "other", "words"),
    [
        (
            "eu-west-1",
            "us-east-1",
            " (orders of region us-east-1; the one of region eu-west-1 is read)",
        ),
        ("123456789012", "999999999999", " (orders of account 999999999999; the one of account"),
        ("/orders", "/Orders", " (Orders is written otherwise than orders"),
        ("/orders", "/audits", None),
    ],
)
def test_a_consumer_of_nearly_the_same_stream_is_named_with_the_difference(part, other, words):
    summary = StreamSummary("orders", STREAM, "ACTIVE", 24, 1, WallTime(0.0))
    named = f"{STREAM}/consumer/mine:1700000000"
    assert consumer_of(summary, named, "fetch.consumer") == "mine"

    with pytest.raises(SettingsError) as refused:
        consumer_of(summary, named.replace(part, other), "fetch.consumer")

    assert (words in str(refused.value)) if words else ("stream orders\n" in str(refused.value))
