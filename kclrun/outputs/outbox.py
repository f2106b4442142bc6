"""The outbox of a lease: with `state.outbox` the version of the state holds the rows of its commit,
too. So outputs and state are of one execution of the processor [K12].

A commit writes the rows to the store of the versions, then the version that names them. The first
output decides the commit: it stores the name of the version with its own rows, under its condition.
Then the other outputs get their rows, and the row of the lease gets the position. An owner that
finds the first output ahead of its row begins with the version that is named there. The other
outputs get the rows of that version, and not those of another execution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.output import Cursor
from kclrun.ports import Output
from kclrun.processor import Row
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


def pack_row(row: Row) -> bytes:
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


class Decided(msgspec.Struct, frozen=True):
    """The commit that the first output had decided beyond the checkpoint when the lease began:
    `version` is the state at `at`. `boxes` has the rows that other outputs may lack: those of this
    commit, or of an earlier one if this one had no rows and no change of the state, and so no
    version of its own. An output has the rows of its box if its cursor is at `Box.upto` or behind
    it."""

    version: str
    at: Cursor
    boxes: Boxes


class DecidingOutput(Output, Protocol):
    """An output that can be the first one of an outbox: it stores the name of the state's version
    with its cursor, under the condition of a commit."""

    @property
    def decided(self) -> str:
        """The version that was named with the cursor that `begin` returned; empty if none was."""
        ...

    def decide(self, version: str, upto: Cursor) -> None:
        """The next `commit` stores this version and moves the cursor to `upto`, with the rows that
        were added, or without rows."""
        ...


class BoxedOutput:
    """Implements `Output` over another output: packs each row, and passes rows to the other output
    only at its commit, because the first output decides before any row is sent."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.stores_cursor = output.stores_cursor
        self._rows: list[Any] = []
        self._upto: Cursor | None = None
        self._waiting_bytes = 0
        self._decision: tuple[str, Cursor] | None = None
        self._packed: list[bytes] = []  # the rows of the next commit, until it is confirmed

    def encode(self, row: Row) -> tuple[Any, int]:
        """As `Output.encode`. The size is that of both forms."""
        encoded, size = self._output.encode(row)
        packed = pack_row(row)
        return (encoded, packed, size + len(packed)), size + len(packed)

    def begin(self, at: Cursor) -> Cursor:
        return self._output.begin(at)

    @property
    def decided(self) -> str:
        return _deciding(self._output).decided

    def add(self, rows: Sequence[tuple[Any, bytes, int]], upto: Cursor) -> None:
        for encoded, packed, size in rows:
            self._rows.append(encoded)
            self._packed.append(packed)
            self._waiting_bytes += size
        self._upto = upto

    def fill(self, packed: Sequence[bytes], upto: Cursor) -> None:
        """Add the rows of a version, which another owner wrote."""
        self.add([(*self._encoded(row), len(row)) for row in packed], upto)

    def _encoded(self, packed: bytes) -> tuple[Any, bytes]:
        return self._output.encode(unpack_row(packed))[0], packed

    @property
    def has_rows(self) -> bool:
        """Whether the next commit has rows of this output."""
        return bool(self._packed)

    def box(self) -> Box:
        """The rows of the next commit."""
        assert self._upto is not None, "rows were added up to a cursor"
        return Box(str(self._upto), tuple(self._packed))

    @property
    def unsent_bytes(self) -> int:
        return self._waiting_bytes + self._output.unsent_bytes

    def decide(self, version: str, upto: Cursor) -> None:
        """As `DecidingOutput`. Repeated with a commit that failed, it changes nothing."""
        if self._decision is None:
            self._decision = (version, upto)
            self._pass_on()
            _deciding(self._output).decide(version, upto)

    def commit(self) -> Cursor:
        self._pass_on()
        cursor = self._output.commit()
        self._decision = None
        self._packed.clear()
        self._waiting_bytes = 0
        return cursor

    def _pass_on(self) -> None:
        if self._rows and self._upto is not None:
            self._output.add(self._rows, self._upto)
            self._rows = []

    def is_tried_with(self, other: Output) -> bool:
        is_tried_with = getattr(self._output, "is_tried_with", None)
        inner = other._output if isinstance(other, BoxedOutput) else other  # noqa: SLF001 - ours
        return is_tried_with is not None and bool(is_tried_with(inner))

    def try_rows(
        self, rows: Sequence[tuple[Any, bytes, int]], before: Sequence[tuple[Output, Sequence[Any]]]
    ) -> None:
        try_rows = getattr(self._output, "try_rows", None)
        if try_rows is not None:
            try_rows([row[0] for row in rows], [_unboxed(*given) for given in before])

    def check(self) -> str:
        return self._output.check()

    def close(self) -> None:
        self._output.close()


def _unboxed(output: Output, rows: Sequence[Any]) -> tuple[Output, Sequence[Any]]:
    if not isinstance(output, BoxedOutput):
        return output, rows
    return output._output, [*output._rows, *(row[0] for row in rows)]  # noqa: SLF001 - our own


def _deciding(output: Output) -> DecidingOutput:
    assert hasattr(output, "decide"), "the settings name an output that can be the first one"
    return output  # type: ignore[return-value]
