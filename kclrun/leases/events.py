"""The events of the lease manager's core. Past tense; each failure is a type of its own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.shard import Shard
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import WallTime
from kclrun.protocol.reports import CoreReport
from kclrun.protocol.writes import LeaseChange, Outcome


class Started(msgspec.Struct, frozen=True):
    """The manager has its identity and its table, and begins.

    `started_at` is the service's time, as the requests of the start showed it; a listing brings it
    anew. It is used for `halted_at`, and for the end of a pause.
    """

    started_at: WallTime = WallTime(0.0)


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; the next one is due at `LeaseManager.next_deadline`."""


class LeasesScanned(msgspec.Struct, frozen=True):
    """A whole scan of the table. `broken` are keys of rows that cannot be read as leases [P8], and
    `reasons` says why; `kcl3_mode` is the state of a KCL 3 fleet, where the table holds one."""

    leases: tuple[Lease, ...]
    broken: tuple[str, ...] = ()
    foreign: int = 0
    kcl3_mode: str | None = None
    reasons: Mapping[str, str] = {}


class ShardsListed(msgspec.Struct, frozen=True):
    """A complete ListShards, made after a lease scan. `listed_at` is the service's Date [P10, P14].

    `at_start` is the listing filtered by the start position; it is asked for (and not None) only
    while the table has no row of this stream, as the Java KCL does. Among several streams all ids
    are qualified like lease keys.
    """

    shards: tuple[Shard, ...]
    listed_at: WallTime
    at_start: tuple[Shard, ...] | None = None
    stream: StreamKey = ONLY_STREAM


class StreamDescribed(msgspec.Struct, frozen=True):
    """The creation time of a stream as the service reports it now, by `DescribeStream` [P13]."""

    created_at: WallTime
    stream: StreamKey = ONLY_STREAM


class Kcl3ModeRead(msgspec.Struct, frozen=True):
    """The mode of a KCL 3 fleet as kept outside of the lease table, by `ReadKcl3Mode` [P8]. None:
    there was not such a fleet yet."""

    mode: str | None


class Kcl3ModeUnreadable(msgspec.Struct, frozen=True):
    """`ReadKcl3Mode` is not permitted, or the data there is not written by a KCL."""

    reason: str


class WriteResolved(msgspec.Struct, frozen=True):
    """The outcome of one `WriteRow`."""

    change: LeaseChange
    outcome: Outcome


class RowRead(msgspec.Struct, frozen=True):
    """The consistent read asked for by `ReadRow` (retried by the shell until it succeeded)."""

    key: LeaseKey
    row: Lease | None


class RowUnreadable(msgspec.Struct, frozen=True):
    """The row asked for by `ReadRow` is there and cannot be read as a lease: a broken row [P8]."""

    key: LeaseKey
    reason: str


class ParentsRead(msgspec.Struct, frozen=True):
    """Consistent reads of a child's parents, by `ReadParents` [P11]. Absent rows are None."""

    key: LeaseKey
    parents: tuple[Lease | None, ...]


class OffersFound(msgspec.Struct, frozen=True):
    """Offered rows, by `FindOffers`: found by index, read consistently [P17].

    None: they could not be looked for (no such index, or the service failed); scans find them.
    """

    leases: tuple[Lease, ...] | None


class FormerOwnersProvenGone(msgspec.Struct, frozen=True):
    """Former owners of our slot whose lock is ours now: none of their processes is alive [P3]."""

    owners: frozenset[OwnerId]


class DrainRequested(msgspec.Struct, frozen=True):
    """Stop in good order: by SIGTERM, SIGINT or `--until caught-up`."""

    reason: str


class ProcessStarted(msgspec.Struct, frozen=True):
    """The lease process exists; it has not claimed yet."""

    key: LeaseKey
    pid: int


class StartFailed(msgspec.Struct, frozen=True):
    """A process could not be started (fork refused, launcher gone); there is none."""

    key: LeaseKey
    reason: str


class ProcessReported(msgspec.Struct, frozen=True):
    """A lease process reported about its lease."""

    key: LeaseKey
    report: CoreReport


class ProcessExited(msgspec.Struct, frozen=True):
    """The lease process is proven to have ended (its pidfd says so). `reason` in words for people.

    `waiting_since`: the arrival time of the oldest record that it read and did not process; None
    where it had none or did not report it. `is_shared`: a process for several leases died, so its
    death may be the fault of another lease. If a lease ended in a shared process that goes on, the
    message of that process is the proof.
    """

    key: LeaseKey
    pid: int
    reason: str
    waiting_since: WallTime | None = None
    is_shared: bool = False


# The events of a lease process: its reports, and what the manager sees that starts and reaps it.
ProcessEvent = ProcessStarted | StartFailed | ProcessReported | ProcessExited

Event = (
    Started
    | Ticked
    | LeasesScanned
    | ShardsListed
    | StreamDescribed
    | Kcl3ModeRead
    | Kcl3ModeUnreadable
    | WriteResolved
    | RowRead
    | RowUnreadable
    | ParentsRead
    | OffersFound
    | FormerOwnersProvenGone
    | DrainRequested
    | ProcessEvent
)
