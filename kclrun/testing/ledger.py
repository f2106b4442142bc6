"""The deliveries, checkpoints and rows of one run, in memory.

It does not know processors, batches or errors of user code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kclrun.errors import SinkError, StaleCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber


class Ledger:
    """Replaces the lease table and the output in a test, over crashes and restarts.

    It keeps the rule of `kclrun.sinks.emitted_rows`: a checkpoint that user code asks for covers
    the rows emitted until the call, and a crash removes rows that no checkpoint covers.
    """

    def __init__(self, position: ExtendedSequenceNumber) -> None:
        self.position = position  # the last checkpoint: a restart reads from here
        self.delivered = position
        self.checkpoints: list[ExtendedSequenceNumber] = []
        self.rows: list[dict[str, Any]] = []
        self._covered = 0
        self._batch_start: int | None = None  # None outside a call that may emit

    def emit(self, row: Mapping[str, Any]) -> None:
        if self._batch_start is None:
            raise SinkError("emit() is for process_records and shard_ended, while they run")
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a mapping of names to values, not {type(row).__name__}")
        msgspec.json.encode(dict(row))  # a row that raises TypeError here raises it in production
        self.rows.append(dict(row))

    def begin_batch(self) -> None:
        self._batch_start = len(self.rows)

    def end_batch(self, _: ExtendedSequenceNumber, /) -> None:
        """User code returned: its rows stay until a crash, or for good once they are covered."""
        self._batch_start = None

    def take_back_batch(self, _: ExtendedSequenceNumber | None = None, /) -> None:
        """User code raised: remove its rows, except those that a checkpoint covers."""
        del self.rows[max(self._batch_start or 0, self._covered) :]
        self._batch_start = None

    def checkpoint(self, position: ExtendedSequenceNumber) -> None:
        """Write one checkpoint. Raises: StaleCheckpoint, as `Checkpointer.checkpoint` says."""
        if position < self.position:
            raise StaleCheckpoint(f"{position} is below the last checkpoint, {self.position}")
        if position > self.delivered:
            raise StaleCheckpoint(f"{position} is above what was delivered, {self.delivered}")
        if position != self.position:
            self.checkpoints.append(position)
        self.position = position
        self._covered = len(self.rows)

    def crash(self) -> None:
        """The process crashed: rows and deliveries that no checkpoint covers are undone."""
        del self.rows[self._covered :]
        self.delivered = self.position
