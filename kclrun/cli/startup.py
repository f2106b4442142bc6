"""Opens the world of the manager: the first requests, sent with patience, and its checks.

`services.py` makes the clients. The manager gets the finished `FleetServices`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kclrun.aws import patience
from kclrun.aws.table_setup import TableReport, ensure_table
from kclrun.cli.consumers import active_consumer
from kclrun.cli.destination_checks import check_letters, output_checks
from kclrun.cli.services import (
    Aws,
    OpenStream,
    advising_on_streams,
    open_streams,
    readable,
    refuse_other_kind,
)
from kclrun.cli.waiting import waiting_for
from kclrun.config.kcl import kcl_application
from kclrun.config.schema import Settings
from kclrun.errors import NotFound
from kclrun.ipc.board import boottime
from kclrun.manager.world import FleetServices, InstanceServices, SourceStream
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant
from kclrun.ports import StreamSummary

T = TypeVar("T")


def open_world(settings: Settings, paths: Sequence[Path] | None = None) -> FleetServices:
    """The clients of the manager, after checks: streams found, lease table usable. `paths` are the
    folders of user code, whose outputs are checked too.

    Raises: SettingsError, NotFound (with the names of all missing streams), AccessDenied,
    TableRefused; Unavailable if AWS has not answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    imds = aws.imds
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)

    def patient(call: Callable[[], T], what: str) -> T:
        return patiently(call, deadline, patience_s, what=what)

    missing: dict[str, str] = {}
    opened, described_instant = _described(aws, deadline, patience_s, missing)
    patient(lambda: _ensured(aws, deadline), aws.called_table)
    # The manager repeats these calls until they succeed. Here a refusal still ends the start. Later
    # the manager would wait for a missing permission without an error that an operator sees.
    for stream in opened.values():
        patient(stream.admin.list_shards, aws.called_stream(stream.settings.name))
    created = {key: stream.summary.created_at for key, stream in opened.items()}
    patient(lambda: refuse_other_kind(aws, created), aws.called_table)
    if settings.on_error.then == "dead-letter":
        patient(
            partial(check_letters, aws),
            "on_error.dead_letter, to see whether it can be written to",
        )
    for name, check in output_checks(aws, paths):
        patient(check, f"{name}, to see whether it can be written to")
    consumers: Mapping[StreamKey, str] = {}
    if settings.fetch.mode == "fan-out":
        consumers = {
            key: patient(
                partial(active_consumer, aws, stream.summary),
                f"the consumer of {stream.summary.name} to be active",
            )
            for key, stream in opened.items()
        }
    return FleetServices(
        table=aws.table,
        streams={
            key: SourceStream(
                stream.admin,
                stream.summary,
                stream.settings,
                consumer_arn=consumers.get(key),
                reader=stream.reader,
            )
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
        missing=missing,
    )


def _described(
    aws: Aws, deadline: Instant, patience_s: float, missing: dict[str, str] | None = None
) -> tuple[Mapping[StreamKey, OpenStream], Instant]:
    """All streams, and the time at which the oldest of the used answers was requested. `missing`
    gets those that are not there any more, with the service's words."""
    asked: list[Instant] = []

    def patient(call: Callable[[], T], what: str) -> T:
        def once() -> T:
            began = boottime()
            answer = call()
            asked.append(began)
            return answer

        return patiently(once, deadline, patience_s, what=what)

    def note(name: str, error: NotFound) -> None:
        if missing is not None:
            missing[name] = str(error)

    opened = open_streams(aws, patient, note)
    return opened, min(asked)


def require_stream(settings: Settings) -> StreamSummary:
    """The described stream, for an engine without a lease table.

    Raises: SettingsError, NotFound (no such stream), AccessDenied; Unavailable if AWS has not
    answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    what = aws.called_stream(settings.only_stream)
    with advising_on_streams(aws):
        summary = patiently(lambda: readable(aws.stream.summary()), deadline, patience_s, what=what)
        patiently(aws.stream.list_shards, deadline, patience_s, what=what)
    aws.kinesis_client.close()
    return summary


def patiently(call: Callable[[], T], deadline: Instant, patience_s: float, *, what: str) -> T:
    """As `aws.patience.patiently`; `what` it waits for is said."""
    with waiting_for(what) as wait:
        return patience.patiently(call, deadline, patience_s, wait.failed)


def _ensured(aws: Aws, deadline: Instant) -> TableReport:
    settings = aws.settings
    return ensure_table(
        aws.control,
        settings.table,
        application=kcl_application(settings),
        create=settings.leases.create,
        tags=settings.leases.tags,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
        timeout_s=max(1.0, deadline - time.monotonic()),
    )
