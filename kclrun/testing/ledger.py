"""What one run delivered, processed and checkpointed, and the rows each checkpoint covers.

Knows: positions and rows, in memory. May not know: processors, batches, errors of user code.
Rule: the same as `kclrun.sinks.emitted_rows` keeps on disk: a checkpoint asked for by user code
covers the rows emitted until the call, and rows that no checkpoint covers go with a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kclrun.errors import StaleCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["Ledger"]


class Ledger:
    """The stand-in for the lease table and the output, over crashes and restarts."""

    def __init__(self, position: ExtendedSequenceNumber) -> None:
        self.position = position  # the last checkpoint, which is what a restart reads from
        self.delivered = position
        self.checkpoints: list[ExtendedSequenceNumber] = []
        self.rows: list[dict[str, Any]] = []
        self._covered = 0
        self._batch_start = 0

    def emit(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a mapping of names to values, not {type(row).__name__}")
        msgspec.json.encode(dict(row))  # a TypeError here is one in production
        self.rows.append(dict(row))

    def begin_batch(self) -> None:
        self._batch_start = len(self.rows)

    def take_back_batch(self) -> None:
        """User code raised: its rows go, but for those a checkpoint covers."""
        del self.rows[max(self._batch_start, self._covered) :]

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
        """The process is gone: rows and deliveries that no checkpoint covers never happened."""
        del self.rows[self._covered :]
        self.delivered = self.position
