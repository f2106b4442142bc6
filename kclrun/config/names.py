"""The types of names and addresses in the settings, and the documentation of a setting.

Each has a pattern, and the words for it in messages (`convert.accepted_values`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from kclrun.model.table import TABLE, TABLE_ARN


def documented(text: str, **constraints: Any) -> msgspec.Meta:
    """The documentation of a setting, and the constraints on its value."""
    return msgspec.Meta(description=text, **constraints)


def spelled(
    pattern: str, words: str, instead: Mapping[str, str] = MappingProxyType({})
) -> msgspec.Meta:
    """The pattern of a text, and the words for it that follow `a text` in messages. `instead` says
    what to write in place of a text that matches another pattern."""
    return msgspec.Meta(pattern=pattern, extra={"words": words, "instead": instead})


_STREAM: Final = (
    r"[A-Za-z0-9_.-]{1,128}"
    r"|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128}"
)
_STREAM_OF_TABLE: Final = (
    r"arn:[a-z0-9-]+:dynamodb:[a-z0-9-]+:\d{12}:table/[A-Za-z0-9_.-]{3,255}/stream/[0-9T:.-]{1,40}"
)
_CONSUMER: Final = (
    r"[A-Za-z0-9_.-]{1,128}"
    r"|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128}"
    r"/consumer/[A-Za-z0-9_.-]{1,128}:\d+"
)
BUCKET: Final = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=/-]*)?"
# Code to import is named by module and attribute; the patterns admit nothing else.
_CODE: Final = r"[A-Za-z_]\w*(\.\w+)*:\w+"

# One colon after kclpy names a script; a module of that name does not count.
ProcessorRef = Annotated[
    str,
    spelled(
        rf"^((?!kclpy:\w+$)(kclpy:)?{_CODE}|kclpy:[\w-][\w.-]*\.py)$",
        " like module:Class, or kclpy:script.py",
    ),
]
OutputRef = Annotated[str, spelled(rf"^{_CODE}$", " like module:Class")]
FunctionRef = Annotated[str, spelled(rf"^{_CODE}$", " like module:function")]
DecodeRef = Annotated[
    str,
    spelled(
        rf"^(json|text|msgpack|glue|{_CODE})$",
        ": json, text, msgpack, glue, module:Type or module:function",
    ),
]
# An application's tables are named by it.
ApplicationName = Annotated[
    str,
    spelled(
        f"^{TABLE}$",
        " of 3 to 255 letters, digits, dots, dashes and underscores",
        {TABLE_ARN: "the ARN of a lease table belongs in leases.table"},
    ),
]
# DynamoDB takes the ARN of a table, of another account too, wherever it takes a name.
TableReference = Annotated[
    str,
    spelled(
        f"^({TABLE}|{TABLE_ARN})$",
        " that is a table's name (3 to 255 letters, digits, dots, dashes, underscores) or its ARN",
        {f"{TABLE_ARN}/.*": "the ARN of a table ends with the table's name"},
    ),
]
StreamName = Annotated[str, spelled(f"^({_STREAM})$", " that is a stream's name or ARN")]
# What `stream:` reads: the stream of a DynamoDB table is known by its ARN alone.
SourceName = Annotated[
    str,
    spelled(
        f"^({_STREAM}|{_STREAM_OF_TABLE})$",
        " that is a stream's name or ARN",
        {TABLE_ARN: "of a table its stream is read, by the ARN that ends with /stream/ and a time"},
    ),
]
ConsumerName = Annotated[str, spelled(f"^({_CONSUMER})$", " that is a consumer's name or ARN")]
BucketUrl = Annotated[
    str,
    spelled(f"^{BUCKET}$", " like s3://bucket/prefix, with a bucket's name (no capitals, no _)"),
]
StoryPlace = Annotated[
    str, spelled(f"^(disk|nowhere|{BUCKET})$", " that is disk, nowhere, or like s3://bucket/prefix")
]
QueueName = Annotated[
    str,
    spelled(
        r"^(https?://[A-Za-z0-9.:-]+/\d{12}/)?[A-Za-z0-9_-]{1,75}(\.fifo)?$",
        " that is a queue's name or URL",
    ),
]
VariableName = Annotated[
    str,
    spelled(r"^[A-Za-z_][A-Za-z0-9_]*\*?$", " that is a variable's name, or its beginning and *"),
]
TopicArn = Annotated[
    str,
    spelled(
        r"^arn:[a-z0-9-]+:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,251}(\.fifo)?$",
        " that is a topic's ARN",
    ),
]
DeliveryStreamName = Annotated[
    str, spelled(r"^[A-Za-z0-9_.-]{1,64}$", " that is the name of a delivery stream")
]
# Names of hooks that EC2 Auto Scaling accepts.
HookName = Annotated[
    str,
    spelled(r"^[A-Za-z0-9_/-]{1,255}$", " of letters, digits, dashes, underscores and slashes"),
]
