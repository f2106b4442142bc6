"""The requests of Kinesis's API as types: their fields, and the bounds that its schema gives them.

A field outside its bounds is refused when a body is decoded, before an operation sees it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kclrun.local.iterators import ShardQuery
from kclrun.local.stream import PutEntry
from kclrun.model.quotas import (
    GET_RECORDS_MAX,
    ITERATOR_CHARACTERS_MAX,
    KIB,
    NAME_CHARACTERS_MAX,
    PARTITION_KEY_CHARACTERS_MAX,
    PUT_RECORDS_MAX,
    RECORD_BYTES_DEFAULT,
    RECORD_BYTES_LARGEST,
)
from kclrun.model.record import IteratorType
from kclrun.model.time import WallTime

_ABBREVIATIONS: Final = {"Arn": "ARN", "InKib": "InKiB"}

Name = Annotated[
    str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]+$", min_length=1, max_length=NAME_CHARACTERS_MAX)
]
_ARN_MAX: Final = 2048
StreamArn = Annotated[
    str, msgspec.Meta(pattern=r"^arn:aws.*:kinesis:.*:\d{12}:stream/\S+$", max_length=_ARN_MAX)
]
ConsumerArn = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^arn:aws.*:kinesis:.*:\d{12}:.*stream/[a-zA-Z0-9_.-]+/consumer/[a-zA-Z0-9_.-]+:\d+$",
        max_length=_ARN_MAX,
    ),
]
# A stream, or a consumer of one.
ResourceArn = Annotated[
    str, msgspec.Meta(pattern=r"^arn:aws.*:kinesis:.*:\d{12}:.*stream/\S+$", max_length=_ARN_MAX)
]
StreamId = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{20}-[a-z0-9]{3}$")]
Count = Annotated[int, msgspec.Meta(ge=1)]
PageSize = Annotated[int, msgspec.Meta(ge=1, le=GET_RECORDS_MAX)]
HashKey = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9]\d{0,38})$")]
Number = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9]\d{0,128})$")]
Tags = Annotated[
    dict[
        Annotated[str, msgspec.Meta(min_length=1, max_length=128)],
        Annotated[str, msgspec.Meta(max_length=256)],
    ],
    msgspec.Meta(min_length=1, max_length=200),
]
TagKeys = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=128)]],
    msgspec.Meta(min_length=1, max_length=50),
]
Token = Annotated[str, msgspec.Meta(min_length=1, max_length=1_048_576)]
RecordSizeKib = Annotated[
    int, msgspec.Meta(ge=RECORD_BYTES_DEFAULT // KIB, le=RECORD_BYTES_LARGEST // KIB)
]
FilterKind = Literal[
    "AFTER_SHARD_ID",
    "AT_LATEST",
    "AT_TIMESTAMP",
    "AT_TRIM_HORIZON",
    "FROM_TIMESTAMP",
    "FROM_TRIM_HORIZON",
]
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


class _Fields(msgspec.Struct, frozen=True, kw_only=True, rename=_wire_name):
    """A structure inside a request."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, rename=_wire_name):
    """These fields of the service are read to refuse them: what they ask for is not emulated, and
    without it the operation would do something else."""

    stream_id: StreamId | None = None
    dry_run: bool | None = None
    warm_throughput_mi_bps: Annotated[int, msgspec.Meta(ge=0)] | None = None
    record_distribution_strategy: Literal["AUTO", "USER_PARTITION_KEY"] | None = None

    def not_emulated(self) -> str | None:
        """The name of a field that asks for what is not emulated."""
        asked = {
            "StreamId": self.stream_id is not None,
            "DryRun": self.dry_run is True,
            "WarmThroughputMiBps": bool(self.warm_throughput_mi_bps),
            "RecordDistributionStrategy": self.record_distribution_strategy == "AUTO",
        }
        return next((name for name, is_asked in asked.items() if is_asked), None)


class OfStream(_Request, frozen=True, kw_only=True):
    """A request about one stream, by name or ARN."""

    stream_name: Name | None = None
    stream_arn: StreamArn | None = None


class OfStreamArn(_Request, frozen=True, kw_only=True):
    """A request about one stream, by ARN alone."""

    stream_arn: StreamArn


class StreamMode(_Fields, frozen=True, kw_only=True):
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
    exclusive_start_stream_name: Name | None = None
    next_token: Token | None = None


class PagedStream(OfStream, frozen=True, kw_only=True):
    """DescribeStream: its shards by page."""

    limit: PageSize = 100
    exclusive_start_shard_id: Name | None = None


class ShardFilterField(_Fields, frozen=True, kw_only=True):
    """The filter of ListShards."""

    type: FilterKind
    shard_id: Name | None = None
    timestamp: float | None = None

    def query(self, after: str | None) -> ShardQuery:
        timestamp = None if self.timestamp is None else WallTime(self.timestamp)
        return ShardQuery(self.type, timestamp, self.shard_id, after)


class ListShards(OfStream, frozen=True, kw_only=True):
    """ListShards: a first page, or the next one by token alone."""

    next_token: Token | None = None
    exclusive_start_shard_id: Name | None = None
    max_results: PageSize = 1000
    stream_creation_timestamp: float | None = None
    shard_filter: ShardFilterField | None = None


class PutRecord(OfStream, frozen=True, kw_only=True):
    """PutRecord."""

    data: bytes
    partition_key: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=PARTITION_KEY_CHARACTERS_MAX)] | None
    ) = None
    explicit_hash_key: HashKey | None = None
    sequence_number_for_ordering: Number | None = None


class PutRecords(OfStream, frozen=True, kw_only=True):
    """PutRecords: up to 500 entries."""

    records: Annotated[list[PutEntry], msgspec.Meta(min_length=1, max_length=PUT_RECORDS_MAX)]


class GetShardIterator(OfStream, frozen=True, kw_only=True):
    """GetShardIterator: one of the five types."""

    shard_id: Name
    shard_iterator_type: IteratorType
    starting_sequence_number: Number | None = None
    timestamp: float | None = None


class GetRecords(_Request, frozen=True, kw_only=True):
    """GetRecords: by iterator."""

    shard_iterator: Annotated[str, msgspec.Meta(min_length=1, max_length=ITERATOR_CHARACTERS_MAX)]
    limit: PageSize = GET_RECORDS_MAX
    stream_arn: StreamArn | None = None


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
    scaling_type: Literal["UNIFORM_SCALING"]


class Retention(OfStream, frozen=True, kw_only=True):
    """Increase- and DecreaseStreamRetentionPeriod."""

    retention_period_hours: int


class MaxRecordSize(OfStreamArn, frozen=True, kw_only=True):
    """UpdateMaxRecordSize."""

    max_record_size_in_kib: RecordSizeKib


class AddTags(OfStream, frozen=True, kw_only=True):
    """AddTagsToStream."""

    tags: Tags


class RemoveTags(OfStream, frozen=True, kw_only=True):
    """RemoveTagsFromStream."""

    tag_keys: TagKeys


class ListTags(OfStream, frozen=True, kw_only=True):
    """ListTagsForStream: by page."""

    exclusive_start_tag_key: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = (
        None
    )
    limit: TagPage = 50


class OfResource(_Request, frozen=True, kw_only=True):
    """ListTagsForResource, of a stream or a consumer."""

    resource_arn: ResourceArn


class TagResource(OfResource, frozen=True, kw_only=True):
    """TagResource."""

    tags: Tags


class UntagResource(OfResource, frozen=True, kw_only=True):
    """UntagResource."""

    tag_keys: TagKeys


class DescribeLimits(_Request, frozen=True, kw_only=True):
    """DescribeLimits, of the account."""


class UpdateStreamMode(OfStreamArn, frozen=True, kw_only=True):
    """UpdateStreamMode."""

    stream_mode_details: StreamMode


class Encryption(OfStream, frozen=True, kw_only=True):
    """Start- and StopStreamEncryption. The model stores in the clear whatever the key is."""

    encryption_type: Literal["KMS"]
    key_id: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Monitoring(OfStream, frozen=True, kw_only=True):
    """Enable- and DisableEnhancedMonitoring."""

    shard_level_metrics: Annotated[list[ShardMetric], msgspec.Meta(min_length=1, max_length=7)]


class RegisterConsumer(OfStreamArn, frozen=True, kw_only=True):
    """RegisterStreamConsumer."""

    consumer_name: Name
    tags: Tags | None = None


class OfConsumer(_Request, frozen=True, kw_only=True):
    """Describe- and DeregisterStreamConsumer: by ARN, or by the stream's and name."""

    consumer_arn: ConsumerArn | None = None
    stream_arn: StreamArn | None = None
    consumer_name: Name | None = None


class ListConsumers(OfStreamArn, frozen=True, kw_only=True):
    """ListStreamConsumers: by page."""

    next_token: Token | None = None
    max_results: PageSize = 100
    stream_creation_timestamp: float | None = None


class StartingPosition(_Fields, frozen=True, kw_only=True):
    """Where a subscription begins: one of the five types of iterator."""

    type: IteratorType
    sequence_number: Number | None = None
    timestamp: float | None = None


class SubscribeToShard(_Request, frozen=True, kw_only=True):
    """SubscribeToShard."""

    consumer_arn: ConsumerArn
    shard_id: Name
    starting_position: StartingPosition
