"""What botocore raises, as a leaf of our tree: by what the service said, or said not."""

import socket

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from kclrun.aws.control import ControlPlane, asking, from_botocore
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.errors import ErrorReply, parse_error_reply, safe_text
from kclrun.aws.operations import CREATE_TABLE, GET_ITEM
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    NotFound,
    NothingListens,
    OutcomeUnknown,
    Unavailable,
)
from kclrun.model.wire import WireCredentials
from tests.support.tables import over_rows


def refused(status, code, message=""):
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "GetItem")


@over_rows(
    ("error", "leaf"),
    [
        (refused(400, "ResourceNotFoundException"), NotFound),
        (refused(400, "ValidationException", "no"), InvalidRequest),
        (refused(403, "403"), AccessDenied),
        (refused(404, "404"), InvalidRequest),
        (refused(503, "503"), Unavailable),
        (refused(401, "SomethingNew"), AccessDenied),
        (refused(400, "ValidationException\nforged line", "no"), InvalidRequest),
    ],
)
def test_what_the_service_named_is_what_it_is(error, leaf):
    found = from_botocore(GET_ITEM, error)
    assert type(found) is leaf
    assert "\n" not in f"{found} {found.code}"


def test_a_400_that_names_no_error_was_cut_off_inside_its_head_and_says_nothing():
    read = from_botocore(GET_ITEM, refused(400, "400"))
    write = from_botocore(CREATE_TABLE, refused(400, "400"))

    assert (type(read), type(write)) == (Unavailable, OutcomeUnknown)
    assert "cut short" in str(read)


@over_rows(
    ("body", "header", "code"),
    [
        (b'{"__type": "com.amazonaws#Named", "code": "Other"}', "InAHeader", "Named"),
        (b'{"code": "Other"}', "InAHeader:http://amazonaws.com/", "InAHeader"),
        (b'{"code": "Other"}', None, "Other"),
        (b"<html>", None, ""),
        (b'{"__type": "' + b"N" * 150 + b'"}', None, "N" * 100),
        (b'{"__type": "a#Named\\n\\u001b[31mforged line"}', None, "Named"),
        (b"<html>", "Named\x1b[31m:http://amazonaws.com/", "Named"),
        (
            b'{"__type": "AWS.SimpleQueueService.NonExistentQueue"}',
            None,
            "AWS.SimpleQueueService.NonExistentQueue",
        ),
    ],
)
def test_an_error_is_named_in_the_body_or_in_a_header(body, header, code):
    assert parse_error_reply(body, header).code == code


@pytest.mark.parametrize(
    ("message", "shown"),
    [("first\nsecond\nthird", "first"), ("", "the service gave no reason"), ("a\tb", "a b")],
)
def test_of_a_message_one_line_is_shown(message, shown):
    assert safe_text(ErrorReply(code="X", message=message)) == shown


@pytest.mark.parametrize("service", ["dynamodb_reads", "s3", "sqs", "sns", "firehose"])
def test_a_connection_that_this_host_refuses_is_an_answer_and_is_not_repeated(service, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = EndpointSettings(region="eu-west-1", endpoint_url=f"http://{host}")
    monkeypatch.setattr("time.sleep", lambda pause_s: pytest.fail(f"a pause of {pause_s} s"))
    made = ControlPlane(open_session(settings), settings, WireCredentials("k", "s"))
    client = getattr(made, service)()
    call = {
        "dynamodb_reads": lambda: client.describe_table(TableName="orders"),
        "s3": lambda: client.list_objects_v2(Bucket="orders"),
        "sqs": lambda: client.get_queue_url(QueueName="orders"),
        "sns": lambda: client.publish(TopicArn="arn:aws:sns:eu-west-1:1:orders", Message="x"),
        "firehose": lambda: client.describe_delivery_stream(DeliveryStreamName="orders"),
    }[service]

    with pytest.raises(NothingListens, match=f"nothing listens at {host}"), asking(GET_ITEM):
        call()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("https://dynamodb.eu-west-1.amazonaws.com/", ConnectionRefusedError("refused")),
        ("http://127.0.0.1:4567/", socket.gaierror("no such name")),
        ("http://127.0.0.1:4567/", "refused"),
    ],
)
def test_any_other_connection_that_is_not_made_may_be_repeated(url, cause):
    found = from_botocore(GET_ITEM, EndpointConnectionError(endpoint_url=url, error=cause))

    assert type(found) is Unavailable
