"""An ARN names one thing: with a part of it changed, every operation that takes one refuses it."""

import pytest

from kclrun.local.operations import OPERATIONS
from tests.support.tables import over_rows
from tests.unit.local.test_api_reference import (
    ARN,
    CONSUMER,
    MODEL,
    NOW,
    code_of,
    service,
    valid,
)

NOT_FOUND, INVALID = "ResourceNotFoundException", "InvalidArgumentException"
MALFORMED = "ValidationException"
NO_TIME = "a consumer without its time"
# Parts of an ARN, and what another place, another resource or nothing would have there.
PARTS = {
    "no stream": (":stream/s", ":stream/unknown"),
    "another region": (":us-east-1:", ":eu-west-1:"),
    "another account": (":123456789012:", ":999999999999:"),
    "another partition": ("arn:aws:", "arn:aws-cn:"),
    "another service": (":kinesis:", ":dynamodb:"),
    "no account": (":123456789012:", "::"),
    "not an ARN": ("arn:aws:kinesis:us-east-1:123456789012:", ""),
}
OF_CONSUMERS = {
    "another stream": (":stream/s", ":stream/other"),
    "another consumer": ("/consumer/c:", "/consumer/d:"),
    "a consumer of an earlier time": (f":{int(NOW)}", f":{int(NOW) - 1}"),
    NO_TIME: (f":{int(NOW)}", ""),
}
# No ARN of this form exists.
SHAPES = {"another service", "no account", "not an ARN"}
ARNS = {"StreamARN": ARN, "ConsumerARN": CONSUMER, "ResourceARN": ARN}


def members():
    """Each member with an ARN of each operation; one of a resource is both kinds."""
    for operation in sorted(OPERATIONS):
        for member in MODEL.operation_model(operation).input_shape.members:
            if member in ARNS:
                yield operation, member, ARNS[member]
            if member == "ResourceARN":
                yield operation, member, CONSUMER


def cases():
    for operation, member, arn in members():
        more = OF_CONSUMERS if arn == CONSUMER else {}
        for name, (part, other) in (PARTS | more).items():
            wrong = arn.replace(part, other)
            is_malformed = name in SHAPES or (name == NO_TIME and member == "ConsumerARN")
            code = MALFORMED if is_malformed else NOT_FOUND
            if operation == "GetRecords" and code == NOT_FOUND:
                code = INVALID  # of the iterator's stream
            yield operation, member, arn, wrong, code


def request_by(kinesis, operation, member, arn):
    """The valid request of an operation, which names its stream or its consumer by this ARN."""
    request = valid(kinesis, operation)
    if operation in {"DescribeStreamConsumer", "DeregisterStreamConsumer"}:
        return {member: arn} | ({"ConsumerName": "c"} if member == "StreamARN" else {})
    return {name: value for name, value in request.items() if name != "StreamName"} | {member: arn}


@over_rows(("operation", "member", "arn", "wrong", "code"), cases)
def test_an_arn_of_something_else_is_refused(operation, member, arn, wrong, code):
    kinesis = service()
    kinesis.create_stream("other", 1, NOW)
    request = request_by(kinesis, operation, member, arn)

    assert code_of(kinesis, operation, request | {member: wrong}) == code
    assert code_of(kinesis, operation, request) is None


@pytest.mark.parametrize("operation", ["DescribeStreamConsumer", "DeregisterStreamConsumer"])
@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({}, None),
        ({"StreamARN": ARN}, None),
        ({"StreamARN": ARN, "ConsumerName": "c"}, None),
        ({"StreamARN": ARN.replace("/s", "/other")}, INVALID),
        ({"StreamARN": ARN.replace("us-east-1", "eu-west-1")}, INVALID),
        ({"ConsumerName": "d"}, INVALID),
    ],
)
def test_an_arn_of_a_consumer_and_what_else_names_it_agree(operation, more, code):
    kinesis = service()
    other = kinesis.create_stream("other", 1, NOW)
    kinesis.consumers_of(other).register("c", NOW)

    assert code_of(kinesis, operation, {"ConsumerARN": CONSUMER} | more) == code
