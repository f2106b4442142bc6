"""`kclrun.read`: the records of a stream, for a script or a notebook.

The composition of the readers with the clients of `aws/`. `import kclrun` does not load this
module; the first use of the name does.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, Literal, Self, assert_never

from kclrun.aws.changes.stream import admin_of, reader_of
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.missing_streams import advised, is_of_stream
from kclrun.aws.patience import patiently
from kclrun.aws.stream_client import open_stream_client
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.codec.values import BY_NAME, Decode, decoding
from kclrun.config.changes import refuse_changes
from kclrun.config.load import settings_of
from kclrun.config.rules import refuse_embedded
from kclrun.config.schema import Settings
from kclrun.config.units import Duration, parse_instant
from kclrun.errors import DataLoss, NotFound, SettingsError
from kclrun.loading import load_decoder
from kclrun.model.record import Decoding, IteratorType, OwnStr, Record, StartPoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream import is_change_stream, region_of, spelled_out
from kclrun.model.time import Instant, WallTime
from kclrun.ports import StreamAdmin
from kclrun.reading.ends import FOR_EVER, ReadingEnd
from kclrun.reading.readers import (
    Arrived,
    Ended,
    EveryShardBegan,
    Expired,
    Passed,
    ReadEvent,
    StreamReaders,
    Trouble,
)
from kclrun.reading.starts import (
    Begin,
    ShardStart,
    first_listing,
    parse_from,
    parse_position,
    position_starts,
    shard_starts,
)

# Aggregates of so many records are opened at a time: one of 1 MiB may hold thousands.
_OPENED_AT_ONCE: Final = 100
# A request under way ends within the time-outs of its connection, 7 s.
_JOIN_MAX_S: Final = 10.0
_CAUGHT_UP: Final = "caught-up"

# A word, an instant, a duration; a position as `record.position`, or as its text.
Start = str | datetime
Position = ExtendedSequenceNumber | str | datetime


class ShardRecord(Record, frozen=True, gc=False):
    """A `Record`, and the shard that it was read from: `shard_id`, such as
    `shardId-000000000000`."""

    shard_id: OwnStr = ""


def read(  # noqa: PLR0913 - public: the arguments of a reading, by name
    stream: str,
    *,
    start: Start | Mapping[str, Position] = "TRIM_HORIZON",
    until: Literal["caught-up"] | Start | None = _CAUGHT_UP,
    shards: Sequence[str] = (),
    decode: Literal["json", "text", "msgpack"] | type | None = None,
    region: str | None = None,
    endpoint: str | None = None,
    profile: str | None = None,
    role_arn: str | None = None,
    start_timeout: str = "60s",
) -> Reading:
    """The records of a stream, one after the other, without a fleet: no lease, no table, no
    process, no checkpoint.

    >>> for record in kclrun.read("orders", start="1h"):
    ...     print(record.shard_id, record.position, record.arrived_at, record.data)

    `stream` is a name or an ARN. `start` is TRIM_HORIZON (the oldest record that the stream has),
    LATEST (from this call on), an instant as an aware datetime or as text, a duration (`"10m"` is
    ten minutes ago), or a mapping of shard ids to positions: reading goes on after them. A shard
    that the mapping does not name is read from its oldest record, unless a child of it is named.
    `until` is caught-up (up to the tip that the stream had at this call), an instant or a duration
    (records that arrived then or later are left out), or None: for ever. `shards` are the only
    ones to read, without their children. `decode` makes `record.value`. The other keywords are
    those of the settings' section `aws`.

    Guaranteed: every record once; those of a shard in their order, and those of a shard before
    those of its children, over splits and merges; aggregates of the KPL opened. Records of
    different shards come in any order. It ends only when every shard was read to its end or up to
    `until`; a shard that cannot be read is an error, and so are records that expire while it reads.

    A few threads read ahead, at most ten pages of 10 MiB. They use half of the five reads a second
    that a shard gives to all its readers. For one thread, and not across a fork.

    Raises: SettingsError for a wrong argument; NotFound, AccessDenied, InvalidRequest as the
    service says; Unavailable where it does not answer for `start_timeout`. The same while it is
    iterated, and there also Throttled, if a shard is throttled for that time, and DataLoss.
    """
    settings = _settings(
        stream,
        region=region,
        endpoint=endpoint,
        profile=profile,
        role_arn=role_arn,
        start_timeout=start_timeout,
    )
    made = _decoding(decode)
    began, now = Instant(time.monotonic()), WallTime(time.time())
    begin = _begin(start, now)
    end = _end(until, begin, began, now)
    if end.until_at is not None or _has_time(begin):
        refuse_changes(
            settings,
            "read from or until a time",
            "one of a DynamoDB table is read from"
            " TRIM_HORIZON, LATEST or a position, until caught-up or None",
        )
    named = [spelled_out(shard) for shard in ((shards,) if isinstance(shards, str) else shards)]
    return _opened(settings, begin, end, named, made)


class Reading(Iterator[ShardRecord]):
    """The records that `kclrun.read` reads: an iterator, and a context that closes it.

    >>> with kclrun.read("orders", start="LATEST", until=None) as records:
    ...     for record in itertools.islice(records, 100):
    ...         print(record.data)

    When it has ended, failed or is closed, its threads and connections are gone. One that is
    dropped unfinished closes by itself, within the time of a request.
    """

    def __init__(
        self, readers: StreamReaders, client: WireClient, records: Iterator[ShardRecord]
    ) -> None:
        self._open: tuple[StreamReaders, WireClient] | None = (readers, client)
        self._records = records
        self._failure: Exception | None = None
        self._is_closed = False
        self._drop = weakref.finalize(self, readers.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ShardRecord:
        try:
            return next(self._records)
        except StopIteration:
            if self._failure is not None:
                raise self._failure from None
            if self._is_closed:
                raise ValueError("the reading is closed: call kclrun.read again") from None
            self._release()
            raise
        except Exception as error:
            self._failure = copy.copy(error)  # without its traceback, which refers to all of it
            self._release()
            raise
        except BaseException:  # Ctrl-C may have taken a page that nothing gives again
            self.close()
            raise

    def close(self) -> None:
        """End the threads and connections. May be called twice."""
        self._is_closed = True
        self._records = iter(())
        self._release()

    def _release(self) -> None:
        """Nothing is referred to afterwards: botocore keeps a connection where it looked for
        credentials, until its session is collected."""
        opened, self._open = self._open, None
        if opened is not None:
            self._drop()
            _release(*opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _opened(
    settings: Settings,
    begin: StartPoint | Mapping[str, Begin],
    end: ReadingEnd,
    named: Sequence[str],
    made: Decoding | None,
) -> Reading:
    """List the shards and begin to read. Raises: SettingsError, a ServiceError leaf."""
    stream, patience_s = settings.only_stream, float(settings.aws.start_timeout)
    aws = EndpointSettings(
        region=settings.aws.region or region_of(stream),
        profile=settings.aws.profile,
        endpoint_url=settings.aws.endpoint,
    )
    client, endpoint = open_stream_client(stream, aws, role_arn=settings.aws.role_arn)
    readers = None
    try:
        admin = admin_of(client, stream)
        try:
            starts = _starts(admin, begin, named, patience_s)
        except NotFound as error:
            if not is_of_stream(error):
                raise
            raise advised(error, (stream,), endpoint, lambda: client) from None
        readers = StreamReaders(
            starts,
            reader_of(client, stream),
            admin,
            follows=not named,
            patience_s=patience_s,
            gives_up="each",
            end=end,
            may_be_listed=is_change_stream(stream),
        )
        readers.open()
        events = readers.events()
        from_now = any(start.start.kind is IteratorType.LATEST for start in starts.values())
        early = _until_begun(events) if from_now else deque()
    except BaseException:
        _release(readers, client)
        raise
    return Reading(readers, client, _records(early, events, starts, made))


def _release(readers: StreamReaders | None, client: WireClient) -> None:
    """End the threads, then their connections."""
    if readers is not None:
        readers.close()
        readers.join(_JOIN_MAX_S)
    client.close()


def _starts(
    admin: StreamAdmin,
    begin: StartPoint | Mapping[str, Begin],
    named: Sequence[str],
    patience_s: float,
) -> Mapping[str, ShardStart]:
    wanted = first_listing(begin) if isinstance(begin, StartPoint) else None
    deadline = Instant(time.monotonic() + patience_s)
    listed = patiently(lambda: admin.list_shards(wanted), deadline, patience_s)
    if isinstance(begin, StartPoint):
        return shard_starts(listed, named, begin)
    starts = position_starts(listed, begin)
    if not named:
        return starts
    chosen = shard_starts(listed, named, StartPoint(IteratorType.TRIM_HORIZON))
    return {shard_id: start for shard_id, start in starts.items() if shard_id in chosen}


def _until_begun(events: Iterator[ReadEvent | None]) -> deque[ReadEvent]:
    """What came before every shard had its iterator: from then on, each new record is read."""
    early: deque[ReadEvent] = deque()
    for event in events:
        if isinstance(event, EveryShardBegan):
            break
        if event is not None:
            early.append(event)
    return early


def _records(
    early: deque[ReadEvent],
    events: Iterator[ReadEvent | None],
    starts: Mapping[str, ShardStart],
    made: Decoding | None,
) -> Iterator[ShardRecord]:
    """The records of the events. It must not refer to the `Reading`, which is dropped before it."""
    after = {name: start.after for name, start in starts.items() if start.after is not None}
    for event in itertools.chain(_taken(early), events):
        match event:
            case Arrived(shard_id=shard_id, records=records):
                yield from _of_page(shard_id, records, after, made)
            case Ended(shard_id=shard_id, is_trimmed=True):
                raise DataLoss(
                    f"{shard_id} was trimmed before it was read to its end: the stream keeps its"
                    " records for a time (the retention), and that is over\n"
                    "Read faster, begin later, or raise the retention"
                )
            case Expired(shard_id=shard_id, text=text):
                raise DataLoss(f"{shard_id}: {text}")
            case EveryShardBegan() | Ended() | Passed() | Trouble() | None:
                pass
            case _:
                assert_never(event)


def _taken(early: deque[ReadEvent]) -> Iterator[ReadEvent]:
    while early:
        yield early.popleft()


def _of_page(
    shard_id: str,
    records: Sequence[Record],
    after: dict[str, ExtendedSequenceNumber],
    made: Decoding | None,
) -> Iterator[ShardRecord]:
    """The user records of a page, those up to the position in `after` left out."""
    for first in range(0, len(records), _OPENED_AT_ONCE):
        opened = open_aggregates(records[first : first + _OPENED_AT_ONCE])
        if (position := after.get(shard_id)) is not None:
            opened = drop_until(opened, position)
            if opened:
                del after[shard_id]
        for record in opened:
            yield ShardRecord(
                record.data,
                record.partition_key,
                record.sequence_number,
                record.approximate_arrival_timestamp,
                record.encryption_type,
                record.sub_sequence_number,
                record.explicit_hash_key,
                record.aggregated,
                record.malformed,
                made,
                shard_id,
            )


# The arguments.


def _settings(
    stream: str,
    *,
    region: str | None,
    endpoint: str | None,
    profile: str | None,
    role_arn: str | None,
    start_timeout: str,
) -> Settings:
    """The same rules as for the settings of an application. Raises: SettingsError."""
    given = {
        "stream": stream,
        "aws.region": region,
        "aws.endpoint": endpoint,
        "aws.profile": profile,
        "aws.role_arn": role_arn,
        "aws.start_timeout": start_timeout,
    }
    named = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    settings = settings_of(
        "application: read", named, environment={}, now=WallTime(time.time()), name="kclrun.read"
    )
    refuse_embedded(settings, 'endpoint="http://127.0.0.1:4567"')
    of_arn = region_of(stream)
    if of_arn is not None and region not in {None, of_arn}:
        raise SettingsError(f"region: the stream {stream} is in {of_arn}, not in {region}")
    return settings


def _text(value: object, name: str, also: str = "") -> str:
    """Raises: SettingsError for neither a text nor a datetime."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    raise SettingsError(f"{name}: expected a text or a datetime with a zone{also}, got {kind}")


def _begin(
    start: Start | Mapping[str, Position], now: WallTime
) -> StartPoint | Mapping[str, Begin]:
    if not isinstance(start, Mapping):
        return parse_from(_text(start, "start", ", or positions by shard id"), now, "start")
    begins: dict[str, Begin] = {}
    for shard, position in start.items():
        name = f"start[{shard!r}]"
        if isinstance(position, ExtendedSequenceNumber):
            begins[spelled_out(shard)] = parse_position(str(position), now, name)
        else:
            begins[spelled_out(shard)] = parse_position(_text(position, name), now, name)
    return begins


def _end(
    until: str | datetime | None,
    begin: StartPoint | Mapping[str, Begin],
    began: Instant,
    now: WallTime,
) -> ReadingEnd:
    if until is None:
        return FOR_EVER
    if until == _CAUGHT_UP:
        if isinstance(begin, StartPoint) and begin.kind is IteratorType.LATEST:
            raise SettingsError(
                "until: from LATEST there is nothing up to the tip\n"
                "Give until=None to read for ever, or an instant in the future"
            )
        return ReadingEnd(began_instant=began)
    until_at = _until_at(_text(until, "until"), now)
    is_before = isinstance(begin, StartPoint) and until_at <= _begins_at(begin, now)
    if is_before:
        raise SettingsError("until: is not after start, so there is nothing to read")
    return ReadingEnd(until_at=until_at)


_UNTIL_FORMS: Final = (
    "caught-up, None for ever, an instant such as 2026-03-01T06:00:00Z, or 10m for ten minutes ago"
)


def _until_at(text: str, now: WallTime) -> WallTime:
    try:
        return WallTime(now - Duration.parse(text))
    except ValueError:
        pass
    try:
        return parse_instant(text, _UNTIL_FORMS)
    except ValueError as error:
        raise SettingsError(f"until: {error}") from None


def _begins_at(begin: StartPoint, now: WallTime) -> float:
    match begin.kind:
        case IteratorType.LATEST:
            return now
        case _:
            return float("-inf") if begin.timestamp is None else begin.timestamp


def _has_time(begin: StartPoint | Mapping[str, Begin]) -> bool:
    begins = [begin] if isinstance(begin, StartPoint) else begin.values()
    return any(isinstance(point, StartPoint) and point.timestamp is not None for point in begins)


def _decoding(decode: str | type | None) -> Decoding | None:
    if decode is None:
        return None
    if isinstance(decode, str) and decode not in BY_NAME:
        words = ", ".join(sorted(BY_NAME))
        raise SettingsError(f"decode: expected {words} or a type, got {decode[:60]!r}")
    return decoding(load_decoder(decode, (), _no_registry))


def _no_registry() -> Decode:
    raise AssertionError("refused above")
