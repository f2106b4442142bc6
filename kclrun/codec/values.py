"""Payloads into values, for `record.value`: JSON, MessagePack, text, and types. Pure.

A payload that cannot be decoded is an UndecodableRecord. Its reason never contains the payload:
messages that would quote it are cut, and of an exception of user code only the class is named.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Final, get_origin, is_typeddict

import msgspec

from kclrun import errors
from kclrun.model.record import Decoding, Record

# Bytes into a value. Raises: anything; RecordError with words that do not contain the payload.
Decode = Callable[[bytes], Any]

# The beginnings of msgspec's messages that go on with a part of the payload.
_QUOTING: Final = re.compile(
    r"(Object contains unknown field).*"
    r"|(Invalid enum value|Invalid value)\b.*?( - at `\$[^`]*`)?\Z",
    re.DOTALL,
)


def _text(data: bytes) -> str:
    return data.decode()


# The decoders that the setting names by a word.
BY_NAME: Final[dict[str, Decode]] = {
    "json": msgspec.json.Decoder().decode,
    "msgpack": msgspec.msgpack.Decoder().decode,
    "text": _text,
}


def is_value_type(found: object) -> bool:
    """Whether JSON can be decoded into it: a Struct, a dataclass, a TypedDict, a NamedTuple, an
    attrs class, a plain type such as dict, or a generic or a union of types."""
    if not isinstance(found, type):
        return get_origin(found) is not None
    return (
        issubclass(found, msgspec.Struct)
        or dataclasses.is_dataclass(found)
        or is_typeddict(found)
        or hasattr(found, "__attrs_attrs__")
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
        or found in {dict, list, str, int, float, bool}
    )


def decoder_of_type(kind: Any) -> Decode:
    """JSON into values of this type. Raises: TypeError if msgspec cannot."""
    return msgspec.json.Decoder(kind).decode


def decoding(decode: Decode) -> Decoding:
    """How `record.value` is made with `decode`, for all records of a lease."""

    def decoded(record: Record) -> Any:
        try:
            return decode(record.data)
        except (errors.ConfigError, errors.ProcessorVerdict, errors.InvariantViolation):
            raise  # not a matter of this record
        except Exception as error:
            if errors.is_host_shortage(error):
                raise
            raise errors.UndecodableRecord(reason_without_value(error), record) from None

    return Decoding(decoded)


def reason_without_value(error: Exception) -> str:
    """What an error of decoding says, without the value that it was about."""
    if isinstance(error, errors.RecordError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding.upper()} at byte {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, msgspec.DecodeError) and error.__cause__ is None:
        return _QUOTING.sub(r"\1\2\3", str(error))
    # An exception of user code, such as of a type's `__post_init__`: its words may quote anything.
    return f"it raised {type(error.__cause__ or error).__name__}"
