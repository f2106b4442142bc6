"""One processor instance in its shard: its position, and the counts of the current range. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from kclrun.lease.checkpoints import CheckpointLedger
from kclrun.model.record import Record
from kclrun.model.sequence import AT_TIMESTAMP, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.spark.positions import Position, PositionKind

# Processor instances that stay in a Python worker between two micro-batches, fenced by position.
#
# Spark gives a shard's next range to any worker, so an instance found here may have missed ranges
# that another worker processed: it may continue only if its position is exactly where the range
# begins. Pure: a mapping with a limit.
# The limit is the default of one machine of the fleet (`leases.max`): it bounds the connections and
# the memory of a worker in the same way.
INSTANCES_MAX: Final = 64
# All states of a worker together: the default of `state.max_bytes`, which bounds one. Shards move
# between workers, so each worker would come to hold a state of every shard, most of them outdated.
STATES_BYTES_MAX: Final = 2**30

Instance = TypeVar("Instance")


class Key(NamedTuple):
    """The owner of an instance. `run` differs for a restarted application and for another query."""

    run: str
    application: str
    stream: str
    shard_id: str


class Found(msgspec.Struct, Generic[Instance], frozen=True):
    """The instance's position is where the range begins: it continues."""

    instance: Instance


class Stale(msgspec.Struct, Generic[Instance], frozen=True):
    """The instance has another position: other workers had the shard, or the range comes again."""

    instance: Instance


class Absent(msgspec.Struct, frozen=True):
    """The cache has no instance for the key."""


class ProcessorCache(Generic[Instance]):
    """Keeps a bounded number of instances; the least recently kept one leaves first.

    Their states are bounded, too. The latest instance is kept however large its state is.
    """

    def __init__(
        self, instances_max: int = INSTANCES_MAX, states_bytes_max: int = STATES_BYTES_MAX
    ) -> None:
        self._instances_max = instances_max
        self._states_bytes_max = states_bytes_max
        self._kept: OrderedDict[Key, tuple[Position, Instance, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Key, begin: Position) -> Found[Instance] | Stale[Instance] | Absent:
        """The instance leaves the cache, so that a failing task cannot leave it half done."""
        if key not in self._kept:
            return Absent()
        stands_at, instance, _ = self._kept.pop(key)
        return Found(instance) if stands_at == begin else Stale(instance)

    def keep(
        self, key: Key, stands_at: Position, instance: Instance, state_bytes: int = 0
    ) -> tuple[Instance, ...]:
        """Keep until the next range. Returns: the instances that `instance` displaces or
        replaces."""
        dropped = [self._kept.pop(key)] if key in self._kept else []
        self._kept[key] = (stands_at, instance, state_bytes)
        while len(self._kept) > self._instances_max or self._has_too_much_state():
            dropped.append(self._kept.popitem(last=False)[1])
        return tuple(instance for _, instance, _ in dropped)

    def _has_too_much_state(self) -> bool:
        held_bytes = sum(state_bytes for _, _, state_bytes in self._kept.values())
        return len(self._kept) > 1 and held_bytes > self._states_bytes_max


# Tokens count seconds from here (2020-01-01), so that they fit into 63 bits until 2088.
_TOKENS_BEGIN_S: Final = 1_577_836_800
# Four billion tasks are 13 years of ten a second.
_TASK_BITS: Final = 32

_data = attrgetter("data")


class RangeReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The account of one range, for the report: counts of user records and of emitted rows.

    `position` is that of the last record given (SHARD_END once the shard ended), `checkpoint` the
    last checkpoint that the processor requested in this range. `processing_s` is the time in user
    code. The last two count records that were given up.
    """

    shard_id: str
    records: int
    bytes: int
    rows: int
    position: str
    checkpoint: str | None = None
    processing_s: float = 0.0
    dead_letters: int = 0
    skipped: int = 0

    def then(self, later: RangeReport) -> RangeReport:
        """The sum of both: the account of a range that two instances shared."""
        return msgspec.structs.replace(
            later,
            records=self.records + later.records,
            bytes=self.bytes + later.bytes,
            rows=self.rows + later.rows,
            checkpoint=later.checkpoint or self.checkpoint,
            processing_s=round(self.processing_s + later.processing_s, 6),
            dead_letters=self.dead_letters + later.dead_letters,
            skipped=self.skipped + later.skipped,
        )


class _Given(msgspec.Struct):
    """The counts of the current range so far; `asked` is the last checkpoint requested in it."""

    records: int = 0
    bytes: int = 0
    processing_s: float = 0.0
    dead_letters: int = 0
    skipped: int = 0
    asked: ExtendedSequenceNumber | None = None


class RangeProgress:
    """Positions and counts. `checkpointed` is the last checkpoint that user code may rely on.

    For a processor, a range of a micro-batch is like a lease that one process holds on the fleet.
    Positions follow the fleet's ledger (delivered >= processed >= checkpointed). Spark's commit of
    the batch is the checkpoint: a range that begins at this instance's position proves that commit.
    """

    def __init__(self, position: ExtendedSequenceNumber, uncheckpointed_max: int) -> None:
        self._ledger = CheckpointLedger(position, uncheckpointed_max)
        self._given = _Given()

    @property
    def delivered(self) -> ExtendedSequenceNumber:
        """The last delivered record, or the position where the instance began."""
        return self._ledger.delivered

    @property
    def processed(self) -> ExtendedSequenceNumber:
        """The last record for which user code returned, or the position of the beginning."""
        return self._ledger.processed

    @property
    def checkpointed(self) -> ExtendedSequenceNumber:
        return self._ledger.checkpointed

    def continue_with_next_range(self) -> None:
        """A range begins where the last range ended, so Spark has committed that range."""
        self._ledger.confirm(self._ledger.processed)
        self._given = _Given()

    def deliver(self, records: Sequence[Record]) -> ExtendedSequenceNumber:
        """Count records that user code gets now. Returns: the position of the last of them."""
        last = records[-1].position
        self._ledger.deliver(last, len(records))
        self._given.records += len(records)
        self._given.bytes += sum(map(len, map(_data, records)))
        return last

    def process(self, last: ExtendedSequenceNumber, processing_s: float) -> None:
        """User code returned for everything up to `last`."""
        self._ledger.process(last)
        self._given.processing_s += processing_s

    def give_up(self, *, is_skipped: bool) -> None:
        """Count a record that is a dead letter now, or skipped."""
        self._given.skipped += is_skipped
        self._given.dead_letters += not is_skipped

    def end(self, processing_s: float) -> None:
        """`shard_ended` returned: the shard has no further records."""
        self._ledger.process(SHARD_END)
        self._given.processing_s += processing_s

    def checkpoint(self, at: ExtendedSequenceNumber | None) -> None:
        """User code asks for a checkpoint; it is remembered, and durable with Spark's commit.

        Raises: StaleCheckpoint below the last checkpoint or above the last delivered record.
        """
        position = self._ledger.admit(at)
        self._ledger.confirm(position)
        self._given.asked = position

    def report(self, shard_id: str, rows: int) -> RangeReport:
        """The account of the range since `continue_with_next_range`."""
        return RangeReport(
            shard_id=shard_id,
            records=self._given.records,
            bytes=self._given.bytes,
            rows=rows,
            position=str(self._ledger.processed),
            checkpoint=None if self._given.asked is None else str(self._given.asked),
            processing_s=round(self._given.processing_s, 6),
            dead_letters=self._given.dead_letters,
            skipped=self._given.skipped,
        )


def begins_at(position: Position) -> ExtendedSequenceNumber:
    """The start position for a processor: everything at or below it is accounted for.

    Just before record n means at or below n - 1, whether or not a record has that number.
    """
    match position.kind:
        case PositionKind.TRIM_HORIZON:
            return TRIM_HORIZON
        case PositionKind.TIMESTAMP:
            return AT_TIMESTAMP
        case PositionKind.SHARD_END:
            return SHARD_END
    if position.is_before:
        number = int(position.number)
        return ExtendedSequenceNumber(str(number - 1)) if number else TRIM_HORIZON
    return ExtendedSequenceNumber(position.number, position.sub_sequence_number or 0)


def cut(records: Sequence[Record], batch_max: int) -> Iterator[Sequence[Record]]:
    """Cuts a page into batches of at most `batch_max`; a page that fits is not copied."""
    if len(records) <= batch_max:
        if records:
            yield records
        return
    for start in range(0, len(records), batch_max):
        yield records[start : start + batch_max]


def fencing_token(began_s: int, task_attempt: int) -> int:
    """A number that only grows over the attempts at a shard, in any process.

    Spark numbers the attempts at all tasks of an application in the order of their start, retries
    and speculative copies included. `began_s` is the start of the query (seconds since the epoch,
    the driver's clock) and orders applications that follow each other.
    """
    return (max(began_s - _TOKENS_BEGIN_S, 0) << _TASK_BITS) + task_attempt
