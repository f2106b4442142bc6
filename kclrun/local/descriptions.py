"""Streams and shards as the answers of Kinesis describe them.

Values in, JSON objects out; nothing is decided here. Look next: `operations.py`.
"""

from __future__ import annotations

from typing import Any, Final

from kclrun.local.shards import ShardLog
from kclrun.local.stream import Stream
from kclrun.model.shard import ChildShard, HashRange
from kclrun.model.time import WallTime

__all__ = ["Json", "child_json", "described_json", "shard_json", "summary_json"]

Json = dict[str, Any]
_HOUR_S: Final = 3600


def summary_json(stream: Stream, now: WallTime) -> Json:
    """As ListStreams has it."""
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status(now),
        "StreamModeDetails": {"StreamMode": "PROVISIONED"},
        "StreamCreationTimestamp": stream.created_at,
    }


def described_json(stream: Stream, now: WallTime) -> Json:
    """What DescribeStream and DescribeStreamSummary have in common."""
    return summary_json(stream, now) | {
        "RetentionPeriodHours": int(stream.retention_s) // _HOUR_S,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
    }


def shard_json(log: ShardLog) -> Json:
    """As ListShards has it."""
    shard = log.describe()
    numbers = {"StartingSequenceNumber": shard.starting_sequence_number}
    if shard.ending_sequence_number is not None:
        numbers["EndingSequenceNumber"] = shard.ending_sequence_number
    body: Json = {
        "ShardId": shard.shard_id,
        "HashKeyRange": _hash_range_json(shard.hash_range),
        "SequenceNumberRange": numbers,
    }
    for name, parent in zip(("ParentShardId", "AdjacentParentShardId"), log.parents, strict=False):
        body[name] = parent
    return body


def _hash_range_json(hash_range: HashRange) -> Json:
    return {"StartingHashKey": str(hash_range.start), "EndingHashKey": str(hash_range.end)}


def child_json(child: ChildShard) -> Json:
    """As the last GetRecords of a closed shard has it."""
    return {
        "ShardId": child.shard_id,
        "ParentShards": child.parents,
        "HashKeyRange": _hash_range_json(child.hash_range),
    }
