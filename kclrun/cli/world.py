"""Opens the world of the manager: the first requests, sent with patience, and its checks.

`services.py` makes the clients. The manager gets the finished `World`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

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
from kclrun.cli.waiting import waiting_for
from kclrun.config.schema import Settings
from kclrun.errors import NothingListens, Throttled, Unavailable
from kclrun.ipc.board import boottime
from kclrun.manager.world import InstanceServices, SourceStream, World
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant, backoff_s
from kclrun.ports import StreamSummary

T = TypeVar("T")

# 120 s in all at the default of `aws.start_timeout`. This is twice the time that 1,000 managers
# need, and below the 4 minutes of the unit file, also if the table must be created.
THROTTLED_PATIENCES: Final = 2
# With pauses of this size, 1,000 managers send 67 requests a second, three times the account's
# limit.
_THROTTLED_PAUSE_MAX_S: Final = 20.0


def open_world(settings: Settings) -> World:
    """The clients of the manager, after checks: streams found, lease table usable.

    Raises: SettingsError, NotFound (with the names of all missing streams), AccessDenied,
    TableRefused; Unavailable if AWS has not answered within `aws.start_timeout`.
    """
    aws = Aws(settings)
    imds = aws.imds
    patience_s = float(settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)

    def patient(call: Callable[[], T], what: str) -> T:
        return patiently(call, deadline, patience_s, what=what)

    opened, described_instant = _described(aws, deadline, patience_s)
    patient(lambda: _ensured(aws, deadline), aws.called_table)
    # The manager repeats these calls until they succeed. Here a refusal still ends the start. Later
    # the manager would wait for a missing permission without an error that an operator sees.
    for stream in opened.values():
        patient(stream.admin.list_shards, aws.called_stream(stream.settings.name))
    created = {key: stream.summary.created_at for key, stream in opened.items()}
    patient(lambda: refuse_other_kind(aws, created), aws.called_table)
    if settings.on_error.then == "dead-letter":
        patient(aws.check_letters, "on_error.dead_letter, to see whether it can be written to")
    for name, check in aws.outputs:
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

    def patient(call: Callable[[], T], what: str) -> T:
        def once() -> T:
            began = boottime()
            answer = call()
            asked.append(began)
            return answer

        return patiently(once, deadline, patience_s, what=what)

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
    what = aws.called_stream(settings.only_stream)
    with advising_on_streams(aws):
        summary = patiently(lambda: readable(aws.stream.summary()), deadline, patience_s, what=what)
        patiently(aws.stream.list_shards, deadline, patience_s, what=what)
    aws.kinesis_client.close()
    return summary


def patiently(call: Callable[[], T], deadline: Instant, patience_s: float, *, what: str) -> T:
    """The value of `call`, repeated while AWS is unavailable, until `deadline`. `what` it waits for
    is said.

    While AWS throttles, the call is repeated for twice as long. Throttling is an answer, and the
    managers of a fleet that start together are served one after the other.
    Raises: Unavailable after that, with the last error; NothingListens and any other error at once.
    """
    with waiting_for(what) as wait:
        attempt = 0
        while True:
            try:
                return call()
            except NothingListens:
                raise
            except (Throttled, Unavailable) as error:
                attempt += 1
                is_throttled = isinstance(error, Throttled)
                pause_s = start_pause_s(attempt, random.random(), is_throttled=is_throttled)
                patient_s = patience_s * (THROTTLED_PATIENCES - 1) if is_throttled else 0.0
                left_s = deadline + patient_s - time.monotonic()
                if pause_s >= left_s:
                    who = "AWS" if error.operation else "The destination"
                    raise error.reworded(
                        f"{who} has not answered for {patience_s:g} s (aws.start_timeout)\n"
                        f"The last attempt: {error}",
                        Unavailable,
                    ) from None
                wait.failed(error, left_s)
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
