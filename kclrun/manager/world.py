"""The services outside this host, as the composition root passes them to the manager.

Only plain values and ports, so that a test or a simulation can pass its own.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kclrun.config.schema import StreamSettings
from kclrun.model.lease import OwnerId
from kclrun.model.record import Measurement
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.observe.story import StoryOutlet
from kclrun.ports import (
    CoordinatorState,
    InstanceMetadata,
    LeaseTable,
    LifecycleActions,
    MetricOutlet,
    ShardReader,
    StreamAdmin,
    StreamSummary,
)

Until = Literal["caught-up"]


class RunNames(NamedTuple):
    """What samples and reports call the run of a manager by. `stream` may name several."""

    application: str
    stream: str
    owner: OwnerId


class CredentialSource(Protocol):
    """The source of the AWS credentials. It renews them before they expire."""

    def current(self) -> WireCredentials:
        """Credentials that are valid now. May do I/O: the manager calls it on a thread of its pool.

        Raises: AccessDenied or Unavailable; then the credentials of the call before stay in use.
        """
        ...

    def notify(self, replaced: Callable[[], None]) -> None:
        """`replaced` is called, on any thread, when keys that a service refused were replaced."""
        ...


@dataclass(frozen=True)
class SourceStream:
    """One stream of the application, found and described. `settings` are this stream's settings.
    `consumer_arn` is its registered consumer for enhanced fan-out; None where shards are polled.
    `reader` reads the shards of other owners for `--until caught-up`; None: they count as unread.
    """

    admin: StreamAdmin
    summary: StreamSummary
    settings: StreamSettings
    consumer_arn: str | None = None
    reader: ShardReader | None = None


@dataclass(frozen=True)
class InstanceServices:
    """The instance metadata of this machine, and the lifecycle actions by which it answers."""

    metadata: InstanceMetadata
    lifecycle: LifecycleActions


@dataclass(frozen=True)
class FleetServices:
    """The services of one application, as reached from this host.

    `streams` has one entry: that of ONLY_STREAM. With several streams it has one entry for each.
    `table` is used from several threads at once. `kinesis` and `dynamodb` are sent to the lease
    processes; so is `source`, where the streams are read, if they are not of Kinesis.
    `service_time` is the service's clock as last seen, else this host's [P14].
    `metrics` is the outlet for metrics; None if they are not published. `instance` is None if the
    life of this EC2 instance is not watched. `coordinator` is None if a KCL 3 fleet of an early
    version cannot exist. `described_instant`: when the streams were described, by the loop's clock.
    `story` is where stories are kept besides this machine; None if nowhere. `missing` are streams
    of the settings that are not there any more, each with the service's words: the others are read.
    """

    table: LeaseTable
    streams: Mapping[StreamKey, SourceStream]
    credentials: CredentialSource
    kinesis: WireEndpoint
    dynamodb: WireEndpoint
    service_time: Callable[[], WallTime] = field(default=lambda: WallTime(time.time()))
    metrics: MetricOutlet[Measurement] | None = None
    instance: InstanceServices | None = None
    coordinator: CoordinatorState | None = None
    described_instant: Instant | None = None
    story: StoryOutlet | None = None
    source: WireEndpoint | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def endpoints(self) -> tuple[WireEndpoint, ...]:
        """The endpoints that every lease process uses."""
        return (self.kinesis, self.dynamodb, self.source or self.kinesis)

    @property
    def stream_names(self) -> str:
        """The names of all streams in one line, for log and reports."""
        return ", ".join(stream.summary.name for stream in self.streams.values())


class ExitReason(enum.Enum):
    """Why `run_fleet` returned."""

    DRAINED = "drained"
    CAUGHT_UP = "caught up"
    # With `--until caught-up`: user code gave up on a shard, and the other shards are read.
    HALTED = "caught up but for halted shards"
    # Ownership cannot be proven, renewed or checkpointed any more: an operator has to act.
    TABLE_GONE = "the lease table is gone"
    # The checkpoints mean nothing in the stream that is read: an operator decides where reading
    # begins. Its log line says whether the stream was deleted and made again under its name.
    ANOTHER_STREAM = "the rows of the lease table are of another stream"
    # A process had to be killed, a row of ours was left to expire, or processed records could not
    # be checkpointed (a full disk). No loss: records that were not checkpointed are read again.
    CUT_SHORT = "stopped before it was drained"

    @property
    def exit_code(self) -> int:
        """0 for a stop in good order; 65 (EX_DATAERR) with shards halted; 66 (EX_NOINPUT) without
        the lease table; 75 (EX_TEMPFAIL) for a stop that was cut short; 78 (EX_CONFIG) if the rows
        belong to another stream: systemd does not restart the unit then."""
        codes = {
            ExitReason.HALTED: 65,
            ExitReason.TABLE_GONE: 66,
            ExitReason.CUT_SHORT: 75,
            ExitReason.ANOTHER_STREAM: 78,
        }
        return codes.get(self, 0)
