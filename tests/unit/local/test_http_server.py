"""The endpoint of the embedded AWS over real sockets: by stock boto3 and by hand, Kinesis itself
and what is forwarded."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from urllib.parse import urlsplit

import botocore.auth
import h2.connection
import h2.events
import pytest
from botocore.exceptions import ClientError, EventStreamError
from botocore.parsers import ResponseParserError

from kclrun.codec.cbor import decode_cbor, encode_cbor
from kclrun.codec.event_stream import MessageDecoder
from kclrun.local import forwarding as forwarding_module
from kclrun.local import moto_server
from kclrun.local.asgi import BodyTooLarge, ClientGone, read_body
from kclrun.local.forwarding import Forwarder
from kclrun.local.http_server import HttpServer
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.moto_server import MotoServer
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.signatures import Credentials
from tests.patience import HUNG_S
from tests.support.tables import over_rows
from tests.unit.local.conftest import KEY, SECRET
from tests.unit.local.serving import ask, code_of, post, served

FIRST = "shardId-000000000000"


@pytest.fixture(scope="module")
def embedded():
    with served(HttpServer(Kinesis(KinesisSettings(), b"s" * 32), None)) as endpoint:
        yield SimpleNamespace(endpoint=endpoint)


@pytest.fixture(scope="module")
def guarded():
    kinesis = Kinesis(KinesisSettings(limits=AWS_LIMITS), b"s" * 32)
    with served(HttpServer(kinesis, None, Credentials(KEY, SECRET))) as endpoint:
        yield SimpleNamespace(endpoint=endpoint)


def test_errors_carry_the_names_and_codes_of_aws(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    kinesis.create_stream(StreamName="errors", ShardCount=1)

    assert code_of(kinesis.describe_stream, StreamName="nothing") == (
        "ResourceNotFoundException",
        400,
    )
    assert code_of(kinesis.create_stream, StreamName="errors", ShardCount=1) == (
        "ResourceInUseException",
        400,
    )
    assert code_of(
        kinesis.get_shard_iterator, StreamName="errors", ShardId=FIRST, ShardIteratorType="NEVER"
    ) == ("ValidationException", 400)
    assert code_of(kinesis.list_shards, StreamName="errors", MaxResults=20_000) == (
        "ValidationException",
        400,
    )
    assert code_of(kinesis.list_shards, StreamName="errors", NextToken="x") == (
        "InvalidArgumentException",
        400,
    )
    assert code_of(kinesis.get_resource_policy, ResourceARN="arn:aws:kinesis:r:0:stream/x") == (
        "UnknownOperationException",
        400,
    )


def test_an_answer_has_a_request_id_and_the_content_type_of_aws(embedded):
    status, headers, body = post(embedded.endpoint, "Kinesis_20131202.ListStreams", b"{}")

    assert status == 200
    assert "StreamNames" in json.loads(body)
    assert headers["content-type"] == "application/x-amz-json-1.1"
    assert len(headers["x-amzn-requestid"]) == 36


@pytest.mark.parametrize(
    "sent", [b"{nonsense", b'{"NextToken": "\xff"}', b'{"more": ' + b"[" * 100_000]
)
def test_a_body_that_is_no_json_is_a_serialization_exception(embedded, sent):
    status, _, body = post(embedded.endpoint, "Kinesis_20131202.ListStreams", sent)

    assert (status, json.loads(body)["__type"]) == (400, "SerializationException")


def test_what_is_asked_in_cbor_is_answered_in_cbor(embedded, client):
    client("kinesis", embedded.endpoint).create_stream(StreamName="by-cbor", ShardCount=1)
    cbor = {"Content-Type": "application/x-amz-cbor-1.1"}

    def ask(operation, **request):
        target = f"Kinesis_20131202.{operation}"
        status, headers, body = post(embedded.endpoint, target, encode_cbor(request), cbor)
        assert headers["Content-Type"] == cbor["Content-Type"]
        return status, decode_cbor(body)

    status, put = ask("PutRecord", StreamName="by-cbor", Data=b"\xff", PartitionKey="k")
    assert (status, put["ShardId"]) == (200, FIRST)
    status, refusal = ask("PutRecord", StreamName="not-there", Data=b"", PartitionKey="k")
    assert (status, refusal["__type"]) == (400, "ResourceNotFoundException")


def test_an_unsigned_cbor_request_is_refused_in_cbor(guarded):
    cbor = {"Content-Type": "application/x-amz-cbor-1.1"}

    status, _, body = post(guarded.endpoint, "Kinesis_20131202.ListStreams", b"\xa0", cbor)

    assert status == 400
    assert decode_cbor(body)["__type"] == "MissingAuthenticationTokenException"


@contextlib.contextmanager
def subscribed(kinesis, name):
    """A stream of one shard with a consumer: its ARN, and the events of a subscription to it."""
    kinesis.create_stream(StreamName=name, ShardCount=1)
    summary = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
    made = kinesis.register_stream_consumer(StreamARN=summary["StreamARN"], ConsumerName="c")
    wanted = {"ConsumerARN": made["Consumer"]["ConsumerARN"], "ShardId": FIRST}
    answer = kinesis.subscribe_to_shard(**wanted, StartingPosition={"Type": "TRIM_HORIZON"})
    with contextlib.closing(answer["EventStream"]) as events:
        yield wanted, events


def test_boto3_reads_a_shard_by_fan_out_to_its_end(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    wanted = []

    def produce():
        for number in range(100):
            record = {"Data": b"%d" % number, "PartitionKey": "k"}
            put = kinesis.put_record(StreamName="fan-out", **record)
            wanted.append((put["SequenceNumber"], record["Data"]))
        kinesis.split_shard(
            StreamName="fan-out", ShardToSplit=FIRST, NewStartingHashKey=str(2**127)
        )

    with subscribed(kinesis, "fan-out") as (_, events):
        producer = threading.Thread(target=produce)
        producer.start()
        parts = [event["SubscribeToShardEvent"] for event in events]
        producer.join()

    records = [record for part in parts for record in part["Records"]]
    assert [(each["SequenceNumber"], each["Data"]) for each in records] == wanted
    assert [child["ShardId"][-1] for child in parts[-1]["ChildShards"]] == ["1", "2"]
    assert "ContinuationSequenceNumber" not in parts[-1]
    assert all(part["ContinuationSequenceNumber"] for part in parts[:-1])


def test_a_subscription_whose_consumer_is_deregistered_ends_with_an_error(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    with subscribed(kinesis, "deregistered") as (wanted, events):
        arriving = iter(events)
        next(arriving)

        kinesis.deregister_stream_consumer(ConsumerARN=wanted["ConsumerARN"])

        with pytest.raises(EventStreamError) as refusal:
            next(arriving)
    assert refusal.value.response["Error"]["Code"] == "ResourceNotFoundException"


def test_a_refused_subscription_is_an_answer_as_any_other(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    with subscribed(kinesis, "refused") as (wanted, _):
        assert code_of(
            kinesis.subscribe_to_shard, **wanted, StartingPosition={"Type": "LATEST"}
        ) == ("ResourceInUseException", 400)


class Http2:
    """A connection of HTTP/2: `ask` an operation, `take` what arrives."""

    def __init__(self, connection, host):
        self.connection, self.host = connection, host
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.data, self.ended = defaultdict(bytes), set()

    def ask(self, stream, operation, request, *more, service="Kinesis_20131202"):
        head = [(":method", "POST"), (":path", "/"), (":scheme", "http")]
        head += [(":authority", self.host), ("x-amz-target", f"{service}.{operation}"), *more]
        self.h2.send_headers(stream, head)
        self.h2.send_data(stream, json.dumps(request).encode(), end_stream=True)
        self.connection.sendall(self.h2.data_to_send())

    def take(self):
        for event in self.h2.receive_data(self.connection.recv(65_536)):
            if isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)


def test_a_client_of_http_2_ends_its_subscription_and_its_connection_goes_on(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    with subscribed(kinesis, "by-h2") as (wanted, _):
        stream_arn = wanted["ConsumerARN"].partition("/consumer/")[0]
    made = kinesis.register_stream_consumer(StreamARN=stream_arn, ConsumerName="second")
    kinesis.put_record(StreamName="by-h2", Data=b"x", PartitionKey="k")
    wanted["ConsumerARN"] = made["Consumer"]["ConsumerARN"]
    wanted["StartingPosition"] = {"Type": "TRIM_HORIZON"}
    where = urlsplit(embedded.endpoint)

    with socket.create_connection((where.hostname, where.port), HUNG_S) as connection:
        by_h2 = Http2(connection, where.netloc)
        # Its events arrive while its own side of the HTTP/2 stream is closed.
        by_h2.ask(1, "SubscribeToShard", wanted)
        while b'"Data":"eA=="' not in by_h2.data[1]:
            by_h2.take()
        by_h2.h2.reset_stream(1)
        by_h2.ask(3, "ListStreams", {})
        while 3 not in by_h2.ended:
            by_h2.take()

    first, second = MessageDecoder().feed(by_h2.data[1])[:2]
    assert first.headers[":event-type"] == "initial-response"
    assert second.headers[":event-type"] == "SubscribeToShardEvent"
    assert "StreamNames" in json.loads(by_h2.data[3])
    assert 1 not in by_h2.ended


def test_a_body_above_its_bound_is_refused(embedded):
    body = b'{"x":"' + b"x" * (17 * 1024 * 1024) + b'"}'

    status, _, answer = post(embedded.endpoint, "Kinesis_20131202.PutRecords", body)

    assert (status, json.loads(answer)["__type"]) == (413, "RequestEntityTooLargeException")


def test_a_refused_record_shows_neither_its_data_nor_its_key(embedded):
    body = {"StreamName": "s", "Data": 5, "PartitionKey": {"canary": "canary"}}

    _, _, answer = post(embedded.endpoint, "Kinesis_20131202.PutRecord", json.dumps(body))

    assert json.loads(answer)["__type"] == "ValidationException"
    assert b"canary" not in answer


def test_tags_retention_and_sizes_are_kept(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    kinesis.create_stream(StreamName="kept", ShardCount=1, Tags={"a": "1"}, MaxRecordSizeInKiB=2048)
    arn = kinesis.describe_stream_summary(StreamName="kept")["StreamDescriptionSummary"][
        "StreamARN"
    ]
    kinesis.add_tags_to_stream(StreamName="kept", Tags={"b": "2"})
    kinesis.remove_tags_from_stream(StreamName="kept", TagKeys=["a"])
    kinesis.tag_resource(ResourceARN=arn, Tags={"c": "3"})
    kinesis.increase_stream_retention_period(StreamARN=arn, RetentionPeriodHours=48)
    kinesis.update_max_record_size(StreamARN=arn, MaxRecordSizeInKiB=3072)

    assert arn == "arn:aws:kinesis:us-east-1:123456789012:stream/kept"
    assert [tag["Key"] for tag in kinesis.list_tags_for_stream(StreamName="kept")["Tags"]] == [
        "b",
        "c",
    ]
    assert len(kinesis.list_tags_for_resource(ResourceARN=arn)["Tags"]) == 2
    summary = kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"]
    assert (summary["RetentionPeriodHours"], summary["MaxRecordSizeInKiB"]) == (48, 3072)
    kinesis.put_record(StreamName="kept", Data=b"x" * (2_500_000), PartitionKey="k")


def test_a_time_is_read_as_boto3_sends_it(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    kinesis.create_stream(StreamName="timed", ShardCount=1)
    kinesis.put_record(StreamName="timed", Data=b"x", PartitionKey="k")

    iterator = kinesis.get_shard_iterator(
        StreamName="timed",
        ShardId=FIRST,
        ShardIteratorType="AT_TIMESTAMP",
        Timestamp=datetime.fromtimestamp(time.time() - 60, UTC),
    )["ShardIterator"]

    assert len(kinesis.get_records(ShardIterator=iterator)["Records"]) == 1


def test_a_clock_an_hour_off_is_refused(guarded, client, monkeypatch):
    real = botocore.auth.get_current_datetime

    def skewed(*given, **named):
        return real(*given, **named).replace(hour=(real().hour + 12) % 24)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", skewed)
    with pytest.raises(ClientError) as refusal:
        client("kinesis", guarded.endpoint).list_streams()

    reported = refusal.value.response["Error"]
    assert reported["Code"] == "InvalidSignatureException"
    assert reported["Message"].startswith(("Signature expired", "Signature not yet current"))


def test_limits_throttle_with_the_error_of_aws(guarded, client):
    kinesis = client("kinesis", guarded.endpoint)
    kinesis.create_stream(StreamName="limited", ShardCount=1)
    records = [{"Data": b"x" * 500_000, "PartitionKey": "k"}] * 4
    iterator = kinesis.get_shard_iterator(
        StreamName="limited", ShardId=FIRST, ShardIteratorType="LATEST"
    )["ShardIterator"]

    def poll_hard():
        for _ in range(50):
            kinesis.get_records(ShardIterator=iterator)

    answer = kinesis.put_records(StreamName="limited", Records=records)
    with pytest.raises(ClientError) as refusal:
        poll_hard()

    codes = [record.get("ErrorCode") for record in answer["Records"]]
    assert answer["FailedRecordCount"] == 2
    assert codes == [None, None, *["ProvisionedThroughputExceededException"] * 2]
    assert refusal.value.response["Error"]["Code"] == "ProvisionedThroughputExceededException"


async def parts(messages):
    arriving = iter(messages)

    async def receive():
        return next(arriving)

    return await read_body(receive, 3)


def part(body, **more):
    return {"type": "http.request", "body": body, **more}


@over_rows(
    ("messages", "body"),
    [
        ([part(b"abc")], b"abc"),
        ([part(b"ab", more_body=True), part(b"c", more_body=False)], b"abc"),
        ([part(b"a", more_body=True), part(b"", more_body=True), part(b"bc")], b"abc"),
        ([{"type": "http.request"}], b""),
        ([part(b"abcd")], BodyTooLarge),
        ([part(b"ab", more_body=True), part(b"cd", more_body=True)], BodyTooLarge),
        ([part(b"ab", more_body=True), {"type": "http.disconnect"}], ClientGone),
    ],
)
def test_a_body_is_read_to_its_end_and_no_further_than_its_bound(messages, body):
    if isinstance(body, bytes):
        assert asyncio.run(parts(messages)) == body
    else:
        with pytest.raises(body):
            asyncio.run(parts(messages))


class Behind:
    """A server behind the endpoint: it notes each request, and answers as a test says."""

    def __init__(self):
        self.scopes, self.bodies, self.left = [], [], threading.Event()
        self.head = {"type": "http.response.start", "status": 207, "headers": []}
        self.answer = [b"answer"]

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        try:
            self.bodies.append(await read_body(receive, 2**30))
        except ClientGone:
            self.left.set()
            return
        await send(self.head)
        for piece in self.answer:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def connections(self):
        return [scope["client"][1] for scope in self.scopes]


@pytest.fixture
def behind():
    return Behind()


@pytest.fixture
def forwarding(behind):
    """An endpoint of Kinesis that forwards all else to `behind`."""
    with served(behind) as target:
        forwarder = Forwarder(urlsplit(target).port)
        face = HttpServer(Kinesis(KinesisSettings(), b"s" * 32), forwarder)
        with served(face, forwarder) as endpoint:
            yield endpoint


def test_a_request_that_is_not_for_kinesis_is_forwarded_as_it_is_and_so_is_its_answer(
    behind, forwarding
):
    behind.head["headers"] = [(b"x-answer", b"1"), (b"x-answer", b"2")]
    behind.answer = [b"x" * 100_000, b"y" * 100_000]
    pieces = [b"a" * 100_000, b"b" * 100_000]
    headers = {"X-Own": "own", "Proxy-Connection": "x", "Keep-Alive": "x", "Connection": "close"}

    status, answered, body = ask(
        forwarding, "PUT", "/a%2Fb%20c?x=%2F&y", iter(pieces), headers, encode_chunked=True
    )

    (scope,) = behind.scopes
    assert (scope["method"], scope["raw_path"]) == ("PUT", b"/a%2Fb%20c")
    assert (scope["query_string"], scope["http_version"]) == (b"x=%2F&y", "1.1")
    names = [name for name, _ in scope["headers"]]
    assert not {b"proxy-connection", b"keep-alive", b"connection"} & {*names}
    assert (b"x-own", b"own") in scope["headers"]
    assert (b"host", urlsplit(forwarding).netloc.encode()) in scope["headers"]
    assert behind.bodies == [b"".join(pieces)]
    assert (status, answered.get_all("x-answer"), body) == (
        207,
        ["1", "2"],
        b"".join(behind.answer),
    )


@pytest.mark.parametrize("length", [None, b"6"])
def test_one_connection_serves_one_request_after_the_other(behind, forwarding, length):
    if length is not None:
        behind.head["headers"] = [(b"content-length", length)]

    for body in (b"1", b"", b"3"):
        assert ask(forwarding, "POST", "/", body, {"Connection": "close"})[2] == b"answer"

    assert behind.bodies == [b"1", b"", b"3"]
    assert len(set(behind.connections())) == 1


def test_a_head_has_the_length_of_what_a_get_would_have_and_no_body(behind, forwarding):
    behind.head["headers"] = [(b"content-length", b"6")]
    behind.answer = []

    status, headers, body = ask(forwarding, "HEAD", "/")

    assert (status, headers["content-length"], body) == (207, "6", b"")
    behind.answer = [b"answer"]
    assert ask(forwarding, "GET", "/")[2] == b"answer"


@pytest.mark.parametrize(("name", "value"), [("_IDLE_AGE_MAX_S", 0.0), ("_IDLE_MAX", 0)])
def test_a_connection_that_was_idle_too_long_or_that_is_one_too_many_is_not_used_again(
    behind, forwarding, monkeypatch, name, value
):
    monkeypatch.setattr(forwarding_module, name, value)

    for _ in range(2):
        assert ask(forwarding, "GET", "/")[0] == 207

    assert len(set(behind.connections())) == 2


def test_an_answer_that_ends_its_connection_ends_it(behind, forwarding):
    behind.head["headers"] = [(b"connection", b"close")]

    answers = [ask(forwarding, "GET", "/") for _ in range(2)]

    assert [(status, headers["connection"]) for status, headers, _ in answers] == [(207, None)] * 2
    assert len(set(behind.connections())) == 2


def test_a_client_that_leaves_in_its_request_leaves_behind_too(behind, forwarding):
    where = urlsplit(forwarding)
    with socket.create_connection((where.hostname, where.port), HUNG_S) as leaving:
        leaving.sendall(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nsome")

    assert behind.left.wait(HUNG_S)
    assert ask(forwarding, "GET", "/")[0] == 207


@contextlib.contextmanager
def raw(answer):
    """A server that takes one request after the other, sends `answer` and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("answer", [None, b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_what_does_not_answer_is_unavailable_and_kinesis_goes_on(answer):
    with contextlib.ExitStack() as stack:
        if answer is None:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
        else:
            port = stack.enter_context(raw(answer))
        face = HttpServer(Kinesis(KinesisSettings(), b"s" * 32), Forwarder(port))
        endpoint = stack.enter_context(served(face))

        status, headers, body = post(endpoint, "DynamoDB_20120810.ListTables", b"{}")

        assert (status, headers["content-type"]) == (503, "application/x-amz-json-1.1")
        assert json.loads(body)["__type"] == "ServiceUnavailableException"
        assert post(endpoint, "Kinesis_20131202.ListStreams", b"{}")[0] == 200


def test_an_answer_that_breaks_off_is_not_given_as_a_whole_one(caplog):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"
    with (
        raw(answer) as port,
        served(Forwarder(port)) as endpoint,
        caplog.at_level(logging.CRITICAL),
        pytest.raises(http.client.IncompleteRead),
    ):
        ask(endpoint, "GET", "/")


def test_a_connection_that_was_closed_meanwhile_is_not_used_again():
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as port:
        forwarder = Forwarder(port)
        with served(forwarder, forwarder) as endpoint:
            for _ in range(2):
                assert ask(endpoint, "GET", "/")[2] == b"ok"
                while not (forwarder._idle and forwarder._idle[0].reader.at_eof()):
                    time.sleep(0.001)


def test_a_connection_that_is_in_use_while_the_others_are_closed_is_not_kept():
    scope = {
        "http_version": "1.1",
        "method": "GET",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [],
    }

    async def receive():
        return {"type": "http.request"}

    async def scenario(port):
        forwarder = Forwarder(port)

        async def send(message):
            await forwarder.close()

        await forwarder(scope, receive, send)
        await asyncio.sleep(0)
        assert not forwarder._idle

    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as port:
        asyncio.run(scenario(port))


def test_http_2_reaches_kinesis_and_what_is_behind_it(behind, forwarding):
    where = urlsplit(forwarding)
    with socket.create_connection((where.hostname, where.port), HUNG_S) as connection:
        by_h2 = Http2(connection, where.netloc)
        # Neither request says how long it is: HTTP/2 need not.
        by_h2.ask(1, "ListStreams", {})
        by_h2.ask(3, "DescribeTable", {"TableName": "t"}, service="DynamoDB_20120810")
        by_h2.ask(5, "ListTables", {}, ("content-length", "2"), service="DynamoDB_20120810")
        while by_h2.ended != {1, 3, 5}:
            by_h2.take()

    assert "StreamNames" in json.loads(by_h2.data[1])
    assert (by_h2.data[3], by_h2.data[5]) == (b"answer", b"answer")
    assert sorted(behind.bodies) == [b'{"TableName": "t"}', b"{}"]


class Wsgi:
    """A WSGI application: notes its requests and answers as a test says."""

    def __init__(self, headers=(), pieces=(b"answer",)):
        self.environs, self.closed = [], 0
        self._headers, self._pieces = list(headers), pieces

    def __call__(self, environ, start_response):
        self.environs.append(environ | {"body": environ["wsgi.input"].read()})
        start_response("500 A first try", [])
        start_response("207 Multi Status", self._headers)(b"written ")
        return self

    def __iter__(self):
        return iter(self._pieces)

    def close(self):
        self.closed += 1


def test_an_application_sees_a_request_as_wsgi_describes_it():
    wsgi = Wsgi()
    with served(MotoServer(wsgi, None)) as endpoint:
        where = urlsplit(endpoint)
        with socket.create_connection((where.hostname, where.port), HUNG_S) as connection:
            connection.sendall(
                b"PUT /a%20b/%C3%A9?x=%2F&y HTTP/1.1\r\nHost: h\r\nContent-Type: text/x\r\n"
                b"X-Twice: 1\r\nX-Twice: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
            )
            assert connection.recv(65_536).startswith(b"HTTP/1.1 207")
        ask(endpoint, "GET", "/plain")

    environ, plain = wsgi.environs
    del environ["wsgi.errors"], environ["wsgi.input"]
    assert environ == {
        "REQUEST_METHOD": "PUT",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/a b/Ã©",
        "QUERY_STRING": "x=%2F&y",
        "RAW_URI": "/a%20b/%C3%A9?x=%2F&y",
        "REQUEST_URI": "/a%20b/%C3%A9?x=%2F&y",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": str(where.port),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_LENGTH": "3",
        "CONTENT_TYPE": "text/x",
        "HTTP_HOST": "h",
        "HTTP_X_TWICE": "1,2",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "body": b"abc",
    }
    assert (plain["RAW_URI"], plain["REQUEST_URI"]) == ("/plain", "/plain")


@pytest.mark.parametrize(
    ("method", "headers", "length", "content"),
    [
        ("GET", [("X-Own", "own")], "14", b"written answer"),
        ("GET", [("X-Own", "own"), ("Content-Length", "14")], "14", b"written answer"),
        ("GET", [("X-Own", "own"), ("Date", "once"), ("Connection", "x")], "14", b"written answer"),
        ("HEAD", [("X-Own", "own"), ("Content-Length", "99")], "99", b""),
    ],
)
def test_an_answer_of_an_application_has_its_length_and_one_date(method, headers, length, content):
    wsgi, before = Wsgi(headers), int(time.time())
    with served(MotoServer(wsgi, None)) as endpoint:
        status, answered, body = ask(endpoint, method, "/")

    assert (status, answered["x-own"], body) == (207, "own", content)
    assert answered.get_all("content-length") == [length]
    assert answered["connection"] is None
    (date,) = answered.get_all("date")
    assert date.endswith("GMT")
    assert before <= parsedate_to_datetime(date).timestamp() <= time.time()
    assert wsgi.closed == 1


def test_a_request_to_an_application_is_bounded(monkeypatch):
    monkeypatch.setattr(moto_server, "_MOTO_BODY_BYTES_MAX", 3)
    wsgi = Wsgi()
    with served(MotoServer(wsgi, None)) as endpoint:
        assert ask(endpoint, "PUT", "/", b"abc")[0] == 207
        status, headers, body = ask(endpoint, "PUT", "/", b"abcd")

    assert (status, headers["content-type"], len(wsgi.environs)) == (413, "application/xml", 1)
    assert b"<Code>EntityTooLarge</Code>" in body


@pytest.mark.parametrize(
    ("service", "operation", "mismatch", "unknown"),
    [
        ("dynamodb", "list_tables", "InvalidSignatureException", "UnrecognizedClientException"),
        ("sts", "get_caller_identity", "SignatureDoesNotMatch", "InvalidClientTokenId"),
        ("s3", "list_buckets", "SignatureDoesNotMatch", "InvalidAccessKeyId"),
    ],
)
def test_only_what_is_signed_with_the_right_secret_reaches_an_application(
    client, service, operation, mismatch, unknown
):
    wsgi = Wsgi([("Content-Type", "text/plain")], pieces=())
    with served(MotoServer(wsgi, Credentials(KEY, SECRET))) as endpoint:

        def call(**given):
            return getattr(client(service, endpoint, **given), operation)

        status = 400 if service == "dynamodb" else 403
        assert code_of(call(secret="wrong")) == (mismatch, status)
        assert code_of(call(key="AKIDOTHER")) == (unknown, status)
        assert wsgi.environs == []
        with contextlib.suppress(ClientError, ResponseParserError):
            call()()  # an answer that no service gives
        assert len(wsgi.environs) == 1
