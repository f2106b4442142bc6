"""The records that a producer has accepted and that are not done, and what became of the others.

Pure. `pending_records.py` decides; here is what is true of each record.
"""

from __future__ import annotations

import msgspec

from kclrun import errors
from kclrun.model.record import PutEntry
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.shard_queues import KeyQueue, Receipt, Waiting, weight_of


class Outcome(msgspec.Struct, frozen=True):
    """What became of one record. `error` None: it is in the stream, at this place; in an aggregate
    it is user record number `sub_sequence_number`."""

    receipt: Receipt
    shard_id: str
    sequence_number: str
    sub_sequence_number: int | None
    error: errors.KclrunError | None


class Backlog:
    """The records by their key queues, and `outcomes`: of records with a receipt.

    A record leaves by `deliver` or `fail`, once, from the front of its key queue.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        self._is_ordered = settings.keeps_order or settings.aggregates
        self._by_key: dict[str, KeyQueue] = {}
        self._unordered: set[KeyQueue] = set()
        self.records = self.bytes = 0
        self.delivered = self.failed = 0
        self.outcomes: list[Outcome] = []

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full: add no record now."""
        return (
            self.records >= self._settings.buffer_records_max
            or self.bytes >= self._settings.buffer_bytes_max
        )

    def add(
        self, entry: PutEntry, size_bytes: int, receipt: Receipt | None
    ) -> tuple[KeyQueue, bool]:
        """Accept a record. Returns its key queue, and whether it was made for it."""
        key = entry.partition_key if self._is_ordered else None
        key_queue = None if key is None else self._by_key.get(key)
        is_new = key_queue is None
        if key_queue is None:
            key_queue = KeyQueue(key)
            if key is None:
                self._unordered.add(key_queue)
            else:
                self._by_key[key] = key_queue
        key_queue.entries.append(Waiting(entry, size_bytes, receipt))
        key_queue.weight += weight_of(size_bytes)
        self.records += 1
        self.bytes += size_bytes
        return key_queue, is_new

    def deliver(
        self,
        key_queue: KeyQueue,
        shard_id: str,
        sequence_number: str,
        sub_sequence_number: int | None = None,
    ) -> None:
        """The stream has the first record of the key queue, at this place."""
        record = key_queue.entries.popleft()
        size_bytes = record.size_bytes
        key_queue.weight -= weight_of(size_bytes)
        self.records -= 1
        self.bytes -= size_bytes
        self.delivered += record.entry.user_records
        if record.receipt is not None:
            self.outcomes.append(
                Outcome(record.receipt, shard_id, sequence_number, sub_sequence_number, None)
            )

    def fail(self, key_queue: KeyQueue, error: errors.KclrunError) -> None:
        """The first record of the key queue was given up."""
        record = key_queue.entries.popleft()
        key_queue.weight -= weight_of(record.size_bytes)
        self.fail_taken(record, error)

    def fail_taken(self, record: Waiting, error: errors.KclrunError) -> None:
        """A record that was taken out of its key queue was given up."""
        self.records -= 1
        self.bytes -= record.size_bytes
        self.failed += record.entry.user_records
        if record.receipt is not None:
            self.outcomes.append(Outcome(record.receipt, "", "", None, error))

    def remove(self, key_queue: KeyQueue) -> None:
        """The key queue is empty."""
        if key_queue.key is None:
            self._unordered.discard(key_queue)
        else:
            self._by_key.pop(key_queue.key, None)

    def fail_all(self, error: errors.KclrunError) -> None:
        """Every record was given up."""
        for key_queue in (*self._by_key.values(), *self._unordered):
            while key_queue.entries:
                self.fail(key_queue, error)

    def take_outcomes(self) -> list[Outcome]:
        """What became of records since the last call."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes
