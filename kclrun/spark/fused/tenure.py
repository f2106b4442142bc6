"""One processor instance in its shard: where it stands, and what the current range gave it.

A range of a micro-batch is to a processor what the tenure of a lease is on the fleet. Positions
follow the fleet's ledger (delivered >= processed >= checkpointed); Spark's commit of the batch is
the checkpoint, so a range that continues where this instance stands proves it. Pure.
Look next: `hosting.py`, which calls user code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from kclrun.consuming.ledger import CheckpointLedger
from kclrun.model.record import Record
from kclrun.model.sequence import AT_TIMESTAMP, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.spark.positions import Place, Position
from kclrun.spark.ranges import ShardRange

__all__ = ["Ack", "Tenure", "begins_at", "cut", "fencing_token"]

# Tokens count seconds from here (2020-01-01), so that they fit into 63 bits until 2088.
_TOKENS_BEGIN_S: Final = 1_577_836_800
# Four billion tasks are 13 years of ten a second.
_TASK_BITS: Final = 32

_data = attrgetter("data")


class Ack(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What one range came to, for the report: counts of user records and of emitted rows.

    `position` is that of the last record given (SHARD_END once the shard ended), `checkpoint` the
    last one the processor asked for in this range. `processing_s` is the time in user code.
    """

    shard_id: str
    begin: str
    end: str
    records: int
    bytes: int
    batches: int
    rows: int
    position: str
    checkpoint: str | None = None
    processing_s: float = 0.0

    def then(self, later: Ack) -> Ack:
        """Both as one: the account of a range that two instances shared."""
        return msgspec.structs.replace(
            later,
            records=self.records + later.records,
            bytes=self.bytes + later.bytes,
            batches=self.batches + later.batches,
            rows=self.rows + later.rows,
            checkpoint=later.checkpoint or self.checkpoint,
            processing_s=round(self.processing_s + later.processing_s, 6),
        )


class _Given(msgspec.Struct):
    """What the current range gave so far; `asked` is the last checkpoint asked for in it."""

    records: int = 0
    bytes: int = 0
    batches: int = 0
    processing_s: float = 0.0
    asked: ExtendedSequenceNumber | None = None


class Tenure:
    """Positions and counts. `checkpointed` is the last checkpoint user code may count on."""

    def __init__(self, position: ExtendedSequenceNumber, uncheckpointed_max: int) -> None:
        self._ledger = CheckpointLedger(position, uncheckpointed_max)
        self._given = _Given()

    @property
    def delivered(self) -> ExtendedSequenceNumber:
        """The last record given, or where the instance began."""
        return self._ledger.delivered

    @property
    def checkpointed(self) -> ExtendedSequenceNumber:
        return self._ledger.checkpointed

    def continue_with_next_range(self) -> None:
        """A range begins where the last one ended, so Spark has committed that one."""
        self._ledger.confirm(self._ledger.processed)
        self._given = _Given()

    def deliver(self, records: Sequence[Record]) -> ExtendedSequenceNumber:
        """These are given to user code. Returns: the position of the last of them."""
        last = records[-1].position
        self._ledger.deliver(last, len(records))
        self._given.records += len(records)
        self._given.bytes += sum(map(len, map(_data, records)))
        self._given.batches += 1
        return last

    def process(self, last: ExtendedSequenceNumber, processing_s: float) -> None:
        """User code returned for everything up to `last`."""
        self._ledger.process(last)
        self._given.processing_s += processing_s

    def end(self, processing_s: float) -> None:
        """`shard_ended` returned: there is nothing beyond."""
        self._ledger.process(SHARD_END)
        self._given.processing_s += processing_s

    def checkpoint(self, at: ExtendedSequenceNumber | None) -> None:
        """User code asks for a checkpoint; it is remembered, and durable with Spark's commit.

        Raises: StaleCheckpoint below the last checkpoint or above what was delivered.
        """
        position = self._ledger.admit(at)
        self._ledger.confirm(position)
        self._given.asked = position

    def ack(self, shard_range: ShardRange, rows: int) -> Ack:
        """The account of the range that was given since `continue_with_next_range`."""
        return Ack(
            shard_id=shard_range.shard_id,
            begin=str(shard_range.begin),
            end=str(shard_range.end),
            records=self._given.records,
            bytes=self._given.bytes,
            batches=self._given.batches,
            rows=rows,
            position=str(self._ledger.processed),
            checkpoint=None if self._given.asked is None else str(self._given.asked),
            processing_s=round(self._given.processing_s, 6),
        )


def begins_at(position: Position) -> ExtendedSequenceNumber:
    """What a processor is told as its position: everything at or below it is accounted for.

    Just before record n is at or below n - 1, whether or not a record has that number.
    """
    match position.place:
        case Place.TRIM_HORIZON:
            return TRIM_HORIZON
        case Place.TIMESTAMP:
            return AT_TIMESTAMP
        case Place.SHARD_END:
            return SHARD_END
    if position.is_before:
        number = int(position.number)
        return ExtendedSequenceNumber(str(number - 1)) if number else TRIM_HORIZON
    return ExtendedSequenceNumber(position.number, position.sub_sequence_number or 0)


def cut(records: Sequence[Record], batch_max: int) -> Iterator[Sequence[Record]]:
    """A page in batches of at most `batch_max`; a page that fits is not copied."""
    if len(records) <= batch_max:
        if records:
            yield records
        return
    for start in range(0, len(records), batch_max):
        yield records[start : start + batch_max]


def fencing_token(began_s: int, task_attempt: int) -> int:
    """A number that only grows over the attempts at a shard, whoever makes them.

    Spark numbers the attempts at all tasks of an application in the order of their start, retries
    and speculative copies included; `began_s`, when the query was started (seconds since the
    epoch, the driver's clock), does that for applications that follow each other.
    """
    return (max(began_s - _TOKENS_BEGIN_S, 0) << _TASK_BITS) + task_attempt
