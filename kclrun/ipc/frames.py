"""Bytes of another process become a message, or one named error.

Holds: `decoded`, the one boundary between hostile bytes and typed values, for rings and channels.
Rule: whatever is wrong with the bytes, the error is `MalformedFrame`, and it shows none of them:
they may hold credentials, or what user code wrote over our memory.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kclrun.errors import MalformedFrame

__all__ = ["decoded"]

Message = TypeVar("Message")


def decoded(decoder: msgspec.msgpack.Decoder[Message], data: bytes, sender: str) -> Message:
    """The message in `data`. Raises: MalformedFrame, naming the `sender`, for anything else."""
    try:
        return decoder.decode(data)
    # A named boundary: beside its own errors the decoder lets out what str, dict, datetime and our
    # model make of bad values (UnicodeDecodeError, TypeError, OverflowError, LimitExceeded …).
    except Exception as error:  # noqa: BLE001 - see above; nothing but the decoder runs inside
        kind = type(error).__name__
        raise MalformedFrame(f"{len(data)} bytes of {sender} are no message ({kind})") from None
