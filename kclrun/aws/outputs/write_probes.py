"""Finds out, without writing, whether the caller may write to a destination: for `kclrun check`.

A probe is a request to write that the service can never accept, by its own documentation. If the
service refuses the caller, the permission is missing. If it takes the request and refuses the
message inside, the caller is authorized, because IAM decides on a request as a whole. If it refuses
the request for its content, nothing is proven: AWS does not document that the permission is checked
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.aws import operations
from kclrun.aws.errors import LACKS_PERMISSION, advising
from kclrun.aws.operations import Operation
from kclrun.aws.wire import WireClient
from kclrun.errors import AccessDenied, InvalidRequest, OutcomeUnknown, Unavailable

# A service that is not AWS's may take the message: its text says what it is.
_TEXT: Final = "a probe of kclrun check, which no service should take"
# A standard queue or topic refuses the deduplication id, a FIFO one a message without a group. SQS
# delays a message by at most 900 seconds; SNS requires `default` in a message that is "json".
_OF_QUEUES: Final = {"DelaySeconds": 901, "MessageDeduplicationId": "kclrun"}
_OF_TOPICS: Final = {"MessageStructure": "json", "MessageDeduplicationId": "kclrun"}
# The keys of shards end with 2**128 - 1. The schema of the API allows 39 digits.
_HASH_KEY: Final = str(2**128)
# PutRecordBatch takes 4 MiB, and 1,000 KiB a record. Readers of lines skip empty ones.
_LINES: Final = (b"\n" * 900_000,) * 5
_KMS: Final = "kms"
_FIRST: Final = "AWS does not document that it looks at the permission first"

_encode: Final = msgspec.json.Encoder().encode


def may_write(operation: Operation, resource: str, send: Callable[[], str | None]) -> str:
    """Whether the caller may write to `resource`, in words. `send` sends the probe once. It returns
    None if the answer is a proof, else the reason why it is not.

    Raises: AccessDenied with the action to allow, and its ARN; NotFound, Throttled; Unavailable
    also where no answer came, since a probe may be repeated; InvalidRequest for a key of KMS.
    """
    try:
        with advising(operation, resource):
            why = send()
    except OutcomeUnknown as error:
        raise error.reworded(str(error), Unavailable) from None
    except InvalidRequest as error:
        if error.code.lower().startswith(_KMS):
            raise
        why = f"the request as a whole was refused ({error.code}), and {_FIRST}"
    return "may write: proven" if why is None else f"may write: not proven, because {why}"


def probe_queue(client: Any, url: str, kms_key: str | None) -> str | None:
    """Send the probe to an SQS queue through botocore's client; for `may_write`."""
    entry = {"Id": "probe", "MessageBody": _TEXT, **_OF_QUEUES}
    answer = client.send_message_batch(QueueUrl=url, Entries=[entry])
    return _refused_inside(operations.SEND_MESSAGE_BATCH, answer, kms_key)


def probe_topic(client: Any, topic_arn: str, kms_key: str | None) -> str | None:
    """Send the probe to an SNS topic through botocore's client; for `may_write`."""
    entry = {"Id": "probe", "Message": _encode({"probe": _TEXT}).decode(), **_OF_TOPICS}
    answer = client.publish_batch(TopicArn=topic_arn, PublishBatchRequestEntries=[entry])
    return _refused_inside(operations.PUBLISH_BATCH, answer, kms_key)


def probe_delivery_stream(client: Any, name: str) -> str:
    """Send the probe to a Firehose delivery stream through botocore's client; for `may_write`."""
    records = [{"Data": line} for line in _LINES]
    client.put_record_batch(DeliveryStreamName=name, Records=records)
    return _taken("more than 4 MiB of empty lines in a request")


def probe_stream(client: WireClient, stream: str) -> str:
    """Whether records may be put into a Kinesis stream (a name or an ARN), in words. Raises: as
    `may_write`."""
    is_arn = stream.startswith("arn:")
    record = {"Data": "", "PartitionKey": "kclrun-check", "ExplicitHashKey": _HASH_KEY}
    body = _encode({"StreamARN" if is_arn else "StreamName": stream, "Records": [record]})

    def send() -> str:
        client.call(operations.PUT_RECORDS, body)
        return _taken("an empty record with a hash key above the last shard's")

    resource = stream if is_arn else f"the ARN of the stream {stream}"
    return may_write(operations.PUT_RECORDS, resource, send)


def _refused_inside(
    operation: Operation, answer: dict[str, Any], kms_key: str | None
) -> str | None:
    """None if the service took the request, and refused the message for its content."""
    failed = answer.get("Failed", ())
    if not failed:
        return _taken("a message") if answer.get("Successful") else "the answer names no result"
    code = str(failed[0].get("Code", ""))[:100]
    if code in LACKS_PERMISSION:
        raise AccessDenied(f"{operation.name}: {code}", operation=operation.name, code=code)
    if not code.startswith("Invalid") and not failed[0].get("SenderFault"):
        return f"the message was refused with {code}"
    if kms_key is None:
        return None
    return (
        f"it is encrypted with the key {kms_key}, and only a message that is taken shows whether"
        " kms:GenerateDataKey and kms:Decrypt are allowed"
    )


def _taken(what: str) -> str:
    return f"the service took {what}, which AWS refuses: it is there now"
