"""AWS's CBOR (`application/x-amz-cbor-1.1`): values to bytes and back.

It is RFC 8949 with two habits: a time is tag 1 over whole *milliseconds* since 1970, and objects
may come without their length. Needs `cbor2`, of the extra `local`. Rule: any bytes give a value or
`MalformedCbor`. Nesting is bounded, and only the tag of a time is accepted: the others build big
numbers, shared objects and patterns out of a few bytes.
"""

from __future__ import annotations

import math
from typing import Any, Final

import cbor2

# PutRecords nests three deep (request, records, record); no request of Kinesis goes beyond.
_DEPTH_MAX: Final = 8
_TIME_TAG: Final = 1
# The tags that cbor2 decodes by itself (tried from 0 to 60,000). Other tags reach the tag hook.
# 52 and 54 are addresses, as 260 and 261 are.
_TAGS_KNOWN: Final = (0, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261)
_MORE_TAGS_KNOWN: Final = (1004, 43000, 55799)


class MalformedCbor(ValueError):
    """The bytes are not CBOR, or not CBOR of an AWS request."""


def decode_cbor(data: bytes) -> Any:
    """The value in the bytes; times as seconds since 1970. Raises: MalformedCbor."""
    try:
        return cbor2.loads(
            data,
            tag_hook=_refuse_unknown,
            semantic_decoders=_DECODERS,
            max_depth=_DEPTH_MAX,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except cbor2.CBORError as error:
        # Its message may quote the bytes.
        raise MalformedCbor("not the CBOR of a request") from error


def encode_cbor(value: Any) -> bytes:
    """The bytes of a JSON-like value whose real numbers are times in seconds since 1970.

    Kinesis answers with no other real number (its rates and delays are whole), so a time needs no
    type of its own.
    """
    return cbor2.dumps(value, encoders={float: _encode_time})


def _encode_time(encoder: cbor2.CBOREncoder, seconds: float) -> None:
    encoder.encode(cbor2.CBORTag(_TIME_TAG, round(seconds * 1000)))


def _decode_time(milliseconds: Any, _immutable: bool) -> float:  # noqa: FBT001 - cbor2's face.
    is_number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
    if not is_number or not math.isfinite(milliseconds):
        raise cbor2.CBORDecodeError("a time is not a number")
    return float(milliseconds) / 1000


def _refuse_known(_value: Any, _immutable: bool) -> Any:  # noqa: FBT001 - cbor2's face.
    raise cbor2.CBORDecodeError("a tag that no request has")


def _refuse_unknown(tag: cbor2.CBORTag, _immutable: bool) -> Any:  # noqa: FBT001 - cbor2's face.
    raise cbor2.CBORDecodeError(f"tag {tag.tag}, that no request has")


_DECODERS: Final = {_TIME_TAG: _decode_time} | dict.fromkeys(
    (*_TAGS_KNOWN, *_MORE_TAGS_KNOWN), _refuse_known
)
