"""What a fault is, and how the services word theirs.

A fault holds for a while, for some operations, on the way of some managers, and hits a share of
the requests. As JSON it is an object of these fields; times are seconds after the storm began.
"""

import json
import zlib
from typing import Literal

import msgspec

KINDS = (
    "delay",  # the request and its answer each wait half of `seconds`
    "throttle",  # refused, as the service words it
    "fail",  # 5xx; the service never saw it
    "fail_after",  # 5xx; the service did it
    "cut_before",  # the connection ends; the service never saw it
    "cut_after",  # the connection ends; the service did it
    "cut_amid",  # the service did it; half of its answer arrives
    "repeat",  # the service is asked twice, and the second answer arrives
    "echo",  # the service is asked again, `seconds` later
    "stall",  # silence for `seconds`, then the connection ends; the service never saw it
    "slice",  # the answer arrives in small pieces, over `seconds`
    "expire",  # the iterator is too old
    "page",  # listings come in pages of two
)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of no operations, or no doors, are all. `share` of the requests are hit."""

    kind: Literal[KINDS]
    start_s: float = 0.0
    duration_s: float
    operations: tuple[str, ...] = ()
    doors: tuple[str, ...] = ()
    share: float = 1.0
    seconds: float = 0.0

    def concerns(self, door, operation, at_s):
        return (
            self.start_s <= at_s < self.start_s + self.duration_s
            and (not self.operations or operation in self.operations)
            and (not self.doors or door in self.doors)
            and (self.kind != "expire" or operation == "GetRecords")
            and (self.kind != "page" or operation in PAGE_SIZES)
        )


# The parameter by which each listing is told to come in pages.
PAGE_SIZES = {"Scan": "Limit", "ListShards": "MaxResults"}


class Refusal(msgspec.Struct, frozen=True):
    status: int
    content_type: str
    body: bytes

    def as_answer(self):
        """As HTTP. DynamoDB's clients compare the checksum."""
        return (
            f"HTTP/1.1 {self.status} Refused\r\ncontent-type: {self.content_type}\r\n"
            f"content-length: {len(self.body)}\r\nx-amz-crc32: {zlib.crc32(self.body)}\r\n\r\n"
        ).encode() + self.body


_DYNAMODB_THROTTLES = (
    "com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException",
    "com.amazonaws.dynamodb.v20120810#RequestLimitExceeded",
    "com.amazon.coral.availability#ThrottlingException",
)
_READ_THROTTLES = ("ProvisionedThroughputExceededException", "KMSThrottlingException")
_CONTROL_THROTTLES = ("LimitExceededException", "ThrottlingException")
_READS = ("GetRecords", "GetShardIterator")


def refusal(kind, target, chance):
    """How the service of this `X-Amz-Target` refuses; `chance`, in [0, 1), chooses the words."""
    is_dynamodb = target.startswith("DynamoDB")
    operation = target.rpartition(".")[2]
    if kind == "throttle":
        if is_dynamodb:
            names = _DYNAMODB_THROTTLES
        else:
            names = _READ_THROTTLES if operation in _READS else _CONTROL_THROTTLES
        return _worded(is_dynamodb, 400, names[int(chance * len(names))], "Rate exceeded.")
    if kind == "expire":
        return _worded(is_dynamodb, 400, "ExpiredIteratorException", "Iterator expired.")
    if chance < 0.3:
        # What stands before the service, a load balancer, speaks no JSON.
        return Refusal(
            503, "text/html", b"<html><body><h1>503 Service Unavailable</h1></body></html>"
        )
    name = (
        "com.amazonaws.dynamodb.v20120810#InternalServerError" if is_dynamodb else "InternalFailure"
    )
    return _worded(is_dynamodb, 500, name, "The request processing has failed.")


def _worded(is_dynamodb, status, name, message):
    version = "1.0" if is_dynamodb else "1.1"
    body = json.dumps({"__type": name, "message": message}).encode()
    return Refusal(status, f"application/x-amz-json-{version}", body)
