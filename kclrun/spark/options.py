"""The options of source and sink, and the settings that they become. Pure.

The fields declare the options; `option_reading.py` reads them. A secret has no field here: these
values appear in plans.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kclrun.model.quotas import RECORD_BYTES_LARGEST, SHARD_READ_CALLS_MAX
from kclrun.spark import option_table
from kclrun.spark.offsets import StreamIs
from kclrun.spark.positions import Position
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

    address: StreamAddress
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

    address: StreamAddress
    keeps_order: bool = option_table.option(
        "ordering",
        option_table.choice({"key": True, "none": False}),
        "records of a key never overtake each other; `none`: a refused record may be overtaken",
        default=True,
    )
    aggregates: bool = option_table.option(
        "aggregate",
        option_table.SWITCH,
        "`true` packs the records of a shard into KPL aggregates: more records a request",
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
