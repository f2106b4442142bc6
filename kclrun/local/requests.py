"""The JSON of requests and answers of Kinesis_20131202, as types.

The annotations have the bounds of single fields, from the API reference. `service.py` makes the
checks that need the state of a stream. `_wire_name` converts field names to AWS's.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kclrun.local.iterators import ShardQuery
from kclrun.local.stream import PutEntry
from kclrun.model.time import WallTime

_ABBREVIATIONS: Final = {"Arn": "ARN", "InKib": "InKiB"}

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]+$", min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=1)]
PageSize = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
HashKey = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9]\d{0,38})$")]
Number = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9]\d{0,128})$")]
Tags = Annotated[
    dict[
        Annotated[str, msgspec.Meta(min_length=1, max_length=128)],
        Annotated[str, msgspec.Meta(max_length=256)],
    ],
    msgspec.Meta(max_length=200),
]
RecordSizeKib = Annotated[int, msgspec.Meta(ge=1024, le=10_240)]
TagPage = Annotated[int, msgspec.Meta(ge=1, le=50)]


def _wire_name(field: str) -> str:
    name = "".join(word.capitalize() for word in field.split("_"))
    for ours, theirs in _ABBREVIATIONS.items():
        name = name.replace(ours, theirs)
    return name


class _Request(msgspec.Struct, frozen=True, kw_only=True, rename=_wire_name):
    pass


class OfStream(_Request, frozen=True, kw_only=True):
    """A request about one stream, by name or ARN."""

    stream_name: Name | None = None
    stream_arn: str | None = None


class CreateStream(_Request, frozen=True, kw_only=True):
    """CreateStream."""

    stream_name: Name
    shard_count: Count | None = None
    max_record_size_in_kib: RecordSizeKib | None = None
    tags: Tags | None = None


class ListStreams(_Request, frozen=True, kw_only=True):
    """ListStreams: by page, or after a name."""

    limit: PageSize = 100
    exclusive_start_stream_name: str | None = None
    next_token: str | None = None


class PagedStream(OfStream, frozen=True, kw_only=True):
    """DescribeStream: its shards by page."""

    limit: PageSize = 100
    exclusive_start_shard_id: str | None = None


class ShardFilterField(_Request, frozen=True, kw_only=True):
    """The filter of ListShards."""

    type: str
    shard_id: str | None = None
    timestamp: float | None = None

    def query(self, after: str | None) -> ShardQuery:
        timestamp = None if self.timestamp is None else WallTime(self.timestamp)
        return ShardQuery(self.type, timestamp, self.shard_id, after)


class ListShards(OfStream, frozen=True, kw_only=True):
    """ListShards: a first page, or the next one by token alone."""

    next_token: str | None = None
    exclusive_start_shard_id: str | None = None
    max_results: PageSize = 1000
    stream_creation_timestamp: float | None = None
    shard_filter: ShardFilterField | None = None


class PutRecord(OfStream, frozen=True, kw_only=True):
    """PutRecord."""

    data: bytes
    partition_key: str | None = None
    explicit_hash_key: str | None = None
    sequence_number_for_ordering: str | None = None


class PutRecords(OfStream, frozen=True, kw_only=True):
    """PutRecords: up to 500 entries."""

    records: Annotated[list[PutEntry], msgspec.Meta(min_length=1, max_length=500)]


class GetShardIterator(OfStream, frozen=True, kw_only=True):
    """GetShardIterator: one of the five types."""

    shard_id: Name
    shard_iterator_type: str
    starting_sequence_number: Number | None = None
    timestamp: float | None = None


class GetRecords(_Request, frozen=True, kw_only=True):
    """GetRecords: by iterator."""

    shard_iterator: str
    limit: int = 10_000
    stream_arn: str | None = None


class SplitShard(OfStream, frozen=True, kw_only=True):
    """SplitShard: the child above begins at the hash key."""

    shard_to_split: Name
    new_starting_hash_key: HashKey


class MergeShards(OfStream, frozen=True, kw_only=True):
    """MergeShards: two neighbours."""

    shard_to_merge: Name
    adjacent_shard_to_merge: Name


class UpdateShardCount(OfStream, frozen=True, kw_only=True):
    """UpdateShardCount: uniform scaling."""

    target_shard_count: Count
    scaling_type: str


class Retention(OfStream, frozen=True, kw_only=True):
    """Increase- and DecreaseStreamRetentionPeriod."""

    retention_period_hours: int


class MaxRecordSize(OfStream, frozen=True, kw_only=True):
    """UpdateMaxRecordSize."""

    max_record_size_in_kib: RecordSizeKib


class Tagging(OfStream, frozen=True, kw_only=True):
    """Adding (`tags`) and removing (`tag_keys`), by the old names and the new."""

    resource_arn: str | None = None
    tags: Tags | None = None
    tag_keys: list[str] | None = None


class ListTags(OfStream, frozen=True, kw_only=True):
    """ListTagsForStream: by page."""

    resource_arn: str | None = None
    exclusive_start_tag_key: str | None = None
    limit: TagPage = 50
