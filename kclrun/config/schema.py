"""Every setting, its type, its default, and one line that says what it is for.

The docstring lines under "Settings" are what `kclrun check --schema` puts into the JSON Schema,
so an editor shows them. Units are in the types: Duration is seconds, ByteSize bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kclrun.config.units import ByteSize, Duration

__all__ = [
    "AwsSettings",
    "CheckpointSettings",
    "CloudWatchSettings",
    "EmbeddedSettings",
    "FetchSettings",
    "FillSettings",
    "LeaseSettings",
    "LogSettings",
    "ObserveSettings",
    "OnErrorSettings",
    "OutputSettings",
    "ReshardSettings",
    "Settings",
    "ShutdownSettings",
    "SparkSettings",
    "StartAtLeases",
]

# What is imported is named by module and attribute, and by nothing an import could be tricked with.
ProcessorRef = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_]\w*(\.\w+)*:\w+$", extra={"words": " like module:Class"})
]
# What DynamoDB and Kinesis accept as names.
TableName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9_.-]{3,255}$",
        extra={"words": " of 3 to 255 letters, digits, dots, dashes and underscores"},
    ),
]
StreamName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9_.-]{1,128}|arn:[a-z0-9-]+:kinesis:[a-z0-9-]+:\d{12}:stream/[A-Za-z0-9_.-]{1,128})$",
        extra={"words": " that is a stream's name or ARN"},
    ),
]
FunctionRef = Annotated[
    str,
    msgspec.Meta(pattern=r"^[A-Za-z_]\w*(\.\w+)*:\w+$", extra={"words": " like module:function"}),
]

# Spark's options are texts; people write numbers and switches, too.
SparkOptions = dict[str, str | int | float | bool]


def _doc(text: str, **constraints: Any) -> msgspec.Meta:
    """The documentation of a setting, and what its value must satisfy."""
    return msgspec.Meta(description=text, **constraints)


class AwsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where AWS is, and as whom to speak to it."""

    region: Annotated[str | None, _doc("AWS region; else from the environment or profile")] = None
    endpoint: Annotated[
        str | None, _doc("`embedded` for the AWS inside kclrun, a URL, or leave out for AWS")
    ] = None
    endpoints: Annotated[
        dict[Literal["kinesis", "dynamodb", "cloudwatch", "sts"], str],
        _doc("a URL for one service, over `endpoint`"),
    ] = {}
    profile: Annotated[str | None, _doc("profile of the AWS configuration files")] = None
    role_arn: Annotated[str | None, _doc("role to assume for everything")] = None
    start_timeout: Annotated[
        Duration, _doc("how long to wait at start for AWS to answer, then exit 69")
    ] = Duration(60)


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How leases are taken, kept and cleaned up."""

    max: Annotated[int, _doc("most leases this machine takes", ge=1, le=1024)] = 64
    moves_per_cycle: Annotated[int, _doc("most leases asked for in one cycle", ge=1)] = 8
    failover: Annotated[
        Duration, _doc("silence after which a lease counts as expired; the same fleet-wide")
    ] = Duration(10)
    group: Annotated[
        str,
        _doc(
            "availability zone or cluster, for balance",
            pattern=r"^[^:\s]{0,64}$",
            extra={"words": " without colons or spaces, of at most 64 characters"},
        ),
    ] = ""
    cleanup: Annotated[bool, _doc("delete the rows of ended shards once their children began")] = (
        True
    )
    table: Annotated[TableName | None, _doc("lease table, if not named like the application")] = (
        None
    )
    create: Annotated[bool, _doc("create the lease table if it is absent")] = True
    tags: Annotated[dict[str, str], _doc("tags of a table created by kclrun")] = {}


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How records are read."""

    mode: Annotated[Literal["polling"], _doc("how records are read")] = "polling"
    idle: Annotated[Duration, _doc("pause between reads at the tip of a shard")] = Duration(1)
    buffer: Annotated[ByteSize, _doc("payload bytes fetched ahead per lease")] = ByteSize(
        16 * 2**20
    )
    batch_max: Annotated[
        int, _doc("most records in one process_records call", ge=1, le=100_000)
    ] = 10_000
    kpl_range: Annotated[
        Literal["keep", "drop"], _doc("user records of an aggregate outside the shard's hash range")
    ] = "keep"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When progress is made durable."""

    every: Annotated[
        Duration | Literal["batch", "manual"],
        _doc("a duration, `batch` (after each), or `manual` (the processor does it)"),
    ] = Duration(10)
    uncheckpointed_max: Annotated[
        int, _doc("most records delivered beyond the last checkpoint: bounds duplicates", ge=1)
    ] = 100_000


class OnErrorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do when the processor raises."""

    retries: Annotated[int, _doc("how often a failed call is repeated before the halt", ge=0)] = 5
    backoff: Annotated[Duration, _doc("pause before the first repetition; doubles up to 30s")] = (
        Duration(1)
    )


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where emitted rows, or on Spark the rows of the pipeline's DataFrame, go."""

    path: Annotated[
        str | None, _doc("folder for emitted rows, relative to where kclrun is started")
    ] = None
    format: Annotated[
        str | None, _doc("spark: json, parquet, any Spark format, or kclrun for a stream")
    ] = None
    options: Annotated[SparkOptions, _doc("spark: options of that format")] = {}
    mode: Annotated[
        Literal["append", "update", "complete"], _doc("spark: which rows a batch writes")
    ] = "append"
    partition_by: Annotated[tuple[str, ...], _doc("spark: columns that folders are named by")] = ()
    schema: Annotated[
        str | None, _doc("spark: types of emitted rows, such as `carrier string, flights long`")
    ] = None


class SparkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it runs with engine: spark."""

    master: Annotated[
        str | None, _doc("where Spark runs; left out: what spark-submit says, else local[*]")
    ] = None
    checkpoint: Annotated[
        str | None, _doc("folder or s3a:// place of the query's checkpoint, its own alone")
    ] = None
    trigger: Annotated[
        Duration | Literal["asap", "available-now"],
        _doc("how often a batch begins: a duration, `asap`, or `available-now` (then end)"),
    ] = "asap"
    conf: Annotated[
        SparkOptions, _doc("settings of Spark itself, such as spark.executor.memory")
    ] = {}
    source: Annotated[
        SparkOptions, _doc("further options of the source, such as maxRecordsPerTrigger")
    ] = {}


class ShutdownSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stop proceeds."""

    grace: Annotated[Duration, _doc("how long a drain may take before processes are ended")] = (
        Duration(60)
    )


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and how."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least level shown")] = (
        "info"
    )
    format: Annotated[Literal["auto", "json", "text"], _doc("auto: a table on a terminal")] = "auto"


class CloudWatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics to CloudWatch, which bills each metric by the month, and each request."""

    namespace: Annotated[
        str,
        _doc(
            "namespace the metrics are published under",
            pattern=r"^(?!AWS/)[A-Za-z0-9][A-Za-z0-9._/#: -]{0,254}$",
            extra={"words": " of at most 255 letters, digits and . - _ / # : that is not AWS/…"},
        ),
    ] = "kclrun"
    dimensions: Annotated[
        dict[str, str], _doc("dimensions besides Application, such as {Environment: prod}")
    ] = {}
    detail: Annotated[
        Literal["application", "shard"],
        _doc("shard: the metrics of leases by shard as well, three more billed for each"),
    ] = "application"


class ObserveSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this machine is seen from outside: metrics and health."""

    listen: Annotated[
        int | str | None,
        _doc(
            "serve /metrics (Prometheus) and /health there: a port of loopback, or ADDRESS:PORT;"
            " 0 takes a free one; left out: nowhere"
        ),
    ] = None
    cloudwatch: Annotated[
        CloudWatchSettings | None, _doc("publish metrics to CloudWatch, once a minute")
    ] = None


class FillSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is put into an embedded stream while the application runs."""

    source: Annotated[FunctionRef, _doc("module:function that yields (key, data) pairs")]
    aggregate: Annotated[
        float, _doc("share of the records sent inside KPL aggregates", ge=0, le=1)
    ] = 0.0
    rate: Annotated[int | None, _doc("records a second; as fast as it goes if left out", ge=1)] = (
        None
    )


class ReshardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One split or merge of an embedded stream during the fill."""

    after: Annotated[float, _doc("share of the fill after which it happens", ge=0, le=1)]
    split: Annotated[int | None, _doc("index, among the open shards, of the one to split")] = None
    merge: Annotated[
        int | None, _doc("index, among the open shards, of the one to merge with the next")
    ] = None


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the embedded AWS holds."""

    shards: Annotated[int, _doc("shards of the stream that is created", ge=1, le=500)] = 1
    limits: Annotated[bool, _doc("enforce the per-shard limits of the service")] = False
    fill: Annotated[FillSettings | None, _doc("records to put while the application runs")] = None
    reshard: Annotated[tuple[ReshardSettings, ...], _doc("splits and merges during the fill")] = ()


class StartAtLeases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an application of the fleet stands, for a query that goes on from there."""

    leases: Annotated[
        TableName,
        _doc("spark: the application whose leases to begin at (or its table's own name)"),
    ]

    def __str__(self) -> str:
        return f"the leases of {self.leases}"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One application, whole."""

    application: Annotated[TableName, _doc("names the lease table and the owner's files")]
    stream: Annotated[StreamName, _doc("stream name or ARN")]
    processor: Annotated[
        ProcessorRef | None, _doc("module:Class of the RecordProcessor, imported from `path`")
    ] = None
    pipeline: Annotated[
        FunctionRef | None,
        _doc("module:function(records, options) that makes a DataFrame of one, instead (spark)"),
    ] = None
    path: Annotated[
        str | None,
        _doc("folder the processor is imported from; else the file's own folder and its parent"),
    ] = None
    options: Annotated[
        dict[str, Any], _doc("given to the processor as context.options, or to the pipeline")
    ] = {}
    output: Annotated[OutputSettings | None, _doc("where emitted rows go")] = None
    start: Annotated[
        str | StartAtLeases,
        _doc(
            "TRIM_HORIZON, LATEST or an ISO-8601 instant in the past, for shards without a lease;"
            " with engine: spark also `leases: <application>`"
        ),
    ] = "TRIM_HORIZON"
    engine: Annotated[Literal["fleet", "spark"], _doc("where it runs")] = "fleet"
    spark: Annotated[SparkSettings, _doc("how Spark runs it (engine: spark)")] = SparkSettings()
    aws: Annotated[AwsSettings, _doc("how AWS is reached")] = AwsSettings()
    leases: Annotated[LeaseSettings, _doc("the lease table and this machine's share")] = (
        LeaseSettings()
    )
    fetch: Annotated[FetchSettings, _doc("how records are read ahead of the processor")] = (
        FetchSettings()
    )
    checkpoint: Annotated[CheckpointSettings, _doc("when progress is made durable")] = (
        CheckpointSettings()
    )
    on_error: Annotated[OnErrorSettings, _doc("what happens when the processor raises")] = (
        OnErrorSettings()
    )
    stall: Annotated[Duration, _doc("how long a lease may stand still that should move")] = (
        Duration(120)
    )
    shutdown: Annotated[ShutdownSettings, _doc("how the machine drains")] = ShutdownSettings()
    log: Annotated[LogSettings, _doc("what is logged")] = LogSettings()
    observe: Annotated[ObserveSettings, _doc("metrics and health, for machines that look")] = (
        ObserveSettings()
    )
    embedded: Annotated[
        EmbeddedSettings | None, _doc("what the embedded AWS holds (aws.endpoint: embedded)")
    ] = None
    until: Annotated[
        Literal["caught-up"] | None, _doc("end, drained, when every shard is at its tip or ended")
    ] = None
    summary: Annotated[
        FunctionRef | None,
        _doc("module:function called with the output folder after the end; its text is printed"),
    ] = None

    @property
    def table(self) -> str:
        """The lease table's name: `leases.table`, else the application's, as the KCL does."""
        return self.leases.table or self.application

    @property
    def start_text(self) -> str:
        """`start` in one line, as it is logged and written on rows."""
        return str(self.start)
