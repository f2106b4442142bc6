"""Reads the options of the source, as texts, into `SourceSettings`; refuses wrong ones. Pure.

`SourceSettings` lists the options. Other connectors' names are understood: startingPosition,
initialPosition, maxOffsetsPerTrigger; `from` and `to` are the two timestamps.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, TypeVar

import msgspec

from kclrun.config.convert import hint
from kclrun.config.units import ByteSize, Duration
from kclrun.errors import OffsetRefused, SettingsError
from kclrun.model.stream import why_no_endpoint
from kclrun.spark.positions import TRIM_HORIZON, Position, parse_position
from kclrun.spark.stream_set import parted

T = TypeVar("T")
N = TypeVar("N", int, int | None)

_SHOWN_MAX: Final = 60
_SWITCHES: Final = {"true": True, "false": False}
# Parts of the names that other connectors give to credentials (awsAccessKeyId, sessionToken, …).
_CREDENTIALS: Final = ("accesskey", "secret", "sessiontoken", "password", "credential")
_PREFIX: Final = "kinesis."


class OptionReader:
    """The options of a Spark reader or writer; read each one, then call `settle`.

    Options are texts by name; here they become types, and all problems are reported together.
    Spark passes option names lower-cased; the reader restores their own spelling. The value of an
    option that is unknown, or that looks like a credential, is never repeated.

    `what` names the reader or writer, such as "the kclrun source". `known` are the option names in
    the order of the documentation, `aliases` other spellings, `absent` the advice for options of
    other connectors that have no counterpart. A method that reads a wrong option notes the
    problem, under the name that the user gave, and returns the default.
    """

    def __init__(
        self,
        what: str,
        options: Mapping[str, str],
        known: Sequence[str],
        aliases: Mapping[str, str] | None = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        self._what = what
        self._problems: list[str] = []
        names = {name.lower(): name for name in known}
        names |= {alias.lower(): name for alias, name in (aliases or {}).items()}
        spellings = {each.lower(): each for each in (*known, *(aliases or {}))}
        self._absent = {name.lower(): (name, why) for name, why in (absent or {}).items()}
        self._called: dict[str, str] = {}
        self._given: dict[str, str] = {}
        for key in sorted(options):
            name = names.get(key.lower())
            if name is None:
                self._note_unknown(key, known)
            elif name in self._given:
                self.refuse(name, f"is given twice: {key} says the same")
            else:
                self._given[name] = options[key]
                self._called[name] = spellings[key.lower()]

    def text(self, name: str) -> str | None:
        """The option's text; None if the option was not given."""
        return self._given.get(name)

    def refuse(self, name: str, why: str) -> None:
        """Note a problem of an option."""
        self._problems.append(f"{self._called.get(name, name)}: {why}")

    def choice(self, name: str, words: Mapping[str, T], default: T) -> T:
        """One of some words, in any case."""
        *others, last = words
        expected = f"{', '.join(others)} or {last}" if others else last
        by_word = {word.lower(): value for word, value in words.items()}

        def read(text: str) -> T:
            if text.lower() not in by_word:
                raise ValueError(f"expected {expected}")
            return by_word[text.lower()]

        return self.read(name, read, default)

    def switch(self, name: str, *, default: bool) -> bool:
        """true or false."""
        return self.choice(name, _SWITCHES, default)

    def duration_s(self, name: str, default: float, least: str, most: str) -> float:
        """A duration between two others, all in the usual notation: `250ms`, `1m30s`."""

        def read(text: str) -> float:
            value = Duration.parse(text.strip())
            if not Duration.parse(least) <= value <= Duration.parse(most):
                raise ValueError(f"expected {least} to {most}")
            return float(value)

        return self.read(name, read, default)

    def size_bytes(self, name: str, default: N, least: int, most: int) -> N:
        """A size such as `64MiB`, between two others in bytes."""

        def read(text: str) -> int:
            value = ByteSize.parse(text.strip())
            if not least <= value <= most:
                raise ValueError(f"expected {ByteSize(least).text} to {ByteSize(most).text}")
            return int(value)

        return self.read(name, read, default)

    def whole(self, name: str, default: N, least: int, most: int) -> N:
        """A whole number between two others."""

        def read(text: str) -> int:
            if not text.strip().isdecimal() or not least <= int(text) <= most:
                raise ValueError(f"expected a whole number from {least} to {most}")
            return int(text)

        return self.read(name, read, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number between two others."""
        expected = f"expected a number from {least:g} to {most:g}"

        def read(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(expected) from None
            if not least <= value <= most:  # also refuses nan
                raise ValueError(expected)
            return value

        return self.read(name, read, default)

    def read(self, name: str, reading: Callable[[str], T], default: T) -> T:
        """The option through `reading`; its ValueError or SettingsError becomes a problem."""
        text = self._given.get(name)
        if text is None:
            return default
        try:
            return reading(text)
        except (ValueError, SettingsError) as error:
            told = str(error)
            got = "" if "got " in told else f", got {_shown(text)}"
            self.refuse(name, f"{told}{got}")
            return default

    def settle(self) -> None:
        """Raises: SettingsError with all problems, one a line."""
        if len(self._problems) == 1:
            raise SettingsError(f"{self._what} cannot be used: {self._problems[0]}")
        if self._problems:
            told = "\n  ".join(self._problems)
            raise SettingsError(f"{self._what} cannot be used:\n  {told}")

    def _note_unknown(self, key: str, known: Sequence[str]) -> None:
        flat = key.lower().replace("_", "").replace("-", "").replace(".", "")
        if any(word in flat for word in _CREDENTIALS):
            self.refuse(
                key,
                "credentials are no options, they would stand in query plans; leave it out and"
                " give them to the processes (environment, profile, instance or pod role), or"
                " name a role in roleArn",
            )
        elif key.lower() in self._absent:
            self.refuse(*self._absent[key.lower()])
        elif key.lower() == "path":
            self.refuse(key, "a stream has none: name the stream in streamName, and load nothing")
        else:
            self.refuse(key, f"no such option{hint(key.lower().removeprefix(_PREFIX), known)}")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!r}…"


# The typed options of source and sink.
#
# Pure values; texts become these values here (source) and in `sink/columns.py` (sink). A secret has
# no field here: these values appear in plans.
class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, or several, and how to reach it; each process takes credentials from its own chain.

    `stream` is a name or an ARN, or several names in order, separated by commas.
    """

    stream: str
    region: str | None = None
    endpoint_url: str | None = None
    role_arn: str | None = None
    role_external_id: str | None = None
    role_session_name: str | None = None

    @property
    def name(self) -> str:
        """The stream's bare name; with several streams all names, separated by commas."""
        return self.stream.rpartition("/")[2]

    @property
    def several(self) -> tuple[str, ...]:
        """The names of several streams, in order; empty for one stream."""
        return tuple(self.stream.split(",")) if "," in self.stream else ()

    def each(self) -> tuple[Reached, ...]:
        """Each stream as a value of its own."""
        parts = (msgspec.structs.replace(self, stream=each) for each in self.several)
        return tuple(parts) or (self,)

    def named(self, shard: str) -> tuple[str, str]:
        """The stream's name and the shard's own id, from the name in ranges and offsets."""
        stream, shard_id = parted(shard)
        return stream or self.name, shard_id


class StartKind(enum.Enum):
    """The kind of place where a query without a checkpoint begins, or where a batch read ends."""

    LATEST = "latest"
    EARLIEST = "earliest"
    TIMESTAMP = "a timestamp"
    POSITIONS = "positions by shard"
    LEASES = "the checkpoints of a lease table"


class LeasesAt(msgspec.Struct, frozen=True):
    """A lease table and its DynamoDB endpoint; `endpoint_url` None means the same as the stream."""

    table: str
    endpoint_url: str | None = None


class Start(msgspec.Struct, frozen=True):
    """A kind, with the time (milliseconds since the epoch), the positions or the table it needs.

    `positions` may name `"*"` for every shard that it does not list.
    """

    kind: StartKind
    timestamp_ms: int = 0
    positions: Mapping[str, Position] = {}
    leases: LeasesAt | None = None


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All options of the source, in types; units last.

        streamName or streamARN                        required; names with commas are several
                                                       streams, the ARN names the region
        region, endpointUrl                            from the ARN, else the AWS chain
        roleArn, roleExternalId, roleSessionName       a role to assume
        startingOffsets                                latest, earliest or JSON: position by shard
        startingTimestamp                              an ISO-8601 instant, or milliseconds
        startingLeases                                 an application of the fleet (its lease table)
        startingLeasesEndpointUrl                      DynamoDB, where it is not AWS's own
        endingOffsets, endingTimestamp                 the same for the end of a batch read
        failOnDataLoss                                 true
        maxRecordsPerTrigger, maxBytesPerTrigger       none, 64MiB for each shard read at once
        targetBatchDuration, pollInterval              30s, 1s
        maxReadsPerSecondPerShard                      2.5
        shardsPerTask, maxPartitions                   8, none
        inlineMaxBytes                                 512KiB
        alignShards, deaggregate                       true
        shardListInterval                              10s
        retryAttempts, retryBackoffMax                 without end, 3s
        consumerMode                                   polling

    `bytes_per_trigger_max` None is 64 MiB for every shard that is read.
    """

    reached: Reached
    start: Start = Start(StartKind.LATEST)
    end: Start = Start(StartKind.LATEST)
    fails_on_data_loss: bool = True
    records_per_trigger_max: int | None = None
    bytes_per_trigger_max: int | None = None
    target_batch_s: float = 30.0
    poll_interval_s: float = 1.0
    reads_per_second_max: float = 2.5
    shards_per_task: int = 8
    partitions_max: int | None = None
    inline_bytes_max: int = 512 * 1024
    aligns_shards: bool = True
    opens_aggregates: bool = True
    shard_list_interval_s: float = 10.0
    retry_attempts: int | None = None
    retry_backoff_max_s: float = 3.0


# The options that source and sink share: the stream and how to reach it.
REACHED_NAMES: Final = (
    "streamName",
    "streamARN",
    "region",
    "endpointUrl",
    "roleArn",
    "roleExternalId",
    "roleSessionName",
)
NAMES: Final = (
    *REACHED_NAMES,
    "startingOffsets",
    "startingTimestamp",
    "startingLeases",
    "startingLeasesEndpointUrl",
    "endingOffsets",
    "endingTimestamp",
    "failOnDataLoss",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "targetBatchDuration",
    "pollInterval",
    "maxReadsPerSecondPerShard",
    "shardsPerTask",
    "maxPartitions",
    "inlineMaxBytes",
    "alignShards",
    "deaggregate",
    "shardListInterval",
    "retryAttempts",
    "retryBackoffMax",
    "consumerMode",
)
ALIASES: Final = {
    "startingPosition": "startingOffsets",
    "initialPosition": "startingOffsets",
    "maxOffsetsPerTrigger": "maxRecordsPerTrigger",
    "from": "startingTimestamp",
    "to": "endingTimestamp",
}
# Options of Kafka's source that would otherwise be taken for misspelt limits.
_ABSENT: Final = {
    "minOffsetsPerTrigger": "a batch has no least size here: give the query a longer trigger",
    "maxTriggerDelay": "a batch has no least size here, so none is waited for: give the query a"
    " longer trigger",
    "minPartitions": "a shard is read by one task: shardsPerTask=1 gives each one of its own",
    "subscribe": "name the stream in streamName, or several with commas",
    "subscribePattern": "name the streams in streamName, with commas",
}

_STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_STREAM_ARN: Final = re.compile(
    r"arn:[a-z0-9-]+:kinesis:([a-z0-9-]+):\d{12}:stream/[A-Za-z0-9_.-]{1,128}\Z"
)
_TABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}\Z")
_SHARD_ID: Final = re.compile(r"shardId-[0-9]{12}\Z")
# Every shard is listed, looked at and named in each offset; use further queries for more streams.
_STREAMS_MAX: Final = 64
_WORDS: Final = {
    "latest": StartKind.LATEST,
    "earliest": StartKind.EARLIEST,
    "trim_horizon": StartKind.EARLIEST,
}
# One batch is planned in memory, one position a shard: far more than a day of the largest stream.
_RECORDS_MAX: Final = 10**12
_BYTES_MAX: Final = 2**50
# The limit of the rows that travel with a batch's plan, for all shards together (measured: a
# trigger takes 83 ms longer at 8 MB than at 2 MB).
_INLINE_MAX: Final = 4 * 2**20
# A task opens eight shards at once; with more shards than this they wait for each other too long.
_SHARDS_A_TASK_MAX: Final = 1_000
_PARTITIONS_MAX: Final = 100_000
_ATTEMPTS_MAX: Final = 1_000_000
# The service serves five GetRecords a second and shard, for all applications together.
_READS_MAX: Final = 5.0
_READS_MIN: Final = 0.1
# 9999-12-31T23:59:59Z: the last second of `datetime`.
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_000


class Use(enum.Enum):
    """The purpose of the options. EITHER checks only errors that are wrong for both others."""

    STREAM = "spark.readStream"
    BATCH = "spark.read"
    EITHER = "reading"


def read_source_options(options: Mapping[str, str], use: Use) -> SourceSettings:
    """The settings from the options; names in any case.

    Raises: SettingsError naming every option that is unknown, missing, wrong or not for this use.
    """
    given = OptionReader("the kclrun source", options, NAMES, ALIASES, _ABSENT)
    _refuse_what_is_not_there_yet(given)
    reached = read_reached(given, takes_several=True)
    start, end = _start(given, use), _end(given, use)
    for option, place in (("startingOffsets", start), ("endingOffsets", end)):
        _check_names(given, option, place, reached)
    settings = SourceSettings(
        reached=reached,
        start=start,
        end=end,
        fails_on_data_loss=given.switch("failOnDataLoss", default=True),
        records_per_trigger_max=given.whole("maxRecordsPerTrigger", None, 1, _RECORDS_MAX),
        bytes_per_trigger_max=given.size_bytes("maxBytesPerTrigger", None, 1, _BYTES_MAX),
        target_batch_s=given.duration_s("targetBatchDuration", 30.0, "100ms", "1h"),
        # Kept iterators live five minutes; the service allows five reads a second.
        poll_interval_s=given.duration_s("pollInterval", 1.0, "200ms", "1m"),
        reads_per_second_max=given.number("maxReadsPerSecondPerShard", 2.5, _READS_MIN, _READS_MAX),
        shards_per_task=given.whole("shardsPerTask", 8, 1, _SHARDS_A_TASK_MAX),
        partitions_max=given.whole("maxPartitions", None, 1, _PARTITIONS_MAX),
        inline_bytes_max=given.size_bytes("inlineMaxBytes", 512 * 1024, 0, _INLINE_MAX),
        aligns_shards=given.switch("alignShards", default=True),
        opens_aggregates=given.switch("deaggregate", default=True),
        shard_list_interval_s=given.duration_s("shardListInterval", 10.0, "1s", "10m"),
        retry_attempts=given.whole("retryAttempts", None, 1, _ATTEMPTS_MAX),
        retry_backoff_max_s=given.duration_s("retryBackoffMax", 3.0, "100ms", "5m"),
    )
    given.settle()
    return settings


def read_reached(given: OptionReader, *, takes_several: bool = False) -> Reached:
    """The stream and how to reach it: the options that source and sink share.

    `takes_several`: several names form one source; a sink puts into one stream. Problems are noted
    in `given`; this function does not raise.
    """
    endpoint_url = given.text("endpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("endpointUrl", f"expected an https URL: {wrong}")
    role_arn = given.text("roleArn")
    for name in ("roleExternalId", "roleSessionName"):
        if role_arn is None and given.text(name) is not None:
            given.refuse(name, "is for a role: name that in roleArn")
    return Reached(
        stream=_stream(given, takes_several=takes_several),
        region=given.text("region"),
        endpoint_url=endpoint_url,
        role_arn=role_arn,
        role_external_id=given.text("roleExternalId"),
        role_session_name=given.text("roleSessionName"),
    )


def _stream(given: OptionReader, *, takes_several: bool) -> str:
    name, arn = given.text("streamName"), given.text("streamARN")
    if (name is None) == (arn is None):
        why = "is needed, or streamARN" if name is None else "and streamARN are two names for one"
        given.refuse("streamName", why)
    text = arn or name or ""
    if arn is None and name is not None and "," in name:
        if takes_several:
            return _streams(given, name)
        given.refuse("streamName", "one stream: rows are put into each with a write of its own")
    elif name is not None and arn is None and name.startswith("arn:"):
        given.refuse("streamName", "this is an ARN: give it as streamARN")
    elif name is not None and not _STREAM_NAME.match(name):
        given.refuse("streamName", "expected letters, digits, '_', '.' and '-', at most 128")
    if arn is not None:
        _check_arn(given, arn)
    return text


def _streams(given: OptionReader, text: str) -> str:
    """Several streams, sorted by name whatever the order in the option."""
    names = [each.strip() for each in text.split(",")]
    if wrong := [each for each in names if not _STREAM_NAME.match(each)]:
        given.refuse(
            "streamName",
            f"expected names with commas between them, not {wrong[0][:40]!r}: letters, digits,"
            " '_', '.' and '-', at most 128; several streams have no ARNs here",
        )
    elif len(set(names)) < len(names):
        given.refuse("streamName", "names a stream twice")
    elif len(names) > _STREAMS_MAX:
        given.refuse("streamName", f"names {len(names)} streams: at most {_STREAMS_MAX}")
    return ",".join(sorted(names))


def _check_arn(given: OptionReader, arn: str) -> None:
    match = _STREAM_ARN.match(arn)
    if match is None:
        expected = "arn:aws:kinesis:<region>:<account>:stream/<name>"
        more = "; several streams are named in streamName" if "," in arn else ""
        given.refuse("streamARN", f"expected {expected}{more}")
    elif given.text("region") not in {None, match[1]}:
        given.refuse("region", f"the stream's ARN says {match[1]}: leave region out")


def _refuse_what_is_not_there_yet(given: OptionReader) -> None:
    mode = given.text("consumerMode")
    if mode is not None and mode.lower() != "polling":
        given.refuse(
            "consumerMode", "only polling so far; enhanced fan-out comes with a later version"
        )


def _start(given: OptionReader, use: Use) -> Start:
    usual = Start(StartKind.EARLIEST if use is Use.BATCH else StartKind.LATEST)
    start = _leases(given, _place(given, "starting", usual))
    if use is Use.BATCH and start.kind is StartKind.LATEST:
        given.refuse("startingOffsets", "a batch read that starts at latest reads nothing")
    return start


def _leases(given: OptionReader, otherwise: Start) -> Start:
    table, endpoint_url = given.text("startingLeases"), given.text("startingLeasesEndpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("startingLeasesEndpointUrl", f"expected an https URL: {wrong}")
    if table is None:
        if endpoint_url is not None:
            given.refuse("startingLeasesEndpointUrl", "is for a lease table: name startingLeases")
        return otherwise
    for name in ("startingOffsets", "startingTimestamp"):
        if given.text(name) is not None:
            given.refuse("startingLeases", f"and {name} say the same thing: give one of them")
    if not _TABLE_NAME.match(table):
        given.refuse(
            "startingLeases",
            "expected an application, or its lease table where that has another name: 3 to 255"
            " letters, digits, '_', '.' and '-'",
        )
    return Start(StartKind.LEASES, leases=LeasesAt(table, endpoint_url))


def _end(given: OptionReader, use: Use) -> Start:
    end = _place(given, "ending", Start(StartKind.LATEST))
    if use is Use.STREAM:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.text(name) is not None:
                given.refuse(name, "a stream has no end; this is for spark.read")
    if end.kind is StartKind.EARLIEST:
        given.refuse("endingOffsets", "a batch read that ends at earliest reads nothing")
    return end


def _place(given: OptionReader, which: str, usual: Start) -> Start:
    offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
    if given.text(offsets) is not None and given.text(timestamp) is not None:
        given.refuse(offsets, f"and {timestamp} say the same thing: give one of them")
    placed = given.read(offsets, lambda text: _offsets(text, timestamp), usual)
    return given.read(timestamp, _timestamp, placed)


def _offsets(text: str, timestamp: str) -> Start:
    if text.lstrip().startswith("{"):
        return Start(StartKind.POSITIONS, positions=_positions(text))
    kind = _WORDS.get(text.strip().lower())
    if kind is None:
        if text.lower().startswith("at_timestamp"):
            raise ValueError(f"a time is given in {timestamp}")
        raise ValueError(
            "expected latest, earliest or JSON with positions by shard"
            f"{hint(text.strip(), ('latest', 'earliest'))}"
        )
    return Start(kind)


def _positions(text: str) -> dict[str, Position]:
    try:
        plain = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(
            f'expected JSON such as {{"shardId-000000000000": "TRIM_HORIZON"}} ({error})'
        ) from None
    if not plain:
        raise ValueError('expected at least one shard, or "*" for every shard')
    for shard in plain:
        if shard != "*" and not _SHARD_ID.match(parted(shard)[1]):
            raise ValueError(f'expected shard ids and "*", not {shard[:40]!r}')
    return {shard_id: _position(shard_id, place) for shard_id, place in plain.items()}


def _check_names(given: OptionReader, option: str, place: Start, reached: Reached) -> None:
    """Notes shards whose names do not fit the source, for one stream or several."""
    streams = set(reached.several) or {""}
    unknown = [each for each in place.positions if each != "*" and parted(each)[0] not in streams]
    if unknown and reached.several:
        example = f"{reached.several[0]}:{parted(unknown[0])[1]}"
        given.refuse(
            option, f"of several streams, a shard is named with its own: {example!r}, for example"
        )
    elif unknown:
        given.refuse(option, f'expected shard ids and "*", not {unknown[0][:40]!r}')


def _position(shard_id: str, text: str) -> Position:
    if text.lower() in {"earliest", "trim_horizon"}:
        return TRIM_HORIZON
    try:
        return parse_position(text)
    except OffsetRefused as error:
        raise ValueError(f"{shard_id}: {error}") from None


def _timestamp(text: str) -> Start:
    stripped = text.strip()
    at_ms = int(stripped) if stripped.isdecimal() else _instant_ms(stripped)
    if not 0 <= at_ms <= _TIMESTAMP_MS_MAX:
        raise ValueError("expected a time between the years 1970 and 9999")
    return Start(StartKind.TIMESTAMP, timestamp_ms=at_ms)


def _instant_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "expected an instant such as 2026-03-01T06:00:00Z, or milliseconds since the epoch"
        ) from None
    if moment.tzinfo is None:
        raise ValueError("the time zone is missing; add Z for UTC, or +01:00")
    return round(moment.timestamp() * 1000)
