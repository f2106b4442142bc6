"""The running embedded AWS, by stock boto3 and by hand: real processes, real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import boto3
import botocore.auth
import h2.connection
import h2.events
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError

from kclrun.codec.cbor import decode_cbor, encode_cbor
from kclrun.codec.event_stream import MessageDecoder
from kclrun.errors import SettingsError
from kclrun.local import server
from kclrun.local.server import start_embedded
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow
KEY, SECRET = "AKIDTEST", "the secret of the tests"
FIRST = "shardId-000000000000"


@pytest.fixture(scope="module")
def embedded():
    with start_embedded() as running:
        yield running


@pytest.fixture(scope="module")
def guarded():
    with start_embedded(credentials=(KEY, SECRET), limits=True) as running:
        yield running


@pytest.fixture
def client():
    """Makes boto3 clients and closes them."""
    made = []

    def make(service, endpoint, key=KEY, secret=SECRET):
        made.append(
            boto3.client(
                service,
                endpoint_url=endpoint,
                region_name="eu-west-1",
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                config=Config(retries={"total_max_attempts": 1}),
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def code_of(call, **arguments):
    with pytest.raises(ClientError) as refusal:
        call(**arguments)
    answer = refusal.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


def post(endpoint, target, body, headers=None):
    where = urlsplit(endpoint)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HUNG_S)
    try:
        connection.request("POST", "/", body, {"X-Amz-Target": target, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def eventually(condition, within_s=HUNG_S):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


@pytest.mark.parametrize("target", ["Kinesis_20131202.ListStreams", "DynamoDB_20120810.ListTables"])
def test_an_answer_has_one_date_and_it_is_now(embedded, target):
    before = int(time.time())

    _, headers, _ = post(embedded.endpoint, target, b"{}")

    dates = [parsedate_to_datetime(date).timestamp() for date in headers.get_all("date")]
    assert len(dates) == 1
    assert before <= dates[0] <= time.time()


def test_a_body_that_is_no_json_is_a_serialization_exception(embedded):
    status, _, body = post(embedded.endpoint, "Kinesis_20131202.ListStreams", b"{nonsense")

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


def test_http_2_without_tls_reaches_kinesis_and_what_is_behind_it(embedded):
    where = urlsplit(embedded.endpoint)
    body = b'{"TableName":"not-there"}'
    asked = {"Kinesis_20131202.ListStreams": b"{}", "DynamoDB_20120810.DescribeTable": body}
    with socket.create_connection((where.hostname, where.port), 10) as connection:
        client = h2.connection.H2Connection()
        client.initiate_connection()
        for number, (target, request) in enumerate(asked.items()):
            head = [(":method", "POST"), (":path", "/"), (":scheme", "http")]
            head += [(":authority", where.netloc), ("x-amz-target", target)]
            # moto finds the service by the scope of the signature.
            service = target.partition("_")[0].lower()
            scope = f"Credential={KEY}/20260101/eu-west-1/{service}/aws4_request"
            head += [("authorization", f"AWS4-HMAC-SHA256 {scope}")]
            # Neither request says how long it is: HTTP/2 need not.
            client.send_headers(2 * number + 1, head)
            client.send_data(2 * number + 1, request, end_stream=True)
        connection.sendall(client.data_to_send())
        answers, ended = {1: b"", 3: b""}, set()
        while len(ended) < 2:
            for event in client.receive_data(connection.recv(65_536)):
                if isinstance(event, h2.events.DataReceived):
                    answers[event.stream_id] += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    ended.add(event.stream_id)
            connection.sendall(client.data_to_send())

    assert "StreamNames" in json.loads(answers[1])
    assert "ResourceNotFoundException" in json.loads(answers[3])["__type"]


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
        for number in range(300):
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

    def ask(self, stream, operation, request):
        head = [(":method", "POST"), (":path", "/"), (":scheme", "http")]
        head += [(":authority", self.host), ("x-amz-target", f"Kinesis_20131202.{operation}")]
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

    assert arn == "arn:aws:kinesis:eu-west-1:123456789012:stream/kept"
    assert [tag["Key"] for tag in kinesis.list_tags_for_stream(StreamName="kept")["Tags"]] == [
        "b",
        "c",
    ]
    assert len(kinesis.list_tags_for_resource(ResourceARN=arn)["Tags"]) == 2
    summary = kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"]
    assert (summary["RetentionPeriodHours"], summary["MaxRecordSizeInKiB"]) == (48, 3072)
    kinesis.put_record(StreamName="kept", Data=b"x" * (2_500_000), PartitionKey="k")


def test_streams_and_shards_are_described_in_pages(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    for name in ("page-a", "page-b", "page-c"):
        kinesis.create_stream(StreamName=name, ShardCount=3)

    first = kinesis.list_streams(Limit=1, ExclusiveStartStreamName="page-")
    second = kinesis.list_streams(Limit=1, NextToken=first["NextToken"])
    shards = kinesis.describe_stream(StreamName="page-a", Limit=2)["StreamDescription"]
    names = [
        each["ShardId"][-1]
        for page in kinesis.get_paginator("describe_stream").paginate(StreamName="page-a", Limit=2)
        for each in page["StreamDescription"]["Shards"]
    ]

    assert (first["StreamNames"], second["StreamNames"]) == (["page-a"], ["page-b"])
    assert first["HasMoreStreams"] is True
    assert (len(shards["Shards"]), shards["HasMoreShards"]) == (2, True)
    assert names == ["0", "1", "2"]


def test_a_time_is_read_as_boto3_sends_it(embedded, client):
    kinesis = client("kinesis", embedded.endpoint)
    kinesis.create_stream(StreamName="timed", ShardCount=1)
    kinesis.put_record(StreamName="timed", Data=b"x", PartitionKey="k")

    iterator = kinesis.get_shard_iterator(
        StreamName="timed",
        ShardId=FIRST,
        ShardIteratorType="AT_TIMESTAMP",
        Timestamp=datetime.fromtimestamp(time.time() - 60),
    )["ShardIterator"]

    assert len(kinesis.get_records(ShardIterator=iterator)["Records"]) == 1


def test_the_one_endpoint_serves_the_other_services_too(embedded, client):
    s3 = client("s3", embedded.endpoint)
    s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    body = os.urandom(3_000_000)
    s3.put_object(Bucket="bucket", Key="a b/é%2Fc", Body=body)
    assert s3.get_object(Bucket="bucket", Key="a b/é%2Fc")["Body"].read() == body
    assert s3.head_object(Bucket="bucket", Key="a b/é%2Fc")["ContentLength"] == len(body)

    sqs = client("sqs", embedded.endpoint)
    url = sqs.create_queue(QueueName="queue")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="hello")
    assert sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"] == "hello"

    metrics = client("cloudwatch", embedded.endpoint)
    metrics.put_metric_data(Namespace="n", MetricData=[{"MetricName": "m", "Value": 1.0}])
    assert metrics.list_metrics(Namespace="n")["Metrics"][0]["MetricName"] == "m"


def test_conditional_writes_of_many_clients_are_atomic(embedded, client):
    table = {"TableName": "race"}
    dynamodb = client("dynamodb", embedded.endpoint)
    dynamodb.create_table(
        **table,
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
    )
    endpoints = [embedded.endpoint, embedded.dynamodb_endpoint] * 2
    clients = [client("dynamodb", endpoint) for endpoint in endpoints]
    won = []

    def run(own):
        for index in range(25):
            try:
                own.put_item(
                    **table,
                    Item={"k": {"S": str(index)}},
                    ConditionExpression="attribute_not_exists(k)",
                )
            except own.exceptions.ConditionalCheckFailedException:
                continue
            won.append(index)

    threads = [threading.Thread(target=run, args=(own,)) for own in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(25))


@pytest.mark.parametrize("service", ["kinesis", "dynamodb", "sqs", "s3", "cloudwatch"])
def test_the_right_secret_is_let_in_and_a_wrong_one_is_not(guarded, client, service):
    calls = {
        "kinesis": "list_streams",
        "dynamodb": "list_tables",
        "sqs": "list_queues",
        "s3": "list_buckets",
        "cloudwatch": "list_metrics",
    }
    json_codes = ("InvalidSignatureException", "UnrecognizedClientException")
    xml_codes = ("SignatureDoesNotMatch", "InvalidAccessKeyId")
    mismatch, unknown = xml_codes if service == "s3" else json_codes

    def call(**given):
        return getattr(client(service, guarded.endpoint, **given), calls[service])

    call()()
    assert code_of(call(secret="wrong"))[0] == mismatch
    assert code_of(call(key="AKIDOTHER"))[0] == unknown


def test_the_endpoint_behind_wants_a_signature_too(guarded):
    status, _, body = post(guarded.dynamodb_endpoint, "DynamoDB_20120810.ListTables", b"{}")

    assert (status, json.loads(body)["__type"]) == (400, "MissingAuthenticationTokenException")


def test_a_clock_an_hour_off_is_refused(guarded, client, monkeypatch):
    real = botocore.auth.get_current_datetime

    def skewed(*given, **named):
        return real(*given, **named).replace(hour=(real().hour + 12) % 24)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", skewed)
    with pytest.raises(ClientError) as refusal:
        client("kinesis", guarded.endpoint).list_streams()

    told = refusal.value.response["Error"]
    assert told["Code"] == "InvalidSignatureException"
    assert told["Message"].startswith(("Signature expired", "Signature not yet current"))


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


def test_it_listens_on_loopback_only(embedded):
    for pid in embedded.pids:
        listening = [
            each.laddr.ip
            for each in psutil.Process(pid).net_connections()
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]


def test_credentials_are_in_no_command_line_and_no_environment(guarded):
    for pid in guarded.pids:
        process = psutil.Process(pid)
        assert SECRET not in " ".join(process.cmdline())
        assert SECRET not in " ".join(process.environ().values())


def test_an_upload_in_chunks_of_unknown_number_arrives_whole(embedded, client):
    client("s3", embedded.endpoint).create_bucket(
        Bucket="chunked", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    where = urlsplit(embedded.endpoint)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HUNG_S)
    pieces = (b"x" * 100_000 for _ in range(20))

    connection.request("PUT", "/chunked/key", pieces, encode_chunked=True)
    status = connection.getresponse().status
    connection.close()

    got = client("s3", embedded.endpoint).get_object(Bucket="chunked", Key="key")
    assert status == 200
    assert got["Body"].read() == b"x" * 2_000_000


def test_when_the_process_behind_is_dead_kinesis_answers_and_the_rest_is_unavailable(client):
    with start_embedded() as running:
        behind = psutil.Process(running.pids[1])
        client("dynamodb", running.endpoint).list_tables()
        behind.kill()
        eventually(lambda: running.ended() is not None)

        status, _, body = post(running.endpoint, "DynamoDB_20120810.ListTables", b"{}")

        assert (status, json.loads(body)["__type"]) == (503, "ServiceUnavailableException")
        assert client("kinesis", running.endpoint).list_streams()["StreamNames"] == []


def test_closing_ends_both_at_once_though_connections_are_open():
    with start_embedded() as running:
        parts = [urlsplit(running.endpoint), urlsplit(running.dynamodb_endpoint)]
        connections = [socket.create_connection((part.hostname, part.port)) for part in parts]
        pids = running.pids
        began = time.monotonic()
        running.close()
        took_s = time.monotonic() - began
    for connection in connections:
        connection.close()

    assert took_s < HUNG_S, "it waited for the connections"
    assert all(gone(pid) for pid in pids)


def test_both_end_when_their_parent_is_killed():
    code = (
        "from kclrun.local.server import start_embedded; import time\n"
        "print(*start_embedded().pids, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2

    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    eventually(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_it_says_when_it_is_ready_and_ends_with_zero(number):
    code = (
        "import sys; from kclrun.local.server import run_local\n"
        "sys.exit(run_local(0, limits=False, credentials=None))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    children = [child.pid for child in psutil.Process(process.pid).children()]

    process.send_signal(number)

    assert process.wait(HUNG_S) == 0
    assert "http://127.0.0.1:" in line
    assert process.stdout.read() == ""
    process.stdout.close()
    assert len(children) == 2
    assert all(gone(pid) for pid in children)


def test_in_the_foreground_it_ends_when_one_of_its_processes_does():
    code = (
        "import sys; from kclrun.local.server import run_local\n"
        "sys.exit(run_local(0, limits=False, credentials=None))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    process.stdout.readline()
    psutil.Process(process.pid).children()[0].kill()

    _, errors = process.communicate(timeout=HUNG_S)

    assert process.returncode == 69
    assert "has ended" in errors


def test_a_port_that_is_taken_is_a_settings_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(SettingsError) as refusal:
            start_embedded(port=port)

    assert f"127.0.0.1:{port}" in str(refusal.value)


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(server, "_NEEDED", ("a_package_that_is_not_there",))

    with pytest.raises(SettingsError) as refusal:
        start_embedded()

    assert str(refusal.value) == (
        "aws.endpoint: embedded needs the extra: pip install 'kclrun[local]'"
    )
