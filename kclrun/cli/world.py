"""Opens the world of the manager: the first requests, sent with patience, and its checks.

`services.py` makes the clients. The manager gets the finished `World`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from kclrun.aws.patience import patiently
from kclrun.aws.table_setup import TableReport, ensure_table
from kclrun.cli.consumers import active_consumer
from kclrun.cli.services import (
    Aws,
    OpenStream,
    advising_on_streams,
    open_streams,
    readable,
    refuse_other_kind,
)
from kclrun.config.schema import Settings
from kclrun.ipc.board import boottime
from kclrun.manager.world import InstanceServices, SourceStream, World
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant
from kclrun.ports import StreamSummary

T = TypeVar("T")


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
        patiently(aws.check_letters, deadline, patience_s)
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
        source=None if aws.source is aws.kinesis else aws.source,
        dynamodb=aws.dynamodb,
        service_time=aws.source_client.service_time,
        metrics=aws.metrics,
        story=aws.story,
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
            began = boottime()
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
