"""Every setting, its type, its default, and one line about its purpose.

`kclrun check --schema` puts the documentation of each setting into the JSON Schema, so an editor
shows it. Units are in the types: Duration is seconds, ByteSize bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from kclrun.config.destinations import DeadLetterSettings, OutputSettings, SparkOptions
from kclrun.config.embedded import EmbeddedSettings
from kclrun.config.names import (
    ApplicationName,
    ConsumerName,
    DecodeRef,
    FunctionRef,
    HookName,
    ProcessorRef,
    SourceName,
    TableReference,
    VariableName,
    documented,
)
from kclrun.config.observing import ObserveSettings
from kclrun.config.processing import ConcurrencySettings, StateSettings, WatermarkSettings
from kclrun.config.units import ByteSize, Duration
from kclrun.errors import SettingsError
from kclrun.model.letter import LetterDestination
from kclrun.model.policies import Then
from kclrun.model.stream import arn_difference, is_change_stream, table_of


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The reaction to the life cycle of the EC2 instance that this runs on."""

    watch: Annotated[
        Literal["auto"] | bool,
        documented(
            "drain when EC2 or the autoscaling group is about to end this machine; auto: where"
            " there is instance metadata"
        ),
    ] = "auto"
    rebalance: Annotated[
        Literal["auto", "drain", "ignore"],
        documented(
            "what a rebalance recommendation means; auto: drain where a termination hook is named"
        ),
    ] = "auto"
    group: Annotated[
        str | None,
        documented(
            "autoscaling group of this machine; left out: that of its tag in the instance metadata",
            min_length=1,
            max_length=255,
            extra={"words": " of 1 to 255 characters"},
        ),
    ] = None
    launch_hook: Annotated[
        HookName | None, documented("lifecycle hook to complete when this machine is ready")
    ] = None
    termination_hook: Annotated[
        HookName | None, documented("lifecycle hook to complete when this machine is drained")
    ] = None

    @property
    def drains_on_rebalance(self) -> bool:
        """A recommendation ends nothing by itself: a host that drains for it and is not replaced
        would stay idle. A hook shows that the operator set up a group that replaces its
        machines."""
        if self.rebalance == "auto":
            return self.termination_hook is not None
        return self.rebalance == "drain"


class StreamErrorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's own `on_error`; the letters of all streams are in one place."""

    retries: Annotated[int | None, documented("how often a failed call is repeated", ge=0)] = None
    backoff: Annotated[Duration | None, documented("pause before the first repetition")] = None
    max_age: Annotated[
        Duration | None, documented("a call with a record older than this is not repeated")
    ] = None
    then: Annotated[
        Then | None,
        documented("what is done with a record that is given up"),
    ] = None
    limit: Annotated[
        int | None,
        documented("records that a shard gives up in 10 minutes before it halts", ge=1),
    ] = None


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One of several streams of an application, and its own settings."""

    name: Annotated[SourceName, documented("stream name or ARN")]
    processor: Annotated[
        ProcessorRef | None, documented("module:Class for this stream, if not the application's")
    ] = None
    priority: Annotated[
        int,
        documented(
            "0 is first; the niceness of its lease processes, for when CPU is short", ge=0, le=19
        ),
    ] = 0
    options: Annotated[
        dict[str, Any],
        documented("given to this stream's processor, over the application's options"),
    ] = {}
    decode: Annotated[
        DecodeRef | None, documented("how record.value is made, if not as for the application")
    ] = None
    start: Annotated[
        str | None,
        documented("where its shards without a lease begin, if not the application's start"),
    ] = None
    concurrency: Annotated[
        ConcurrencySettings | None,
        documented("records at the same time, if not as for the application"),
    ] = None
    on_error: Annotated[
        StreamErrorSettings,
        documented("what happens when the processor raises, if not as for the application"),
    ] = StreamErrorSettings()


def stream_name(stream: str) -> str:
    """The name in an ARN, or the name itself; of a DynamoDB stream that of its table."""
    return table_of(stream) if is_change_stream(stream) else stream.rpartition("/")[2]


def is_named(stream: str, named: str) -> bool:
    """Whether `named` means this stream of the settings: by its name, its ARN, or the ARN of one
    that the settings name."""
    is_one = named.startswith("arn:") and not stream.startswith("arn:")
    return named in (stream, stream_name(stream)) or (is_one and stream_name(named) == stream)


def why_not_named(streams: Sequence[str], named: str) -> str:
    """Why `named` means none of the streams of the settings, in words; with the difference from
    one that is nearly the same."""
    near = (arn_difference(stream, named) for stream in streams)
    difference = next((f" ({words})" for words in near if words), "")
    known = ", ".join(map(stream_name, streams))
    return f"{named} is not a stream of this application{difference}: {known}"


AwsService = Literal[
    "kinesis",
    "dynamodb",
    "dynamodbstreams",
    "cloudwatch",
    "sts",
    "autoscaling",
    "s3",
    "sqs",
    "sns",
    "firehose",
    "glue",
]


class AwsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address of AWS, and the identity to use there."""

    region: Annotated[
        str | None, documented("AWS region; else from the environment or profile")
    ] = None
    endpoint: Annotated[
        str | None, documented("`embedded` for the AWS inside kclrun, a URL, or leave out for AWS")
    ] = None
    endpoints: Annotated[
        dict[AwsService, str], documented("a URL for one service, over `endpoint`")
    ] = {}
    profile: Annotated[str | None, documented("profile of the AWS configuration files")] = None
    role_arn: Annotated[str | None, documented("role to assume for everything")] = None
    start_timeout: Annotated[
        Duration,
        documented("how long to wait for AWS at start, then exit 69; throttled, twice that"),
    ] = Duration(60)

    def url_of(self, service: str) -> str | None:
        """The URL for one service; None leaves it to botocore's own sources. The streams of tables
        are read where the tables are, unless they have a URL of their own."""
        urls: dict[str, str] = dict(self.endpoints.items())
        if service == "dynamodbstreams" and service not in urls:
            service = "dynamodb"
        return urls.get(service, self.endpoint)


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How leases are taken, kept and cleaned up."""

    max: Annotated[int, documented("most leases this machine takes", ge=1, le=1024)] = 64
    per_process: Annotated[
        int,
        documented(
            "most quiet leases of a stream that share one lease process; a busy one gets a process"
            " of its own. With 1 every lease has its own",
            ge=1,
            le=64,
        ),
    ] = 1
    moves_per_cycle: Annotated[int, documented("most leases asked for in one cycle", ge=1)] = 8
    balance: Annotated[
        Literal["load", "counts"],
        documented(
            "`counts`: every machine holds as many leases as the others; `load`: and machines with"
            " heavy leases exchange them for light ones"
        ),
    ] = "load"
    failover: Annotated[
        Duration, documented("silence after which a lease counts as expired; the same fleet-wide")
    ] = Duration(10)
    group: Annotated[
        str,
        documented(
            "availability zone or cluster, for balance",
            pattern=r"^[^:\s]{0,64}$",
            extra={"words": " without colons or spaces, of at most 64 characters"},
        ),
    ] = ""
    cleanup: Annotated[
        bool, documented("delete the rows of ended shards once their children began")
    ] = True
    table: Annotated[
        TableReference | None,
        documented("lease table, by its name or ARN, if not named like the application"),
    ] = None
    kcl_application: Annotated[
        ApplicationName | None,
        documented("application of a KCL 3.0-3.4 on this table, if not ours: shows its mode"),
    ] = None
    create: Annotated[bool, documented("create the lease table if it is absent")] = True
    tags: Annotated[dict[str, str], documented("tags of a table created by kclrun")] = {}


class EnvironmentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which environment variables lease processes get: those of kclrun, unless narrowed."""

    only: Annotated[
        tuple[VariableName, ...] | None,
        documented(
            "pass these variables alone (a name may end in *), besides what Python, locale, TLS and"
            " proxies need; left out: the whole environment"
        ),
    ] = None


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How records are read."""

    mode: Annotated[
        Literal["polling", "fan-out"],
        documented(
            "`polling` shares five reads and 2 MB a second and shard with other applications;"
            " `fan-out` has 2 MB/s of its own, is pushed records at once, and is billed apart"
        ),
    ] = "polling"
    consumer: Annotated[
        ConsumerName | None,
        documented(
            "with fan-out: name of the registered consumer, if not the application's, or its ARN;"
            " it is registered on first use and never removed by a run"
        ),
    ] = None
    idle: Annotated[Duration, documented("pause after an empty page at the tip")] = Duration(1)
    every: Annotated[
        Duration,
        documented(
            "least time between two polls of a shard at its tip, with records or without; behind"
            " the tip five are made a second. The KCL's is 1s"
        ),
    ] = Duration(0.4)
    buffer: Annotated[ByteSize, documented("payload bytes fetched ahead per lease")] = ByteSize(
        16 * 2**20
    )
    batch_max: Annotated[
        int, documented("most records in one process_records call", ge=1, le=100_000)
    ] = 10_000
    kpl_range: Annotated[
        Literal["keep", "drop"],
        documented("user records of an aggregate outside the shard's hash range"),
    ] = "keep"


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When progress is made durable."""

    every: Annotated[
        Duration | Literal["batch", "manual"] | None,
        documented(
            "a duration, `batch` (after each), or `manual` (the processor does it); left out: 10s,"
            " with the state in S3 30s"
        ),
    ] = None
    uncheckpointed_max: Annotated[
        int,
        documented("most records delivered beyond the last checkpoint: bounds duplicates", ge=1),
    ] = 100_000


class OnErrorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The reaction when the processor raises."""

    retries: Annotated[
        int, documented("how often a failed call is repeated before its records are given up", ge=0)
    ] = 5
    backoff: Annotated[
        Duration, documented("pause before the first repetition; doubles up to 30s")
    ] = Duration(1)
    max_age: Annotated[
        Duration | None, documented("a call with a record older than this is not repeated")
    ] = None
    then: Annotated[
        Then,
        documented("what is done with a record that is given up"),
    ] = "halt"
    dead_letter: Annotated[DeadLetterSettings, documented("where records go that are given up")] = (
        DeadLetterSettings()
    )
    limit: Annotated[
        int, documented("records that a shard gives up in 10 minutes before it halts", ge=1)
    ] = 100


class SparkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How it runs with engine: spark."""

    master: Annotated[
        str | None, documented("where Spark runs; left out: that of spark-submit, else local[*]")
    ] = None
    checkpoint: Annotated[
        str | None, documented("folder or s3a:// place of the query's checkpoint, its own alone")
    ] = None
    trigger: Annotated[
        Duration | Literal["asap", "available-now"],
        documented("how often a batch begins: a duration, `asap`, or `available-now` (then end)"),
    ] = "asap"
    conf: Annotated[
        SparkOptions, documented("settings of Spark itself, such as spark.executor.memory")
    ] = {}
    source: Annotated[
        SparkOptions, documented("further options of the source, such as maxRecordsPerTrigger")
    ] = {}


class ShutdownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stop proceeds."""

    grace: Annotated[
        Duration, documented("how long a drain may take before processes are ended")
    ] = Duration(60)


LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The content and format of the log."""

    level: Annotated[LogLevel, documented("least level shown")] = "info"
    levels: Annotated[
        dict[str, LogLevel],
        documented(
            "least level by the name of a logger, as {httpx: info}: libraries are at warning else,"
            " your own loggers at log.level; kclrun: of its own events"
        ),
    ] = {}
    format: Annotated[
        Literal["auto", "json", "text"], documented("auto: a table on a terminal")
    ] = "auto"


class StartAtLeases(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a fleet's application, for a query that goes on from there."""

    leases: Annotated[
        TableReference,
        documented(
            "spark: the application whose leases to begin at (or its table's own name or ARN)"
        ),
    ]

    def __str__(self) -> str:
        return f"the leases of {self.leases}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One application, whole."""

    application: Annotated[
        ApplicationName, documented("names the lease table and the owner's files")
    ]
    stream: Annotated[
        SourceName | None,
        documented("stream name or ARN, also the ARN of a DynamoDB table's stream"),
    ] = None
    streams: Annotated[
        tuple[StreamSettings, ...],
        documented(
            "several streams instead of one, each with its own name, processor and priority"
        ),
    ] = ()
    processor: Annotated[
        ProcessorRef | None,
        documented(
            "module:Class of the RecordProcessor, imported from `path`; of amazon_kclpy:"
            " kclpy:script.py or kclpy:module:Class"
        ),
    ] = None
    pipeline: Annotated[
        FunctionRef | None,
        documented(
            "module:function(records, options) that makes a DataFrame of one, instead (spark)"
        ),
    ] = None
    path: Annotated[
        str | None,
        documented(
            "folder the processor is imported from; else the file's own folder and its parent"
        ),
    ] = None
    options: Annotated[
        dict[str, Any], documented("given to the processor as context.options, or to the pipeline")
    ] = {}
    decode: Annotated[
        DecodeRef | None,
        documented(
            "how record.value is made of the payload: json, text, msgpack, module:Type (of JSON),"
            " module:function (of bytes), or glue (by the AWS Glue Schema Registry)"
        ),
    ] = None
    output: Annotated[OutputSettings | None, documented("where emitted rows go")] = None
    outputs: Annotated[
        dict[str, OutputSettings],
        documented("further outputs by name: context.emit(row, to=name)"),
    ] = {}
    state: Annotated[StateSettings | None, documented("what context.state remembers")] = None
    watermark: Annotated[
        WatermarkSettings | None, documented("the time of a shard, for timers and windows")
    ] = None
    start: Annotated[
        str | StartAtLeases,
        documented(
            "TRIM_HORIZON, LATEST or an ISO-8601 instant in the past, for shards without a lease;"
            " with engine: spark also `leases: <application>`"
        ),
    ] = "TRIM_HORIZON"
    engine: Annotated[Literal["fleet", "spark"], documented("where it runs")] = "fleet"
    spark: Annotated[SparkSettings, documented("how Spark runs it (engine: spark)")] = (
        SparkSettings()
    )
    aws: Annotated[AwsSettings, documented("how AWS is reached")] = AwsSettings()
    leases: Annotated[LeaseSettings, documented("the lease table and this machine's share")] = (
        LeaseSettings()
    )
    fetch: Annotated[FetchSettings, documented("how records are read ahead of the processor")] = (
        FetchSettings()
    )
    checkpoint: Annotated[CheckpointSettings, documented("when progress is made durable")] = (
        CheckpointSettings()
    )
    on_error: Annotated[OnErrorSettings, documented("what happens when the processor raises")] = (
        OnErrorSettings()
    )
    concurrency: Annotated[
        ConcurrencySettings | None,
        documented("records of a shard at the same time, for process_record; left out: one"),
    ] = None
    environment: Annotated[
        EnvironmentSettings, documented("the environment variables of lease processes")
    ] = EnvironmentSettings()
    stall: Annotated[Duration, documented("how long a lease may stand still that should move")] = (
        Duration(120)
    )
    shutdown: Annotated[ShutdownSettings, documented("how the machine drains")] = ShutdownSettings()
    log: Annotated[LogSettings, documented("what is logged")] = LogSettings()
    observe: Annotated[
        ObserveSettings, documented("metrics and health, for machines that look")
    ] = ObserveSettings()
    instance: Annotated[
        InstanceSettings, documented("the life of the EC2 instance that this runs on")
    ] = InstanceSettings()
    embedded: Annotated[
        EmbeddedSettings | None, documented("what the embedded AWS holds (aws.endpoint: embedded)")
    ] = None
    until: Annotated[
        Literal["caught-up"] | None,
        documented("end, drained, when every shard is at its tip or ended"),
    ] = None
    summary: Annotated[
        FunctionRef | None,
        documented(
            "module:function called with the output folder after the end; its text is printed"
        ),
    ] = None

    @property
    def table(self) -> str:
        """The lease table, by its name or ARN: `leases.table`, else named like the application, as
        the KCL does."""
        return self.leases.table or self.application

    @property
    def start_text(self) -> str:
        """`start` in one line, as it is in the log and on rows."""
        return str(self.start)

    @property
    def sources(self) -> tuple[StreamSettings, ...]:
        """The streams to read, each with its effective settings: one, or all of `streams`."""
        if not self.streams:
            return (
                StreamSettings(
                    name=self.only_stream,
                    processor=self.processor,
                    options=self.options,
                    decode=self.decode,
                    start=self.start_text,
                    concurrency=self.concurrency,
                ),
            )
        return tuple(
            msgspec.structs.replace(
                stream,
                processor=stream.processor or self.processor,
                options=self.options | stream.options,
                decode=stream.decode or self.decode,
                start=stream.start or self.start_text,
                concurrency=stream.concurrency or self.concurrency,
            )
            for stream in self.streams
        )

    def on_error_of(self, stream: StreamSettings) -> OnErrorSettings:
        """`on_error` for one of `sources`. It has the application's place of letters: a stream
        keeps letters only if the application does, which a replay may not."""
        stated = msgspec.structs.asdict(stream.on_error)
        own = {name: value for name, value in stated.items() if value is not None}
        if self.on_error.then != "dead-letter" and stream.on_error.then == "dead-letter":
            del own["then"]
        return msgspec.structs.replace(self.on_error, **own)

    @property
    def letter_place(self) -> LetterDestination:
        """Where dead letters are kept. A relative folder is relative to where kclrun is started."""
        place = self.on_error.dead_letter
        return LetterDestination(
            path=place.path,
            s3=place.s3,
            sqs=place.sqs,
            stream=place.stream,
            s3_url=self.aws.url_of("s3"),
            sqs_url=self.aws.url_of("sqs"),
        )

    @property
    def only_stream(self) -> str:
        """The stream of an application with one stream.

        Raises: SettingsError if there are several, naming them.
        """
        if self.stream is None:
            names = ", ".join(stream.name for stream in self.streams)
            raise SettingsError(f"the application has several streams ({names}): name one of them")
        return self.stream

    @property
    def stream_names(self) -> str:
        """All streams in one line, for people."""
        return ", ".join(stream_name(source.name) for source in self.sources)

    def of_stream(self, named: str) -> Settings:
        """The settings of an application of this one stream of ours, by its name or ARN.

        Raises: SettingsError for a stream that is not among ours.
        """
        for source in self.sources:
            if is_named(source.name, named):
                if not self.streams:
                    return self
                return msgspec.structs.replace(
                    self,
                    stream=source.name,
                    streams=(),
                    processor=source.processor,
                    options=source.options,
                    decode=source.decode,
                    start=source.start or self.start,
                    concurrency=source.concurrency,
                    on_error=self.on_error_of(source),
                )
        raise SettingsError(why_not_named([source.name for source in self.sources], named))
