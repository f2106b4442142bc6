"""Regions of the embedded AWS share nothing but memory: a client sees what is in its own."""

import json

import pytest
from botocore.exceptions import ClientError

from kclrun.errors import ServiceError
from kclrun.local.http_server import HttpServer
from kclrun.local.operations import OPERATIONS, answer
from kclrun.local.server import start_embedded
from kclrun.local.service import SHARDS_MAX, Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.stream import LOOPBACK_REGION, region_of
from tests.support.tables import over_rows
from tests.unit.local.serving import served
from tests.unit.local.test_api_reference import (
    ARN,
    NOW,
    body_of,
    code_of,
    service,
    valid,
)
from tests.unit.local.test_http_server import post

HERE, THERE = LOOPBACK_REGION, "eu-west-1"
NOT_FOUND, INVALID = "ResourceNotFoundException", "InvalidArgumentException"
# Of the account and not of a stream.
OF_THE_ACCOUNT = {"CreateStream", "DescribeLimits", "ListStreams"}


def region_error(call, *arguments, **more):
    with pytest.raises(ServiceError) as caught:
        call(*arguments, **more)
    return caught.value.code


@over_rows("operation", sorted(OPERATIONS.keys() - OF_THE_ACCOUNT))
def test_no_operation_reaches_a_stream_of_another_region(operation):
    kinesis = service()
    request = valid(kinesis, operation)

    refused = code_of(kinesis.in_region(THERE), operation, request)

    # An iterator is unreadable there, as the service's own are.
    assert refused == (INVALID if operation == "GetRecords" else NOT_FOUND)
    assert code_of(kinesis, operation, request) is None


def test_a_name_may_be_used_in_each_region_for_a_stream_of_its_own():
    here = service()
    there = here.in_region(THERE)
    made = there.create_stream("s", 1, NOW)

    there.put(made, PutEntry(b"there", "k"), NOW)

    assert region_of(made.arn) == THERE
    assert [len(each.stream("s", None, NOW).open_shards()) for each in (here, there)] == [2, 1]
    assert here.in_region(THERE) is there
    assert there.in_region(HERE) is here
    there.delete_stream(made, NOW)
    assert [[stream.arn for stream in each.streams(NOW)] for each in (here, there)] == [[ARN], []]


def test_a_listing_and_its_tokens_are_of_one_region():
    here = service()
    there = here.in_region(THERE)
    for kinesis, names in ((here, ["a", "b"]), (there, ["x", "y"])):
        for name in names:
            kinesis.create_stream(name, 1, NOW)

    listed = body_of(here, "ListStreams", {"Limit": 1})

    assert body_of(here, "ListStreams", {})["StreamNames"] == ["a", "b", "s"]
    assert body_of(there, "ListStreams", {})["StreamNames"] == ["x", "y"]
    assert code_of(there, "ListStreams", {"NextToken": listed["NextToken"]}) == INVALID
    shards = body_of(here, "ListShards", {"StreamName": "s", "MaxResults": 1})
    assert code_of(there, "ListShards", {"NextToken": shards["NextToken"]}) == INVALID


def test_limits_of_an_account_are_those_of_a_region():
    here = service()
    there = here.in_region(THERE)
    there.create_stream("t", SHARDS_MAX - 1, NOW)

    assert region_error(there.create_stream, "u", 2, NOW) == "LimitExceededException"
    here.create_stream("u", 2, NOW)
    assert body_of(here, "DescribeLimits", {})["OpenShardCount"] == 4


def test_the_memory_of_all_regions_is_bounded_together():
    here = Kinesis(KinesisSettings(stored_bytes_max=3000), b"s" * 32)
    there = here.in_region(THERE)
    streams = [each.create_stream("s", 1, NOW) for each in (here, there)]
    here.put(streams[0], PutEntry(b"x" * 2000, "k"), NOW)

    full = "ProvisionedThroughputExceededException"
    assert region_error(there.put, streams[1], PutEntry(b"x" * 2000, "k"), NOW) == full
    # What expired in another region makes room.
    there.put(streams[1], PutEntry(b"x" * 2000, "k"), NOW + 2 * 86_400)


def test_a_region_without_a_stream_is_not_kept():
    here = service()
    for number in range(1000):
        assert not here.in_region(f"made-up-{number}").streams(NOW)
    for number in range(99):
        here.in_region(f"made-up-{number}").create_stream("s", 1, NOW)

    last = here.in_region("made-up-99")
    assert region_error(last.create_stream, "s", 1, NOW) == "LimitExceededException"


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - OF_THE_ACCOUNT))
def test_a_refusal_says_what_the_service_says_and_the_log_says_the_region(operation):
    notes = []
    kinesis = service(note=notes.append)
    request = json.dumps(valid(kinesis, operation))

    for _ in "ab":
        refused = answer(kinesis.in_region(THERE), operation, request.encode(), NOW).body.decode()
        assert THERE not in refused
        assert HERE not in refused or HERE in request

    assert all(note.startswith("A request for stream s in eu-west-1 finds none") for note in notes)
    assert len(notes) <= 1


def test_the_region_of_a_stream_is_noted_once_for_a_region_of_requests():
    notes = []
    kinesis = service(note=notes.append)
    for region in (THERE, THERE, HERE, "eu-west-2"):
        for name in ("s", "absent"):
            if region != HERE or name != "s":
                with pytest.raises(ServiceError) as caught:
                    kinesis.in_region(region).stream(name, None, NOW)
                message = f"Stream {name} under account 123456789012 not found."
                assert str(caught.value) == message
    for number in range(1000):
        region_error(kinesis.in_region(f"made-up-{number}").stream, "s", None, NOW)

    assert notes[0] == (
        "A request for stream s in eu-west-1 finds none: it is in us-east-1. Set the region of"
        " that client (AWS_REGION, aws.region)"
    )
    assert " in eu-west-2 finds none" in notes[1]
    assert len(notes) == 100


@over_rows(
    ("authorization", "region"),
    [
        (None, HERE),
        ("AWS4-HMAC-SHA256 Credential=k/20260101/eu-west-1/kinesis/aws4_request", THERE),
        ("AWS4-HMAC-SHA256 Credential=k/20260101/Mine-1/kinesis/aws4_request", "Mine-1"),
        ("AWS4-ECDSA-P256-SHA256 Credential=k/20260101/kinesis/aws4_request", HERE),
        ("Bearer x", HERE),
    ],
)
def test_the_region_of_a_request_is_that_of_its_signature(authorization, region):
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    headers = {"Authorization": authorization} if authorization else {}
    with served(HttpServer(kinesis, None)) as endpoint:
        body = json.dumps({"StreamName": "s", "ShardCount": 1}).encode()
        assert post(endpoint, "Kinesis_20131202.CreateStream", body, headers)[0] == 200

    (stream,) = kinesis.in_region(region).streams(NOW)
    assert region_of(stream.arn) == region


def test_a_credential_in_the_query_of_a_request_is_for_the_default_region():
    kinesis = Kinesis(KinesisSettings(), b"s" * 32)
    query = "?X-Amz-Credential=k/20260101/eu-west-1/kinesis/aws4_request&X-Amz-Signature=0"
    with served(HttpServer(kinesis, None)) as endpoint:
        body = json.dumps({"StreamName": "s", "ShardCount": 1}).encode()
        assert post(f"{endpoint}/{query}", "Kinesis_20131202.CreateStream", body)[0] == 200

    assert [stream.name for stream in kinesis.streams(NOW)] == ["s"]


@pytest.mark.seconds
def test_every_service_but_s3_keeps_regions_apart(client):
    """Through moto, too; with the streams of its tables."""
    table = {
        "TableName": "t",
        "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}],
        "BillingMode": "PAY_PER_REQUEST",
        "StreamSpecification": {"StreamEnabled": True, "StreamViewType": "KEYS_ONLY"},
    }
    with start_embedded() as embedded:
        here, there = (
            {
                service: client(service, embedded.endpoint, region=region)
                for service in ("kinesis", "dynamodb", "dynamodbstreams", "sqs", "sns")
            }
            for region in (HERE, "made-up-1")
        )
        for clients in (here, there):
            clients["kinesis"].create_stream(StreamName="s", ShardCount=1)
            clients["dynamodb"].create_table(**table)
            clients["sqs"].create_queue(QueueName="q")
            clients["sns"].create_topic(Name="n")
        tables = [each["dynamodb"].describe_table(TableName="t")["Table"] for each in (here, there)]
        arns = [each["LatestStreamArn"] for each in tables]
        assert [region_of(arn) for arn in arns] == [HERE, "made-up-1"]
        for clients, arn, other in ((here, *arns), (there, *reversed(arns))):
            listed = clients["dynamodbstreams"].list_streams()["Streams"]
            assert [each["StreamArn"] for each in listed] == [arn]
            with pytest.raises(ClientError) as refused:
                clients["dynamodbstreams"].describe_stream(StreamArn=other)
            assert refused.value.response["Error"]["Code"] == NOT_FOUND
            clients["dynamodb"].delete_table(TableName="t")
            assert len(clients["sqs"].list_queues()["QueueUrls"]) == 1
            assert len(clients["sns"].list_topics()["Topics"]) == 1
