"""The states of one lease in its process, as data: a missing key is an error, not a shrug.

    claiming      claimed → initializing        withdrawn → releasing
                  refused → unclaimed
    initializing  ready → processing            failed → failing
                  withdrawn → stopping          lost → losing
    processing    exhausted → creating          withdrawn → stopping
                  failed → failing              lost → losing
    creating      children_created → naming     withdrawn → stopping
                  lost → losing
    naming        children_named → closing      lost → losing
    closing       closed → ending               failed → failing
                  lost → losing
    ending        shard_end_written → ended     lost → losing
    stopping      stopped → releasing           lost → losing
    releasing     release_written → released    lost → losing
    failing       settled → failed              lost → losing
    losing        let_go → lost

`withdrawn` is every reason to give the lease up in good order: a drain, an ask of another owner, a
release asked for by the processor, a KCL 3 leader's hand-over, the manager's death. `releasing`
waits for the one write that gives it away: an offer, a release or a hand-over. Final: ended,
released, failed, lost, unclaimed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

__all__ = [
    "ANSWERS_ASKS",
    "FINAL",
    "MAY_PUT_OFF",
    "MAY_WITHDRAW",
    "SILENT",
    "TRANSITIONS",
    "State",
    "Step",
]


class State(enum.Enum):
    """Where the lease stands."""

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

    # By identity: several sets are asked at each event, and the hash of an Enum is Python code.
    # Members are single, in every process.
    __hash__ = object.__hash__


class Step(enum.Enum):
    """What moves it on."""

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


TRANSITIONS: Final[Mapping[State, Mapping[Step, State]]] = {
    State.CLAIMING: {
        Step.CLAIMED: State.INITIALIZING,
        Step.REFUSED: State.UNCLAIMED,
        Step.WITHDRAWN: State.RELEASING,
    },
    State.INITIALIZING: {
        Step.READY: State.PROCESSING,
        Step.FAILED: State.FAILING,
        Step.WITHDRAWN: State.STOPPING,
        Step.LOST: State.LOSING,
    },
    State.PROCESSING: {
        Step.EXHAUSTED: State.CREATING,
        Step.WITHDRAWN: State.STOPPING,
        Step.FAILED: State.FAILING,
        Step.LOST: State.LOSING,
    },
    State.CREATING: {
        Step.CHILDREN_CREATED: State.NAMING,
        Step.WITHDRAWN: State.STOPPING,
        Step.LOST: State.LOSING,
    },
    State.NAMING: {Step.CHILDREN_NAMED: State.CLOSING, Step.LOST: State.LOSING},
    State.CLOSING: {
        Step.CLOSED: State.ENDING,
        Step.FAILED: State.FAILING,
        Step.LOST: State.LOSING,
    },
    State.ENDING: {Step.SHARD_END_WRITTEN: State.ENDED, Step.LOST: State.LOSING},
    State.STOPPING: {Step.STOPPED: State.RELEASING, Step.LOST: State.LOSING},
    State.RELEASING: {Step.RELEASE_WRITTEN: State.RELEASED, Step.LOST: State.LOSING},
    State.FAILING: {Step.SETTLED: State.FAILED, Step.LOST: State.LOSING},
    State.LOSING: {Step.LET_GO: State.LOST},
}

FINAL: Final = frozenset({State.ENDED, State.RELEASED, State.FAILED, State.LOST, State.UNCLAIMED})
# The row is not ours to write any more [P7].
SILENT: Final = FINAL | {State.LOSING}
# The lease can be withdrawn from here; where the children exist, the end is nearer.
MAY_WITHDRAW: Final = frozenset({State.INITIALIZING, State.PROCESSING, State.CREATING})
# An ask is answered from here; at the end of a shard that is nearer than the next owner [P16].
ANSWERS_ASKS: Final = frozenset({State.CLAIMING, State.INITIALIZING, State.PROCESSING})
# While these last a renewal goes before a checkpoint that fails: a full disk costs no lease.
MAY_PUT_OFF: Final = frozenset({State.PROCESSING, State.CLOSING})
