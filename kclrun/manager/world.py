"""What the manager is given by the composition root: the world outside this host, and its words.

Rule: plain values and ports only, so that a test or a simulation hands in its own.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kclrun.config.stream_schema import StreamSettings
from kclrun.model.stream_key import StreamKey
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import (
    InstanceMetadata,
    LeaseTable,
    LifecycleActions,
    MetricOutlet,
    StreamAdmin,
    StreamSummary,
)

__all__ = [
    "CredentialSource",
    "ExitReason",
    "InstanceServices",
    "SourceStream",
    "Until",
    "World",
]

Until = Literal["caught-up"]


class CredentialSource(Protocol):
    """Where keys come from; renews them before they expire."""

    def current(self) -> WireCredentials:
        """Keys good for now. May do I/O: the manager asks on a thread of its pool.

        Raises: AccessDenied or Unavailable; then the keys handed out before stay in use.
        """
        ...


def _host_time() -> WallTime:
    return WallTime(time.time())


@dataclass(frozen=True)
class SourceStream:
    """One stream of the application, found and described; `settings` are what holds for it."""

    admin: StreamAdmin
    summary: StreamSummary
    settings: StreamSettings


@dataclass(frozen=True)
class InstanceServices:
    """What this machine is told about itself, and where it answers."""

    metadata: InstanceMetadata
    lifecycle: LifecycleActions


@dataclass(frozen=True)
class World:
    """The services of one application, as reached from this host.

    `streams` has one entry, ONLY_STREAM's, or one for each of several.
    `table` is used from several threads at once. `kinesis` and `dynamodb` travel to the lease
    processes. `service_time` is the service's clock as last seen, else this host's [P14].
    `metrics` is where metrics are published, None where they are not. `instance` is None where
    nobody asks what becomes of this machine.
    """

    table: LeaseTable
    streams: Mapping[StreamKey, SourceStream]
    credentials: CredentialSource
    kinesis: WireEndpoint
    dynamodb: WireEndpoint
    service_time: Callable[[], WallTime] = field(default=_host_time)
    metrics: MetricOutlet | None = None
    instance: InstanceServices | None = None

    @property
    def stream_names(self) -> str:
        """All streams in one line, for people."""
        return ", ".join(stream.summary.name for stream in self.streams.values())


class ExitReason(enum.Enum):
    """Why `run_fleet` returned."""

    DRAINED = "drained"
    CAUGHT_UP = "caught up"
    # With `--until caught-up`: user code gave up on a shard, and the others are read.
    HALTED = "caught up but for halted shards"
    # Nothing can be proven, renewed or checkpointed any more: a person has to look.
    TABLE_GONE = "the lease table is gone"
    # Something had to be killed, or a row of ours was left to expire: no loss, but what was not
    # checkpointed is read again.
    CUT_SHORT = "stopped before it was drained"

    @property
    def exit_code(self) -> int:
        """0 for a stop in good order; 65 (EX_DATAERR) with shards halted, 66 (EX_NOINPUT) without
        its table, 75 (EX_TEMPFAIL) for one that was cut short."""
        codes = {ExitReason.HALTED: 65, ExitReason.TABLE_GONE: 66, ExitReason.CUT_SHORT: 75}
        return codes.get(self, 0)
