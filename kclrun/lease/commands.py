"""The commands of the core of one lease. Imperative; the shell has one function each."""

from __future__ import annotations

import enum

import msgspec

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.reports import Report
from kclrun.protocol.writes import LateCheckpoint, LeaseChange


class SendWrite(msgspec.Struct, frozen=True):
    """Send this change once, not before `not_before`; comes back as WriteResolved.

    If it carries a position beyond the last one, emitted rows are made durable first.
    """

    change: LeaseChange
    not_before: Instant | None = None


class SendLateCheckpoint(msgspec.Struct, frozen=True):
    """Send it once, not before `not_before`, although the lease is lost; comes back as
    WriteResolved.

    Emitted rows up to its position are made durable first. User code may run meanwhile [P19].
    """

    change: LateCheckpoint
    not_before: Instant | None = None


class CommitOutputs(msgspec.Struct, frozen=True):
    """Make rows up to `upto` durable in the outputs; comes back as OutputsCommitted with this
    command in `answers`. Performed by the thread of the outputs; the lease goes on meanwhile.

    `must`: every output commits all rows up to `upto`. Without it only outputs that are due by
    their own pace commit, and the answer may be lower. `is_leaving`: the lease is given away after
    the commit, so an output with much left to send need not send it. One such command is unanswered
    at a time, but a command with `must` may follow one without.
    """

    upto: ExtendedSequenceNumber
    must: bool
    is_leaving: bool = False


class ReadOwnRow(msgspec.Struct, frozen=True):
    """Read the own row consistently; comes back as OwnRowRead or ReadFailed."""

    not_before: Instant | None = None


class ReadRows(msgspec.Struct, frozen=True):
    """Read these rows consistently; comes back as RowsRead or LookUpFailed."""

    keys: tuple[LeaseKey, ...]


class ListShards(msgspec.Struct, frozen=True):
    """List all shards; comes back as ShardsListed or LookUpFailed."""


class CallInitialize(msgspec.Struct, frozen=True):
    """Make the processor and call `initialize`; begin fetching at the row's position."""

    row: Lease


class CallShardEnded(msgspec.Struct, frozen=True):
    """Call `shard_ended`; comes back as CallReturned or ProcessorFailed."""


class CallShutdownRequested(msgspec.Struct, frozen=True):
    """Call `shutdown_requested`; comes back as CallReturned or ProcessorFailed."""


class CallLeaseLost(msgspec.Struct, frozen=True):
    """Call `lease_lost`; comes back as CallReturned or ProcessorFailed."""


class AllowDelivery(msgspec.Struct, frozen=True):
    """User code may start batches until `fence`, while fewer than `start_below` records in all were
    delivered, and up to `delivered_max` records in all [P7, I7]."""

    fence: Instant
    start_below: int
    delivered_max: int


class StopDelivery(msgspec.Struct, frozen=True):
    """Start no further batch; comes back as DeliveryStopped once no user code runs."""


class CheckpointAnswer(enum.Enum):
    """How a requested checkpoint ended."""

    DURABLE = "durable"
    LOST = "the lease is lost"
    STALE = "below the last checkpoint, or above what was delivered"


class AnswerCheckpoint(msgspec.Struct, frozen=True):
    """Let the waiting user code continue."""

    request: int
    answer: CheckpointAnswer
    detail: str = ""


class ExitCause(enum.Enum):
    """Why the process ends; the shell turns it into an exit code."""

    DONE = "done"
    UNCLAIMED = "unclaimed"
    LOST = "lost"
    REPLACED = "replaced"
    FAILED = "failed"
    HOST = "host"


class Exit(msgspec.Struct, frozen=True):
    """End the process."""

    cause: ExitCause


Command = (
    SendWrite
    | SendLateCheckpoint
    | CommitOutputs
    | ReadOwnRow
    | ReadRows
    | ListShards
    | CallInitialize
    | CallShardEnded
    | CallShutdownRequested
    | CallLeaseLost
    | AllowDelivery
    | StopDelivery
    | AnswerCheckpoint
    | Report
    | Exit
)
