"""The model's account: the streams of each region, their tokens, and the bound on all their bytes.

The HTTP endpoint and the simulator both call it. It knows neither HTTP nor JSON nor clocks: `now`
is an argument of every call, the secret of the tokens one of the constructor. Every refusal is a
`ServiceError` leaf with AWS's error name as its `code`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from kclrun.errors import Throttled
from kclrun.local import iterators
from kclrun.local.consumers import StreamConsumers
from kclrun.local.iterators import Tokens
from kclrun.local.limits import Storage
from kclrun.local.refusals import (
    invalid_argument,
    limit_exceeded,
    resource_in_use,
    resource_not_found,
)
from kclrun.local.settings import KinesisSettings
from kclrun.local.shard_log import RECORD_OVERHEAD_BYTES, ShardLog, StoredRecord
from kclrun.local.stream import (
    ON_DEMAND,
    PROVISIONED,
    PutEntry,
    PutResult,
    Stream,
    add_tags,
    check_entry,
)
from kclrun.model.quotas import (
    GET_RECORDS_MAX,
    PARTITION_KEY_CHARACTERS_MAX,
    PUT_RECORDS_MAX,
    RECORD_BYTES_DEFAULT,
    RETENTION_HOURS_MAX,
    RETENTION_HOURS_MIN,
)
from kclrun.model.record import IteratorType
from kclrun.model.shard import ChildShard
from kclrun.model.time import WallTime

# AWS has fewer. The names of regions are not checked: any client chooses its own.
_REGIONS_MAX: Final = 100
# A shard costs a few kB here; AWS's default quota in its largest regions is 20,000 an account.
SHARDS_MAX: Final = 20_000
_HOUR_S: Final = 3600.0
# "50 on-demand streams" an account in the largest regions.
ON_DEMAND_STREAMS_MAX: Final = 50
# "More than five streams in the CREATING state at any point in time."
_CREATING_MAX: Final = 5
# A character is at most 4 bytes of UTF-8.
_ENTRY_OVERHEAD_BYTES: Final = RECORD_OVERHEAD_BYTES + 4 * PARTITION_KEY_CHARACTERS_MAX
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}\Z")


class ReadPage(msgspec.Struct, frozen=True):
    """A GetRecords answer. `next_iterator` None is the end of a closed shard."""

    records: list[StoredRecord]
    next_iterator: str | None
    millis_behind_latest: int
    children: tuple[ChildShard, ...] = ()


# A client may name any region.
_NOTES_MAX: Final = 100


class ShardPage(msgspec.Struct, frozen=True):
    """One page of a ListShards."""

    shards: list[ShardLog]
    next_token: str | None


class Account:
    """What the regions of one account share: the bound on the stored bytes, and the regions in
    which a stream was created. `note` takes what the service itself does not say, for the
    emulator's log."""

    def __init__(self, bytes_max: int, note: Callable[[str], None]) -> None:
        self.storage = Storage(bytes_max)
        self._regions: dict[str, Kinesis] = {}
        self._note = note
        self._noted: set[tuple[str, str]] = set()

    def region(self, name: str) -> Kinesis | None:
        """The region, if a stream was created there."""
        return self._regions.get(name)

    def keep(self, kinesis: Kinesis) -> None:
        """A stream is created in this region. Raises: Throttled for too many regions."""
        region = kinesis.settings.region
        if region not in self._regions and len(self._regions) >= _REGIONS_MAX:
            raise limit_exceeded(f"There are streams in {_REGIONS_MAX} regions already.")
        self._regions[region] = kinesis

    def note_elsewhere(self, stream: str, region: str) -> None:
        """Once for a region: where there is a stream of this name. A client with another region is
        easily taken for one of this."""
        others = sorted(
            other for other, kinesis in self._regions.items() if kinesis.has_stream(stream)
        )
        is_noted = (region, stream) in self._noted or len(self._noted) >= _NOTES_MAX
        if is_noted or region in others or not others:
            return
        self._noted.add((region, stream))
        self._note(
            f"A request for stream {stream} in {region} finds none: it is in"
            f" {', '.join(others)}. Set the region of that client (AWS_REGION, aws.region)"
        )

    def make_room(self, entries: Sequence[PutEntry], now: WallTime) -> None:
        """Before a write is refused, trim the expired records of every stream of every region."""
        needed = sum(len(entry.data) + _ENTRY_OVERHEAD_BYTES for entry in entries)
        if not self.storage.has_room(needed):
            for kinesis in self._regions.values():
                for stream in kinesis.streams(now):
                    stream.trim(now)


class Kinesis:
    """Every operation of the embedded service in one region, with Python values.

    As in AWS, regions share no stream, no consumer and no token.
    """

    def __init__(
        self,
        settings: KinesisSettings,
        secret: bytes,
        *,
        beside: Kinesis | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`beside` is another region of the same account."""
        self.settings = settings
        self.tokens = Tokens(secret)
        self._secret = secret
        if beside is None:
            self.account = Account(settings.stored_bytes_max, note)
            self.account.keep(self)
        else:
            self.account = beside.account
        self.storage = self.account.storage
        self._streams: dict[str, Stream] = {}
        self._by_id: dict[int, Stream] = {}
        self._consumers: dict[int, StreamConsumers] = {}

    def in_region(self, region: str) -> Kinesis:
        """The same account in another region, or this one."""
        found = self.account.region(region)
        if found is None:
            settings = msgspec.structs.replace(self.settings, region=region)
            # Another secret: a token of one region is not valid in another.
            secret = blake2b(region.encode(), key=self._secret).digest()
            found = Kinesis(settings, secret, beside=self)
        return found

    # Streams

    def create_stream(
        self,
        name: str,
        shard_count: int,
        now: WallTime,
        *,
        record_bytes_max: int = RECORD_BYTES_DEFAULT,
        tags: dict[str, str] | None = None,
        mode: str = PROVISIONED,
    ) -> Stream:
        """Raises: Unavailable (exists), Throttled (too many streams or shards), InvalidRequest (its
        name or tags)."""
        if not _NAME.match(name):
            raise invalid_argument("StreamName must match [a-zA-Z0-9_.-]+ (1 to 128 characters).")
        self._forget_deleted(now)
        if name in self._streams:
            raise resource_in_use(
                f"Stream {name} under account {self.settings.account_id} already exists."
            )
        kept_tags: dict[str, str] = {}
        if tags:
            add_tags(kept_tags, tags)
        self._require_shards_left(shard_count)
        self._require_streams_left(mode, now)
        self.account.keep(self)
        stream = Stream(
            name,
            shard_count,
            self.settings,
            self.storage,
            now,
            record_bytes_max=record_bytes_max,
            mode=mode,
        )
        stream.tags.update(kept_tags)
        self._streams[name] = stream
        self._by_id[stream.stream_id] = stream
        self._consumers[stream.stream_id] = StreamConsumers(
            stream, self.settings.settle_s, self.settings.limits
        )
        return stream

    def delete_stream(self, stream: Stream, now: WallTime, *, with_consumers: bool = False) -> None:
        """Raises: Unavailable (ResourceInUse: it has consumers and may not lose them)."""
        consumers = self.consumers_of(stream)
        if len(consumers) and not with_consumers:
            raise resource_in_use(
                f"Stream {stream.name} under account {self.settings.account_id} has"
                f" {len(consumers)} registered consumers. Deregister them, or delete it with"
                " EnforceConsumerDeletion."
            )
        consumers.end_all()
        stream.delete(now)

    def streams(self, now: WallTime) -> list[Stream]:
        """In the order of their names."""
        self._forget_deleted(now)
        return [self._streams[name] for name in sorted(self._streams)]

    def stream(self, name: str | None, arn: str | None, now: WallTime) -> Stream:
        """By name, by ARN, or by both if they agree. Raises: NotFound, InvalidRequest."""
        self._forget_deleted(now)
        wanted = name if arn is None else arn.rpartition("/")[2]
        if wanted is None:
            raise invalid_argument("Either StreamName or StreamARN must be given.")
        if name not in (None, wanted):
            raise invalid_argument("StreamName and StreamARN name different streams.")
        stream = self._streams.get(wanted)
        if stream is None or arn not in (None, stream.arn):
            self.account.note_elsewhere(wanted, self.settings.region)
            raise resource_not_found(
                f"Stream {wanted} under account {self.settings.account_id} not found."
            )
        return stream

    def has_stream(self, name: str) -> bool:
        return name in self._streams

    def update_shard_count(self, stream: Stream, count: int, now: WallTime) -> None:
        """Raises: as `Stream.update_shard_count`, and Throttled for too many shards."""
        self._require_shards_left(count - len(stream.open_shards()))
        stream.update_shard_count(count, now)

    def split_shard(self, stream: Stream, shard_id: str, at: int, now: WallTime) -> None:
        """Raises: as `Stream.split`, and Throttled for too many shards."""
        self._require_shards_left(1)
        stream.split(shard_id, at, now)

    def set_retention(self, stream: Stream, hours: int, now: WallTime, *, longer: bool) -> None:
        """Raises: InvalidRequest if out of bounds or in the other direction, Unavailable."""
        current = int(stream.retention_s / _HOUR_S)
        if not RETENTION_HOURS_MIN <= hours <= RETENTION_HOURS_MAX:
            raise invalid_argument(
                f"RetentionPeriodHours {hours} must be between {RETENTION_HOURS_MIN} and"
                f" {RETENTION_HOURS_MAX}."
            )
        if (hours < current) if longer else (hours > current):
            word = "less" if longer else "greater"
            raise invalid_argument(
                f"Requested retention period ({hours} hours) for stream {stream.name} can not be"
                f" {word} than existing retention period ({current} hours)."
            )
        stream.change(now)
        stream.trim(now)  # what has expired does not come back with a longer retention
        stream.retention_s = hours * _HOUR_S

    @property
    def open_shard_count(self) -> int:
        return sum(len(stream.open_shards()) for stream in self._streams.values())

    # Consumers with enhanced fan-out

    def consumers_of(self, stream: Stream) -> StreamConsumers:
        return self._consumers[stream.stream_id]

    def consumers_by_arn(self, arn: str, now: WallTime) -> StreamConsumers:
        """The consumers of the stream that the ARN of a consumer names. Raises: NotFound."""
        stream_arn, mark, _ = arn.partition("/consumer/")
        if not mark:
            raise invalid_argument("ConsumerARN must be the ARN of a consumer.")
        return self.consumers_of(self.stream(None, stream_arn, now))

    def tags_of(self, arn: str, now: WallTime) -> dict[str, str]:
        """The tags of the stream or consumer of this ARN. Raises: NotFound."""
        if "/consumer/" in arn:
            return self.consumers_by_arn(arn, now).consumer(None, arn).tags
        return self.stream(None, arn, now).tags

    # Records

    def put(self, stream: Stream, entry: PutEntry, now: WallTime) -> PutResult:
        """Write one record. Raises: InvalidRequest, Throttled, NotFound (still being created)."""
        self._require_writable(stream, now)
        hash_key = check_entry(entry, stream.record_bytes_max, "the record")
        self.account.make_room([entry], now)
        shard_id, record = stream.put(entry.data, entry.partition_key or "", hash_key, now)
        return PutResult(record.sequence_number, shard_id)

    def put_many(
        self, stream: Stream, entries: Sequence[PutEntry], now: WallTime
    ) -> list[PutResult]:
        """Write in order; each record succeeds or is throttled separately.

        Raises: InvalidRequest for the whole request, before anything is written, if any record
        is malformed or too large; NotFound (still being created).
        """
        self._require_writable(stream, now)
        if not 1 <= len(entries) <= PUT_RECORDS_MAX:
            raise invalid_argument(f"PutRecords takes 1 to {PUT_RECORDS_MAX} records.")
        checked = [
            (entry, check_entry(entry, stream.record_bytes_max, f"Records[{index}]"))
            for index, entry in enumerate(entries)
        ]
        self.account.make_room(entries, now)
        results = []
        for entry, hash_key in checked:
            try:
                shard_id, record = stream.put(entry.data, entry.partition_key or "", hash_key, now)
            except Throttled as refusal:
                results.append(PutResult(error_code=refusal.code, error_message=str(refusal)))
            else:
                results.append(PutResult(record.sequence_number, shard_id))
        return results

    def iterator(
        self,
        stream: Stream,
        shard_id: str,
        kind: IteratorType,
        now: WallTime,
        *,
        sequence_number: str | None = None,
        timestamp: WallTime | None = None,
    ) -> str:
        """GetShardIterator. Raises: NotFound (no such shard), InvalidRequest."""
        shard = stream.shard(shard_id, now)
        position = iterators.position_of(
            shard, kind, now, sequence_number=sequence_number, timestamp=timestamp
        )
        return self.tokens.seal_iterator(
            iterators.IteratorPosition(stream.stream_id, shard.number, position), now
        )

    def fetch(
        self,
        token: str,
        limit: int,
        now: WallTime,
        *,
        arn: str | None = None,
    ) -> ReadPage:
        """GetRecords. Raises: ExpiredIterator, InvalidRequest, NotFound, Throttled."""
        if not 1 <= limit <= GET_RECORDS_MAX:
            raise invalid_argument(f"Limit {limit} must be between 1 and {GET_RECORDS_MAX}.")
        at = self.tokens.open_iterator(token, now)
        stream = self._by_id.get(at.stream_id)
        if stream is None:
            raise resource_not_found(
                "The stream this iterator belongs to does not exist any more in account"
                f" {self.settings.account_id}."
            )
        if arn is not None and arn != stream.arn:
            raise invalid_argument("StreamARN does not match the stream of the ShardIterator.")
        page = stream.read(at.shard, at.position, limit, now)
        following = None
        if page.next_position is not None:
            after = iterators.IteratorPosition(at.stream_id, at.shard, page.next_position)
            following = self.tokens.seal_iterator(after, now)
        return ReadPage(page.records, following, page.millis_behind_latest, page.children)

    # Shards

    def list_shards(
        self, stream: Stream, query: iterators.ShardQuery, count_max: int, now: WallTime
    ) -> ShardPage:
        """One page, with the token of the next one if there are more. Raises: InvalidRequest."""
        query.check()
        named = iterators.select(stream.shards(now), query, stream.horizon(now))
        if len(named) <= count_max:
            return ShardPage(named, None)
        page = named[:count_max]
        following = msgspec.structs.replace(query, after=page[-1].shard_id)
        token = iterators.PageToken(stream.stream_id, now, following)
        return ShardPage(page, self.tokens.seal_page(token))

    def list_more_shards(self, token: str, count_max: int, now: WallTime) -> ShardPage:
        """The next page. Raises: InvalidRequest (token expired or not ours), NotFound."""
        opened = self.tokens.open_page(token, now)
        self._forget_deleted(now)
        stream = self._by_id.get(opened.stream_id)
        if stream is None:
            raise resource_not_found("The stream of this NextToken does not exist any more.")
        return self.list_shards(stream, opened.query, count_max, now)

    def _forget_deleted(self, now: WallTime) -> None:
        for stream in [stream for stream in self._streams.values() if stream.is_gone(now)]:
            del self._streams[stream.name], self._by_id[stream.stream_id]
            del self._consumers[stream.stream_id]

    def _require_writable(self, stream: Stream, now: WallTime) -> None:
        if stream.status(now) in ("CREATING", "DELETING"):
            raise resource_not_found(
                f"Stream {stream.name} under account {self.settings.account_id} not found."
            )

    def _require_shards_left(self, more: int) -> None:
        used = self.open_shard_count
        if used + more > SHARDS_MAX:
            raise limit_exceeded(
                f"This request would exceed the shard limit for the account"
                f" {self.settings.account_id}. Current shard count for the account: {used}."
                f" Limit: {SHARDS_MAX}. Number of additional shards that would have resulted from"
                f" this request: {more}."
            )

    def _require_streams_left(self, mode: str, now: WallTime) -> None:
        streams = self._streams.values()
        if sum(stream.status(now) == "CREATING" for stream in streams) >= _CREATING_MAX:
            raise limit_exceeded(
                f"{_CREATING_MAX} streams of account {self.settings.account_id} are in the state"
                " CREATING, the most at one time."
            )
        if mode == ON_DEMAND and sum(stream.mode == ON_DEMAND for stream in streams) >= (
            ON_DEMAND_STREAMS_MAX
        ):
            raise limit_exceeded(
                f"Account {self.settings.account_id} has {ON_DEMAND_STREAMS_MAX} streams with the"
                " mode ON_DEMAND, the most that it can have."
            )
