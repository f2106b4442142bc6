"""What botocore raises, as a leaf of our tree: by what the service said, or said not."""

import pytest
from botocore.exceptions import ClientError

from kclrun.aws.control import from_botocore
from kclrun.aws.errors import ErrorReply, parse_error_reply, safe_text
from kclrun.aws.operations import CREATE_TABLE, GET_ITEM
from kclrun.errors import AccessDenied, InvalidRequest, NotFound, OutcomeUnknown, Unavailable


def refused(status, code, message=""):
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "GetItem")


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
