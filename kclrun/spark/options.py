"""The options of source and sink, and the settings that they become; wrong ones are refused. Pure.

The fields declare the options. Other connectors' names are understood: startingPosition,
initialPosition, maxOffsetsPerTrigger; `from` and `to` are the two timestamps. A secret has no field
here: these values appear in plans.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kclrun.model.names import hint
from kclrun.model.quotas import RECORD_BYTES_LARGEST, SHARD_READ_CALLS_MAX
from kclrun.model.stream import why_no_endpoint
from kclrun.model.table import TABLE, TABLE_ARN
from kclrun.spark import option_table, other_connectors
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.other_connectors import ALIASES
from kclrun.spark.positions import Position
from kclrun.spark.start_texts import instant_ms, positions_of
from kclrun.spark.stream_set import parted


class StreamAddress(msgspec.Struct, frozen=True, kw_only=True):
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

    def each(self) -> tuple[StreamAddress, ...]:
        """Each stream as a value of its own."""
        parts = (msgspec.structs.replace(self, stream=name) for name in self.several)
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

    `positions` may name `"*"` for every shard that it does not list. `streams` are those of the
    offset of a query that the positions are from; empty for positions that a person gave.
    """

    kind: StartKind
    timestamp_ms: int = 0
    positions: Mapping[str, Position] = {}
    streams: Mapping[str, StreamIs] = {}
    leases: LeasesAt | None = None


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
_READS_MAX: Final = float(SHARD_READ_CALLS_MAX)
_READS_MIN: Final = 0.1


_CONSUMER: Final = re.compile(
    r"([A-Za-z0-9_.-]{1,128}|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128}"
    r"/consumer/[A-Za-z0-9_.-]{1,128}:\d+)\Z"
)


def _consumer(given: object) -> str:
    text = option_table.text_of(given).strip()
    if not _CONSUMER.match(text):
        raise ValueError("expected a consumer's name (letters, digits, '_', '.', '-') or its ARN")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """The settings of the source; units last.

    `bytes_per_trigger_max` None is 64 MiB for every shard that is read at once.
    """

    reached: StreamAddress
    start: Start = field(
        default=Start(StartKind.LATEST),
        metadata=option_table.by_hand(
            option_table.Option(
                "startingOffsets",
                'or JSON: `{"shardId-000000000000": "4959…", "*": "TRIM_HORIZON"}`, after that'
                " record; `@4959…` before it; of several streams `orders:shardId-…`. Or the"
                " `endOffset` of a query's progress: go on where it was",
                shown="`latest`; a batch: `earliest`",
            ),
            option_table.Option(
                "startingTimestamp", "an ISO-8601 instant with its zone, or milliseconds"
            ),
            option_table.Option(
                "startingLeases",
                "an application of the fleet, or its lease table where that has another name: begin"
                " at its checkpoints",
            ),
            option_table.Option(
                "startingLeasesEndpointUrl",
                "where DynamoDB answers for that table",
                shown="AWS; on an emulator of this machine `endpointUrl`",
            ),
        ),
    )
    end: Start = field(
        default=Start(StartKind.LATEST),
        metadata=option_table.by_hand(
            option_table.Option("endingOffsets", "the end of a batch read", shown="`latest`"),
            option_table.Option("endingTimestamp", "the same, as a time"),
        ),
    )
    fails_on_data_loss: bool = option_table.option(
        "failOnDataLoss",
        option_table.SWITCH,
        "records that expired unread end the query; `false`: a warning",
        default=True,
    )
    records_per_trigger_max: int | None = option_table.option(
        "maxRecordsPerTrigger",
        option_table.whole(1, _RECORDS_MAX),
        "soft, in Kinesis records",
        default=None,
        shown="none",
    )
    bytes_per_trigger_max: int | None = option_table.option(
        "maxBytesPerTrigger",
        option_table.size(1, _BYTES_MAX),
        "soft, in bytes of Kinesis records",
        default=None,
        shown="64MiB a shard",
    )
    target_batch_s: float = option_table.option(
        "targetBatchDuration",
        option_table.duration("100ms", "1h"),
        "behind the tip, batches grow and shrink towards this",
        default=30.0,
    )
    # Kept iterators live five minutes; the service allows five reads a second.
    poll_interval_s: float = option_table.option(
        "pollInterval",
        option_table.duration("200ms", "1m"),
        "how often the tip is looked for; 200ms or more",
        default=1.0,
    )
    reads_per_second_max: float = option_table.option(
        "maxReadsPerSecondPerShard",
        option_table.number(_READS_MIN, _READS_MAX),
        "of the five that all readers of a shard share",
        default=2.5,
    )
    shards_per_task: int = option_table.option(
        "shardsPerTask",
        option_table.whole(1, _SHARDS_A_TASK_MAX),
        "how many shards one task reads, at once",
        default=8,
    )
    partitions_max: int | None = option_table.option(
        "maxPartitions",
        option_table.whole(1, _PARTITIONS_MAX),
        "the most tasks of a batch",
        default=None,
        shown="none",
    )
    inline_bytes_max: int = option_table.option(
        "inlineMaxBytes",
        option_table.size(0, _INLINE_MAX),
        "rows that the driver has read anyway travel with the plan; `0`: none",
        default=512 * 1024,
    )
    aligns_shards: bool = option_table.option(
        "alignShards",
        option_table.SWITCH,
        "behind the tip, all shards are read up to the same arrival time",
        default=True,
    )
    opens_aggregates: bool = option_table.option(
        "deaggregate",
        option_table.SWITCH,
        "KPL aggregates come as their user records",
        default=True,
    )
    shard_list_interval_s: float = option_table.option(
        "shardListInterval",
        option_table.duration("1s", "10m"),
        "how often the shards are listed",
        default=10.0,
    )
    consumer_mode: str = option_table.option(
        "consumerMode",
        # `efo` is Databricks' word.
        option_table.choice({"polling": "polling", "fan-out": "fan-out"}, {"efo": "fan-out"}),
        "`fan-out`: a stream's records are pushed to the driver within milliseconds; what is behind"
        " the tip, batch reads and AvailableNow are polled",
        default="polling",
    )
    consumer: str | None = option_table.option(
        "consumerName",
        option_table.Kind(_consumer),
        "with `fan-out`: the registered consumer, or its ARN, one for each query; it is registered"
        " on first use, and never removed",
        default=None,
        shown="none",
    )
    retry_attempts: int | None = option_table.option(
        "retryAttempts",
        option_table.whole(1, _ATTEMPTS_MAX),
        "attempts of one request, then the task fails",
        default=None,
        shown="without end",
    )
    retry_backoff_max_s: float = option_table.option(
        "retryBackoffMax",
        option_table.duration("100ms", "5m"),
        "the longest pause between attempts",
        default=3.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkSettings:
    """The settings of the sink; units last.

    `keeps_order`: a request holds one record of a key. `give_up_after_s`: the time for which a
    shard, or the service, may accept nothing before a task fails; Spark then tries it again. Two
    minutes are twelve of the flow control's longest pauses: the tasks of a query compete for a
    throttled shard.
    """

    reached: StreamAddress
    keeps_order: bool = option_table.option(
        "ordering",
        option_table.choice({"key": True, "none": False}),
        "records of a key never overtake each other; `none`: a refused record may be overtaken",
        default=True,
    )
    aggregates: bool = option_table.option(
        "aggregate",
        option_table.SWITCH,
        "`true` packs the records of a key into KPL aggregates: for few keys with many records",
        default=False,
    )
    record_bytes_max: int | None = option_table.option(
        "maxRecordBytes",
        option_table.size(1024, RECORD_BYTES_LARGEST),
        "of a record and its key. Unset, a task asks for the stream's limit above 1 MiB",
        default=None,
        shown="the stream's",
    )
    # A throttled shard gets a request at least every 10 s: a shorter limit would give it up.
    give_up_after_s: float = option_table.option(
        "giveUpAfter",
        option_table.duration("15s", "1h"),
        "a task fails when a shard takes nothing for so long",
        default=120.0,
    )


# The options that source and sink share: the stream and how to reach it.
STREAM_OPTIONS: Final = (
    option_table.Option(
        "streamName",
        "the stream; it or `streamARN` is needed. `orders,returns` are several streams of one"
        " account and region",
    ),
    option_table.Option("streamARN", "the stream, with its region"),
    option_table.Option("region", "where the stream is", shown="the ARN's, or the AWS chain"),
    option_table.Option("endpointUrl", "where Kinesis answers", shown="AWS"),
    option_table.Option(
        "roleArn",
        "a role to assume. Keys are not options: they would stand in the plan",
        shown="the AWS chain",
    ),
    option_table.Option(
        "roleExternalId",
        "of that role. It stands in the plan, unless `spark.sql.redaction.options.regex` matches it"
        " (`(?i)url|externalid` in sessions that kclrun opens)",
    ),
    option_table.Option("roleSessionName", "of that role"),
)
SOURCE_OPTIONS: Final = (*STREAM_OPTIONS, *option_table.options_of(SourceSettings))
SINK_OPTIONS: Final = (*STREAM_OPTIONS, *option_table.options_of(SinkSettings))
_STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_STREAM_ARN: Final = re.compile(
    r"arn:[a-z0-9-]+:kinesis:([a-z0-9-]+):\d{12}:stream/[A-Za-z0-9_.-]{1,128}\Z"
)
_TABLE_NAME: Final = re.compile(rf"({TABLE}|{TABLE_ARN})\Z")
# Every shard is listed, looked at and named in each offset; use further queries for more streams.
_STREAMS_MAX: Final = 64
_WORDS: Final = {
    "latest": StartKind.LATEST,
    "earliest": StartKind.EARLIEST,
    "trim_horizon": StartKind.EARLIEST,
}


class Use(enum.Enum):
    """The purpose of the options. EITHER checks only errors that are wrong for both others."""

    STREAM = "spark.readStream"
    BATCH = "spark.read"
    EITHER = "reading"


def read_source_options(options: option_table.Given, use: Use) -> SourceSettings:
    """The settings from the options; names in any case. A `Start` or `Duration` is taken as it is.

    Raises: SettingsError naming every option that is unknown, missing, wrong or not for this use.
    """
    names = [option.name for option in SOURCE_OPTIONS]
    given = option_table.OptionReader(
        "the kclrun source", options, names, ALIASES, other_connectors.OF_SOURCES
    )
    reached = read_reached(given, takes_several=True)
    start, end = _start(given, use), _end(given, use)
    for name, place in (("startingOffsets", start), ("endingOffsets", end)):
        _check_names(given, name, place, reached)
    more = given.values(SourceSettings)
    _check_consumer(given, more["consumer_mode"], more["consumer"], reached)
    given.settle()
    return SourceSettings(reached=reached, start=start, end=end, **more)


def source_texts(settings: SourceSettings) -> dict[str, str]:
    """The options for Spark, as texts: `read_source_options` reads them as these settings."""
    reached, start = settings.reached, settings.start
    named = "streamARN" if reached.stream.startswith("arn:") else "streamName"
    texts = {
        named: reached.stream,
        "region": reached.region,
        "endpointUrl": reached.endpoint_url,
        "roleArn": reached.role_arn,
        "roleExternalId": reached.role_external_id,
        "roleSessionName": reached.role_session_name,
    }
    match start.kind:
        case StartKind.LATEST | StartKind.EARLIEST:
            texts["startingOffsets"] = start.kind.value
        case StartKind.TIMESTAMP:
            texts["startingTimestamp"] = str(start.timestamp_ms)
        case StartKind.POSITIONS:
            texts["startingOffsets"] = msgspec.json.encode(_by_shard(start)).decode()
        case StartKind.LEASES:
            assert start.leases is not None, "the kind needs it"
            texts["startingLeases"] = start.leases.table
            texts["startingLeasesEndpointUrl"] = start.leases.endpoint_url
    return {name: text for name, text in texts.items() if text is not None} | option_table.texts_of(
        settings
    )


def _by_shard(start: Start) -> dict[str, Any]:
    if start.streams:
        return encode_offset(Offset(streams=start.streams, shards=start.positions))
    return {shard: str(position) for shard, position in start.positions.items()}


# Options that Spark adds to a streaming sink's options by itself.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})


def sink_settings(options: option_table.Given) -> SinkSettings:
    """The settings from the options; names in any case.

    Raises: SettingsError naming every option that is unknown, missing or wrong.
    """
    named = {key: value for key, value in options.items() if key.lower() not in _SPARKS_OWN}
    names = [option.name for option in SINK_OPTIONS]
    given = option_table.OptionReader(
        "the kclrun sink", named, names, absent=other_connectors.OF_SINKS
    )
    reached = read_reached(given)
    more = given.values(SinkSettings)
    given.settle()
    return SinkSettings(reached=reached, **more)


def read_reached(given: option_table.OptionReader, *, takes_several: bool = False) -> StreamAddress:
    """The stream and how to reach it: the options that source and sink share.

    `takes_several`: several names form one source; a sink puts into one stream. Problems are noted
    in `given`; this function does not raise.
    """
    endpoint_url = given.text("endpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("endpointUrl", f"expected an https URL: {wrong}")
    role_arn = given.text("roleArn")
    if role_arn is not None and not role_arn.startswith("arn:"):
        given.refuse("roleArn", "expected arn:aws:iam::<account>:role/<name>")
    for name in ("roleExternalId", "roleSessionName"):
        if role_arn is None and given.text(name) is not None:
            given.refuse(name, "is for a role: name that in roleArn")
    return StreamAddress(
        stream=_stream(given, takes_several=takes_several),
        region=given.text("region"),
        endpoint_url=endpoint_url,
        role_arn=role_arn,
        role_external_id=given.text("roleExternalId"),
        role_session_name=given.text("roleSessionName"),
    )


def _stream(given: option_table.OptionReader, *, takes_several: bool) -> str:
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


def _streams(given: option_table.OptionReader, text: str) -> str:
    """Several streams, sorted by name whatever the order in the option."""
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if not _STREAM_NAME.match(name)]:
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


def _check_arn(given: option_table.OptionReader, arn: str) -> None:
    match = _STREAM_ARN.match(arn)
    if match is None:
        expected = "arn:aws:kinesis:<region>:<account>:stream/<name>"
        more = "; several streams are named in streamName" if "," in arn else ""
        given.refuse("streamARN", f"expected {expected}{more}")
    elif given.text("region") not in {None, match[1]}:
        given.refuse("region", f"the stream's ARN says {match[1]}: leave region out")


def _check_consumer(
    given: option_table.OptionReader, mode: str, consumer: str | None, reached: StreamAddress
) -> None:
    if mode == "polling" and given.text("consumerName") is not None:
        given.refuse("consumerName", "is for consumerMode=fan-out")
    elif mode == "fan-out" and given.text("consumerName") is None:
        given.refuse("consumerName", "is needed with consumerMode=fan-out: one for each query")
    elif consumer is not None and consumer.startswith("arn:") and reached.several:
        given.refuse("consumerName", "several streams: give a name, each has a consumer of it")


def _start(given: option_table.OptionReader, use: Use) -> Start:
    usual = Start(StartKind.EARLIEST if use is Use.BATCH else StartKind.LATEST)
    start = _leases(given, _place(given, "starting", usual))
    if use is Use.BATCH and start.kind is StartKind.LATEST:
        given.refuse("startingOffsets", "a batch read that starts at latest reads nothing")
    return start


def _leases(given: option_table.OptionReader, otherwise: Start) -> Start:
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
            " letters, digits, '_', '.' and '-', or the table's ARN",
        )
    return Start(StartKind.LEASES, leases=LeasesAt(table, endpoint_url))


def _end(given: option_table.OptionReader, use: Use) -> Start:
    end = _place(given, "ending", Start(StartKind.LATEST))
    if use is Use.STREAM:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.text(name) is not None:
                given.refuse(name, "a stream has no end; this is for spark.read")
    if end.kind is StartKind.EARLIEST:
        given.refuse("endingOffsets", "a batch read that ends at earliest reads nothing")
    return end


def _place(given: option_table.OptionReader, which: str, usual: Start) -> Start:
    offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
    if given.text(offsets) is not None and given.text(timestamp) is not None:
        given.refuse(offsets, f"and {timestamp} say the same thing: give one of them")
    placed = given.read(offsets, lambda value: _offsets(value, timestamp), usual)
    return given.read(timestamp, _timestamp, placed)


def _offsets(given: object, timestamp: str) -> Start:
    if isinstance(given, Start):
        return given
    text = option_table.text_of(given)
    if text.lstrip().startswith("{"):
        offset = positions_of(text)
        return Start(StartKind.POSITIONS, positions=offset.shards, streams=offset.streams)
    kind = _WORDS.get(text.strip().lower())
    if kind is None:
        if text.lower().startswith("at_timestamp"):
            raise ValueError(f"a time is given in {timestamp}")
        raise ValueError(
            "expected latest, earliest or JSON with positions by shard"
            f"{hint(text.strip(), ('latest', 'earliest'))}"
        )
    return Start(kind)


def _check_names(
    given: option_table.OptionReader, name: str, place: Start, reached: StreamAddress
) -> None:
    """Notes shards whose names do not fit the source, for one stream or several."""
    if place.streams:
        _check_streams(given, name, place, reached)
        return
    streams = set(reached.several) or {""}
    unknown = [
        position
        for position in place.positions
        if position != "*" and parted(position)[0] not in streams
    ]
    if unknown and reached.several:
        example = f"{reached.several[0]}:{parted(unknown[0])[1]}"
        given.refuse(
            name, f"of several streams, a shard is named with its own: {example!r}, for example"
        )
    elif unknown:
        given.refuse(name, f'expected shard ids and "*", not {unknown[0][:40]!r}')


def _check_streams(
    given: option_table.OptionReader, name: str, place: Start, reached: StreamAddress
) -> None:
    """Notes an offset of a query of other streams; that they were made again is known later."""
    arns = {which.arn for which in place.streams.values()}
    names = {arn.rpartition("/")[2] for arn in arns}
    is_arn = reached.stream.startswith("arn:")
    if (arns != {reached.stream}) if is_arn else (names != set(reached.stream.split(","))):
        given.refuse(name, f"this is the offset of a query of {', '.join(sorted(arns))}")


def _timestamp(given: object) -> Start:
    return Start(StartKind.TIMESTAMP, timestamp_ms=instant_ms(option_table.text_of(given)))
