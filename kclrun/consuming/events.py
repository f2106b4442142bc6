"""What happened, for one lease's life. Past tense; posted by the threads of the lease process."""

from __future__ import annotations

import msgspec

from kclrun.model.changes import LeaseChange
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Outcome
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import Instant

__all__ = [
    "BatchDelivered",
    "BatchProcessed",
    "CallReturned",
    "CheckpointRequested",
    "DrainRequested",
    "Event",
    "FailoverChanged",
    "GateShut",
    "LookUpFailed",
    "ManagerGone",
    "OthersInSight",
    "OwnRowRead",
    "ProcessorFailed",
    "ReadFailed",
    "ReleaseRequested",
    "RowsRead",
    "ShardExhausted",
    "ShardsListed",
    "Started",
    "ThreadStalled",
    "Ticked",
    "WriteResolved",
]


class Started(msgspec.Struct, frozen=True):
    """The process has its start command and its lock; nothing is claimed yet."""


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; `LeaseLife.next_deadline` says when the next one is due."""


class WriteResolved(msgspec.Struct, frozen=True):
    """The outcome of a SendWrite or SendLateCheckpoint. `sent_instant` was taken before the first
    byte left [P7]."""

    change: LeaseChange
    outcome: Outcome
    sent_instant: Instant


class OwnRowRead(msgspec.Struct, frozen=True):
    """The consistent read of ReadOwnRow."""

    row: Lease | None


class ReadFailed(msgspec.Struct, frozen=True):
    """The read of ReadOwnRow failed; nothing is known; the core will ask again."""

    message: str


class LookUpFailed(msgspec.Struct, frozen=True):
    """ReadRows or ListShards failed; nothing is known; the core will ask again."""

    message: str


class RowsRead(msgspec.Struct, frozen=True):
    """Consistent reads of the other parents of a merge, by ReadRows."""

    rows: tuple[tuple[LeaseKey, Lease | None], ...]


class ShardsListed(msgspec.Struct, frozen=True):
    """A complete listing, by ListShards."""

    shards: tuple[Shard, ...]


class BatchDelivered(msgspec.Struct, frozen=True, gc=False):
    """A batch is about to be given to the processor. `last` is its highest position."""

    last: ExtendedSequenceNumber
    records: int
    payload_bytes: int


class BatchProcessed(msgspec.Struct, frozen=True, gc=False):
    """`process_records` returned for the batch delivered last (or it held no user record)."""

    last: ExtendedSequenceNumber


class ShardExhausted(msgspec.Struct, frozen=True):
    """Every record was processed and the service said the shard ends here.

    `children` as the last GetRecords named them; empty with services that leave them out.
    """

    children: tuple[ChildShard, ...]


class CheckpointRequested(msgspec.Struct, frozen=True):
    """User code waits for a checkpoint. `position` None means everything delivered so far."""

    request: int
    position: ExtendedSequenceNumber | None


class CallReturned(msgspec.Struct, frozen=True):
    """A call the core asked for (initialize, shard_ended, …) returned normally."""


class ProcessorFailed(msgspec.Struct, frozen=True):
    """User code raised and the error policy gave up. Texts are bounded and hold no payload."""

    where: str
    error: str
    attempts: int
    position: ExtendedSequenceNumber | None = None
    traceback_text: str = ""


class GateShut(msgspec.Struct, frozen=True):
    """User code is not running and no batch will start until the gate opens again."""


class DrainRequested(msgspec.Struct, frozen=True):
    """The manager asks: finish the batch, checkpoint, offer or release the lease, exit."""

    reason: str


class ReleaseRequested(msgspec.Struct, frozen=True):
    """User code asked to give the lease up after this batch (`context.release()`)."""


class ManagerGone(msgspec.Struct, frozen=True):
    """The manager is dead: drain within the fence that stands, renew no more."""


class FailoverChanged(msgspec.Struct, frozen=True):
    """The smallest failover in the fleet changed [P7]."""

    failover_s: float


class OthersInSight(msgspec.Struct, frozen=True):
    """The manager sees another kclrun owner, or none any more: offer or release [P17]."""

    others: bool


class ThreadStalled(msgspec.Struct, frozen=True):
    """The lease thread did not run for so long. `in_user_code`: user code ran all the while."""

    stalled_s: float
    in_user_code: bool


Event = (
    Started
    | Ticked
    | WriteResolved
    | OwnRowRead
    | ReadFailed
    | LookUpFailed
    | RowsRead
    | ShardsListed
    | BatchDelivered
    | BatchProcessed
    | ShardExhausted
    | CheckpointRequested
    | CallReturned
    | ProcessorFailed
    | GateShut
    | DrainRequested
    | ReleaseRequested
    | ManagerGone
    | FailoverChanged
    | OthersInSight
    | ThreadStalled
)
