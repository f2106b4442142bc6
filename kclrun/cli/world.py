"""From settings to what talks to AWS: the one place where `aws/` is put together.

Every verb that touches AWS starts here; the manager is given the finished `World`. Rule: making
an `Aws` sends nothing; `open_world` is the first to ask, and waits for answers no longer than
`aws.start_timeout`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from kclrun.aws.cloudwatch import CloudWatchOutlet
from kclrun.aws.control import ControlPlane
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.instance_metadata import Imds, open_imds
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.lifecycle import BotoLifecycleActions
from kclrun.aws.table_setup import TableReport, ensure_table
from kclrun.aws.wire import WireClient
from kclrun.cli.streams import open_streams, readable, refuse_other_kind
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError, Throttled, Unavailable
from kclrun.model.backoff import backoff_s
from kclrun.model.time import Instant
from kclrun.model.wire import WireEndpoint
from kclrun.ports import StreamSummary

if TYPE_CHECKING:
    from kclrun.manager.world import World

__all__ = ["Aws", "open_world", "patiently", "require_stream"]

T = TypeVar("T")


class Aws:
    """The services as these settings reach them. Makes its clients when they are first needed.

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
        self._dynamodb_settings = self._endpoint_settings("dynamodb")
        self._session = open_session(self._dynamodb_settings)
        self.kinesis: WireEndpoint = resolve_endpoint(
            self._session, "kinesis", self._endpoint_settings("kinesis")
        )
        self.dynamodb: WireEndpoint = resolve_endpoint(
            self._session, "dynamodb", self._dynamodb_settings
        )
        self.credentials = CredentialSource(
            self._session,
            endpoint_url=self.kinesis.url,
            role_arn=settings.aws.role_arn,
            sts_endpoint_url=self._url("sts"),
        )

    @cached_property
    def kinesis_client(self) -> WireClient:
        return WireClient(self.kinesis, self.credentials.current, service="kinesis")

    @cached_property
    def table(self) -> DynamoLeaseTable:
        client = WireClient(self.dynamodb, self.credentials.current, service="dynamodb")
        return DynamoLeaseTable(client, self.settings.table)

    @cached_property
    def stream(self) -> WireStreamAdmin:
        """The one stream. Raises: SettingsError where there are several."""
        return self.admin_of(self.settings.only_stream)

    @cached_property
    def reader(self) -> PollingReader:
        """Of the one stream. Raises: SettingsError where there are several."""
        return self.reader_of(self.settings.only_stream)

    def admin_of(self, stream: str) -> WireStreamAdmin:
        return WireStreamAdmin(self.kinesis_client, stream)

    def reader_of(self, stream: str) -> PollingReader:
        return PollingReader(self.kinesis_client, stream)

    @property
    def metrics(self) -> CloudWatchOutlet | None:
        """Where `observe.cloudwatch` has metrics published, if it does."""
        cloudwatch = self.settings.observe.cloudwatch
        if cloudwatch is None:
            return None
        return CloudWatchOutlet(
            self._endpoint_settings("cloudwatch"), cloudwatch.namespace, self.credentials.current
        )

    @property
    def imds(self) -> Imds | None:
        """The instance metadata, if `instance` has it watched; asks nothing.

        Raises: SettingsError where it must be watched and is switched off, or has no address.
        """
        watch = self.settings.instance.watch
        # With an AWS of its own, an application is no machine of a group.
        is_elsewhere = watch == "auto" and self.settings.aws.endpoint is not None
        if watch is False or is_elsewhere:
            return None
        imds = open_imds(self._session, os.environ)
        if imds is None and watch is True:
            raise SettingsError("instance.watch is on, and AWS_EC2_METADATA_DISABLED says no")
        return imds

    @property
    def lifecycle(self) -> BotoLifecycleActions:
        """The hooks of this machine's group; asks nothing."""
        return BotoLifecycleActions(self._endpoint_settings("autoscaling"))

    @cached_property
    def control(self) -> ControlPlane:
        """botocore's clients for DynamoDB, with the credentials of this moment."""
        return ControlPlane(self._session, self._dynamodb_settings, self.credentials.current())

    def _endpoint_settings(self, service: str) -> EndpointSettings:
        aws = self.settings.aws
        return EndpointSettings(
            region=aws.region, profile=aws.profile, endpoint_url=self._url(service)
        )

    def _url(self, service: str) -> str | None:
        aws = self.settings.aws
        return next((url for name, url in aws.endpoints.items() if name == service), aws.endpoint)


def open_world(settings: Settings) -> World:
    """Everything the manager needs, asked for and answered: streams found, lease table usable.

    Raises: SettingsError, NotFound (naming every stream that is not there), AccessDenied,
    TableRefused; Unavailable when AWS has not answered within `aws.start_timeout`.
    """
    from kclrun.manager.world import InstanceServices, SourceStream, World

    aws = Aws(settings)
    imds = aws.imds
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    opened = open_streams(aws, lambda call: patiently(call, deadline, patience_s))
    patiently(lambda: _ensured(aws, deadline), deadline, patience_s)
    # What the manager repeats until it works is tried here, where a refusal still ends the start;
    # later it would wait for a permission that nobody knows to be missing.
    for stream in opened.values():
        patiently(stream.admin.list_shards, deadline, patience_s)
    patiently(lambda: refuse_other_kind(aws), deadline, patience_s)
    return World(
        table=aws.table,
        streams={
            key: SourceStream(stream.admin, stream.summary, stream.settings)
            for key, stream in opened.items()
        },
        credentials=aws.credentials,
        kinesis=aws.kinesis,
        dynamodb=aws.dynamodb,
        metrics=aws.metrics,
        instance=InstanceServices(imds, aws.lifecycle) if imds is not None else None,
    )


def require_stream(settings: Settings) -> StreamSummary:
    """The stream, asked for and answered, for an engine that keeps no lease table.

    Raises: SettingsError, NotFound (no such stream), AccessDenied; Unavailable when AWS has not
    answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    summary = patiently(lambda: readable(aws.stream.summary()), deadline, patience_s)
    patiently(aws.stream.list_shards, deadline, patience_s)
    aws.kinesis_client.close()
    return summary


def patiently(call: Callable[[], T], deadline: Instant, patience_s: float) -> T:
    """What `call` returns, asked again while AWS throttles or is away, until `deadline`.

    Raises: Unavailable after that, naming the last trouble; anything else at once.
    """
    attempt = 0
    while True:
        try:
            return call()
        except (Throttled, Unavailable) as error:
            attempt += 1
            pause_s = backoff_s(attempt, random.random())
            if time.monotonic() + pause_s >= deadline:
                raise Unavailable(
                    f"AWS has not answered for {patience_s:g} s (aws.start_timeout)\n"
                    f"The last attempt: {error}",
                    operation=error.operation,
                    code=error.code,
                ) from None
            time.sleep(pause_s)


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
