"""The states of one lease in its process, as data: a missing key is an error.

    claiming      claimed → initializing        withdrawn → releasing
                  refused → unclaimed
    initializing  ready → processing            failed → failing
                  withdrawn → stopping          lost → losing
    processing    exhausted → creating          withdrawn → stopping
                  failed → failing              lost → losing
    creating      children_created → naming     withdrawn → stopping
                  failed → failing              lost → losing
    naming        children_named → closing      failed → failing
                  lost → losing
    closing       closed → ending               failed → failing
                  lost → losing
    ending        shard_end_written → ended     failed → failing
                  lost → losing
    stopping      stopped → releasing           lost → losing
    releasing     release_written → released    lost → losing
    failing       settled → failed              lost → losing
    losing        let_go → lost

`withdrawn` stands for every reason to give the lease up in good order: a drain, an ask of another
owner, a release requested by the processor, a KCL 3 leader's handover, the manager's end. In
`releasing` the lease waits for the one write that gives it away: an offer, a release or a handover;
or, if the manager only asked for a restart, for the last checkpoint.
Final: ended, released, failed, lost, unclaimed.
"""

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
