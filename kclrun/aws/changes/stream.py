"""DynamoDB Streams as the ports of a stream. Only this module knows how it differs from Kinesis.

`docs/explanation/dynamodb-streams.md` says why each difference keeps the guarantees. The service
has no time to read from, no lag, no hash keys, and no children in the last answer of a shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from kclrun.aws.kinesis import (
    ITERATOR_DECODER,
    PAGES_MAX,
    PollingReader,
    SequenceNumberRange,
    WireStreamAdmin,
)
from kclrun.aws.operations import (
    DESCRIBE_STREAM,
    GET_CHANGE_ITERATOR,
    GET_CHANGES,
    LIST_CHANGE_STREAMS,
)
from kclrun.aws.wire import Caller, WireClient, call_json, garbled
from kclrun.codec.change_events import decode_changes
from kclrun.errors import InvalidRequest, MalformedBody, ServiceError, Throttled
from kclrun.model.quotas import CHANGES_MAX, CHANGES_RETENTION_HOURS
from kclrun.model.reading import TRIMMED_CODE, FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.retries import Retries
from kclrun.model.shard import ALL_HASH_KEYS, Shard
from kclrun.model.statuses import ROLLING
from kclrun.model.stream import is_change_stream, table_of
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter, ShardReader, StreamAdmin, StreamSummary

# The prefix of an iterator that reads from a time: `since:<seconds>:<iterator>`.
_SINCE: Final = "since:"
# The pause between two pages of a listing: DescribeStream answers ten requests a second, of all
# readers together. 1,000 shards are ten pages, one second.
_PAGE_PAUSE_S: Final = 0.1
# How often the pages of one listing may be throttled, and the pause before each repetition.
_RETRIES: Final = Retries(attempts_max=4, base_s=0.5, max_s=0.5, passing=(Throttled,))
# As a stream of Kinesis says it. The others have no counterpart there.
_STATUS: Final = {"ENABLED": "ACTIVE"}
_encode: Final = msgspec.json.Encoder().encode


class _Shard(msgspec.Struct, rename="pascal"):
    shard_id: str
    sequence_number_range: SequenceNumberRange
    parent_shard_id: str | None = None


class _Description(msgspec.Struct, rename="pascal"):
    stream_arn: str
    stream_status: str
    shards: list[_Shard]
    creation_request_date_time: float = 0.0
    last_evaluated_shard_id: str | None = None


class _Described(msgspec.Struct, rename="pascal"):
    stream_description: _Description


class _Listed(msgspec.Struct, rename="pascal"):
    stream_arn: str


class _Listing(msgspec.Struct, rename="pascal"):
    streams: list[_Listed]


_DESCRIBED_DECODER: Final = msgspec.json.Decoder(_Described)
_LISTED_DECODER: Final = msgspec.json.Decoder(_Listing)


def signing_service(stream: str) -> str:
    """The service in whose name requests to a stream are signed."""
    return "dynamodb" if is_change_stream(stream) else "kinesis"


def endpoint_service(stream: str) -> str:
    """The service at whose endpoint a stream is read."""
    return "dynamodbstreams" if is_change_stream(stream) else "kinesis"


def reader_of(client: WireClient, stream: str) -> ShardReader:
    """The reader of a stream, by its name or ARN."""
    return (
        ChangeReader(client, stream) if is_change_stream(stream) else PollingReader(client, stream)
    )


def admin_of(client: WireClient, stream: str) -> StreamAdmin:
    """The control plane of a stream, by its name or ARN."""
    if is_change_stream(stream):
        return ChangeStreamAdmin(client, stream)
    return WireStreamAdmin(client, stream)


def change_streams(client: Caller) -> tuple[str, ...]:
    """The ARNs of the first page of the account's streams of tables. Raises: a ServiceError,
    usually AccessDenied, because none of our policies grants the call."""
    found = call_json(client, LIST_CHANGE_STREAMS, {}, _LISTED_DECODER)
    return tuple(stream.stream_arn for stream in found.streams)


class ChangeReader:
    """Implements `ports.ShardReader` with GetShardIterator and GetRecords of DynamoDB Streams.

    Reading from a time: the shard is read from its oldest record, and records that were created
    before that time are left out. A creation time is in whole seconds, rounded down, so all records
    of its second are read. No later record is left out [P14].

    A position that was trimmed is replaced by the oldest record left, as Kinesis does without an
    error; `HeadWatch` then reports the loss.
    """

    def __init__(self, client: Caller, stream: str) -> None:
        self._client = client
        self._stream = stream

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """A shard iterator; it expires after fifteen minutes.

        Raises: NotFound (also for a trimmed shard), Throttled, Unavailable, AccessDenied,
        InvalidRequest.
        """
        oldest = StartPoint(IteratorType.TRIM_HORIZON)
        if start.kind is IteratorType.AT_TIMESTAMP:
            assert start.timestamp is not None, "a time to read from"
            return f"{_SINCE}{int(start.timestamp)}:{self._iterator(shard_id, oldest)}"
        try:
            return self._iterator(shard_id, start)
        except ServiceError as error:
            if error.code != TRIMMED_CODE or start.sequence_number is None:
                raise
        return self._iterator(shard_id, oldest)

    def _iterator(self, shard_id: str, start: StartPoint) -> str:
        request: dict[str, Any] = {
            "StreamArn": self._stream,
            "ShardId": shard_id,
            "ShardIteratorType": start.kind.value,
        }
        if start.sequence_number is not None:
            request["SequenceNumber"] = start.sequence_number
        found = call_json(self._client, GET_CHANGE_ITERATOR, request, ITERATOR_DECODER)
        return found.shard_iterator

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """One GetRecords, of at most 1,000 records.

        Raises: ExpiredIterator, Throttled, Unavailable (also for a malformed answer), NotFound,
        AccessDenied, InvalidRequest (with TRIMMED_CODE where the place was trimmed: `PageCursor`
        goes on at the oldest record left); LimitExceeded for an answer above the service's limits.
        """
        since, iterator = _opened(iterator)
        request = {"ShardIterator": iterator, "Limit": min(limit, CHANGES_MAX)}
        reply = self._client.call(GET_CHANGES, _encode(request))
        try:
            page = decode_changes(reply.body)
        except MalformedBody as error:
            raise garbled(GET_CHANGES, str(error)) from None
        records, following = page.records, page.next_iterator
        if since is not None:
            records = [r for r in records if int(r.approximate_arrival_timestamp) >= since]
            if following is not None and not records:
                following = f"{_SINCE}{since}:{following}"
        return FetchedPage(
            records=records,
            next_iterator=following,
            millis_behind_latest=_behind_ms(page.records, reply.date_at),
            body_bytes=len(reply.body),
            served_at=reply.date_at,
        )


def _opened(iterator: str) -> tuple[int | None, str]:
    if not iterator.startswith(_SINCE):
        return None, iterator
    since, _, plain = iterator.removeprefix(_SINCE).partition(":")
    return int(since), plain


def _behind_ms(records: list[Record], served_at: WallTime | None) -> int | None:
    """How far a page is behind the tip: the age of its last record, at least 1, because more
    records may follow; 0 for a page without records; None if the service sent no time. Both times
    are in whole seconds."""
    if not records:
        return 0
    if served_at is None:
        return None
    return max(1, int((served_at - records[-1].approximate_arrival_timestamp) * 1000))


class ChangeStreamAdmin:
    """Implements `ports.StreamAdmin` with DescribeStream."""

    def __init__(
        self, client: Caller, stream: str, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self._client = client
        self._stream = stream
        self._wait = wait

    def summary(self) -> StreamSummary:
        """The stream by its table's name. `open_shards` also counts a shard that has just closed
        and whose child is not listed yet; otherwise the count could be 0 at that moment.

        Raises: NotFound, Throttled, Unavailable, AccessDenied.
        """
        first, shards = self._described()
        if first.stream_status in ROLLING:
            counted = _without_child(shards)
        else:
            counted = tuple(shard for shard in shards if shard.is_open)
        return StreamSummary(
            name=table_of(self._stream),
            arn=first.stream_arn,
            status=_STATUS.get(first.stream_status, first.stream_status),
            retention_hours=CHANGES_RETENTION_HOURS,
            open_shards=len(counted),
            created_at=WallTime(first.creation_request_date_time),
        )

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """A complete listing, or a ServiceError; never an incomplete listing.

        The service has no filters for a position. AT_TRIM_HORIZON are the shards without a listed
        parent. AT_LATEST are the shards without a listed child, closed ones too: a child that is
        not listed yet then gets its lease from its parent, and nothing between is left out.
        Raises: InvalidRequest for another filter.
        """
        _, shards = self._described()
        if shard_filter is None:
            return shards
        if shard_filter.kind == "AT_LATEST":
            return _without_child(shards)
        if shard_filter.kind == "AT_TRIM_HORIZON":
            listed = {shard.shard_id for shard in shards}
            return tuple(shard for shard in shards if shard.parent_shard_id not in listed)
        raise InvalidRequest(
            f"{DESCRIBE_STREAM.name}: DynamoDB Streams has no shards {shard_filter.kind}",
            operation=DESCRIBE_STREAM.name,
        )

    def _described(self) -> tuple[_Description, tuple[Shard, ...]]:
        """The first page's description, and the shards of all pages.

        A page that is throttled is requested again, because a long listing that began anew each
        time would never be complete. Raises: Throttled, at the fourth time.
        """
        request = {"StreamArn": self._stream}
        first: _Description | None = None
        found: dict[str, _Shard] = {}
        throttled = 0
        for number in range(PAGES_MAX):
            if number:
                self._wait(_PAGE_PAUSE_S)
            while True:
                try:
                    page = call_json(self._client, DESCRIBE_STREAM, request, _DESCRIBED_DECODER)
                    break
                except Throttled as error:
                    throttled += 1
                    pause_s = _RETRIES.pause_s(error, throttled, chance=1.0)
                    if pause_s is None:
                        raise
                self._wait(pause_s)
            described = page.stream_description
            first = first or described
            found |= {shard.shard_id: shard for shard in described.shards}
            if described.last_evaluated_shard_id is None:
                return first, _lineage(found.values())
            request = request | {"ExclusiveStartShardId": described.last_evaluated_shard_id}
        raise InvalidRequest(
            f"{DESCRIBE_STREAM.name}: more than {PAGES_MAX} pages",
            operation=DESCRIBE_STREAM.name,
        )


def _without_child(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """The shards that no listed shard comes from."""
    listed = tuple(shards)
    parents = {shard.parent_shard_id for shard in listed}
    return tuple(shard for shard in listed if shard.shard_id not in parents)


def _lineage(listed: Iterable[_Shard]) -> tuple[Shard, ...]:
    """The shards of all pages as those of one moment: a page may be older than a later one, and
    show a shard open whose child the later one has. A shard with a child is closed."""
    shards = tuple(listed)
    parents = {shard.parent_shard_id for shard in shards}
    return tuple(
        Shard(
            shard_id=shard.shard_id,
            hash_range=ALL_HASH_KEYS,
            starting_sequence_number=shard.sequence_number_range.starting_sequence_number,
            ending_sequence_number=shard.sequence_number_range.ending_sequence_number
            or (
                shard.sequence_number_range.starting_sequence_number
                if shard.shard_id in parents
                else None
            ),
            parent_shard_id=shard.parent_shard_id,
        )
        for shard in shards
    )
