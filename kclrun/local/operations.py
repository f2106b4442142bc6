"""Each operation of Kinesis: its JSON in, the model's call, its JSON out.

May not know: sockets, clocks. Rule: the table `OPERATIONS` is the list of what is supported; every
refusal leaves as AWS's error name with the HTTP status the service uses (400 but for our bugs).
Look next: `service.py` below it, `http_face.py` above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.errors import ServiceError
from kclrun.local import requests as wire
from kclrun.local.descriptions import Json, child_json, described_json, shard_json, summary_json
from kclrun.local.listing import ShardQuery
from kclrun.local.puts import PutEntry
from kclrun.local.refusals import invalid_argument, unknown_operation, validation
from kclrun.local.service import REGION, Kinesis, ReadPage
from kclrun.local.stream import Stream
from kclrun.model.time import WallTime
from kclrun.ports import IteratorType

__all__ = ["OPERATIONS", "Answer", "answer", "refusal_answer"]

_KIB: Final = 1024
# PutRecords: "up to 10 MiB, including partition keys" a request.
_PUT_BYTES_MAX: Final = 10 * 1024 * _KIB
_ENCODE: Final = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, frozen=True):
    """An HTTP status and a JSON body."""

    status: int
    body: bytes


class _Call(msgspec.Struct, frozen=True):
    """What every operation is given besides its request."""

    kinesis: Kinesis
    now: WallTime
    region: str

    def stream(self, request: wire.OfStream) -> Stream:
        return self.kinesis.stream(request.stream_name, request.stream_arn, self.now)


def answer(
    kinesis: Kinesis, operation: str, body: bytes, now: WallTime, region: str = REGION
) -> Answer:
    """Carry one operation out. Never raises for what the request says."""
    try:
        entry = OPERATIONS.get(operation)
        if entry is None:
            raise unknown_operation(f"The embedded Kinesis does not know {operation[:64]!r}.")
        decode, carry_out = entry
        given = carry_out(_Call(kinesis, now, region), decode(body or b"{}"))
    except msgspec.ValidationError as error:
        return refusal_answer(validation(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _error(400, "SerializationException", "The request body is no JSON object.")
    except ServiceError as refusal:
        return refusal_answer(refusal)
    return Answer(200, b"" if given is None else _ENCODE(given))


def refusal_answer(refusal: ServiceError) -> Answer:
    return _error(400, refusal.code, str(refusal))


def _error(status: int, code: str, message: str) -> Answer:
    return Answer(status, _ENCODE({"__type": code, "message": message}))


def _create_stream(call: _Call, request: wire.CreateStream) -> None:
    # Without a count the service makes an on-demand stream, which begins with four shards.
    call.kinesis.create_stream(
        request.stream_name,
        request.shard_count or 4,
        call.now,
        region=call.region,
        record_bytes_max=(request.max_record_size_in_kib or _KIB) * _KIB,
        tags=request.tags,
    )


def _delete_stream(call: _Call, request: wire.OfStream) -> None:
    call.kinesis.delete_stream(call.stream(request), call.now)


def _describe_summary(call: _Call, request: wire.OfStream) -> Json:
    stream = call.stream(request)
    body = described_json(stream, call.now)
    body["OpenShardCount"] = len(stream.open_shards())
    body["ConsumerCount"] = 0
    body["MaxRecordSizeInKiB"] = stream.record_bytes_max // _KIB
    return {"StreamDescriptionSummary": body}


def _describe_stream(call: _Call, request: wire.PagedStream) -> Json:
    stream = call.stream(request)
    after = request.exclusive_start_shard_id or ""
    shards = [shard for shard in stream.shards(call.now) if shard.shard_id > after]
    if stream.status(call.now) == "CREATING":
        shards = []
    body = described_json(stream, call.now)
    body["Shards"] = [shard_json(shard) for shard in shards[: request.limit]]
    body["HasMoreShards"] = len(shards) > request.limit
    return {"StreamDescription": body}


def _list_streams(call: _Call, request: wire.ListStreams) -> Json:
    after = request.next_token or request.exclusive_start_stream_name or ""
    streams = [stream for stream in call.kinesis.streams(call.now) if stream.name > after]
    page = streams[: request.limit]
    body: Json = {
        "StreamNames": [stream.name for stream in page],
        "HasMoreStreams": len(streams) > len(page),
        "StreamSummaries": [summary_json(stream, call.now) for stream in page],
    }
    if len(streams) > len(page):
        # Names are no secret: the token of the next page is the last name given.
        body["NextToken"] = page[-1].name
    return body


def _list_shards(call: _Call, request: wire.ListShards) -> Json:
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


def _put_record(call: _Call, request: wire.PutRecord) -> Json:
    entry = PutEntry(request.data, request.partition_key, request.explicit_hash_key)
    result = call.kinesis.put(call.stream(request), entry, call.now)
    return {"ShardId": result.shard_id, "SequenceNumber": result.sequence_number}


def _put_records(call: _Call, request: wire.PutRecords) -> Json:
    size_bytes = sum(len(entry.data) + len(entry.partition_key or "") for entry in request.records)
    if size_bytes > _PUT_BYTES_MAX:
        raise invalid_argument(
            f"Records of {size_bytes} bytes in one request; at most {_PUT_BYTES_MAX} are possible."
        )
    results = call.kinesis.put_many(call.stream(request), request.records, call.now)
    failed = sum(result.error_code is not None for result in results)
    return {"FailedRecordCount": failed, "Records": results}


def _get_shard_iterator(call: _Call, request: wire.GetShardIterator) -> Json:
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


def _get_records(call: _Call, request: wire.GetRecords) -> Json:
    page: ReadPage = call.kinesis.fetch(
        request.shard_iterator, request.limit, call.now, arn=request.stream_arn
    )
    body: Json = {"Records": page.records, "MillisBehindLatest": page.millis_behind_latest}
    if page.next_iterator is not None:
        body["NextShardIterator"] = page.next_iterator
    if page.children:
        body["ChildShards"] = [child_json(child) for child in page.children]
    return body


def _split_shard(call: _Call, request: wire.SplitShard) -> None:
    at = int(request.new_starting_hash_key)
    call.kinesis.split_shard(call.stream(request), request.shard_to_split, at, call.now)


def _merge_shards(call: _Call, request: wire.MergeShards) -> None:
    stream = call.stream(request)
    stream.merge(request.shard_to_merge, request.adjacent_shard_to_merge, call.now)


def _update_shard_count(call: _Call, request: wire.UpdateShardCount) -> Json:
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


def _lengthen_retention(call: _Call, request: wire.Retention) -> None:
    hours = request.retention_period_hours
    call.kinesis.set_retention(call.stream(request), hours, call.now, longer=True)


def _shorten_retention(call: _Call, request: wire.Retention) -> None:
    hours = request.retention_period_hours
    call.kinesis.set_retention(call.stream(request), hours, call.now, longer=False)


def _set_record_size(call: _Call, request: wire.MaxRecordSize) -> None:
    call.stream(request).record_bytes_max = request.max_record_size_in_kib * _KIB


def _tagged(call: _Call, request: wire.Tagging | wire.ListTags) -> Stream:
    arn = request.resource_arn or request.stream_arn
    return call.kinesis.stream(request.stream_name, arn, call.now)


def _add_tags(call: _Call, request: wire.Tagging) -> None:
    stream = _tagged(call, request)
    # "You can assign up to 50 tags to a data stream."
    if len(stream.tags | (request.tags or {})) > 50:
        raise invalid_argument(f"Stream {stream.name} would have more than 50 tags.")
    stream.tags.update(request.tags or {})


def _remove_tags(call: _Call, request: wire.Tagging) -> None:
    stream = _tagged(call, request)
    for key in request.tag_keys or []:
        stream.tags.pop(key, None)


def _list_tags(call: _Call, request: wire.ListTags) -> Json:
    tags = sorted(_tagged(call, request).tags.items())
    after = request.exclusive_start_tag_key or ""
    rest = [{"Key": key, "Value": value} for key, value in tags if key > after]
    if request.resource_arn is not None:
        return {"Tags": rest}
    return {"Tags": rest[: request.limit], "HasMoreTags": len(rest) > request.limit}


_Entry = tuple[Callable[[bytes], Any], Callable[[_Call, Any], Json | None]]


def _of(request: type[msgspec.Struct], carry_out: Callable[[_Call, Any], Json | None]) -> _Entry:
    return msgspec.json.Decoder(request).decode, carry_out


OPERATIONS: Final[dict[str, _Entry]] = {
    "AddTagsToStream": _of(wire.Tagging, _add_tags),
    "CreateStream": _of(wire.CreateStream, _create_stream),
    "DecreaseStreamRetentionPeriod": _of(wire.Retention, _shorten_retention),
    "DeleteStream": _of(wire.OfStream, _delete_stream),
    "DescribeStream": _of(wire.PagedStream, _describe_stream),
    "DescribeStreamSummary": _of(wire.OfStream, _describe_summary),
    "GetRecords": _of(wire.GetRecords, _get_records),
    "GetShardIterator": _of(wire.GetShardIterator, _get_shard_iterator),
    "IncreaseStreamRetentionPeriod": _of(wire.Retention, _lengthen_retention),
    "ListShards": _of(wire.ListShards, _list_shards),
    "ListStreams": _of(wire.ListStreams, _list_streams),
    "ListTagsForResource": _of(wire.ListTags, _list_tags),
    "ListTagsForStream": _of(wire.ListTags, _list_tags),
    "MergeShards": _of(wire.MergeShards, _merge_shards),
    "PutRecord": _of(wire.PutRecord, _put_record),
    "PutRecords": _of(wire.PutRecords, _put_records),
    "RemoveTagsFromStream": _of(wire.Tagging, _remove_tags),
    "SplitShard": _of(wire.SplitShard, _split_shard),
    "TagResource": _of(wire.Tagging, _add_tags),
    "UntagResource": _of(wire.Tagging, _remove_tags),
    "UpdateMaxRecordSize": _of(wire.MaxRecordSize, _set_record_size),
    "UpdateShardCount": _of(wire.UpdateShardCount, _update_shard_count),
}
