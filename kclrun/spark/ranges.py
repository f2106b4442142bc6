"""What one batch reads: a range a shard, as a function of (start, end) [A2], packed into tasks.

Pure. `Hint` is what the driver happens to know about a range besides: never needed, and never
able to change a row. Look next: `executor/reading.py`, which reads ranges on executors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.model.record import Record
from kclrun.spark.offsets import Offset
from kclrun.spark.positions import TRIM_HORIZON, Position

__all__ = ["Hint", "ShardRange", "pack", "ranges_between"]


class Hint(msgspec.Struct, frozen=True):
    """A short cut for one range [A4].

    `iterator` stands exactly at the range's beginning and was made at `iterator_at` (seconds since
    the epoch, this host's clock): tokens live five minutes. `rows` are all Kinesis records of the
    range, in order, aggregates not opened; None where the driver has not read them all.
    `records_expected` is an estimate from the shard's density, for the Limit of a read.
    """

    iterator: str | None = None
    iterator_at: float = 0.0
    rows: tuple[Record, ...] | None = None
    records_expected: int | None = None


class ShardRange(msgspec.Struct, frozen=True):
    """The records of one shard in one batch: those after `begin` and not after `end`.

    `as_of_ms`: all that had arrived by then is covered by `begin`; None if that was never seen.
    `is_from_horizon`: the query began at the oldest record, so nothing before was promised.
    """

    shard_id: str
    begin: Position
    end: Position
    as_of_ms: int | None = None
    hint: Hint = Hint()
    is_from_horizon: bool = False


def ranges_between(
    start: Offset, end: Offset, hints: Mapping[str, Hint] | None = None
) -> tuple[ShardRange, ...]:
    """The ranges of the batch (start, end], by shard id; shards without news have none.

    Raises: InvariantViolation where an offset does not say where a range begins, or goes back.
    """
    ranges = []
    for shard_id, bound in sorted(end.shards.items()):
        begin = end.began.get(shard_id) or start.shards.get(shard_id)
        if begin is None:
            raise InvariantViolation(f"no offset says where {shard_id} begins")
        if begin == bound:
            continue
        if begin > bound:
            raise InvariantViolation(f"{shard_id} would be read backwards: {begin} to {bound}")
        hint = (hints or {}).get(shard_id, Hint())
        ranges.append(
            ShardRange(
                shard_id,
                begin,
                bound,
                start.as_of_ms.get(shard_id),
                hint,
                is_from_horizon=start.shards.get(shard_id) == TRIM_HORIZON,
            )
        )
    return tuple(ranges)


def pack(
    ranges: Sequence[ShardRange], shards_per_task: int, partitions_max: int | None
) -> tuple[tuple[ShardRange, ...], ...]:
    """Ranges shared out to tasks: at most `shards_per_task` in each, but no more than
    `partitions_max` tasks where that is given; a function of its arguments."""
    if not ranges:
        return ()
    tasks = -(-len(ranges) // shards_per_task)
    if partitions_max is not None:
        tasks = min(tasks, partitions_max)
    return tuple(tuple(ranges[index::tasks]) for index in range(tasks))
