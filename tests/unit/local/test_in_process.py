"""The embedded AWS in the process of a test: its clock, its reset, the services behind it."""

import gc
import http.client
import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import boto3
import pytest

from kclrun.local.in_process import InProcessAws, ServiceClock
from kclrun.pytest_plugin.streams import TestStream
from tests.patience import HUNG_S

AT = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def running():
    aws = InProcessAws()
    yield aws
    aws.close()


@pytest.fixture
def aws(running):
    running.reset()
    return running


def ask(aws, operation, **request):
    where = urlsplit(aws.endpoint)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HUNG_S)
    target = {"X-Amz-Target": f"Kinesis_20131202.{operation}"}
    connection.request("POST", "/", json.dumps(request), target)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer, body


def test_the_clock_stands_goes_on_and_is_moved():
    clock = ServiceClock()
    clock.freeze(AT)
    clock.advance(timedelta(minutes=1))
    assert clock() == clock() == AT.timestamp() + 60
    clock.advance(1.5)
    clock.run()
    assert AT.timestamp() + 61.5 <= clock() < AT.timestamp() + 61.5 + HUNG_S


def test_records_arrive_and_expire_in_the_time_of_the_service_and_answers_have_its_date(aws):
    stream = TestStream(aws)
    aws.clock.freeze(AT)
    stream.put(["a", ("key", b"b")])

    assert {each.approximate_arrival_timestamp for each in stream.records()} == {AT.timestamp()}
    answer, _ = ask(aws, "DescribeStreamSummary", StreamName="test")
    assert answer.headers["Date"] == "Tue, 01 Jan 2030 00:00:00 GMT"
    _, iterator = ask(
        aws, "GetShardIterator", StreamName="test", ShardId=stream.shards()[0],
        ShardIteratorType="TRIM_HORIZON",
    )  # fmt: skip
    aws.clock.advance(timedelta(minutes=6))
    _, refusal = ask(aws, "GetRecords", **iterator)
    assert refusal["__type"] == "ExpiredIteratorException"
    aws.clock.advance(timedelta(hours=24))
    assert stream.records() == []


def test_shards_split_and_merge_at_once(aws):
    stream = TestStream(aws, shards=2)
    stream.split()
    stream.merge(stream.shards()[1])

    assert [name[-1] for name in stream.shards()] == ["2", "4"]
    with pytest.raises(IndexError):
        stream.merge(stream.shards()[-1])


@pytest.mark.seconds
def test_a_reset_forgets_what_every_service_has(aws):
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    s3, kinesis = (
        boto3.client(name, endpoint_url=aws.endpoint, **keys) for name in ("s3", "kinesis")
    )
    s3.create_bucket(Bucket="kept")
    TestStream(aws, "kept")
    assert s3.list_buckets()["Buckets"]
    assert kinesis.list_streams()["StreamNames"] == ["kept"]

    aws.reset()

    assert s3.list_buckets()["Buckets"] == []
    assert kinesis.list_streams()["StreamNames"] == []


@pytest.mark.seconds
def test_its_end_leaves_no_connection_open():
    """An open one is a ResourceWarning of whichever test collects it, and an error of this one."""
    own = InProcessAws()
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = boto3.client("dynamodb", "eu-west-1", endpoint_url=own.endpoint, **keys)
    assert client.list_tables()["TableNames"] == []
    client.close()

    own.close()
    del own
    gc.collect()
