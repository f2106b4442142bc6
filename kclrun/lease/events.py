"""The events of one lease in its process. Past tense; posted by the threads of the process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import Instant
from kclrun.protocol.reports import ProcessorFailed
from kclrun.protocol.writes import LeaseChange, Outcome


class Started(msgspec.Struct, frozen=True):
    """The process has its start command and its lock; it has not claimed yet."""


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; `LeaseStateMachine.next_deadline` says when the next one is due."""


class WriteResolved(msgspec.Struct, frozen=True):
    """The outcome of a SendWrite or SendLateCheckpoint. `sent_instant` was taken before the first
    byte left [P7]."""

    change: LeaseChange
    outcome: Outcome
    sent_instant: Instant


class RowsNotKept(msgspec.Struct, frozen=True):
    """A write that carries a position was not sent: the emitted rows that it covers cannot be made
    durable (a full disk, a file that broke). `message` names the file and why."""

    change: LeaseChange
    message: str


class OutputsBegan(msgspec.Struct, frozen=True):
    """Every output was taken over from its former owners [K11]. No batch starts before this event.

    `position` is where reading begins: the row's checkpoint, or a higher position up to which every
    output has its rows [K12]. Records up to `position` are processed, not yet checkpointed.
    `cursors` are those of the outputs that store one; the row gets them with its next checkpoint.
    `state_version` is the keyed state at `position`; None if that is the version of the row [K12].
    """

    position: ExtendedSequenceNumber
    cursors: Mapping[str, Cursor]
    state_version: str | None = None


class OutputsCommitted(msgspec.Struct, frozen=True):
    """Every output has its rows up to `upto`, durably. `cursors` as in OutputsBegan.

    `answers` is the command that this event answers, the only answer to it; None if the outputs
    committed at their own pace. `upto` may be lower than the command. `state_version` is the
    version of the keyed state at exactly `upto`; None without state.
    """

    upto: ExtendedSequenceNumber
    cursors: Mapping[str, Cursor]
    answers: CommitOutputs | None = None
    state_version: str | None = None


class OutputsNotCommitted(msgspec.Struct, frozen=True):
    """An output could not commit; the host tries again by itself, and answers later. `message`
    names the output and why."""

    upto: ExtendedSequenceNumber
    message: str


class OutputsRefused(msgspec.Struct, frozen=True):
    """An output refuses our rows, and no repetition helps (a table with other columns): the lease
    halts with these words."""

    message: str


class OutputsSuperseded(msgspec.Struct, frozen=True):
    """Another owner has written to an output where our rows were to be, or an output refused our
    rows at their commit: the process ends without another checkpoint, and the next one begins from
    the row [K8]."""

    message: str


class OwnRowRead(msgspec.Struct, frozen=True):
    """The consistent read of ReadOwnRow."""

    row: Lease | None


class ReadFailed(msgspec.Struct, frozen=True):
    """The read of ReadOwnRow failed without a result; the core requests another one."""

    message: str


class LookUpFailed(msgspec.Struct, frozen=True):
    """ReadRows or ListShards failed without a result; the core requests it again."""

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
    """Every record was processed, and the service reported the end of the shard.

    `children` as the last GetRecords named them; empty with services that leave them out.
    `is_expired`: the service does not have the shard any more, as `shard_end.py` proved. The
    records that were not read by then are lost, and no children are named.
    """

    children: tuple[ChildShard, ...]
    is_expired: bool = False


class CheckpointRequested(msgspec.Struct, frozen=True):
    """User code waits for a checkpoint. `position` None means every record delivered so far."""

    request: int
    position: ExtendedSequenceNumber | None


class CallReturned(msgspec.Struct, frozen=True):
    """A call that the core asked for (initialize, shard_ended, …) returned normally."""


class DeliveryStopped(msgspec.Struct, frozen=True):
    """User code is not running and no batch will start until AllowDelivery comes again."""


class DrainRequested(msgspec.Struct, frozen=True):
    """The manager requests: finish the batch, checkpoint, offer or release the lease, exit."""

    reason: str


class RestartRequested(msgspec.Struct, frozen=True):
    """The manager requests: finish the batch, checkpoint, keep the lease, exit. Another process
    goes on with the lease. Without effect unless records are processed: then repeat it if it still
    matters."""


class ReleaseRequested(msgspec.Struct, frozen=True):
    """User code asked to give the lease up after this batch (`context.release()`)."""


class ManagerGone(msgspec.Struct, frozen=True):
    """The manager has ended: drain within the current fence; do not renew any more."""


class FailoverChanged(msgspec.Struct, frozen=True):
    """The smallest failover in the fleet changed [P7]."""

    failover_s: float


class OthersInSight(msgspec.Struct, frozen=True):
    """The manager sees another kclrun owner, so that the last write is an offer; or none any more,
    so that it is a release [P17]."""

    others: bool


class ThreadStalled(msgspec.Struct, frozen=True):
    """The lease thread did not run for so long. `in_user_code`: user code ran all the while."""

    stalled_s: float
    in_user_code: bool


OfOutputs = (
    OutputsBegan | OutputsCommitted | OutputsNotCommitted | OutputsRefused | OutputsSuperseded
)
Event = (
    Started
    | Ticked
    | WriteResolved
    | RowsNotKept
    | OfOutputs
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
    | DeliveryStopped
    | DrainRequested
    | RestartRequested
    | ReleaseRequested
    | ManagerGone
    | FailoverChanged
    | OthersInSight
    | ThreadStalled
)
