"""The requests of Kinesis's API as types: their fields, and the bounds that its schema gives them.

A field outside its bounds is refused when a body is decoded, before an operation sees it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kclrun.local.iterators import ShardQuery
from kclrun.local.stream import PutEntry
from kclrun.model.record import IteratorType
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
ShardMetric = Literal[
    "ALL",
    "IncomingBytes",
    "IncomingRecords",
    "IteratorAgeMilliseconds",
    "OutgoingBytes",
    "OutgoingRecords",
    "ReadProvisionedThroughputExceeded",
    "WriteProvisionedThroughputExceeded",
]


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


class StreamMode(_Request, frozen=True, kw_only=True):
    """PROVISIONED or ON_DEMAND, which the model only remembers: it does not scale by itself."""

    stream_mode: Literal["PROVISIONED", "ON_DEMAND"]


class CreateStream(_Request, frozen=True, kw_only=True):
    """CreateStream."""

    stream_name: Name
    shard_count: Count | None = None
    max_record_size_in_kib: RecordSizeKib | None = None
    stream_mode_details: StreamMode | None = None
    tags: Tags | None = None


class DeleteStream(OfStream, frozen=True, kw_only=True):
    """DeleteStream: one with consumers only if the request says so."""

    enforce_consumer_deletion: bool = False


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


class DescribeLimits(_Request, frozen=True, kw_only=True):
    """DescribeLimits, of the account."""


class UpdateStreamMode(OfStream, frozen=True, kw_only=True):
    """UpdateStreamMode."""

    stream_mode_details: StreamMode


class Encryption(OfStream, frozen=True, kw_only=True):
    """Start- and StopStreamEncryption. The model stores in the clear whatever the key is."""

    encryption_type: Literal["KMS"]
    key_id: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Monitoring(OfStream, frozen=True, kw_only=True):
    """Enable- and DisableEnhancedMonitoring."""

    shard_level_metrics: Annotated[list[ShardMetric], msgspec.Meta(min_length=1, max_length=7)]


class RegisterConsumer(_Request, frozen=True, kw_only=True):
    """RegisterStreamConsumer."""

    stream_arn: str
    consumer_name: Name


class OfConsumer(_Request, frozen=True, kw_only=True):
    """Describe- and DeregisterStreamConsumer: by ARN, or by the stream's and name."""

    consumer_arn: str | None = None
    stream_arn: str | None = None
    consumer_name: Name | None = None


class ListConsumers(_Request, frozen=True, kw_only=True):
    """ListStreamConsumers: by page."""

    stream_arn: str
    next_token: str | None = None
    max_results: PageSize = 100
    stream_creation_timestamp: float | None = None


class StartingPosition(_Request, frozen=True, kw_only=True):
    """Where a subscription begins: one of the five types of iterator."""

    type: IteratorType
    sequence_number: Number | None = None
    timestamp: float | None = None


class SubscribeToShard(_Request, frozen=True, kw_only=True):
    """SubscribeToShard."""

    consumer_arn: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    shard_id: Name
    starting_position: StartingPosition
