"""How many records a producer has accepted that are not done, and what became of the others.

Pure. `pending_records.py` decides; here is the account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kclrun import errors
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.shard_queues import Receipt, Waiting


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What became of records that were sent together. `error` None: they are in the stream, in this
    record; if it is an aggregate, they are its user records from `sub_sequence_number` on."""

    shard_id: str = ""
    sequence_number: str = ""
    sub_sequence_number: int | None = None
    error: errors.KclrunError | None = None


class Settled(NamedTuple):
    """Records that have left, by their receipts, in order."""

    receipts: Sequence[Receipt]
    outcome: Outcome


class Backlog:
    """The account of one producer, and `settled`: the records with a receipt that have left."""

    def __init__(self, settings: ProducerSettings) -> None:
        self._records_max = settings.buffer_records_max
        self._bytes_max = settings.buffer_bytes_max
        self.records = self.bytes = 0
        self.delivered = self.failed = 0
        self.settled: list[Settled] = []

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full: add no record now."""
        return self.records >= self._records_max or self.bytes >= self._bytes_max

    def deliver(
        self,
        records: Sequence[Waiting],
        shard_id: str,
        sequence_number: str,
        sub_sequence_number: int | None,
    ) -> None:
        """The stream has these records; see `Outcome`."""
        self.delivered += self._leave(records)
        if receipts := _receipts_of(records):
            outcome = Outcome(shard_id, sequence_number, sub_sequence_number)
            self.settled.append(Settled(receipts, outcome))

    def fail(self, records: Sequence[Waiting], error: errors.KclrunError) -> None:
        """These records were given up."""
        self.failed += self._leave(records)
        if receipts := _receipts_of(records):
            self.settled.append(Settled(receipts, Outcome(error=error)))

    def take_settled(self) -> list[Settled]:
        """What became of records since the last call."""
        settled, self.settled = self.settled, []
        return settled

    def _leave(self, records: Sequence[Waiting]) -> int:
        """Returns how many records they are with aggregates opened."""
        self.records -= len(records)
        self.bytes -= sum([record.size_bytes for record in records])
        return sum([record.entry.user_records for record in records])


def _receipts_of(records: Sequence[Waiting]) -> list[Receipt]:
    return [record.receipt for record in records if record.receipt is not None]
