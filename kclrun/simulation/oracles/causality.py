"""I3: parents first. A child is read once every parent's shard end stands on its row, and no shard
is read after its own."""

from __future__ import annotations

from collections.abc import Callable

from kclrun.model.lease import Lease, LeaseKey
from kclrun.simulation.oracles.reader import Reader
from kclrun.simulation.oracles.row_lives import RowLives
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.story import RuleBroken

__all__ = ["Causality"]


class Causality:
    """`lives` knows which rows have ended, also those that are gone since."""

    def __init__(
        self,
        stream: ShardStream,
        row_of: Callable[[LeaseKey], Lease | None],
        lives: RowLives,
    ) -> None:
        self._stream = stream
        self._row_of = row_of
        self._lives = lives

    def require_open(self, reader: Reader) -> None:
        """Any batch. Raises: RuleBroken once the shard's own end is written."""
        if reader.key in self._lives.ended:
            raise RuleBroken("I3", reader.key, f"{reader.who} reads it after its shard end")

    def require_parents_ended(self, reader: Reader) -> None:
        """A shard's first batch. Raises: RuleBroken for a parent that was read and has not ended.

        A parent without a row was cleaned up, which takes a shard end, or was never ours to read.
        """
        for parent in self._stream.parents_of(reader.key):
            row = self._row_of(LeaseKey(parent))
            if row is not None and not row.is_ended:
                raise RuleBroken("I3", reader.key, f"read before its parent {parent} ended")
