"""The operations of Kinesis: decodes a request, calls the model, encodes its answer (JSON or CBOR).

It knows neither sockets nor clocks. The table `OPERATIONS` lists the supported operations. Every
refusal has AWS's error name and the HTTP status that the service uses (400, except for our bugs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, get_args

import msgspec

from kclrun.codec.cbor import MalformedCbor, decode_cbor, encode_cbor
from kclrun.codec.event_stream import encode_message
from kclrun.errors import ServiceError
from kclrun.local import requests
from kclrun.local.consumers import Consumer, StreamConsumers, Subscription, SubscriptionEvent
from kclrun.local.iterators import ShardQuery
from kclrun.local.refusals import (
    invalid_argument,
    resource_not_found,
    unknown_operation,
    validation,
)
from kclrun.local.service import (
    ON_DEMAND_STREAMS_MAX,
    SHARDS_MAX,
    Kinesis,
    ReadPage,
)
from kclrun.local.shard_log import ShardLog
from kclrun.local.stream import ON_DEMAND, PROVISIONED, PutEntry, Stream, add_tags
from kclrun.model.quotas import KIB, PUT_BYTES_MAX
from kclrun.model.shard import ChildShard, HashRange
from kclrun.model.time import WallTime

# Streams and shards as JSON objects of Kinesis's answers.
Json = dict[str, Any]
_HOUR_S: Final = 3600


def summary_json(stream: Stream, now: WallTime) -> Json:
    """A stream as in the answer of ListStreams."""
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status(now),
        "StreamModeDetails": {"StreamMode": stream.mode},
        "StreamCreationTimestamp": stream.created_at,
    }


def described_json(stream: Stream, now: WallTime) -> Json:
    """The common part of the answers of DescribeStream and DescribeStreamSummary."""
    return summary_json(stream, now) | {
        "RetentionPeriodHours": int(stream.retention_s) // _HOUR_S,
        "EnhancedMonitoring": [{"ShardLevelMetrics": sorted(stream.shard_metrics)}],
        **_encryption_json(stream),
    }


def _encryption_json(stream: Stream) -> Json:
    key = stream.encryption_key
    return {"EncryptionType": "NONE"} if key is None else {"EncryptionType": "KMS", "KeyId": key}


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


# "If you specify a value greater than 100 (ListShards: 1000), at most 100 results are returned."
_DESCRIBED_MAX: Final = 100
_NAMES_MAX: Final = 100
_LISTED_MAX: Final = 1000
# The listing of the streams, in its tokens. Another listing has the ARN of a stream.
_STREAMS: Final = "streams"
_ALL_METRICS: Final = frozenset(get_args(requests.ShardMetric)) - {"ALL"}
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

    def stream(self, request: requests.OfStream) -> Stream:
        return self.kinesis.stream(request.stream_name, request.stream_arn, self.now)

    def named(self, arn: str) -> Stream:
        return self.kinesis.stream(None, arn, self.now)


def answer(
    kinesis: Kinesis,
    operation: str,
    body: bytes,
    now: WallTime,
    *,
    encoding: Encoding = Encoding.JSON,
) -> Answer | Subscription:
    """Execute one operation in a region. Never raises because of the request's content."""
    try:
        entry = OPERATIONS.get(operation)
        if entry is None:
            raise unknown_operation(f"The embedded Kinesis does not know {operation[:64]!r}.")
        request = _decoded(entry, body, encoding)
        if (unknown := request.not_emulated()) is not None:
            raise invalid_argument(f"The embedded Kinesis does not emulate {unknown}.")
        given = entry.carry_out(_Call(kinesis, now), request)
    except msgspec.ValidationError as error:
        return refusal_answer(validation(str(error)), encoding)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MalformedCbor):
        message = f"The body is not a {encoding.name} object."
        return error_answer(400, "SerializationException", message, encoding)
    except ServiceError as refusal:
        return refusal_answer(refusal, encoding)
    if isinstance(given, Subscription):
        return given
    return Answer(200, b"" if given is None else _encoded(given, encoding))


def refusal_answer(refusal: ServiceError, encoding: Encoding = Encoding.JSON) -> Answer:
    """A refusal of the model in the service's format."""
    return error_answer(400, refusal.code, str(refusal), encoding)


def error_answer(status: int, code: str, message: str, encoding: Encoding) -> Answer:
    """An error in the encoding of its request: an SDK cannot read another one."""
    return Answer(status, _encoded({"__type": code, "message": message}, encoding))


def _decoded(entry: _Operation, body: bytes, encoding: Encoding) -> Any:
    """Raises: msgspec.ValidationError and DecodeError, UnicodeDecodeError, RecursionError,
    MalformedCbor."""
    if encoding is Encoding.JSON:
        return entry.decode_json(body or b"{}")
    values = decode_cbor(body) if body else {}
    return msgspec.convert(values, entry.request, builtin_types=(bytes,))


def _encoded(given: Json, encoding: Encoding) -> bytes:
    if encoding is Encoding.JSON:
        return _ENCODE(given)
    return encode_cbor(msgspec.to_builtins(given, builtin_types=(bytes,)))


def _create_stream(call: _Call, request: requests.CreateStream) -> None:
    mode = request.stream_mode_details
    # Without a count the service makes an on-demand stream, which begins with four shards.
    is_on_demand = request.shard_count is None if mode is None else mode.stream_mode == ON_DEMAND
    if is_on_demand and request.shard_count is not None:
        raise invalid_argument("ShardCount is not allowed for a stream with the mode ON_DEMAND.")
    if not is_on_demand and request.shard_count is None:
        raise invalid_argument("ShardCount is required for a stream with the mode PROVISIONED.")
    call.kinesis.create_stream(
        request.stream_name,
        request.shard_count or 4,
        call.now,
        record_bytes_max=(request.max_record_size_in_kib or KIB) * KIB,
        tags=request.tags,
        mode=ON_DEMAND if is_on_demand else PROVISIONED,
    )


def _delete_stream(call: _Call, request: requests.DeleteStream) -> None:
    stream = call.stream(request)
    call.kinesis.delete_stream(stream, call.now, with_consumers=request.enforce_consumer_deletion)


def _describe_summary(call: _Call, request: requests.OfStream) -> Json:
    stream = call.stream(request)
    body = described_json(stream, call.now)
    body["OpenShardCount"] = len(stream.open_shards())
    body["ConsumerCount"] = len(call.kinesis.consumers_of(stream))
    body["MaxRecordSizeInKiB"] = stream.record_bytes_max // KIB
    return {"StreamDescriptionSummary": body}


def _describe_stream(call: _Call, request: requests.PagedStream) -> Json:
    stream = call.stream(request)
    after = request.exclusive_start_shard_id or ""
    shards = [shard for shard in stream.shards(call.now) if shard.shard_id > after]
    if stream.status(call.now) == "CREATING":
        shards = []
    body = described_json(stream, call.now)
    page = shards[: min(request.limit, _DESCRIBED_MAX)]
    body["Shards"] = [shard_json(shard) for shard in page]
    body["HasMoreShards"] = len(shards) > len(page)
    return {"StreamDescription": body}


def _list_streams(call: _Call, request: requests.ListStreams) -> Json:
    if request.next_token is None:
        after = request.exclusive_start_stream_name or ""
    else:
        after = call.kinesis.tokens.open_names(request.next_token, _STREAMS, call.now)
    streams = [stream for stream in call.kinesis.streams(call.now) if stream.name > after]
    page = streams[: min(request.limit, _NAMES_MAX)]
    body: Json = {
        "StreamNames": [stream.name for stream in page],
        "HasMoreStreams": len(streams) > len(page),
        "StreamSummaries": [summary_json(stream, call.now) for stream in page],
    }
    if len(streams) > len(page):
        body["NextToken"] = call.kinesis.tokens.seal_names(page[-1].name, _STREAMS, call.now)
    return body


def _list_shards(call: _Call, request: requests.ListShards) -> Json:
    count_max = min(request.max_results, _LISTED_MAX)
    if request.next_token is not None:
        _require_alone(
            StreamName=request.stream_name,
            StreamARN=request.stream_arn,
            StreamCreationTimestamp=request.stream_creation_timestamp,
            ExclusiveStartShardId=request.exclusive_start_shard_id,
            ShardFilter=request.shard_filter,
        )
        page = call.kinesis.list_more_shards(request.next_token, count_max, call.now)
    else:
        after = request.exclusive_start_shard_id
        wanted = request.shard_filter
        query = ShardQuery(after=after) if wanted is None else wanted.query(after)
        stream = call.stream(request)
        _require_created_at(stream, request.stream_creation_timestamp)
        page = call.kinesis.list_shards(stream, query, count_max, call.now)
    body: Json = {"Shards": [shard_json(shard) for shard in page.shards]}
    if page.next_token is not None:
        body["NextToken"] = page.next_token
    return body


def _require_alone(**others: object) -> None:
    """A token names the stream, the filter and the position. Raises: InvalidRequest."""
    for name, value in others.items():
        if value is not None:
            raise invalid_argument(f"NextToken and {name} cannot be provided together.")


def _require_created_at(stream: Stream, at: float | None) -> None:
    """Raises: NotFound if the timestamp is that of another stream of this name."""
    if at is not None and int(at) != int(stream.created_at):
        raise resource_not_found(
            f"Stream {stream.name} that was created at {at:.3f} does not exist."
        )


def _put_record(call: _Call, request: requests.PutRecord) -> Json:
    entry = PutEntry(request.data, request.partition_key, request.explicit_hash_key)
    result = call.kinesis.put(call.stream(request), entry, call.now)
    return {"ShardId": result.shard_id, "SequenceNumber": result.sequence_number}


def _put_records(call: _Call, request: requests.PutRecords) -> Json:
    size_bytes = sum(len(entry.data) + len(entry.partition_key or "") for entry in request.records)
    if size_bytes > PUT_BYTES_MAX:
        raise invalid_argument(
            f"Records of {size_bytes} bytes in one request; at most {PUT_BYTES_MAX} are possible."
        )
    results = call.kinesis.put_many(call.stream(request), request.records, call.now)
    failed = sum(result.error_code is not None for result in results)
    return {"FailedRecordCount": failed, "Records": results}


def _get_shard_iterator(call: _Call, request: requests.GetShardIterator) -> Json:
    token = call.kinesis.iterator(
        call.stream(request),
        request.shard_id,
        request.shard_iterator_type,
        call.now,
        sequence_number=request.starting_sequence_number,
        timestamp=None if request.timestamp is None else WallTime(request.timestamp),
    )
    return {"ShardIterator": token}


def _get_records(call: _Call, request: requests.GetRecords) -> Json:
    page: ReadPage = call.kinesis.fetch(
        request.shard_iterator, request.limit, call.now, arn=request.stream_arn
    )
    body: Json = {"Records": page.records, "MillisBehindLatest": page.millis_behind_latest}
    if page.next_iterator is not None:
        body["NextShardIterator"] = page.next_iterator
    if page.children:
        body["ChildShards"] = [child_json(child) for child in page.children]
    return body


def _split_shard(call: _Call, request: requests.SplitShard) -> None:
    at = int(request.new_starting_hash_key)
    call.kinesis.split_shard(call.stream(request), request.shard_to_split, at, call.now)


def _merge_shards(call: _Call, request: requests.MergeShards) -> None:
    stream = call.stream(request)
    stream.merge(request.shard_to_merge, request.adjacent_shard_to_merge, call.now)


def _update_shard_count(call: _Call, request: requests.UpdateShardCount) -> Json:
    stream = call.stream(request)
    before = len(stream.open_shards())
    call.kinesis.update_shard_count(stream, request.target_shard_count, call.now)
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "CurrentShardCount": before,
        "TargetShardCount": request.target_shard_count,
    }


def _set_retention(call: _Call, request: requests.Retention, *, longer: bool) -> None:
    hours = request.retention_period_hours
    call.kinesis.set_retention(call.stream(request), hours, call.now, longer=longer)


def _set_record_size(call: _Call, request: requests.MaxRecordSize) -> None:
    stream = call.named(request.stream_arn)
    stream.change(call.now)
    stream.record_bytes_max = request.max_record_size_in_kib * KIB


def _add_tags(call: _Call, request: requests.AddTags) -> None:
    add_tags(call.stream(request).tags, request.tags)


def _remove_tags(call: _Call, request: requests.RemoveTags) -> None:
    _untag(call.stream(request).tags, request.tag_keys)


def _untag(tags: dict[str, str], keys: Sequence[str]) -> None:
    for key in keys:
        tags.pop(key, None)


def _list_tags(call: _Call, request: requests.ListTags) -> Json:
    after = request.exclusive_start_tag_key or ""
    rest = [tag for tag in _tags_json(call.stream(request).tags) if tag["Key"] > after]
    return {"Tags": rest[: request.limit], "HasMoreTags": len(rest) > request.limit}


def _tags_json(tags: dict[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def _tag_resource(call: _Call, request: requests.TagResource) -> None:
    add_tags(call.kinesis.tags_of(request.resource_arn, call.now), request.tags)


def _untag_resource(call: _Call, request: requests.UntagResource) -> None:
    _untag(call.kinesis.tags_of(request.resource_arn, call.now), request.tag_keys)


def _list_resource_tags(call: _Call, request: requests.OfResource) -> Json:
    return {"Tags": _tags_json(call.kinesis.tags_of(request.resource_arn, call.now))}


def _describe_limits(call: _Call, _request: requests.DescribeLimits) -> Json:
    streams = call.kinesis.streams(call.now)
    return {
        "ShardLimit": SHARDS_MAX,
        "OpenShardCount": call.kinesis.open_shard_count,
        "OnDemandStreamCount": sum(stream.mode == ON_DEMAND for stream in streams),
        "OnDemandStreamCountLimit": ON_DEMAND_STREAMS_MAX,
    }


def _update_mode(call: _Call, request: requests.UpdateStreamMode) -> None:
    call.named(request.stream_arn).change_mode(request.stream_mode_details.stream_mode, call.now)


def _start_encryption(call: _Call, request: requests.Encryption) -> None:
    call.stream(request).encrypt(request.key_id, call.now)


def _stop_encryption(call: _Call, request: requests.Encryption) -> None:
    call.stream(request).encrypt(None, call.now)


def _monitor(call: _Call, request: requests.Monitoring, *, enable: bool) -> Json:
    stream = call.stream(request)
    stream.change(call.now)
    named = frozenset(request.shard_level_metrics)
    named = _ALL_METRICS if "ALL" in named else named
    before = stream.shard_metrics
    stream.shard_metrics = before | named if enable else before - named
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "CurrentShardLevelMetrics": sorted(before),
        "DesiredShardLevelMetrics": sorted(stream.shard_metrics),
    }


def _consumer_json(consumer: Consumer, now: WallTime) -> Json:
    return {
        "ConsumerName": consumer.name,
        "ConsumerARN": consumer.arn,
        "ConsumerStatus": consumer.status(now),
        "ConsumerCreationTimestamp": consumer.created_at,
    }


def _register_consumer(call: _Call, request: requests.RegisterConsumer) -> Json:
    consumers = call.kinesis.consumers_of(call.named(request.stream_arn))
    consumer = consumers.register(request.consumer_name, call.now, request.tags or {})
    return {"Consumer": _consumer_json(consumer, call.now)}


def _named_consumer(call: _Call, request: requests.OfConsumer) -> tuple[StreamConsumers, Consumer]:
    """Raises: NotFound, InvalidRequest (neither the consumer's ARN nor the stream's and a name; the
    ARN is not that of the consumer that the others name)."""
    if request.consumer_arn is not None:
        consumers = call.kinesis.consumers_by_arn(request.consumer_arn, call.now)
        consumer = consumers.consumer(None, request.consumer_arn)
        # "You may also provide all three parameters, as long as they don't conflict."
        if request.stream_arn not in (None, consumers.stream_arn) or (
            request.consumer_name not in (None, consumer.name)
        ):
            raise invalid_argument("ConsumerARN, StreamARN and ConsumerName conflict.")
        return consumers, consumer
    if request.stream_arn is None or request.consumer_name is None:
        raise invalid_argument("Either ConsumerARN, or StreamARN and ConsumerName, must be given.")
    consumers = call.kinesis.consumers_of(call.named(request.stream_arn))
    return consumers, consumers.consumer(request.consumer_name, None)


def _describe_consumer(call: _Call, request: requests.OfConsumer) -> Json:
    _, consumer = _named_consumer(call, request)
    body = _consumer_json(consumer, call.now)
    body["StreamARN"] = consumer.arn.partition("/consumer/")[0]
    return {"ConsumerDescription": body}


def _deregister_consumer(call: _Call, request: requests.OfConsumer) -> None:
    consumers, consumer = _named_consumer(call, request)
    consumers.deregister(consumer)


def _list_consumers(call: _Call, request: requests.ListConsumers) -> Json:
    stream = call.named(request.stream_arn)
    after = ""
    if request.next_token is not None:
        _require_alone(StreamCreationTimestamp=request.stream_creation_timestamp)
        after = call.kinesis.tokens.open_names(request.next_token, stream.arn, call.now)
    _require_created_at(stream, request.stream_creation_timestamp)
    consumers = call.kinesis.consumers_of(stream).listed()
    rest = [consumer for consumer in consumers if consumer.name > after]
    page = rest[: min(request.max_results, _NAMES_MAX)]
    body: Json = {"Consumers": [_consumer_json(consumer, call.now) for consumer in page]}
    if len(rest) > len(page):
        body["NextToken"] = call.kinesis.tokens.seal_names(page[-1].name, stream.arn, call.now)
    return body


def _subscribe(call: _Call, request: requests.SubscribeToShard) -> Subscription:
    consumers = call.kinesis.consumers_by_arn(request.consumer_arn, call.now)
    start = request.starting_position
    return consumers.subscribe(
        consumers.consumer(None, request.consumer_arn),
        request.shard_id,
        start.type,
        call.now,
        sequence_number=start.sequence_number,
        timestamp=None if start.timestamp is None else WallTime(start.timestamp),
    )


def initial_response(encoding: Encoding) -> bytes:
    """The first message of every answer to SubscribeToShard: the answer without its events."""
    return _message("event", "initial-response", encoding, {})


def event_message(event: SubscriptionEvent, encoding: Encoding) -> bytes:
    """An event as a message of the event stream."""
    body: Json = {"Records": event.records, "MillisBehindLatest": event.millis_behind_latest}
    if event.continuation is not None:
        body["ContinuationSequenceNumber"] = event.continuation
    if event.children:
        body["ChildShards"] = [child_json(child) for child in event.children]
    return _message("event", "SubscribeToShardEvent", encoding, body)


def exception_message(error: ServiceError, encoding: Encoding) -> bytes:
    """The message by which a subscription fails after it began."""
    return _message("exception", error.code, encoding, {"message": str(error)})


def _message(kind: str, name: str, encoding: Encoding, body: Json) -> bytes:
    headers = {
        f":{kind}-type": name,
        ":content-type": encoding.value.decode(),
        ":message-type": kind,
    }
    return encode_message(headers, _encoded(body, encoding))


class _Operation(msgspec.Struct, frozen=True):
    """One row of the table: the type of a request and the function that executes it."""

    request: type[msgspec.Struct]
    decode_json: Callable[[bytes], Any]
    carry_out: Callable[[_Call, Any], Json | Subscription | None]


def _of(
    request: type[msgspec.Struct], carry_out: Callable[[_Call, Any], Json | Subscription | None]
) -> _Operation:
    return _Operation(request, msgspec.json.Decoder(request).decode, carry_out)


OPERATIONS: Final[dict[str, _Operation]] = {
    "AddTagsToStream": _of(requests.AddTags, _add_tags),
    "CreateStream": _of(requests.CreateStream, _create_stream),
    "DecreaseStreamRetentionPeriod": _of(requests.Retention, partial(_set_retention, longer=False)),
    "DeleteStream": _of(requests.DeleteStream, _delete_stream),
    "DeregisterStreamConsumer": _of(requests.OfConsumer, _deregister_consumer),
    "DescribeLimits": _of(requests.DescribeLimits, _describe_limits),
    "DescribeStream": _of(requests.PagedStream, _describe_stream),
    "DescribeStreamConsumer": _of(requests.OfConsumer, _describe_consumer),
    "DescribeStreamSummary": _of(requests.OfStream, _describe_summary),
    "DisableEnhancedMonitoring": _of(requests.Monitoring, partial(_monitor, enable=False)),
    "EnableEnhancedMonitoring": _of(requests.Monitoring, partial(_monitor, enable=True)),
    "GetRecords": _of(requests.GetRecords, _get_records),
    "GetShardIterator": _of(requests.GetShardIterator, _get_shard_iterator),
    "IncreaseStreamRetentionPeriod": _of(requests.Retention, partial(_set_retention, longer=True)),
    "ListShards": _of(requests.ListShards, _list_shards),
    "ListStreamConsumers": _of(requests.ListConsumers, _list_consumers),
    "ListStreams": _of(requests.ListStreams, _list_streams),
    "ListTagsForResource": _of(requests.OfResource, _list_resource_tags),
    "ListTagsForStream": _of(requests.ListTags, _list_tags),
    "MergeShards": _of(requests.MergeShards, _merge_shards),
    "PutRecord": _of(requests.PutRecord, _put_record),
    "PutRecords": _of(requests.PutRecords, _put_records),
    "RegisterStreamConsumer": _of(requests.RegisterConsumer, _register_consumer),
    "RemoveTagsFromStream": _of(requests.RemoveTags, _remove_tags),
    "SplitShard": _of(requests.SplitShard, _split_shard),
    "StartStreamEncryption": _of(requests.Encryption, _start_encryption),
    "StopStreamEncryption": _of(requests.Encryption, _stop_encryption),
    "SubscribeToShard": _of(requests.SubscribeToShard, _subscribe),
    "TagResource": _of(requests.TagResource, _tag_resource),
    "UntagResource": _of(requests.UntagResource, _untag_resource),
    "UpdateMaxRecordSize": _of(requests.MaxRecordSize, _set_record_size),
    "UpdateShardCount": _of(requests.UpdateShardCount, _update_shard_count),
    "UpdateStreamMode": _of(requests.UpdateStreamMode, _update_mode),
}
