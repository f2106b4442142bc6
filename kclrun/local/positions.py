"""Where each of the five kinds of iterator begins in a shard.

Pure arithmetic over one shard. Source: GetShardIterator in the Kinesis API reference; a position
older than the trim horizon reads from there, as the service does.
"""

from __future__ import annotations

from typing import Final

from kclrun.local.refusals import invalid_argument
from kclrun.local.sequence_numbers import parse
from kclrun.local.shards import ShardLog
from kclrun.model.time import WallTime
from kclrun.ports import IteratorType

__all__ = ["position_of"]

_ROUNDING_S: Final = 0.001


def position_of(
    shard: ShardLog,
    kind: IteratorType,
    now: WallTime,
    *,
    sequence_number: str | None,
    timestamp: WallTime | None,
) -> int:
    """The position of the first record to read. Raises: InvalidRequest."""
    match kind:
        case IteratorType.TRIM_HORIZON:
            return shard.start
        case IteratorType.LATEST:
            return shard.end
        case IteratorType.AT_TIMESTAMP:
            return _at_timestamp(shard, timestamp, now)
        case IteratorType.AT_SEQUENCE_NUMBER:
            return _at_number(shard, sequence_number, after=False)
        case IteratorType.AFTER_SEQUENCE_NUMBER:
            return _at_number(shard, sequence_number, after=True)


def _at_timestamp(shard: ShardLog, timestamp: WallTime | None, now: WallTime) -> int:
    if timestamp is None:
        raise invalid_argument("Must specify timestampInMillis parameter.")
    # Arrival times are rounded to the millisecond, so a record's own may lie just ahead of `now`.
    if timestamp > now + _ROUNDING_S:
        raise invalid_argument(
            "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis."
            f" timestampInMillis: {timestamp * 1000:.0f},"
            f" currentTimestampInMillis: {now * 1000:.0f}"
        )
    return shard.position_at(timestamp)


def _at_number(shard: ShardLog, text: str | None, *, after: bool) -> int:
    if text is None:
        raise invalid_argument("Must specify startingSequenceNumber parameter.")
    number = parse(text)
    mine = (shard.number, shard.numbering.generation)
    if number is None or (number.shard, number.generation) != mine:
        raise invalid_argument(
            f"StartingSequenceNumber used in GetShardIterator on shard {shard.shard_id} is invalid"
            " because it did not come from this shard of this stream."
        )
    return shard.position_of(number, after=after)
