"""The AWS services of an application's settings, and its streams. Only `cli/` assembles `aws/`.

Every verb that uses AWS starts here. Making an `Aws` sends nothing: each client is made when it is
first needed. `open_streams` finds and describes the streams, and advises on a missing one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from kclrun import errors
from kclrun.aws.changes.stream import admin_of, endpoint_service, reader_of, signing_service
from kclrun.aws.cloudwatch import CloudWatchOutlet
from kclrun.aws.control import ControlPlane
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.fan_out import StreamConsumers
from kclrun.aws.instance import BotoLifecycleActions, Imds, open_imds
from kclrun.aws.lease_table import DynamoCoordinatorState, DynamoLeaseTable
from kclrun.aws.missing_streams import advised, is_of_stream
from kclrun.aws.wire import WireClient
from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.waiting import waiting_for
from kclrun.config.kcl import kcl_application
from kclrun.config.rules import refuse_embedded
from kclrun.config.schema import Settings, StreamSettings, stream_name
from kclrun.config.tables import named_tables
from kclrun.destinations import open_letters
from kclrun.leases.auditing import why_another_stream
from kclrun.leases.stream_rows import key_in_table, near_misses
from kclrun.model import statuses
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.record import Measurement
from kclrun.model.shard import Shard
from kclrun.model.stream import (
    ONLY_STREAM,
    StreamKey,
    display_name,
    is_change_stream,
    region_of,
    stream_key,
    stream_name_of,
    stream_of,
)
from kclrun.model.table import of_another_region
from kclrun.model.time import WallTime, utc_text
from kclrun.model.wire import WireEndpoint
from kclrun.observe.emf import EmfOutlet
from kclrun.observe.logs import LineSink
from kclrun.ports import LetterStore, MetricOutlet, ShardReader, StreamAdmin, StreamSummary

if TYPE_CHECKING:
    from kclrun.aws.outputs.story_objects import StoryObjects

_STDERR: Final = 2
T = TypeVar("T")


class Patiently(Protocol):
    """Performs a call, given what it waits for in words."""

    def __call__(self, call: Callable[[], T], what: str) -> T: ...


def _refuse_other_region(settings: Settings, region: str, of_tables: str) -> None:
    """A request to another region finds no stream or table of this ARN. Raises: SettingsError."""
    for source in settings.sources:
        named = region_of(source.name)
        if named is not None and named != region:
            raise errors.SettingsError(
                f"stream: {source.name} is in {named}, and the region of the application is"
                f" {region}\nSet aws.region: {named}, where the lease table is then, too"
            )
    for path, table in named_tables(settings):
        if (wrong := of_another_region(table, of_tables)) is not None:
            raise errors.SettingsError(f"{'.'.join(map(str, path))}: {table} {wrong}")


class Aws:
    """The AWS services of these settings. Makes each client when it is first needed.

    Raises: SettingsError (no region, unknown profile, `embedded` outside of `run`).
    """

    def __init__(self, settings: Settings) -> None:
        refuse_embedded(settings, "--set aws.endpoint=http://127.0.0.1:4567")
        self.settings = settings
        dynamodb = self._endpoint_settings("dynamodb")
        aws = settings.aws
        self._session = open_session(EndpointSettings(region=aws.region, profile=aws.profile))
        self.kinesis: WireEndpoint = resolve_endpoint(
            self._session, "kinesis", self._endpoint_settings("kinesis")
        )
        self.dynamodb: WireEndpoint = resolve_endpoint(self._session, "dynamodb", dynamodb)
        _refuse_other_region(settings, self.kinesis.region, self.dynamodb.region)
        self._dynamodb_settings = msgspec.structs.replace(dynamodb, region=self.dynamodb.region)
        self.credentials = CredentialSource(
            self._session,
            endpoint_url=self.kinesis.url,
            role_arn=settings.aws.role_arn,
            sts_endpoint_url=settings.aws.url_of("sts"),
        )

    @cached_property
    def kinesis_client(self) -> WireClient:
        return self._wire_client(self.kinesis, "kinesis")

    def _wire_client(self, endpoint: WireEndpoint, service: str) -> WireClient:
        keys = self.credentials
        return WireClient(endpoint, keys.current, service=service, reread=keys.reread)

    @cached_property
    def source(self) -> WireEndpoint:
        """The endpoint of the streams: Kinesis, or DynamoDB Streams."""
        service = endpoint_service(self._any_stream)
        if service == "kinesis":
            return self.kinesis
        return resolve_endpoint(self._session, service, self._endpoint_settings(service))

    @cached_property
    def source_client(self) -> WireClient:
        """The client for the streams. The rules of the settings allow streams of one service."""
        if self.source is self.kinesis:
            return self.kinesis_client
        service = signing_service(self._any_stream)
        return self._wire_client(self.source, service)

    @property
    def _any_stream(self) -> str:
        return self.settings.sources[0].name

    @cached_property
    def dynamodb_client(self) -> WireClient:
        return self._wire_client(self.dynamodb, "dynamodb")

    @cached_property
    def table(self) -> DynamoLeaseTable:
        return DynamoLeaseTable(self.dynamodb_client, self.settings.table)

    @cached_property
    def coordinator(self) -> DynamoCoordinatorState:
        """The table in which a KCL 3 fleet of an early version keeps its mode."""
        return DynamoCoordinatorState(
            self.dynamodb_client, kcl_application(self.settings), self.settings.table
        )

    @cached_property
    def stream(self) -> StreamAdmin:
        """The only stream. Raises: SettingsError if there are several."""
        return self.admin_of(self.settings.only_stream)

    @cached_property
    def reader(self) -> ShardReader:
        """The reader of the only stream. Raises: SettingsError if there are several."""
        return self.reader_of(self.settings.only_stream)

    def admin_of(self, stream: str) -> StreamAdmin:
        return admin_of(self.source_client, stream)

    def reader_of(self, stream: str) -> ShardReader:
        return reader_of(self.source_client, stream)

    def consumers_of(self, stream_arn: str) -> StreamConsumers:
        return StreamConsumers(self.kinesis_client, stream_arn)

    def letters(self, *, read_max: int | None = None) -> LetterStore:
        """The place of `on_error.dead_letter`; sends nothing. `read_max`: see `LetterStream`."""
        place = self.settings.letter_place
        return open_letters(place, self.kinesis, self.credentials.current, read_max=read_max)

    @property
    def metrics(self) -> MetricOutlet[Measurement] | None:
        """The outlet for metrics of `observe.cloudwatch`, if it is set."""
        cloudwatch = self.settings.observe.cloudwatch
        if cloudwatch is None:
            return None
        if cloudwatch.via == "log":
            return EmfOutlet(LineSink(_STDERR).write, cloudwatch.namespace)
        return CloudWatchOutlet(
            self._endpoint_settings("cloudwatch"), cloudwatch.namespace, self.credentials.current
        )

    @property
    def story(self) -> StoryObjects | None:
        """Stories in S3, if `observe.story` names a bucket. Sends nothing."""
        place = self.settings.observe.story
        if not place.startswith("s3:"):
            return None
        from kclrun.aws.outputs.story_objects import StoryObjects

        endpoint = self._endpoint_settings("s3")
        return StoryObjects(place, self.settings.application, endpoint, self.credentials.current)

    @property
    def imds(self) -> Imds | None:
        """The instance metadata, if `instance.watch` is on. Sends nothing.

        Raises: SettingsError if it must be watched but is switched off or has no address.
        """
        watch = self.settings.instance.watch
        # With its own endpoint, an application does not run on a machine of an autoscaling group.
        is_elsewhere = watch == "auto" and self.settings.aws.endpoint is not None
        if watch is False or is_elsewhere:
            return None
        imds = open_imds(self._session, os.environ)
        if imds is None and watch is True:
            raise errors.SettingsError(
                "instance.watch is on, and AWS_EC2_METADATA_DISABLED is true"
            )
        return imds

    @property
    def lifecycle(self) -> BotoLifecycleActions:
        """The hooks of this machine's group. Sends nothing."""
        return BotoLifecycleActions(self._endpoint_settings("autoscaling"))

    @property
    def called_table(self) -> str:
        """The lease table in words, with its address."""
        return f"the lease table {self.settings.table}, DynamoDB at {_address(self.dynamodb)}"

    def called_stream(self, stream: str) -> str:
        """A stream in words, with its address."""
        service = "Kinesis" if self.source is self.kinesis else "DynamoDB Streams"
        return f"the stream {stream_name(stream)}, {service} at {_address(self.source)}"

    @cached_property
    def control(self) -> ControlPlane:
        """botocore's clients for DynamoDB, with the present credentials."""
        return ControlPlane(self._session, self._dynamodb_settings, self.credentials.current())

    def _endpoint_settings(self, service: str) -> EndpointSettings:
        aws = self.settings.aws
        return EndpointSettings(
            region=aws.region, profile=aws.profile, endpoint_url=aws.url_of(service)
        )


def _address(endpoint: WireEndpoint) -> str:
    return endpoint.url.rstrip("/")


def fleet_aws(config: ConfigChoice, *used: str) -> Aws:
    """Table and stream of the configuration, and the sections `used` (`ConfigChoice.load_for`).
    Raises: SettingsError, also on Spark: no leases."""
    settings = config.load_for(*used).settings
    if settings.engine == "spark":
        raise errors.SettingsError(
            "engine: spark keeps no leases: positions are in the query's checkpoint,"
            f" {settings.spark.checkpoint or 'made by each run'}\n"
            "Lag and progress by shard:  kclrun --config …  on a terminal, or with --report FILE"
        )
    return Aws(settings)


class OpenStream(msgspec.Struct, frozen=True):
    """One stream that was found, with its clients and the settings that apply to it."""

    settings: StreamSettings
    summary: StreamSummary
    admin: StreamAdmin
    reader: ShardReader


def _once(call: Callable[[], T], what: str) -> T:
    with waiting_for(what):
        return call()


def open_streams(
    aws: Aws,
    patiently: Patiently = _once,
    on_missing: Callable[[str, errors.NotFound], None] | None = None,
) -> Mapping[StreamKey, OpenStream]:
    """Describe every stream; a single stream has the key ONLY_STREAM. Several have the keys by
    which the rows of the lease table name them (`leases/stream_rows.py`).

    `on_missing` gets the name of a stream that is not there any more, one of several of which the
    lease table has rows: the others are read. A stream without rows may be a wrong name.

    Raises: NotFound, with the names of all missing streams and advice; another ServiceError leaf at
    once; TableRefused if nothing shows which rows are a stream's.
    """
    with advising_on_streams(aws):
        opened, missing = _opened(aws, patiently)
        if not aws.settings.streams:
            _raise_missing(missing)
            return opened
        rows = None if not opened else _rows_of(aws, patiently)
        if rows is not None and on_missing is not None:
            names = {stream_name_of(stream_of(row.key)) for row in rows}
            for name in names.intersection(missing):
                on_missing(name, missing.pop(name))
        _raise_missing(missing)
    return opened if rows is None else _as_in_table(aws, opened, rows, patiently)


def _raise_missing(missing: Mapping[str, errors.NotFound]) -> None:
    found = list(missing.values())
    if len(found) == 1:
        raise found[0]
    if found:
        message = [f"{len(found)} streams are not there", *map(str, found)]
        raise found[0].reworded("\n".join(message))


def _rows_of(aws: Aws, patiently: Patiently) -> list[Lease] | None:
    """The readable rows of the lease table. None without a table; and without the permission to
    scan: then nothing is read or written by the keys of the streams."""
    try:
        pages = patiently(lambda: list(aws.table.scan(consistent=False)), aws.called_table)
    except (errors.NotFound, errors.AccessDenied):
        return None
    return [lease for page in pages for lease in page.leases]


def _as_in_table(
    aws: Aws,
    opened: Mapping[StreamKey, OpenStream],
    rows: Sequence[Lease],
    patiently: Patiently,
) -> Mapping[StreamKey, OpenStream]:
    """The streams under the keys that the table has."""
    found: dict[StreamKey, OpenStream] = {}
    for own, stream in opened.items():

        def shards(stream: OpenStream = stream) -> Sequence[Shard]:
            return patiently(stream.admin.list_shards, aws.called_stream(stream.settings.name))

        created_at = stream.summary.created_at
        key = key_in_table(own, created_at, rows, shards, table=aws.settings.table)
        found[key] = stream
    return found


def _opened(
    aws: Aws, patiently: Patiently
) -> tuple[dict[StreamKey, OpenStream], dict[str, errors.NotFound]]:
    """The streams that are there, and the errors of the others by name."""
    found: dict[StreamKey, OpenStream] = {}
    missing: dict[str, errors.NotFound] = {}
    for source in aws.settings.sources:
        admin = aws.admin_of(source.name)
        try:
            summary = patiently(partial(_summary, admin), aws.called_stream(source.name))
        except errors.NotFound as error:
            missing[stream_name(source.name)] = error
            continue
        several = bool(aws.settings.streams)
        key = stream_key(summary.arn, summary.created_at) if several else ONLY_STREAM
        found[key] = OpenStream(source, summary, admin, aws.reader_of(source.name))
    return found, missing


@contextmanager
def advising_on_streams(aws: Aws) -> Iterator[None]:
    """Add advice to the error for a missing stream of the application.

    Raises: NotFound in place of the service's NotFound; any other error unchanged.
    """
    try:
        yield
    except errors.NotFound as error:
        if not is_of_stream(error):
            raise
        named = tuple(source.name for source in aws.settings.sources)

        def client() -> WireClient:
            return aws.source_client if is_change_stream(named[0]) else aws.kinesis_client

        raise advised(error, named, aws.kinesis, client) from None


def _summary(admin: StreamAdmin) -> StreamSummary:
    return readable(admin.summary())


def readable(summary: StreamSummary) -> StreamSummary:
    """The summary of a stream that can be read now.

    Raises: NotFound for one that is being deleted; Unavailable for one that is being created.
    """
    statuses.require(statuses.of_stream(summary.arn), f"stream {summary.name}", summary.status)
    return summary


def refuse_expired(summary: StreamSummary, at: WallTime | None, now: WallTime, option: str) -> None:
    """Raises: SettingsError for a time that the stream does not keep, or of before its creation."""
    kept_from = max(summary.created_at, now - summary.retention_hours * 3600.0)
    if at is not None and at < kept_from:
        raise errors.SettingsError(
            f"{option}: {summary.name} keeps records for {summary.retention_hours} h, and was"
            f" created at {utc_text(summary.created_at, 'milliseconds')}\n"
            f"To read all that it has: {option} TRIM_HORIZON"
        )


def refuse_other_kind(aws: Aws, created: Mapping[StreamKey, WallTime]) -> None:
    """Scan the whole table. Raises: TableRefused for leases of the other kind of application, or of
    a stream that was deleted and created again since [P13]; and with `state` for those that a Java
    worker renews.

    The kind does not change after the table's creation, and a row's creation time does not change
    after its first take. So the scan need not be consistent, which costs half, at each start.
    """
    java: dict[LeaseKey, Lease] = {}
    for page in aws.table.scan(consistent=aws.settings.state is not None):
        java |= {lease.key: lease for lease in page.leases if lease.has_foreign_owner}
        why = why_other_kind(
            page.leases, aws.settings.table, is_of_several=bool(aws.settings.streams)
        )
        if why is not None:
            raise errors.TableRefused(why)
        for key, created_at in created.items():
            leases = [lease for lease in page.leases if stream_of(lease.key) == key]
            why = why_another_stream(leases, created_at, table=aws.settings.table)
            if why is not None:
                raise errors.TableRefused(why)
    if java and aws.settings.state is not None:
        _refuse_java(aws, java)


def _refuse_java(aws: Aws, seen: Mapping[LeaseKey, Lease]) -> None:
    """A Java worker moves checkpoints without a version of the state, and each of those leases
    would halt. The leases of one that is gone are not renewed for a failover, and are taken."""
    failover_s = float(aws.settings.leases.failover)
    with waiting_for(f"a failover of {failover_s:g} s, to see whether Java workers live"):
        time.sleep(failover_s)
    rows = [lease for page in aws.table.scan() for lease in page.leases]
    alive = sorted(
        str(row.owner)
        for row in rows
        if row.has_foreign_owner and row.key in seen and row.counter != seen[row.key].counter
    )
    if alive:
        raise errors.TableRefused(
            f"state: {len(alive)} leases of {aws.settings.table} are renewed by Java workers,"
            f" {alive[0]} among them: they move checkpoints and do not know the state\n"
            "Stop them first; or run without `state` beside them, under the same name"
        )


def remarks_on_names(
    aws: Aws, opened: Mapping[StreamKey, OpenStream], keys: Iterable[str]
) -> tuple[str, ...]:
    """What is unusual in how the rows of the table name the streams, in words; one for each."""
    adopted = tuple(
        f"leases of {stream.summary.name} are under {key}: they are used as they are"
        for key, stream in opened.items()
        if is_named_otherwise(key, stream.summary)
    )
    near = near_misses(opened, map(stream_of, keys)) if aws.settings.streams else {}
    return (*adopted, *(f"not used: leases of {words}" for words in near.values()))


def is_named_otherwise(key: StreamKey, summary: StreamSummary) -> bool:
    """Whether the rows of a stream have another key than that of its creation."""
    return key != ONLY_STREAM and key != stream_key(summary.arn, summary.created_at)


def why_other_kind(leases: Iterable[Lease], table: str, *, is_of_several: bool) -> str | None:
    """Why this table cannot be used, if it was begun with one stream and now there are several, or
    the reverse. The keys differ, so every lease would be orphaned and every shard would begin again
    at the start position. This is never wanted (the KCL does it, and its FAQ warns of it)."""
    wrong = next(
        (lease.key for lease in leases if (stream_of(lease.key) == ONLY_STREAM) == is_of_several),
        None,
    )
    if wrong is None:
        return None
    if is_of_several:
        begun, here, advice = "stream:", "streams:", "keep `stream:` for this application"
    else:
        begun, here, advice = "streams:", "stream:", "keep `streams:`, with one entry if need be"
    return (
        f"lease table {table} was begun with `{begun}` (as its lease {display_name(wrong)} shows);"
        f" with `{here}` leases have other keys, and every shard would begin anew at the start\n"
        f"Either {advice},\n"
        "or begin anew on purpose: name another table (leases.table)"
    )
