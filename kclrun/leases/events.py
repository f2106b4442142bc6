"""What happened, for the lease manager's core. Past tense; each failure is a type of its own."""

from __future__ import annotations

import msgspec

from kclrun.model.changes import LeaseChange
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.outcomes import Outcome
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream_key import ONLY_STREAM, StreamKey
from kclrun.model.time import WallTime

__all__ = [
    "DrainRequested",
    "Event",
    "FormerOwnersProvenGone",
    "LeaseClaimed",
    "LeaseLost",
    "LeaseReleased",
    "LeasesScanned",
    "OffersFound",
    "ParentsRead",
    "PositionMoved",
    "ProcessExited",
    "ProcessReport",
    "ProcessStarted",
    "ProcessorFailed",
    "RowRead",
    "ShardEnded",
    "ShardsListed",
    "StartFailed",
    "StartUnclaimed",
    "Started",
    "Ticked",
    "WriteResolved",
]


class Started(msgspec.Struct, frozen=True):
    """The manager has its identity and its table, and begins.

    `started_at` is the host's wall clock, for `halted_at`, until a listing brings the service's.
    """

    started_at: WallTime = WallTime(0.0)


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; `LeaseManager.next_deadline` says when the next one is due."""


class LeasesScanned(msgspec.Struct, frozen=True):
    """A whole scan of the table. `broken` are keys of rows that are no readable leases [P8]."""

    leases: tuple[Lease, ...]
    broken: tuple[str, ...] = ()
    foreign: int = 0


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


class WriteResolved(msgspec.Struct, frozen=True):
    """The outcome of one `WriteRow`."""

    change: LeaseChange
    outcome: Outcome


class RowRead(msgspec.Struct, frozen=True):
    """The consistent read asked for by `ReadRow` (retried by the shell until it succeeded)."""

    key: LeaseKey
    row: Lease | None


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
    """Former owners of our slot whose lock is ours now: nothing of theirs lives [P3]."""

    owners: frozenset[OwnerId]


class DrainRequested(msgspec.Struct, frozen=True):
    """Stop everything in good order: SIGTERM, SIGINT, --until caught-up."""

    reason: str


class ProcessStarted(msgspec.Struct, frozen=True):
    """The lease process exists; it has not claimed yet."""

    key: LeaseKey
    pid: int


class StartFailed(msgspec.Struct, frozen=True):
    """No process could be started (fork refused, launcher gone); none lives."""

    key: LeaseKey
    reason: str


class LeaseClaimed(msgspec.Struct, frozen=True):
    """The lease process's own claim succeeded [P4]; from now on only it writes the row."""

    key: LeaseKey
    counter: int
    position: ExtendedSequenceNumber


class StartUnclaimed(msgspec.Struct, frozen=True):
    """The process gave up before claiming (its start expired, or the row belongs to another)."""

    key: LeaseKey
    reason: str


class PositionMoved(msgspec.Struct, frozen=True):
    """A checkpoint of the lease process was acknowledged: progress, for the crash-loop breaker."""

    key: LeaseKey
    position: ExtendedSequenceNumber


class ShardEnded(msgspec.Struct, frozen=True):
    """SHARD_END is acknowledged on the row; these children have rows and may be taken first."""

    key: LeaseKey
    children: tuple[str, ...]


class LeaseReleased(msgspec.Struct, frozen=True):
    """The lease process gave the lease up, position and release acknowledged."""

    key: LeaseKey
    position: ExtendedSequenceNumber


class LeaseLost(msgspec.Struct, frozen=True):
    """Another owner has the row, the row is gone, or the fence has passed."""

    key: LeaseKey
    reason: str


class ProcessorFailed(msgspec.Struct, frozen=True):
    """User code failed for good (retries spent, import or initialize failed): halt the lease."""

    key: LeaseKey
    reason: str


class ProcessExited(msgspec.Struct, frozen=True):
    """The lease process is proven dead (its pidfd says so). `reason` in words for people."""

    key: LeaseKey
    pid: int
    reason: str


# What is told of a lease process, by itself or by who saw it start and die.
ProcessReport = (
    ProcessStarted
    | StartFailed
    | LeaseClaimed
    | StartUnclaimed
    | PositionMoved
    | ShardEnded
    | LeaseReleased
    | LeaseLost
    | ProcessorFailed
    | ProcessExited
)

Event = (
    Started
    | Ticked
    | LeasesScanned
    | ShardsListed
    | WriteResolved
    | RowRead
    | ParentsRead
    | OffersFound
    | FormerOwnersProvenGone
    | DrainRequested
    | ProcessReport
)
