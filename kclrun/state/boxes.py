"""The rows of a commit in bytes, as a version of the state holds them for an outbox. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

import msgspec

from kclrun.errors import SettingsError
from kclrun.state.versions import checked, with_checksum


class Box(msgspec.Struct, frozen=True, array_like=True):
    """The packed rows of one output in one commit; `upto` is its cursor once it has them."""

    upto: str
    rows: tuple[bytes, ...]


# The boxes of one commit, by the names of their outputs.
Boxes = Mapping[str, Box]

_MAGIC: Final = b"kclrun-rows\n"
_MICROSECOND: Final = timedelta(microseconds=1)
_PLAIN: Final = frozenset({str, float, bool, bytes, type(None)})
# Types whose values msgpack would return as another type: they are packed as texts with a code.
_TEXTS: Final[Mapping[type, tuple[int, Callable[[Any], str]]]] = {
    datetime: (1, datetime.isoformat),
    date: (2, date.isoformat),
    Decimal: (3, str),
    int: (4, str),
    UUID: (5, str),
    time: (6, time.isoformat),
    timedelta: (7, lambda value: str(value // _MICROSECOND)),
}
_OF_TEXT: Final[Mapping[int, Callable[[str], Any]]] = {
    1: datetime.fromisoformat,
    2: date.fromisoformat,
    3: Decimal,
    4: int,
    5: UUID,
    6: time.fromisoformat,
    7: lambda text: int(text) * _MICROSECOND,
}
_INT_MAX: Final = 2**63
_pack: Final = msgspec.msgpack.Encoder().encode


def encode_box(boxes: Boxes) -> bytes:
    """The bytes of the rows of one commit, with a checksum."""
    return with_checksum(_MAGIC, _pack(boxes))


def decode_box(name: str, content: bytes | None) -> dict[str, Box]:
    """The rows of the commit whose box has this name. Raises: SettingsError, in words, if it is
    missing or damaged."""
    if content is None:
        raise SettingsError(
            f"the rows {name} of a version are missing in the store of the state, and an output has"
            " some of them: restore that object"
        )
    body = checked(_MAGIC, f"the rows {name} of a version", content)
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Box])
    except msgspec.MsgspecError:
        raise SettingsError(f"the rows {name} of a version cannot be read") from None


def pack_row(row: Mapping[str, Any]) -> bytes:
    """The row in bytes from which `unpack_row` makes an equal one for the same output."""
    return _pack(_packable(dict(row)))


def unpack_row(packed: bytes) -> dict[str, Any]:
    """The row that was packed."""
    row: dict[str, Any] = msgspec.msgpack.decode(packed, ext_hook=_unpacked)
    return row


def _packable(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and -_INT_MAX <= value < _INT_MAX):
        return value
    if kind is dict:
        return {_packable(key): _packable(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_packable(item) for item in value]
    if isinstance(value, float):  # a subclass, as numpy has
        return float(value)
    base = next(
        (known for known in _TEXTS if isinstance(value, known)), None
    )  # pandas has datetimes
    if base is not None and not isinstance(value, Enum):
        code, text_of = _TEXTS[base]
        return msgspec.msgpack.Ext(code, text_of(value).encode())
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    # Enumerations, sets, Structs and the like become what they are in JSON lines. The `encode` of
    # the output has refused types that msgspec does not know.
    return _packable(msgspec.json.decode(msgspec.json.encode(value)))


def _unpacked(code: int, text: memoryview) -> Any:
    return _OF_TEXT[code](bytes(text).decode())
