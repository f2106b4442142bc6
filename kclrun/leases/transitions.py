"""The states of a lease that this manager holds, and the transitions between them, as data.

A transition that the table does not have is a bug of ours and raises. `held_leases.py` decides
which one comes when. Must not know: rows, processes, time.
"""

# Theory of operation: the held lease
# ===================================
#
# A manager holds a lease from the moment that it sends the take until the row is not its own any
# more. A held lease is in one of two conditions. With a process (`starting`, `running`, `draining`,
# `exiting`) only the process writes the row, and the manager waits for its reports and its exit.
# Without a process (all other states) the manager renews the row, answers asks for it, and looks
# for the moment to start a process. So the row has one writer at a time [P5, P15].
#
# The usual round of a lease:
#
#   taking        Our take is under way. If it does not apply, the lease is gone.
#   waiting       The row is ours. Its parents must have ended, or have no row any more; only a
#                 consistent read shows that [P11]. A scan gives the hint when to read.
#   renewing      (`renewing before start`) A write of ours must have succeeded by its own reply not
#                 long ago: the take, or one more renewal. Then no write of a former process can
#                 apply any more, and the process has most of a failover left for its claim.
#   starting      A start was requested. The process gets the counter of our last write, for its
#                 claim. If it cannot be started, the lease backs off.
#   running       It claimed, and reports its checkpoints.
#   exiting       It reported its end. The report does not prove that it has ended, so the row is
#                 left alone until the exit of the process is proven.
#   examining     The exit is proven; a process that crashed comes here without a report. The row is
#                 read: it has the last writes of the process, or another owner.
#   backing off   The row is still ours. The next round begins after a pause: none after the first
#                 failure, then 1, 2, 4 ... up to 30 seconds. A moved checkpoint ends the counting.
#
# A row that a scan shows as ours and that we do not hold enters in `examining`: a take of ours that
# was given up has applied after all.
#
# What leaves the round:
#
# - The end of the shard, or of our ownership, reported by the process. After the proven exit the
#   lease is gone without a read: another owner may have the row by then.
# - A halt. The process reported that user code or an output failed for good, or the processes died
#   too often (`restarts.py`). `halting` writes the reason on the row; `halted` renews the row. A
#   renewal that returns the row without the halt shows that an operator resumed it: the lease waits
#   for its parents again. A row that has a halt when it is taken or examined is `halted` at once.
# - A pause. An operator wrote it on the row; it is seen before a start. The process that still runs
#   then sees it on its own row and ends by itself. When the pause is over, the lease waits again.
# - A quarantine. The row says that the lease was taken by force from a Java worker, which may work
#   on for a failover. For that time we renew without starting; then the row is read again [P18].
# - A release. We drain, another owner asks for the lease, our host fails too often while another
#   owner could take it, or work needs the place of a lease that waits for its parents. `releasing`
#   writes an offer or a release, and the lease is gone when that has applied. A process gives the
#   row away by itself: it sees an ask on the row, and a drain is passed on to it (`draining`).
# - A loss. A read, or the answer to a write, that shows another owner, an end, or no row ends the
#   holding. A row that vanished is written again once, if our last write is younger than a
#   failover.
#
# What holds always:
#
# 1. While there is a process, the manager has neither a write nor a read of the row under way.
# 2. One change of a row is in flight at a time. Only a success reply, a row whose counter has
#    moved, or a refusal that came before anything was sent settles it [P6].
# 3. A process is started only from `renewing before start`: the parents have ended; no halt, pause
#    or quarantine stands; and a write of ours, sent less than one renewal interval ago and after
#    the last process was proven to have ended, succeeded by its own reply. The start command
#    expires one failover after that write was sent [P4]. (A take counts as well if its reply was
#    lost and the row was read: no process of ours was there before it.)
# 4. A process counts as ended only by the proof of its exit, never by its report, nor by silence.
# 5. No write of the manager moves a position.
#
# What may be lost, and what not:
#
# - The lease itself may be lost at any time, if our renewals do not arrive for a failover, or if a
#   Java worker takes it. Then the next owner goes on from the position of the row.
# - The counts of deaths and failed starts are in memory only. They begin anew with each manager and
#   each holding. The host on which a lease died too often stands on the row, for the next owner.
# - The reason of a halt is lost if the manager ends before `halting` has written it. Then the next
#   process gets the same records.
# - The position is lost only with the row itself. If another program deletes the row, and it cannot
#   be written again in time, the shard sync creates a row at the start position.
#
# The table:
#
#     taking                  taken → waiting                          found halted → halted
#                             not ours → gone
#     examining               still ours → backing off                 found halted → halted
#                             to be halted → halting                   not ours → gone
#     backing off             rest over → waiting                      to be released → releasing
#                             to leave this host → releasing           not ours → gone
#     waiting                 parents over → renewing before start     to be released → releasing
#                             not ours → gone
#     renewing before start   started → starting                       to be paused → paused
#                             to quarantine → quarantined              to be released → releasing
#                             not ours → gone
#     quarantined             quarantine over → renewing before start  found halted → halted
#                             to be released → releasing               not ours → gone
#     starting                claimed → running                        drain sent → draining
#                             not started → backing off                reported end → exiting
#                             died → examining
#     running                 drain sent → draining                    reported end → exiting
#                             died → examining
#     draining                not started → backing off                reported end → exiting
#                             died → examining
#     exiting                 died → examining                         given up → gone
#     halting                 halted → halted                          not ours → gone
#     halted                  resumed → waiting                        to be released → releasing
#                             not ours → gone
#     paused                  resumed → waiting                        to be released → releasing
#                             not ours → gone
#     releasing               released → gone                          not ours → gone
#
# Final: gone.

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.Enum):
    """The state of a lease that this manager holds."""

    TAKING = "taking"  # our take is under way
    EXAMINING = "examining"  # without a process; the row is being read
    BACKING_OFF = "backing off"  # ours; a pause before the next process
    WAITING = "waiting"  # ours; a parent is not ended, or not known to be
    RENEWING_BEFORE_START = (
        "renewing before start"  # ours; one more renewal applies before the start
    )
    QUARANTINED = "quarantined"  # taken by force; its former owner may still be at work [P18]
    STARTING = "starting"  # a start was requested; the process has not claimed yet
    RUNNING = "running"  # it claimed; only it writes the row
    DRAINING = "draining"  # it was asked to finish, release and exit
    EXITING = "exiting"  # it reported its end; its exit is not proven yet
    HALTING = "halting"  # the reason of the halt is being written
    HALTED = "halted"  # ours and renewed, not processed, until an operator resumes it
    PAUSED = "paused"  # the same by an operator's pause, which may end by itself
    RELEASING = "releasing"  # the release, or the offer, is under way
    GONE = "gone"  # not ours any more

    # By identity: each event looks at the states of all held leases, and the hash of an Enum is
    # Python code. Members are single, in every process.
    __hash__ = object.__hash__


class Transition(enum.Enum):
    """A step of a lease from one state to the next."""

    TAKEN = "taken"
    FOUND_HALTED = "found halted"
    STILL_OURS = "still ours"
    REST_OVER = "rest over"
    PARENTS_OVER = "parents over"
    TO_QUARANTINE = "to quarantine"
    QUARANTINE_OVER = "quarantine over"
    STARTED = "started"
    NOT_STARTED = "not started"
    CLAIMED = "claimed"
    DRAIN_SENT = "drain sent"
    REPORTED_END = "reported end"
    DIED = "died"
    GIVEN_UP = "given up"
    TO_BE_HALTED = "to be halted"
    HALTED = "halted"
    TO_BE_PAUSED = "to be paused"
    RESUMED = "resumed"
    TO_BE_RELEASED = "to be released"
    TO_LEAVE_HOST = "to leave this host"
    RELEASED = "released"
    NOT_OURS = "not ours"


WITH_PROCESS: Final = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.EXITING})

TRANSITIONS: Final[Mapping[State, Mapping[Transition, State]]] = {
    State.TAKING: {
        Transition.TAKEN: State.WAITING,
        Transition.FOUND_HALTED: State.HALTED,
        Transition.NOT_OURS: State.GONE,
    },
    State.EXAMINING: {
        Transition.STILL_OURS: State.BACKING_OFF,
        Transition.FOUND_HALTED: State.HALTED,
        Transition.TO_BE_HALTED: State.HALTING,
        Transition.NOT_OURS: State.GONE,
    },
    State.BACKING_OFF: {
        Transition.REST_OVER: State.WAITING,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.TO_LEAVE_HOST: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.WAITING: {
        Transition.PARENTS_OVER: State.RENEWING_BEFORE_START,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.RENEWING_BEFORE_START: {
        Transition.STARTED: State.STARTING,
        Transition.TO_BE_PAUSED: State.PAUSED,
        Transition.TO_QUARANTINE: State.QUARANTINED,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.QUARANTINED: {
        Transition.QUARANTINE_OVER: State.RENEWING_BEFORE_START,
        Transition.FOUND_HALTED: State.HALTED,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.STARTING: {
        Transition.CLAIMED: State.RUNNING,
        Transition.DRAIN_SENT: State.DRAINING,
        Transition.NOT_STARTED: State.BACKING_OFF,
        Transition.REPORTED_END: State.EXITING,
        Transition.DIED: State.EXAMINING,
    },
    State.RUNNING: {
        Transition.DRAIN_SENT: State.DRAINING,
        Transition.REPORTED_END: State.EXITING,
        Transition.DIED: State.EXAMINING,
    },
    State.DRAINING: {
        Transition.NOT_STARTED: State.BACKING_OFF,
        Transition.REPORTED_END: State.EXITING,
        Transition.DIED: State.EXAMINING,
    },
    State.EXITING: {
        Transition.DIED: State.EXAMINING,
        Transition.GIVEN_UP: State.GONE,
    },
    State.HALTING: {
        Transition.HALTED: State.HALTED,
        Transition.NOT_OURS: State.GONE,
    },
    State.HALTED: {
        Transition.RESUMED: State.WAITING,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.PAUSED: {
        Transition.RESUMED: State.WAITING,
        Transition.TO_BE_RELEASED: State.RELEASING,
        Transition.NOT_OURS: State.GONE,
    },
    State.RELEASING: {
        Transition.RELEASED: State.GONE,
        Transition.NOT_OURS: State.GONE,
    },
    State.GONE: {},
}
