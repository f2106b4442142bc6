"""The streams of moto's tables: fed by their writes, answered by our model.

moto has one shard a table, which never closes. Its tables call `add` of their stream shard with the
item before and after each write; a class of ours in its place passes the change to the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec

from kclrun.errors import InvalidRequest, NotFound, ServiceError
from kclrun.local.changes.model import (
    ChangeSettings,
    ChangeStream,
    opened,
)
from kclrun.model.quotas import CHANGE_SHARDS_MAX, CHANGES_MAX
from kclrun.model.record import IteratorType
from kclrun.model.stream import region_of
from kclrun.model.time import WallTime

# A disabled stream stays readable for a day; a process of a development machine rarely lives on.
_STREAMS_MAX: Final = 1_000


class _ShardFilter(msgspec.Struct, rename="pascal"):
    type: Literal["CHILD_SHARDS"]
    shard_id: str


class _Request(msgspec.Struct, rename="pascal"):
    stream_arn: str = ""
    shard_id: str = ""
    shard_iterator_type: str = ""
    shard_iterator: str = ""
    sequence_number: str | None = None
    exclusive_start_shard_id: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1)] = CHANGES_MAX
    table_name: str | None = None
    shard_filter: _ShardFilter | None = None


class ChangeStreams:
    """The streams of all tables, by ARN. Every call is made by the one thread of DynamoDB."""

    def __init__(self, settings: ChangeSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._streams: dict[str, ChangeStream] = {}

    def add_stream(self, arn: str) -> ChangeStream:
        """A stream was enabled. Raises: InvalidRequest beyond a thousand streams."""
        if len(self._streams) >= _STREAMS_MAX:
            raise InvalidRequest(f"more than {_STREAMS_MAX} streams", code="LimitExceededException")
        self._streams[arn] = ChangeStream(arn, self._settings, self._now())
        return self._streams[arn]

    def add(self, arn: str, event: dict[str, Any]) -> None:
        """A change of an item of the stream's table."""
        self._streams[arn].add(event, self._now())

    def answer(self, operation: str, body: bytes, region: str) -> tuple[int, bytes]:
        """The status and the body of the answer to one request. Its region has streams of its own,
        as its tables."""
        try:
            request = msgspec.json.decode(body, type=_Request)
            return 200, msgspec.json.encode(self._answer(operation, request, region))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            error: ServiceError = InvalidRequest("not understood", code="SerializationException")
        except ServiceError as refused:
            error = refused
        named = f"com.amazonaws.dynamodb.v20120810#{error.code}"
        return 400, msgspec.json.encode({"__type": named, "message": str(error)})

    def _answer(self, operation: str, request: _Request, region: str) -> dict[str, Any]:
        now = self._now()
        match operation:
            case "ListStreams":
                there = [arn for arn in self._streams if region_of(arn) == region]
                return {"Streams": [_named(arn) for arn in there if _is_of(arn, request)]}
            case "DescribeStream":
                limit = min(request.limit, CHANGE_SHARDS_MAX)
                stream = self._stream(request.stream_arn, region)
                parent = None if request.shard_filter is None else request.shard_filter.shard_id
                after = request.exclusive_start_shard_id
                described = stream.describe(after, limit, now, children_of=parent)
                return {"StreamDescription": _named(stream.arn) | described}
            case "GetShardIterator":
                kind = _kind(request.shard_iterator_type)
                stream = self._stream(request.stream_arn, region)
                iterator = stream.iterator(request.shard_id, kind, request.sequence_number, now)
                return {"ShardIterator": iterator}
            case "GetRecords":
                stream = self._stream(opened(request.shard_iterator).arn, region)
                return stream.fetch(request.shard_iterator, request.limit, now)
        raise InvalidRequest(f"no operation {operation}", code="UnknownOperationException")

    def _stream(self, arn: str, region: str) -> ChangeStream:
        stream = self._streams.get(arn)
        if stream is None or region_of(arn) != region:
            raise NotFound(
                f"Requested resource not found: Stream: {arn} not found",
                code="ResourceNotFoundException",
            )
        return stream

    def _now(self) -> WallTime:
        return WallTime(self._clock())


def feed(streams: ChangeStreams) -> None:
    """From now on, moto's tables write their changes to these streams."""
    from moto.dynamodb.models import table as moto_table

    class FedShard(moto_table.StreamShard):
        """The stream shard of one table, as moto's table knows it."""

        def __init__(self, account_id: str, table: Any) -> None:
            super().__init__(account_id, table)
            self._arn = f"{table.table_arn}/stream/{table.latest_stream_label}"
            streams.add_stream(self._arn)

        def add(self, old: Any, new: Any) -> None:
            # DynamoDB writes no stream record where an item stays as it is.
            if old is not None and new is not None and old.to_json() == new.to_json():
                return
            super().add(old, new)
            while self.items:
                streams.add(self._arn, self.items.pop(0).to_json())

    vars(moto_table)["StreamShard"] = FedShard


def _kind(name: str) -> IteratorType:
    try:
        return IteratorType(name)
    except ValueError:
        raise InvalidRequest(
            f"{name} is not a type of a shard iterator", code="ValidationException"
        ) from None


def _named(arn: str) -> dict[str, str]:
    table, _, label = arn.partition(":table/")[2].partition("/stream/")
    return {"StreamArn": arn, "TableName": table, "StreamLabel": label}


def _is_of(arn: str, request: _Request) -> bool:
    return request.table_name is None or _named(arn)["TableName"] == request.table_name
