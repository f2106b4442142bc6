"""`context.state` in a test: in memory, with the rule of the runtime for calls that raise, and for
crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import SinkError
from kclrun.state.chain import Entries
from kclrun.state.keyed import LiveEntries, Undoable

# The default of `state.max_bytes`.
_MAX_BYTES: Final = 2**30


class TestedState:
    """The state of one shard, begun with `values`: key → name → value."""

    __test__ = False

    def __init__(self, values: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._entries: Entries = {
            key: {name: msgspec.msgpack.encode(value) for name, value in of.items()}
            for key, of in (values or {}).items()
        }
        self.live = LiveEntries(self._entries, self._change, None, _MAX_BYTES)
        self._changes: list[Undoable] = []
        self._covered = 0
        self._batch_start: int | None = None

    def values(self) -> dict[str, dict[str, Any]]:
        """Everything that is remembered, decoded without types."""
        return {
            key: {name: msgspec.msgpack.decode(value) for name, value in of.items()}
            for key, of in self._entries.items()
        }

    def begin_batch(self) -> None:
        """A call starts."""
        self._batch_start = len(self._changes)

    def end_batch(self) -> None:
        """The call returned."""
        self._batch_start = None

    def take_back_batch(self) -> None:
        """The call raised: its changes are taken back, except those that a checkpoint covers."""
        self._undo(max(self._batch_start or 0, self._covered))
        self._batch_start = None

    def settle(self, changes: Iterable[Undoable]) -> None:
        """Records are done, with changes that they made and kept."""
        self._changes += changes

    def checkpoint(self) -> None:
        """A checkpoint covers every change made so far."""
        self._covered = len(self._changes)

    def crash(self) -> None:
        """The process ends: changes that no checkpoint covers are gone."""
        self._undo(self._covered)

    def _undo(self, kept: int) -> None:
        while len(self._changes) > kept:
            self.live.undo(self._changes.pop())

    def _change(self, change: Callable[[], Undoable | None]) -> None:
        if self._batch_start is None:
            raise SinkError(
                "context.state is changed in process_records and shard_ended, while they run"
            )
        made = change()
        if made is not None:
            self._changes.append(made)
