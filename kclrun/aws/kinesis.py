"""Reading a stream over the signed wire client: iterators, records, listings.

Implements `ports.ShardReader` and `ports.StreamAdmin` for lease processes, without botocore. The
core (`lease/`) decides which iterator is used and when, and what an empty answer means. One
call is one request. A listing is complete or an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from kclrun.aws import operations
from kclrun.aws.wire import WireClient, call_json, garbled
from kclrun.codec.get_records import decode_get_records
from kclrun.errors import InvalidRequest, MalformedBody, ServiceError, Unavailable
from kclrun.model.quotas import KIB
from kclrun.model.reading import FetchedPage
from kclrun.model.record import StartPoint
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter, StreamSummary


class Page(msgspec.Struct, kw_only=True):
    """A part of a listing. The last one has no `next_token`."""

    next_token: str | None = msgspec.field(name="NextToken", default=None)


PageT = TypeVar("PageT", bound=Page)

# ListShards returns at most 1,000 shards a page by default; a stream has at most 20,000 open
# shards, and closed ones for as long as it retains records.
PAGES_MAX: Final = 1_000
_ON_DEMAND: Final = "ON_DEMAND"
_encode: Final = msgspec.json.Encoder().encode


class IteratorBody(msgspec.Struct, rename="pascal"):
    """The answer of GetShardIterator, for a stream and for a table's stream."""

    shard_iterator: str


class _HashKeyRange(msgspec.Struct, rename="pascal"):
    starting_hash_key: str
    ending_hash_key: str


class SequenceNumberRange(msgspec.Struct, rename="pascal"):
    """The first and the last sequence number of a shard; an open shard has no last one."""

    starting_sequence_number: str
    ending_sequence_number: str | None = None


class _Shard(msgspec.Struct, rename="pascal"):
    shard_id: str
    hash_key_range: _HashKeyRange
    sequence_number_range: SequenceNumberRange
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None


class _ShardPage(Page, rename="pascal"):
    shards: list[_Shard]


class _Mode(msgspec.Struct, rename="pascal", frozen=True):
    stream_mode: str = ""


class _Summary(msgspec.Struct, rename="pascal"):
    stream_name: str
    stream_status: str
    retention_period_hours: int
    open_shard_count: int
    stream_arn: str = msgspec.field(name="StreamARN")
    stream_creation_timestamp: float = 0.0
    record_kib_max: int | None = msgspec.field(name="MaxRecordSizeInKiB", default=None)
    stream_mode_details: _Mode = _Mode()


class _SummaryBody(msgspec.Struct):
    summary: _Summary = msgspec.field(name="StreamDescriptionSummary")


class _StreamNames(msgspec.Struct, rename="pascal"):
    stream_names: list[str]


ITERATOR_DECODER: Final = msgspec.json.Decoder(IteratorBody)
_SHARDS_DECODER: Final = msgspec.json.Decoder(_ShardPage)
_SUMMARY_DECODER: Final = msgspec.json.Decoder(_SummaryBody)
_NAMES_DECODER: Final = msgspec.json.Decoder(_StreamNames)


def stream_reference(stream: str) -> dict[str, str]:
    """How a request names the stream: by ARN if an ARN was configured, else by name."""
    return {"StreamARN": stream} if stream.startswith("arn:") else {"StreamName": stream}


class PollingReader:
    """Implements `ports.ShardReader` with GetShardIterator and GetRecords.

    `stream` is a name or an ARN. One reader serves any shard of it.
    """

    def __init__(self, client: WireClient, stream: str) -> None:
        self._client = client
        self._reference = stream_reference(stream)
        # The iterator identifies the stream for GetRecords. Where ARNs are used, AWS wants the ARN
        # of the stream too.
        self._by_arn = self._reference if "StreamARN" in self._reference else {}

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """A shard iterator; it expires after five minutes.

        Raises: NotFound, Throttled, Unavailable, AccessDenied, InvalidRequest.
        """
        request: dict[str, Any] = {
            **self._reference,
            "ShardId": shard_id,
            "ShardIteratorType": start.kind.value,
        }
        if start.sequence_number is not None:
            request["StartingSequenceNumber"] = start.sequence_number
        if start.timestamp is not None:
            request["Timestamp"] = round(start.timestamp, 3)  # the service keeps milliseconds
        return call_json(
            self._client, operations.GET_SHARD_ITERATOR, request, ITERATOR_DECODER
        ).shard_iterator

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """One GetRecords. `limit` is 1 to 10,000 records.

        Raises: ExpiredIterator, Throttled, Unavailable (also for a malformed answer), NotFound,
        AccessDenied, InvalidRequest; LimitExceeded for an answer above the service's limits.
        """
        request = {"ShardIterator": iterator, "Limit": limit, **self._by_arn}
        reply = self._client.call(operations.GET_RECORDS, _encode(request))
        body = reply.body
        try:
            page = decode_get_records(body)
        except MalformedBody as error:
            raise garbled(operations.GET_RECORDS, str(error)) from None
        return FetchedPage(
            records=page.records,
            next_iterator=page.next_iterator,
            millis_behind_latest=page.millis_behind_latest,
            children=page.children,
            body_bytes=len(body),
            served_at=reply.date_at,
        )


class WireStreamAdmin:
    """Implements `ports.StreamAdmin` over the wire client."""

    def __init__(self, client: WireClient, stream: str) -> None:
        self._client = client
        self._reference = stream_reference(stream)

    def summary(self) -> StreamSummary:
        """DescribeStreamSummary. Raises: NotFound, Throttled, Unavailable, AccessDenied."""
        parsed = call_json(
            self._client, operations.DESCRIBE_STREAM_SUMMARY, self._reference, _SUMMARY_DECODER
        )
        summary = parsed.summary
        return StreamSummary(
            name=summary.stream_name,
            arn=summary.stream_arn,
            status=summary.stream_status,
            retention_hours=summary.retention_period_hours,
            open_shards=summary.open_shard_count,
            created_at=WallTime(summary.stream_creation_timestamp),
            record_bytes_max=None
            if summary.record_kib_max is None
            else summary.record_kib_max * KIB,
            is_on_demand=summary.stream_mode_details.stream_mode == _ON_DEMAND,
        )

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """A complete listing, or a ServiceError; never an incomplete listing.

        A page token that expired in between (300 s) is Unavailable: list again from the start.
        """
        request: dict[str, Any] = dict(self._reference)
        if shard_filter is not None:
            request["ShardFilter"] = _filter(shard_filter)
        # The service refuses a token together with a parameter that the token contains.
        pages = all_pages(
            self._client, operations.LIST_SHARDS, request, _SHARDS_DECODER, beside_token={}
        )
        return tuple(_shard(shard) for page in pages for shard in page.shards)


def create_stream(client: WireClient, name: str, shards: int) -> bool:
    """Create a stream; False if one of that name exists. It is CREATING when this returns.

    Raises: a ServiceError leaf.
    """
    try:
        client.call(operations.CREATE_STREAM, _encode({"StreamName": name, "ShardCount": shards}))
    except ServiceError as error:
        if error.code == "ResourceInUseException":
            return False
        raise
    return True


def stream_names(client: WireClient) -> tuple[str, ...]:
    """The first page of the names of the account's streams, in the service's order.

    Raises: a ServiceError; usually AccessDenied, because none of our policies grants the call.
    """
    return tuple(call_json(client, operations.LIST_STREAMS, {}, _NAMES_DECODER).stream_names)


def _filter(shard_filter: ShardFilter) -> dict[str, Any]:
    encoded: dict[str, Any] = {"Type": shard_filter.kind}
    if shard_filter.timestamp is not None:
        encoded["Timestamp"] = round(shard_filter.timestamp, 3)
    return encoded


def _shard(shard: _Shard) -> Shard:
    try:
        hash_range = HashRange(
            int(shard.hash_key_range.starting_hash_key), int(shard.hash_key_range.ending_hash_key)
        )
    except ValueError:
        raise garbled(operations.LIST_SHARDS, "a hash key is not a number") from None
    return Shard(
        shard_id=shard.shard_id,
        hash_range=hash_range,
        starting_sequence_number=shard.sequence_number_range.starting_sequence_number,
        ending_sequence_number=shard.sequence_number_range.ending_sequence_number,
        parent_shard_id=shard.parent_shard_id,
        adjacent_parent_shard_id=shard.adjacent_parent_shard_id,
    )


def all_pages(
    client: WireClient,
    operation: operations.Operation,
    request: dict[str, Any],
    decoder: msgspec.json.Decoder[PageT],
    *,
    beside_token: dict[str, str],
) -> Iterator[PageT]:
    """Every page of a listing; `beside_token` are the members of a request with a token.

    Raises: Unavailable for a token that expired in between; another ServiceError leaf.
    """
    for _ in range(PAGES_MAX):
        try:
            page = call_json(client, operation, request, decoder)
        except ServiceError as error:
            if error.code == "ExpiredNextTokenException":
                raise error.reworded(str(error), Unavailable) from None
            raise
        yield page
        if page.next_token is None:
            return
        request = {**beside_token, "NextToken": page.next_token}
    raise InvalidRequest(f"{operation.name}: more than {PAGES_MAX} pages", operation=operation.name)
