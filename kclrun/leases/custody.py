"""One lease in our hands: its states, and every way from one to the next.

Holds data and the table, decides nothing (`keeping.py` does). Rule: a step that the table does
not name is our bug, never a shrug; and only states without a process may write the row [P5].

    taking ──taken──► waiting
    taking ──found halted──► halted
    taking ──not ours──► gone
    examining ──still ours──► resting
    examining ──found halted──► halted
    examining ──to be halted──► halting
    examining ──not ours──► gone
    resting ──rested──► waiting
    resting ──to be released──► releasing
    resting ──not ours──► gone
    waiting ──parents over──► readying
    waiting ──to be released──► releasing
    waiting ──not ours──► gone
    readying ──started──► starting
    readying ──to outwait──► outwaiting
    readying ──to be released──► releasing
    readying ──not ours──► gone
    outwaiting ──outwaited──► readying
    outwaiting ──found halted──► halted
    outwaiting ──to be released──► releasing
    outwaiting ──not ours──► gone
    starting ──claimed──► running
    starting ──told to drain──► draining
    starting ──not started──► resting
    starting ──said farewell──► leaving
    starting ──died──► examining
    running ──told to drain──► draining
    running ──said farewell──► leaving
    running ──died──► examining
    draining ──not started──► resting
    draining ──said farewell──► leaving
    draining ──died──► examining
    leaving ──died──► examining
    leaving ──given up──► gone
    halting ──halted──► halted
    halting ──not ours──► gone
    halted ──resumed──► waiting
    halted ──to be released──► releasing
    halted ──not ours──► gone
    releasing ──released──► gone
    releasing ──not ours──► gone
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.restarts import Restarts
from kclrun.leases.unresolved import UnresolvedWrite
from kclrun.model.changes import keys_of
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.time import Instant

__all__ = ["TRANSITIONS", "WITH_PROCESS", "Custody", "State", "Step"]


class State(enum.Enum):
    """Where a lease in our hands stands."""

    TAKING = "taking"  # our take is under way
    EXAMINING = "examining"  # no process lives; what the row says now is being read
    RESTING = "resting"  # ours; a pause before the next process
    WAITING = "waiting"  # ours; a parent is not ended, or not known to be
    READYING = "readying"  # ours; one more renewal applies before the start
    OUTWAITING = "outwaiting"  # taken by force; its former owner may still be at work [P18]
    STARTING = "starting"  # a process was asked for, and has not claimed
    RUNNING = "running"  # it claimed; only it writes the row
    DRAINING = "draining"  # it was told to finish, release and exit
    LEAVING = "leaving"  # it said that it is done; its death is not proven yet
    HALTING = "halting"  # the reason of the halt is being written
    HALTED = "halted"  # ours and renewed, not processed, until an operator resumes it
    RELEASING = "releasing"  # the release, or the offer, is under way
    GONE = "gone"  # not ours any more

    # By identity: each event looks at the states of all that is held, and the hash of an Enum is
    # Python code. Members are single, in every process.
    __hash__ = object.__hash__


class Step(enum.Enum):
    """What moves a lease from one state to the next."""

    TAKEN = "taken"
    FOUND_HALTED = "found halted"
    STILL_OURS = "still ours"
    RESTED = "rested"
    PARENTS_OVER = "parents over"
    TO_OUTWAIT = "to outwait"
    OUTWAITED = "outwaited"
    STARTED = "started"
    NOT_STARTED = "not started"
    CLAIMED = "claimed"
    TOLD_TO_DRAIN = "told to drain"
    SAID_FAREWELL = "said farewell"
    DIED = "died"
    GIVEN_UP = "given up"
    TO_BE_HALTED = "to be halted"
    HALTED = "halted"
    RESUMED = "resumed"
    TO_BE_RELEASED = "to be released"
    RELEASED = "released"
    NOT_OURS = "not ours"


WITH_PROCESS: Final = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.LEAVING})

TRANSITIONS: Final[Mapping[State, Mapping[Step, State]]] = {
    State.TAKING: {
        Step.TAKEN: State.WAITING,
        Step.FOUND_HALTED: State.HALTED,
        Step.NOT_OURS: State.GONE,
    },
    State.EXAMINING: {
        Step.STILL_OURS: State.RESTING,
        Step.FOUND_HALTED: State.HALTED,
        Step.TO_BE_HALTED: State.HALTING,
        Step.NOT_OURS: State.GONE,
    },
    State.RESTING: {
        Step.RESTED: State.WAITING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.WAITING: {
        Step.PARENTS_OVER: State.READYING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.READYING: {
        Step.STARTED: State.STARTING,
        Step.TO_OUTWAIT: State.OUTWAITING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.OUTWAITING: {
        Step.OUTWAITED: State.READYING,
        Step.FOUND_HALTED: State.HALTED,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.STARTING: {
        Step.CLAIMED: State.RUNNING,
        Step.TOLD_TO_DRAIN: State.DRAINING,
        Step.NOT_STARTED: State.RESTING,
        Step.SAID_FAREWELL: State.LEAVING,
        Step.DIED: State.EXAMINING,
    },
    State.RUNNING: {
        Step.TOLD_TO_DRAIN: State.DRAINING,
        Step.SAID_FAREWELL: State.LEAVING,
        Step.DIED: State.EXAMINING,
    },
    State.DRAINING: {
        Step.NOT_STARTED: State.RESTING,
        Step.SAID_FAREWELL: State.LEAVING,
        Step.DIED: State.EXAMINING,
    },
    State.LEAVING: {
        Step.DIED: State.EXAMINING,
        Step.GIVEN_UP: State.GONE,
    },
    State.HALTING: {
        Step.HALTED: State.HALTED,
        Step.NOT_OURS: State.GONE,
    },
    State.HALTED: {
        Step.RESUMED: State.WAITING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.RELEASING: {
        Step.RELEASED: State.GONE,
        Step.NOT_OURS: State.GONE,
    },
    State.GONE: {},
}


class Custody(msgspec.Struct, kw_only=True):
    """What we know about one lease in our hands.

    `row` is the row as last confirmed (None until the take applied). `is_proven`: a write of ours
    succeeded since the last process of this lease was proven dead, so whatever that one left in
    flight can no longer apply [P5]; `confirmed_instant` is when that write was sent.
    `misses` counts writes in a row that no success reply settled: the next ones are sent slower.
    `is_over`: the process ended or released the lease, acknowledged; `failure`: why it halts.
    `ours_instant` is when we learned that the row is ours; `has_waited`: a failover has passed
    since, and the row was read again [P18]. `was_restored`: it vanished, and we wrote it again.
    """

    key: LeaseKey
    state: State
    row: Lease | None = None
    unresolved: UnresolvedWrite | None = None
    is_reading: bool = False
    misses: int = 0
    is_proven: bool = False
    confirmed_instant: Instant = Instant(0.0)
    renew_instant: Instant = Instant(0.0)
    rest_until: Instant = Instant(0.0)
    should_ask_parents: bool = True
    is_asking_parents: bool = False
    are_parents_over: bool = False
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    ours_instant: Instant | None = None
    has_waited: bool = False
    was_restored: bool = False
    is_over: bool = False
    failure: str | None = None

    def step(self, step: Step) -> None:
        """Move on. Raises: InvariantViolation if the table does not name the step here."""
        following = TRANSITIONS[self.state].get(step)
        if following is None:
            raise InvariantViolation(f"lease {self.key} cannot be {step.value}: {self.state.value}")
        self.state = following

    @property
    def has_process(self) -> bool:
        return self.state in WITH_PROCESS

    @property
    def counts_as_held(self) -> bool:
        """Whether it fills one of our places: not once it is ended, given up or lost."""
        return self.state is not State.GONE and not self.is_over

    def check(self) -> None:
        """The invariants of one lease in our hands; raises InvariantViolation."""
        if self.state in WITH_PROCESS:
            if self.unresolved is not None:
                raise self._broken("has a write of ours under way")
            if self.is_reading:
                raise self._broken("has a read of ours under way")
            if self.row is None:
                raise self._broken("was started without a row")
            if not self.is_proven:
                raise self._broken("was started without a confirmed write")
            if not self.are_parents_over:
                raise self._broken("was started before its parents ended")
        elif self.unresolved is not None and keys_of(self.unresolved.change) != (self.key,):
            raise self._broken("has another lease's write")

    def _broken(self, complaint: str) -> InvariantViolation:
        return InvariantViolation(f"lease {self.key}, {self.state.value}, {complaint}")
