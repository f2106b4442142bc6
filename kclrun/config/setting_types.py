"""The types of settings that are more than a text or a number, and how a setting is documented.

Rule: a type that a pattern checks carries the words for it, for messages (`settle.describe`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = [
    "FunctionRef",
    "ProcessorRef",
    "SparkOptions",
    "StreamName",
    "TableName",
    "documented",
]

# What is imported is named by module and attribute, and by nothing an import could be tricked with.
ProcessorRef = Annotated[
    str,
    msgspec.Meta(
        # One colon after kclpy names a script; a module of that name is nobody's.
        pattern=r"^((?!kclpy:\w+$)(kclpy:)?[A-Za-z_]\w*(\.\w+)*:\w+|kclpy:[\w-][\w.-]*\.py)$",
        extra={"words": " like module:Class, or kclpy:script.py"},
    ),
]
# What DynamoDB and Kinesis accept as names.
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
FunctionRef = Annotated[
    str,
    msgspec.Meta(pattern=r"^[A-Za-z_]\w*(\.\w+)*:\w+$", extra={"words": " like module:function"}),
]

# Spark's options are texts; people write numbers and switches, too.
SparkOptions = dict[str, str | int | float | bool]


def documented(text: str, **constraints: Any) -> msgspec.Meta:
    """The documentation of a setting, and what its value must satisfy."""
    return msgspec.Meta(description=text, **constraints)
