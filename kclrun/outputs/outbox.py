"""The outbox of a lease: with `state.outbox` the version of the state holds the rows of its commit,
too. So outputs and state are of one execution of the processor [K12].

A commit writes the rows to the store of the versions, then the version that names them. The first
output decides the commit: it stores the name of the version with its own rows, under its condition.
Then the other outputs get their rows, and the row of the lease gets the position. An owner that
finds the first output ahead of its row begins with the version that is named there. The other
outputs get the rows of that version, and not those of another execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kclrun.model.output import Cursor
from kclrun.ports import Output
from kclrun.processor import Row
from kclrun.state.boxes import Box, Boxes, pack_row, unpack_row


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
