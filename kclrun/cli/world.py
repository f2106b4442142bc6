"""Builds the AWS clients from the settings. Only this module assembles `aws/`.

Every verb that uses AWS starts here, and the manager gets the finished `World`. Making an `Aws`
sends nothing. `open_world` sends the first requests.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from kclrun.aws.cloudwatch import CloudWatchOutlet
from kclrun.aws.control import ControlPlane
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.dead_letters import open_letters
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.fan_out import StreamConsumers
from kclrun.aws.instance import BotoLifecycleActions, Imds, open_imds
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoCoordinatorState, DynamoLeaseTable
from kclrun.aws.table_setup import TableReport, ensure_table
from kclrun.aws.wire import WireClient
from kclrun.cli.config_options import load_configuration
from kclrun.cli.consumers import active_consumer
from kclrun.cli.streams import (
    OpenStream,
    advising_on_streams,
    open_streams,
    readable,
    refuse_other_kind,
)
from kclrun.config.outputs import output_places
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings
from kclrun.config.state import state_place
from kclrun.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    ServiceError,
    SettingsError,
    SinkError,
    Throttled,
    Unavailable,
)
from kclrun.manager.world import InstanceServices, SourceStream, World
from kclrun.model.output import OutputPlace, RowsOf, setting_of
from kclrun.model.record import Measurement
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant, WallTime, backoff_s
from kclrun.model.wire import WireEndpoint
from kclrun.observe.emf import EmfOutlet
from kclrun.observe.logs import LineSink
from kclrun.ports import LetterStore, MetricOutlet, StreamSummary
from kclrun.sinks.dead_letters import letter_store
from kclrun.worker.opening import open_output, open_versions

_STDERR: Final = 2

T = TypeVar("T")

# For tests of a destination: no rows are sent.
_NO_ROWS: Final = RowsOf(
    application="check",
    stream="check",
    stream_created_at=WallTime(0.0),
    shard_id="check",
    generation=0,
    token=0,
)

# 120 s in all at the default of `aws.start_timeout`. This is twice the time that 1,000 managers
# need, and below the 4 minutes of the unit file, also if the table must be created.
THROTTLED_PATIENCES: Final = 2
# With pauses of this size, 1,000 managers send 67 requests a second, three times the account's
# limit.
_THROTTLED_PAUSE_MAX_S: Final = 20.0


class Checkable(Protocol):
    """A destination or a store, as far as `kclrun check` needs it."""

    def check(self) -> str: ...

    def close(self) -> None: ...


def _checked(named: str, open_it: Callable[[], Checkable]) -> str:
    """The destination in words. Raises: SettingsError if it is missing or does not fit;
    AccessDenied, Throttled, Unavailable; each with the name of the setting."""
    try:
        with closing(open_it()) as opened:
            return opened.check()
    except (ConfigError, NotFound, InvalidRequest) as error:
        raise SettingsError(f"{named}: {error}") from None
    except ServiceError as error:
        raise type(error)(f"{named}: {error}", operation=error.operation, code=error.code) from None
    except SinkError as error:
        raise Unavailable(f"{named}: {error}") from None


class Aws:
    """The AWS services of these settings. Makes each client when it is first needed.

    Raises: SettingsError (no region, unknown profile, `embedded` outside of `run`).
    """

    def __init__(self, settings: Settings) -> None:
        if settings.aws.endpoint == EMBEDDED:
            raise SettingsError(
                "aws.endpoint: embedded is an AWS that lives only while `kclrun run` does\n"
                "To keep one:  kclrun local --port 4567\n"
                "and use it:   --set aws.endpoint=http://127.0.0.1:4567"
            )
        self.settings = settings
        dynamodb = self._endpoint_settings("dynamodb")
        aws = settings.aws
        self._session = open_session(EndpointSettings(region=aws.region, profile=aws.profile))
        self.kinesis: WireEndpoint = resolve_endpoint(
            self._session, "kinesis", self._endpoint_settings("kinesis")
        )
        self.dynamodb: WireEndpoint = resolve_endpoint(self._session, "dynamodb", dynamodb)
        self._dynamodb_settings = msgspec.structs.replace(dynamodb, region=self.dynamodb.region)
        self.credentials = CredentialSource(
            self._session,
            endpoint_url=self.kinesis.url,
            role_arn=settings.aws.role_arn,
            sts_endpoint_url=settings.aws.url_of("sts"),
        )

    @cached_property
    def kinesis_client(self) -> WireClient:
        return WireClient(self.kinesis, self.credentials.current, service="kinesis")

    @cached_property
    def dynamodb_client(self) -> WireClient:
        return WireClient(self.dynamodb, self.credentials.current, service="dynamodb")

    @cached_property
    def table(self) -> DynamoLeaseTable:
        return DynamoLeaseTable(self.dynamodb_client, self.settings.table)

    @cached_property
    def coordinator(self) -> DynamoCoordinatorState:
        """The table in which a KCL 3 fleet of an early version keeps its mode."""
        return DynamoCoordinatorState(self.dynamodb_client, self.settings.application)

    @cached_property
    def stream(self) -> WireStreamAdmin:
        """The only stream. Raises: SettingsError if there are several."""
        return self.admin_of(self.settings.only_stream)

    @cached_property
    def reader(self) -> PollingReader:
        """The reader of the only stream. Raises: SettingsError if there are several."""
        return self.reader_of(self.settings.only_stream)

    def admin_of(self, stream: str) -> WireStreamAdmin:
        return WireStreamAdmin(self.kinesis_client, stream)

    def reader_of(self, stream: str) -> PollingReader:
        return PollingReader(self.kinesis_client, stream)

    def consumers_of(self, stream_arn: str) -> StreamConsumers:
        return StreamConsumers(self.kinesis_client, stream_arn)

    @cached_property
    def letters(self) -> LetterStore:
        """The place of `on_error.dead_letter`; sends nothing."""
        place = self.settings.letter_place
        return letter_store(
            place, lambda: open_letters(place, self.kinesis, self.credentials.current)
        )

    @property
    def outputs(self) -> tuple[tuple[str, Callable[[], str]], ...]:
        """The store of the state, and the outputs of the fleet that are destinations of their own,
        each by its setting, with a test of it. A file that grows is a folder of this machine, which
        the start makes."""
        places = tuple(
            (setting_of(place.name), partial(self._check_output, place))
            for place in output_places(self.settings, ONLY_STREAM)
            if not place.grows
        )
        state = state_place(self.settings)
        if state is None:
            return places
        store = partial(open_versions, state, "check", self.kinesis, self.credentials.current)
        return (("state", partial(_checked, "state", store)), *places)

    def _check_output(self, place: OutputPlace) -> str:
        """The destination in words, as `_checked`."""
        return _checked(
            setting_of(place.name),
            partial(open_output, place, _NO_ROWS, self.kinesis, self.credentials.current),
        )

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
    def imds(self) -> Imds | None:
        """The instance metadata, if `instance` wants it watched. Sends nothing.

        Raises: SettingsError if it must be watched but is switched off or has no address.
        """
        watch = self.settings.instance.watch
        # With its own endpoint, an application does not run on a machine of an autoscaling group.
        is_elsewhere = watch == "auto" and self.settings.aws.endpoint is not None
        if watch is False or is_elsewhere:
            return None
        imds = open_imds(self._session, os.environ)
        if imds is None and watch is True:
            raise SettingsError("instance.watch is on, and AWS_EC2_METADATA_DISABLED says no")
        return imds

    @property
    def lifecycle(self) -> BotoLifecycleActions:
        """The hooks of this machine's group. Sends nothing."""
        return BotoLifecycleActions(self._endpoint_settings("autoscaling"))

    @cached_property
    def control(self) -> ControlPlane:
        """botocore's clients for DynamoDB, with the present credentials."""
        return ControlPlane(self._session, self._dynamodb_settings, self.credentials.current())

    def _endpoint_settings(self, service: str) -> EndpointSettings:
        aws = self.settings.aws
        return EndpointSettings(
            region=aws.region, profile=aws.profile, endpoint_url=aws.url_of(service)
        )


def fleet_aws(config: Path | None, overrides: Sequence[str]) -> Aws:
    """Table and stream of the configuration. Raises: SettingsError, also on Spark: no leases."""
    settings = load_configuration(config, overrides).settings
    if settings.engine == "spark":
        raise SettingsError(
            "engine: spark keeps no leases: positions are in the query's checkpoint,"
            f" {settings.spark.checkpoint or 'made by each run'}\n"
            "Lag and progress by shard:  kclrun --config … on a terminal, or --report FILE"
        )
    return Aws(settings)


def open_world(settings: Settings) -> World:
    """The clients of the manager, after checks: streams found, lease table usable.

    Raises: SettingsError, NotFound (with the names of all missing streams), AccessDenied,
    TableRefused; Unavailable if AWS has not answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    imds = aws.imds
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    opened, described_instant = _described(aws, deadline, patience_s)
    patiently(lambda: _ensured(aws, deadline), deadline, patience_s)
    # The manager repeats these calls until they succeed. Here a refusal still ends the start. Later
    # the manager would wait for a missing permission without an error that an operator sees.
    for stream in opened.values():
        patiently(stream.admin.list_shards, deadline, patience_s)
    created = {key: stream.summary.created_at for key, stream in opened.items()}
    patiently(lambda: refuse_other_kind(aws, created), deadline, patience_s)
    if settings.on_error.then == "dead-letter":
        patiently(aws.letters.check, deadline, patience_s)
    for _, check in aws.outputs:
        patiently(check, deadline, patience_s)
    consumers: Mapping[StreamKey, str] = {}
    if settings.fetch.mode == "fan-out":
        consumers = {
            key: patiently(partial(active_consumer, aws, stream.summary), deadline, patience_s)
            for key, stream in opened.items()
        }
    return World(
        table=aws.table,
        streams={
            key: SourceStream(stream.admin, stream.summary, stream.settings, consumers.get(key))
            for key, stream in opened.items()
        },
        credentials=aws.credentials,
        kinesis=aws.kinesis,
        dynamodb=aws.dynamodb,
        service_time=aws.kinesis_client.service_time,
        metrics=aws.metrics,
        instance=InstanceServices(imds, aws.lifecycle) if imds is not None else None,
        coordinator=aws.coordinator,
        described_instant=described_instant,
    )


def _described(
    aws: Aws, deadline: Instant, patience_s: float
) -> tuple[Mapping[StreamKey, OpenStream], Instant]:
    """All streams, and the time at which the oldest of the used answers was requested."""
    asked: list[Instant] = []

    def patient(call: Callable[[], T]) -> T:
        def once() -> T:
            began = Instant(time.clock_gettime(time.CLOCK_BOOTTIME))
            answer = call()
            asked.append(began)
            return answer

        return patiently(once, deadline, patience_s)

    opened = open_streams(aws, patient)
    return opened, min(asked)


def require_stream(settings: Settings) -> StreamSummary:
    """The described stream, for an engine without a lease table.

    Raises: SettingsError, NotFound (no such stream), AccessDenied; Unavailable if AWS has not
    answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    with advising_on_streams(aws):
        summary = patiently(lambda: readable(aws.stream.summary()), deadline, patience_s)
        patiently(aws.stream.list_shards, deadline, patience_s)
    aws.kinesis_client.close()
    return summary


def patiently(call: Callable[[], T], deadline: Instant, patience_s: float) -> T:
    """The value of `call`, repeated while AWS is unavailable, until `deadline`.

    While AWS throttles, the call is repeated for twice as long. Throttling is an answer, and the
    managers of a fleet that start together are served one after the other.
    Raises: Unavailable after that, with the last error; any other error at once.
    """
    attempt = 0
    while True:
        try:
            return call()
        except (Throttled, Unavailable) as error:
            attempt += 1
            is_throttled = isinstance(error, Throttled)
            pause_s = start_pause_s(attempt, random.random(), is_throttled=is_throttled)
            patient_s = patience_s * (THROTTLED_PATIENCES - 1) if is_throttled else 0.0
            if time.monotonic() + pause_s >= deadline + patient_s:
                raise Unavailable(
                    f"AWS has not answered for {patience_s:g} s (aws.start_timeout)\n"
                    f"The last attempt: {error}",
                    operation=error.operation,
                    code=error.code,
                ) from None
            time.sleep(pause_s)


def start_pause_s(attempt: int, chance: float, *, is_throttled: bool) -> float:
    """The pause before attempt number `attempt` (from 1) at a call of the start.

    An account may send 20 DescribeStreamSummary a second. 1,000 managers that start together are
    served after 50 s at best. With these pauses the last one is served after 65 s, with 5,000 calls
    in all. With the pauses for an unavailable service it takes as long, but with 15,000 calls,
    which delay the calls of other applications.
    """
    if is_throttled:
        return backoff_s(attempt, chance, base_s=0.25, max_s=_THROTTLED_PAUSE_MAX_S)
    return backoff_s(attempt, chance)


def _ensured(aws: Aws, deadline: Instant) -> TableReport:
    settings = aws.settings
    return ensure_table(
        aws.control,
        settings.table,
        application=settings.application,
        create=settings.leases.create,
        tags=settings.leases.tags,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
        timeout_s=max(1.0, deadline - time.monotonic()),
    )
