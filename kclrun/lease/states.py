"""The states of one lease in its process, and the transitions between them, as data.

A transition that the table does not have is an error. `state_machine.py` decides which transition
comes when. Must not know: rows, positions, time.
"""

# Theory of operation: the life of one lease
# ==========================================
#
# The manager took the row of the lease and started this process for it. From here on events come in
# (a write was resolved, a batch was processed, the manager asks for a drain), and commands go out
# (send a write, let batches start, call user code, exit). Each command comes back as an event,
# whatever its outcome. The state says what the lease waits for next. Renewals, checkpoints and the
# commits of outputs are not states: they go on beside them.
#
# The way of a shard that is read to its end:
#
#   claiming      The claim is under way. It applies only if owner and counter are still those of
#                 the manager's take. Only a success reply claims; a row that was read does not
#                 [P4].
#   initializing  `initialize` of the processor runs.
#   processing    Batches are given to user code, and positions are checkpointed. The first batch
#                 waits until every output was taken over from its former owners.
#   creating      Every record was processed, and the service reported the end of the shard. The
#                 rows of its children are created, once each other parent has a row or is known to
#                 be gone.
#   naming        The row gets the names of its children.
#   closing       `shard_ended` of the processor runs.
#   ending        The outputs commit all of their rows; then SHARD_END is written.
#   ended         Final.
#
# There are four ways out before that:
#
# - Refused, from `claiming` only. The start command expired, the row is gone or belongs to another
#   owner, the shard has ended already, or the lease was taken by force and its former owner may
#   still work. User code was never called. -> unclaimed
#
# - Withdrawn: the lease is given up in good order, or this process only makes room for the next
#   one. The causes are a drain, the end of the manager, the handoff request of another owner, a
#   handover that a KCL 3 leader wrote, `release()` by the processor; and a restart or a pause,
#   which keep the lease. In `stopping` no batch starts any more. The batch under way ends, and
#   `shutdown_requested` is called if `initialize` has returned. In `releasing` the outputs commit,
#   for ten seconds at most, and one write carries the last checkpoint and gives the row away: an
#   offer, a release or a handover. If the lease is kept, that write is a checkpoint, where one is
#   left to write. A claim under way is awaited; if it succeeds, the lease goes from `claiming` to
#   `releasing` without any call of user code. From `naming` on the end of the shard is nearer, so a
#   withdrawal has no effect there; but a handover loses the lease. -> released
#
# - Failed: a call of user code failed for good, an output refuses the rows, the checkpoint on the
#   row is not the one that the outputs or the keyed state were written with, or `checkpoint:
#   manual` leaves no room for another batch. In `failing` the last checkpoint that is due is
#   written. The report says why. If the cause is not the host, the manager halts the lease. A
#   failure in `stopping` or `losing` halts nothing: the records that were not processed are
#   delivered again. -> failed
#
# - Lost, from every state between `claiming` and the final ones. The fence passed; the row has
#   another owner or another writer, is gone, or had its position moved by another program while
#   outputs count on it; an output does not take our commits any more; or the outputs of this host
#   keep no rows while another host could read the shard. In `losing` the batch under way may end,
#   for half a minute at most; if the manager had gone before, nothing is awaited. Then `lease_lost`
#   is called, if `initialize` has returned. One late checkpoint may save work: it changes neither
#   owner nor counter, and it never moves a position back [P19]. -> lost
#
# What holds always:
#
# 1. Before the claim has succeeded only the claim is sent. In `losing` and in the final states
#    nothing is sent as the owner [P4, P7].
# 2. One write of the row is in flight at a time. The next one follows when a success reply or a row
#    that was read has settled it, or when it is given up [P5, P6].
# 3. No batch starts at or after the fence. The fence counts from the earliest send that may have
#    moved the counter, by the smallest failover in the fleet [P7].
# 4. No write moves the position of the row back, past the delivered records, or past what the
#    outputs have [K5]. Only a checkpoint of user code goes past the processed records [I2].
# 5. SHARD_END is written after the children have rows, or are known to need none. So no child is
#    left without a lease [P12].
# 6. The number of delivered records that no checkpoint covers stays within `uncheckpointed_max`.
# 7. In a final state every checkpoint that user code waited for is answered, one report says how
#    the lease ended, and the process exits. The report alone proves nothing: the manager waits for
#    the exit.
#
# What may be lost, and what not:
#
# - Work may be lost: processed records that no checkpoint covers are delivered again, by the next
#   process. After `ended` and `unclaimed` that is nothing. After `released` it is nothing,
#   unless an output could not commit in time, or `checkpoint: manual` was not asked to. After
#   `failed`, `lost` or a kill it may be all that was delivered since the last checkpoint.
# - A call may be lost: `shutdown_requested` and `lease_lost` do not come if the process is killed.
#   `shard_ended` may come twice, if a process ends between that call and SHARD_END.
# - No transition loses a record. Only the retention of the stream takes unread records away. Then
#   the lease ends with a report of its own, and the children are read [P13].
#
# The table:
#
#     claiming      claimed → initializing        withdrawn → releasing
#                   refused → unclaimed
#     initializing  ready → processing            failed → failing
#                   withdrawn → stopping          lost → losing
#     processing    exhausted → creating          withdrawn → stopping
#                   failed → failing              lost → losing
#     creating      children_created → naming     withdrawn → stopping
#                   failed → failing              lost → losing
#     naming        children_named → closing      failed → failing
#                   lost → losing
#     closing       closed → ending               failed → failing
#                   lost → losing
#     ending        shard_end_written → ended     failed → failing
#                   lost → losing
#     stopping      stopped → releasing           lost → losing
#     releasing     release_written → released    lost → losing
#     failing       settled → failed              lost → losing
#     losing        let_go → lost
#
# Final: ended, released, failed, lost, unclaimed.

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from kclrun.errors import InvariantViolation
from kclrun.lease import events
from kclrun.protocol.reports import ProcessorFailed
from kclrun.protocol.status import WorkerState


class State(enum.Enum):
    """The state of the lease."""

    CLAIMING = "claiming"
    INITIALIZING = "initializing"
    PROCESSING = "processing"
    CREATING = "creating"
    NAMING = "naming"
    CLOSING = "closing"
    ENDING = "ending"
    STOPPING = "stopping"
    RELEASING = "releasing"
    FAILING = "failing"
    LOSING = "losing"
    ENDED = "ended"
    RELEASED = "released"
    FAILED = "failed"
    LOST = "lost"
    UNCLAIMED = "unclaimed"

    # By identity: each event looks into several sets, and the hash of an Enum is Python code.
    # Members are single, in every process.
    __hash__ = object.__hash__


class Transition(enum.Enum):
    """A step from one state to the next."""

    CLAIMED = "claimed"
    REFUSED = "refused"
    READY = "ready"
    EXHAUSTED = "exhausted"
    CHILDREN_CREATED = "children_created"
    CHILDREN_NAMED = "children_named"
    CLOSED = "closed"
    SHARD_END_WRITTEN = "shard_end_written"
    WITHDRAWN = "withdrawn"
    STOPPED = "stopped"
    RELEASE_WRITTEN = "release_written"
    FAILED = "failed"
    SETTLED = "settled"
    LOST = "lost"
    LET_GO = "let_go"


TRANSITIONS: Final[Mapping[State, Mapping[Transition, State]]] = {
    State.CLAIMING: {
        Transition.CLAIMED: State.INITIALIZING,
        Transition.REFUSED: State.UNCLAIMED,
        Transition.WITHDRAWN: State.RELEASING,
    },
    State.INITIALIZING: {
        Transition.READY: State.PROCESSING,
        Transition.FAILED: State.FAILING,
        Transition.WITHDRAWN: State.STOPPING,
        Transition.LOST: State.LOSING,
    },
    State.PROCESSING: {
        Transition.EXHAUSTED: State.CREATING,
        Transition.WITHDRAWN: State.STOPPING,
        Transition.FAILED: State.FAILING,
        Transition.LOST: State.LOSING,
    },
    State.CREATING: {
        Transition.CHILDREN_CREATED: State.NAMING,
        Transition.WITHDRAWN: State.STOPPING,
        Transition.FAILED: State.FAILING,
        Transition.LOST: State.LOSING,
    },
    State.NAMING: {
        Transition.CHILDREN_NAMED: State.CLOSING,
        Transition.FAILED: State.FAILING,
        Transition.LOST: State.LOSING,
    },
    State.CLOSING: {
        Transition.CLOSED: State.ENDING,
        Transition.FAILED: State.FAILING,
        Transition.LOST: State.LOSING,
    },
    State.ENDING: {
        Transition.SHARD_END_WRITTEN: State.ENDED,
        Transition.FAILED: State.FAILING,
        Transition.LOST: State.LOSING,
    },
    State.STOPPING: {Transition.STOPPED: State.RELEASING, Transition.LOST: State.LOSING},
    State.RELEASING: {Transition.RELEASE_WRITTEN: State.RELEASED, Transition.LOST: State.LOSING},
    State.FAILING: {Transition.SETTLED: State.FAILED, Transition.LOST: State.LOSING},
    State.LOSING: {Transition.LET_GO: State.LOST},
}

FINAL: Final = frozenset({State.ENDED, State.RELEASED, State.FAILED, State.LOST, State.UNCLAIMED})
# All processed records are covered by the row, or no record was ever processed.
GIVEN_UP_WHOLE: Final = frozenset({State.ENDED, State.RELEASED, State.UNCLAIMED})
# The row must not be written any more [P7].
SILENT: Final = FINAL | {State.LOSING}
# The lease can be withdrawn from here. Once the children exist, the end is reached sooner.
MAY_WITHDRAW: Final = frozenset({State.INITIALIZING, State.PROCESSING, State.CREATING})
# A lease whose output refuses its rows halts from here. A lease that is given away is left to its
# next owner.
MAY_BE_REFUSED: Final = frozenset(
    {
        State.INITIALIZING,
        State.PROCESSING,
        State.CREATING,
        State.NAMING,
        State.CLOSING,
        State.ENDING,
    }
)
# An ask is answered from here. At the end of a shard, the end comes sooner than the next owner
# [P16].
ANSWERS_ASKS: Final = frozenset({State.CLAIMING, State.INITIALIZING, State.PROCESSING})
# In these states a renewal goes before a checkpoint that fails: a full disk costs no lease.
MAY_PUT_OFF: Final = frozenset({State.PROCESSING, State.CLOSING})


# Which events are expected in which state, and which are late and ignored.
#
# Any other event is an error: a bug of ours, or a shell that lost its place.
_ALL: Final = frozenset(State)
_ALIVE: Final = _ALL - FINAL
_DELIVERING: Final = frozenset({State.PROCESSING, State.STOPPING, State.LOSING})
_LEAVING: Final = frozenset({State.STOPPING, State.RELEASING, State.FAILING, State.LOSING}) | FINAL

EXPECTED: Final[Mapping[type[events.Event], frozenset[State]]] = {
    events.Started: frozenset({State.CLAIMING}),
    events.Ticked: _ALIVE,
    events.WriteResolved: _ALIVE,
    events.RowsNotKept: _ALIVE,
    events.OutputsBegan: _ALIVE - {State.CLAIMING},
    events.OutputsCommitted: _ALIVE - {State.CLAIMING},
    events.OutputsNotCommitted: _ALIVE - {State.CLAIMING},
    events.OutputsRefused: _ALIVE - {State.CLAIMING},
    events.OutputsSuperseded: _ALIVE - {State.CLAIMING},
    events.OwnRowRead: _ALIVE,
    events.ReadFailed: _ALIVE,
    events.RowsRead: frozenset({State.CREATING}),
    events.ShardsListed: frozenset({State.CREATING}),
    events.LookUpFailed: frozenset({State.CREATING}),
    events.BatchDelivered: _DELIVERING,
    events.BatchProcessed: _DELIVERING,
    events.ShardExhausted: frozenset({State.PROCESSING}),
    events.CheckpointRequested: _ALL,
    events.CallReturned: frozenset(
        {State.INITIALIZING, State.CLOSING, State.STOPPING, State.LOSING}
    ),
    ProcessorFailed: frozenset(
        {State.INITIALIZING, State.PROCESSING, State.CLOSING, State.STOPPING, State.LOSING}
    ),
    events.DeliveryStopped: frozenset({State.STOPPING, State.LOSING}),
    events.DrainRequested: _ALIVE,
    events.RestartRequested: _ALIVE,
    events.ReleaseRequested: _ALIVE,
    events.ManagerGone: _ALIVE,
    events.FailoverChanged: _ALIVE,
    events.OthersInSight: _ALIVE,
    events.ThreadStalled: _ALIVE,
}

# Results that were under way when the lease moved on: answers and calls that are not awaited any
# more.
LATE: Final[Mapping[type[events.Event], frozenset[State]]] = {
    events.Ticked: FINAL,
    events.WriteResolved: FINAL,
    events.RowsNotKept: FINAL,
    events.OutputsBegan: FINAL,
    events.OutputsCommitted: FINAL,
    events.OutputsNotCommitted: FINAL,
    events.OutputsRefused: FINAL,
    events.OutputsSuperseded: FINAL,
    events.OwnRowRead: FINAL,
    events.ReadFailed: FINAL,
    events.RowsRead: _LEAVING,
    events.ShardsListed: _LEAVING,
    events.LookUpFailed: _LEAVING,
    # A batch behind the one that failed must not move the position past it [I9].
    events.BatchDelivered: FINAL | {State.FAILING},
    events.BatchProcessed: FINAL | {State.FAILING},
    events.ShardExhausted: _LEAVING,
    events.CallReturned: FINAL,
    ProcessorFailed: FINAL,
    events.DeliveryStopped: FINAL | {State.RELEASING, State.FAILING},
    events.DrainRequested: FINAL,
    events.RestartRequested: FINAL,
    events.ReleaseRequested: FINAL,
    events.ManagerGone: FINAL,
    events.FailoverChanged: FINAL,
    events.OthersInSight: FINAL,
    events.ThreadStalled: FINAL,
}


def require_late(event: events.Event, state: State) -> None:
    """Raises: InvariantViolation if the event, which is not expected, is not late either."""
    if state not in LATE.get(type(event), frozenset()):
        raise InvariantViolation(f"{type(event).__name__} in state {state.value}")


# As the status slot shows them to the manager.
WORKER_STATES: Final[Mapping[State, WorkerState]] = {
    State.CLAIMING: WorkerState.CLAIMING,
    State.INITIALIZING: WorkerState.STARTING,
    State.PROCESSING: WorkerState.PROCESSING,
    State.CREATING: WorkerState.ENDING,
    State.NAMING: WorkerState.ENDING,
    State.CLOSING: WorkerState.ENDING,
    State.ENDING: WorkerState.ENDING,
    State.STOPPING: WorkerState.OFFERING,
    State.RELEASING: WorkerState.OFFERING,
    State.FAILING: WorkerState.HALTED,
    State.FAILED: WorkerState.HALTED,
    State.LOSING: WorkerState.LOST,
    State.LOST: WorkerState.LOST,
    State.UNCLAIMED: WorkerState.LOST,
    State.ENDED: WorkerState.FINISHED,
    State.RELEASED: WorkerState.FINISHED,
}
