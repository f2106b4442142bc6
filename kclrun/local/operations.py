"""The operations of Kinesis: decodes a request, calls the model, encodes its answer (JSON or CBOR).

It knows neither sockets nor clocks. The table `OPERATIONS` lists the supported operations. Every
refusal has AWS's error name and the HTTP status that the service uses (400, except for our bugs).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Final

import msgspec

from kclrun.codec.cbor import MalformedCbor, decode_cbor, encode_cbor
from kclrun.errors import ServiceError
from kclrun.local.iterators import ShardQuery
from kclrun.local.service import REGION, Kinesis, ReadPage
from kclrun.local.stream import (
    PutEntry,
    ShardLog,
    Stream,
    invalid_argument,
    unknown_operation,
    validation,
)
from kclrun.model.record import IteratorType
from kclrun.model.shard import ChildShard, HashRange
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


# Streams and shards as JSON objects of Kinesis's answers.
Json = dict[str, Any]
_HOUR_S: Final = 3600


def summary_json(stream: Stream, now: WallTime) -> Json:
    """A stream as in the answer of ListStreams."""
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status(now),
        "StreamModeDetails": {"StreamMode": "PROVISIONED"},
        "StreamCreationTimestamp": stream.created_at,
    }


def described_json(stream: Stream, now: WallTime) -> Json:
    """The common part of the answers of DescribeStream and DescribeStreamSummary."""
    return summary_json(stream, now) | {
        "RetentionPeriodHours": int(stream.retention_s) // _HOUR_S,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
    }


def shard_json(log: ShardLog) -> Json:
    """A shard as in the answer of ListShards."""
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
    """A child shard as in the answer of the last GetRecords of a closed shard."""
    return {
        "ShardId": child.shard_id,
        "ParentShards": child.parents,
        "HashKeyRange": _hash_range_json(child.hash_range),
    }


_KIB: Final = 1024
# PutRecords: "up to 10 MiB, including partition keys" a request.
_PUT_BYTES_MAX: Final = 10 * 1024 * _KIB
_ENCODE: Final = msgspec.json.Encoder().encode


class Encoding(Enum):
    """The format of a request and its answer: AWS's JSON 1.1, or its CBOR (Java's default)."""

    JSON = b"application/x-amz-json-1.1"
    CBOR = b"application/x-amz-cbor-1.1"

    @classmethod
    def of(cls, content_type: bytes) -> Encoding:
        """By the Content-Type of a request; any type other than CBOR is JSON."""
        return cls.CBOR if content_type.lower().startswith(cls.CBOR.value) else cls.JSON


class Answer(msgspec.Struct, frozen=True):
    """An HTTP status and a body."""

    status: int
    body: bytes


class _Call(msgspec.Struct, frozen=True):
    """The arguments of every operation besides its request."""

    kinesis: Kinesis
    now: WallTime
    region: str

    def stream(self, request: OfStream) -> Stream:
        return self.kinesis.stream(request.stream_name, request.stream_arn, self.now)


def answer(
    kinesis: Kinesis,
    operation: str,
    body: bytes,
    now: WallTime,
    region: str = REGION,
    *,
    encoding: Encoding = Encoding.JSON,
) -> Answer:
    """Execute one operation. Never raises because of the request's content."""
    try:
        entry = OPERATIONS.get(operation)
        if entry is None:
            raise unknown_operation(f"The embedded Kinesis does not know {operation[:64]!r}.")
        given = entry.carry_out(_Call(kinesis, now, region), _decoded(entry, body, encoding))
    except msgspec.ValidationError as error:
        return refusal_answer(validation(str(error)), encoding)
    except (msgspec.DecodeError, UnicodeDecodeError, MalformedCbor):
        message = f"The body is not a {encoding.name} object."
        return error_answer(400, "SerializationException", message, encoding)
    except ServiceError as refusal:
        return refusal_answer(refusal, encoding)
    return Answer(200, b"" if given is None else _encoded(given, encoding))


def refusal_answer(refusal: ServiceError, encoding: Encoding = Encoding.JSON) -> Answer:
    """A refusal of the model in the service's format."""
    return error_answer(400, refusal.code, str(refusal), encoding)


def error_answer(status: int, code: str, message: str, encoding: Encoding) -> Answer:
    """An error in the encoding of its request: an SDK cannot read another one."""
    return Answer(status, _encoded({"__type": code, "message": message}, encoding))


def _decoded(entry: _Operation, body: bytes, encoding: Encoding) -> Any:
    """Raises: msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, MalformedCbor."""
    if encoding is Encoding.JSON:
        return entry.decode_json(body or b"{}")
    values = decode_cbor(body) if body else {}
    return msgspec.convert(values, entry.request, builtin_types=(bytes,))


def _encoded(given: Json, encoding: Encoding) -> bytes:
    if encoding is Encoding.JSON:
        return _ENCODE(given)
    return encode_cbor(msgspec.to_builtins(given, builtin_types=(bytes,)))


def _create_stream(call: _Call, request: CreateStream) -> None:
    # Without a count the service makes an on-demand stream, which begins with four shards.
    call.kinesis.create_stream(
        request.stream_name,
        request.shard_count or 4,
        call.now,
        region=call.region,
        record_bytes_max=(request.max_record_size_in_kib or _KIB) * _KIB,
        tags=request.tags,
    )


def _delete_stream(call: _Call, request: OfStream) -> None:
    call.kinesis.delete_stream(call.stream(request), call.now)


def _describe_summary(call: _Call, request: OfStream) -> Json:
    stream = call.stream(request)
    body = described_json(stream, call.now)
    body["OpenShardCount"] = len(stream.open_shards())
    body["ConsumerCount"] = 0
    body["MaxRecordSizeInKiB"] = stream.record_bytes_max // _KIB
    return {"StreamDescriptionSummary": body}


def _describe_stream(call: _Call, request: PagedStream) -> Json:
    stream = call.stream(request)
    after = request.exclusive_start_shard_id or ""
    shards = [shard for shard in stream.shards(call.now) if shard.shard_id > after]
    if stream.status(call.now) == "CREATING":
        shards = []
    body = described_json(stream, call.now)
    body["Shards"] = [shard_json(shard) for shard in shards[: request.limit]]
    body["HasMoreShards"] = len(shards) > request.limit
    return {"StreamDescription": body}


def _list_streams(call: _Call, request: ListStreams) -> Json:
    after = request.next_token or request.exclusive_start_stream_name or ""
    streams = [stream for stream in call.kinesis.streams(call.now) if stream.name > after]
    page = streams[: request.limit]
    body: Json = {
        "StreamNames": [stream.name for stream in page],
        "HasMoreStreams": len(streams) > len(page),
        "StreamSummaries": [summary_json(stream, call.now) for stream in page],
    }
    if len(streams) > len(page):
        # Names are not secret: the token of the next page is the last name of this one.
        body["NextToken"] = page[-1].name
    return body


def _list_shards(call: _Call, request: ListShards) -> Json:
    if request.next_token is not None:
        if request.stream_name or request.exclusive_start_shard_id:
            raise invalid_argument("NextToken and StreamName cannot be provided together.")
        page = call.kinesis.list_more_shards(request.next_token, request.max_results, call.now)
    else:
        after = request.exclusive_start_shard_id
        wanted = request.shard_filter
        query = ShardQuery(after=after) if wanted is None else wanted.query(after)
        stream = call.stream(request)
        page = call.kinesis.list_shards(stream, query, request.max_results, call.now)
    body: Json = {"Shards": [shard_json(shard) for shard in page.shards]}
    if page.next_token is not None:
        body["NextToken"] = page.next_token
    return body


def _put_record(call: _Call, request: PutRecord) -> Json:
    entry = PutEntry(request.data, request.partition_key, request.explicit_hash_key)
    result = call.kinesis.put(call.stream(request), entry, call.now)
    return {"ShardId": result.shard_id, "SequenceNumber": result.sequence_number}


def _put_records(call: _Call, request: PutRecords) -> Json:
    size_bytes = sum(len(entry.data) + len(entry.partition_key or "") for entry in request.records)
    if size_bytes > _PUT_BYTES_MAX:
        raise invalid_argument(
            f"Records of {size_bytes} bytes in one request; at most {_PUT_BYTES_MAX} are possible."
        )
    results = call.kinesis.put_many(call.stream(request), request.records, call.now)
    failed = sum(result.error_code is not None for result in results)
    return {"FailedRecordCount": failed, "Records": results}


def _get_shard_iterator(call: _Call, request: GetShardIterator) -> Json:
    try:
        kind = IteratorType(request.shard_iterator_type)
    except ValueError:
        kinds = ", ".join(sorted(kind.value for kind in IteratorType))
        raise validation(
            "Value at 'shardIteratorType' failed to satisfy constraint: Member must satisfy enum"
            f" value set: [{kinds}]"
        ) from None
    token = call.kinesis.iterator(
        call.stream(request),
        request.shard_id,
        kind,
        call.now,
        sequence_number=request.starting_sequence_number,
        timestamp=None if request.timestamp is None else WallTime(request.timestamp),
    )
    return {"ShardIterator": token}


def _get_records(call: _Call, request: GetRecords) -> Json:
    page: ReadPage = call.kinesis.fetch(
        request.shard_iterator, request.limit, call.now, arn=request.stream_arn
    )
    body: Json = {"Records": page.records, "MillisBehindLatest": page.millis_behind_latest}
    if page.next_iterator is not None:
        body["NextShardIterator"] = page.next_iterator
    if page.children:
        body["ChildShards"] = [child_json(child) for child in page.children]
    return body


def _split_shard(call: _Call, request: SplitShard) -> None:
    at = int(request.new_starting_hash_key)
    call.kinesis.split_shard(call.stream(request), request.shard_to_split, at, call.now)


def _merge_shards(call: _Call, request: MergeShards) -> None:
    stream = call.stream(request)
    stream.merge(request.shard_to_merge, request.adjacent_shard_to_merge, call.now)


def _update_shard_count(call: _Call, request: UpdateShardCount) -> Json:
    if request.scaling_type != "UNIFORM_SCALING":
        raise validation(
            "Value at 'scalingType' failed to satisfy constraint: Member must satisfy enum value"
            " set: [UNIFORM_SCALING]"
        )
    stream = call.stream(request)
    before = len(stream.open_shards())
    call.kinesis.update_shard_count(stream, request.target_shard_count, call.now)
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "CurrentShardCount": before,
        "TargetShardCount": request.target_shard_count,
    }


def _lengthen_retention(call: _Call, request: Retention) -> None:
    hours = request.retention_period_hours
    call.kinesis.set_retention(call.stream(request), hours, call.now, longer=True)


def _shorten_retention(call: _Call, request: Retention) -> None:
    hours = request.retention_period_hours
    call.kinesis.set_retention(call.stream(request), hours, call.now, longer=False)


def _set_record_size(call: _Call, request: MaxRecordSize) -> None:
    call.stream(request).record_bytes_max = request.max_record_size_in_kib * _KIB


def _tagged(call: _Call, request: Tagging | ListTags) -> Stream:
    arn = request.resource_arn or request.stream_arn
    return call.kinesis.stream(request.stream_name, arn, call.now)


def _add_tags(call: _Call, request: Tagging) -> None:
    stream = _tagged(call, request)
    # "You can assign up to 50 tags to a data stream."
    if len(stream.tags | (request.tags or {})) > 50:
        raise invalid_argument(f"Stream {stream.name} would have more than 50 tags.")
    stream.tags.update(request.tags or {})


def _remove_tags(call: _Call, request: Tagging) -> None:
    stream = _tagged(call, request)
    for key in request.tag_keys or []:
        stream.tags.pop(key, None)


def _list_tags(call: _Call, request: ListTags) -> Json:
    tags = sorted(_tagged(call, request).tags.items())
    after = request.exclusive_start_tag_key or ""
    rest = [{"Key": key, "Value": value} for key, value in tags if key > after]
    if request.resource_arn is not None:
        return {"Tags": rest}
    return {"Tags": rest[: request.limit], "HasMoreTags": len(rest) > request.limit}


class _Operation(msgspec.Struct, frozen=True):
    """One row of the table: the type of a request and the function that executes it."""

    request: type[msgspec.Struct]
    decode_json: Callable[[bytes], Any]
    carry_out: Callable[[_Call, Any], Json | None]


def _of(
    request: type[msgspec.Struct], carry_out: Callable[[_Call, Any], Json | None]
) -> _Operation:
    return _Operation(request, msgspec.json.Decoder(request).decode, carry_out)


OPERATIONS: Final[dict[str, _Operation]] = {
    "AddTagsToStream": _of(Tagging, _add_tags),
    "CreateStream": _of(CreateStream, _create_stream),
    "DecreaseStreamRetentionPeriod": _of(Retention, _shorten_retention),
    "DeleteStream": _of(OfStream, _delete_stream),
    "DescribeStream": _of(PagedStream, _describe_stream),
    "DescribeStreamSummary": _of(OfStream, _describe_summary),
    "GetRecords": _of(GetRecords, _get_records),
    "GetShardIterator": _of(GetShardIterator, _get_shard_iterator),
    "IncreaseStreamRetentionPeriod": _of(Retention, _lengthen_retention),
    "ListShards": _of(ListShards, _list_shards),
    "ListStreams": _of(ListStreams, _list_streams),
    "ListTagsForResource": _of(ListTags, _list_tags),
    "ListTagsForStream": _of(ListTags, _list_tags),
    "MergeShards": _of(MergeShards, _merge_shards),
    "PutRecord": _of(PutRecord, _put_record),
    "PutRecords": _of(PutRecords, _put_records),
    "RemoveTagsFromStream": _of(Tagging, _remove_tags),
    "SplitShard": _of(SplitShard, _split_shard),
    "TagResource": _of(Tagging, _add_tags),
    "UntagResource": _of(Tagging, _remove_tags),
    "UpdateMaxRecordSize": _of(MaxRecordSize, _set_record_size),
    "UpdateShardCount": _of(UpdateShardCount, _update_shard_count),
}
