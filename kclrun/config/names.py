"""The types of names and addresses in the settings.

Each has a pattern, and the words for it in messages (`convert.describe`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# Code to import is named by module and attribute; the pattern admits nothing else.
ProcessorRef = Annotated[
    str,
    msgspec.Meta(
        # One colon after kclpy names a script; a module of that name does not count.
        pattern=r"^((?!kclpy:\w+$)(kclpy:)?[A-Za-z_]\w*(\.\w+)*:\w+|kclpy:[\w-][\w.-]*\.py)$",
        extra={"words": " like module:Class, or kclpy:script.py"},
    ),
]
# Names that DynamoDB and Kinesis accept.
TableName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_.-]{3,255}$",
        extra={"words": " of 3 to 255 letters, digits, dots, dashes and underscores"},
    ),
]
StreamName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9_.-]{1,128}|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128})$",
        extra={"words": " that is a stream's name or ARN"},
    ),
]
# What `stream:` reads: the stream of a DynamoDB table is known by its ARN alone.
SourceName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9_.-]{1,128}|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128}"
        r"|arn:[a-z0-9-]+:dynamodb:[a-z0-9-]+:\d{12}:table/[A-Za-z0-9_.-]{3,255}/stream/[0-9T:.-]{1,40})$",
        extra={"words": " that is a stream's name or ARN"},
    ),
]
ConsumerName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9_.-]{1,128}|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128}/consumer/[A-Za-z0-9_.-]{1,128}:\d+)$",
        extra={"words": " that is a consumer's name or ARN"},
    ),
]
BucketUrl = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=/-]*)?$",
        extra={"words": " like s3://bucket/prefix, with a bucket's name (no capitals, no _)"},
    ),
]
StoryPlace = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(disk|nowhere|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=/-]*)?)$",
        extra={"words": " that is disk, nowhere, or like s3://bucket/prefix"},
    ),
]
QueueName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(https?://[A-Za-z0-9.:-]+/\d{12}/)?[A-Za-z0-9_-]{1,75}(\.fifo)?$",
        extra={"words": " that is a queue's name or URL"},
    ),
]
FunctionRef = Annotated[
    str,
    msgspec.Meta(pattern=r"^[A-Za-z_]\w*(\.\w+)*:\w+$", extra={"words": " like module:function"}),
]
DecodeRef = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(json|text|msgpack|glue|[A-Za-z_]\w*(\.\w+)*:\w+)$",
        extra={"words": ": json, text, msgpack, glue, module:Type or module:function"},
    ),
]
VariableName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*\*?$",
        extra={"words": " that is a variable's name, or its beginning and *"},
    ),
]
TopicArn = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^arn:[a-z0-9-]+:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,251}(\.fifo)?$",
        extra={"words": " that is a topic's ARN"},
    ),
]
DeliveryStreamName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        extra={"words": " that is the name of a delivery stream"},
    ),
]
# Names of hooks that EC2 Auto Scaling accepts.
HookName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_/-]{1,255}$",
        extra={"words": " of letters, digits, dashes, underscores and slashes"},
    ),
]
