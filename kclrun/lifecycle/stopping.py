"""When a stop ends: signals, patience, and how lease processes and the manager exit. Pure."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

from kclrun.model.time import Instant
from kclrun.protocol.status import LeaseStatus, WorkerState

# The signals that request a stop, whatever started the process. On a terminal SIGHUP does, too.
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# As users of gunicorn and uvicorn expect from the second Ctrl-C.
_HURRIED_S: Final = 2.0


class Stage(enum.Enum):
    """The stage of the stop."""

    RUNNING = "running"
    DRAINING = "draining"
    HURRIED = "hurried"
    QUITTING = "quitting"


class StopPlan:
    """One run's stop, on either engine. At `force_instant` the remaining processes are cut short.

    Pure. Rule: we never cut a stop in good order short; only its grace or a person does.

        first TERM, INT or HUP    finish what runs; the grace of `shutdown.grace` begins
        second TERM or INT        two seconds more
        QUIT                      no more patience

    A HUP comes here only where it requests a stop: on a terminal.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.stage = Stage.RUNNING
        self.force_instant: Instant | None = None

    @property
    def is_wanted(self) -> bool:
        return self.stage is not Stage.RUNNING

    def drain(self, now: Instant) -> bool:
        """A stop is requested. Returns whether this is the first request."""
        if self.is_wanted:
            return False
        self.stage = Stage.DRAINING
        self.force_instant = Instant(now + self._grace_s)
        return True

    def finish_by(self, instant: Instant) -> None:
        """A requested stop has until `instant` at the latest: the machine ends soon after."""
        assert self.force_instant is not None, "a stop is wanted"
        self.force_instant = min(self.force_instant, instant)

    def hurry(self, now: Instant) -> None:
        """Two seconds more, or the remaining time. Never extends the deadline of a SIGQUIT."""
        if self.stage is Stage.QUITTING:
            return
        self.stage = Stage.HURRIED
        hurried = Instant(now + _HURRIED_S)
        self.force_instant = min(self.force_instant or hurried, hurried)

    def heeds(self, number: signal.Signals) -> bool:
        """Whether a stop signal changes anything. A terminal that is closed sends SIGHUP two or
        three times, from the kernel and from the shell: only a person hurries a stop."""
        return number is not signal.SIGHUP or not self.is_wanted

    def press(self, number: signal.Signals, now: Instant) -> Stage:
        """A stop signal came. Returns the stage that follows."""
        if not self.heeds(number):
            return self.stage
        if number is signal.SIGQUIT:
            self.stage = Stage.QUITTING
            self.force_instant = now
        elif self.stage in (Stage.DRAINING, Stage.HURRIED):
            self.hurry(now)
        else:
            self.drain(now)
        return self.stage

    def force_instant_from(self, now: Instant) -> Instant:
        """When the patience of a drain that begins now ends: the grace, or its remaining time."""
        graced = Instant(now + self._grace_s)
        return min(self.force_instant, graced) if self.force_instant is not None else graced

    def is_over(self, now: Instant) -> bool:
        """Whether the patience with the remaining processes has ended."""
        return self.force_instant is not None and now >= self.force_instant


# The time after ABRT to write the stacks of all threads; then KILL, which no process survives.
_ABORT_TO_KILL_S: Final = 1.0
# The time after the last process was forced for the releases of its rows: a write and one retry.
_LAST_WRITES_S: Final = 5.0


# A process ends within milliseconds after KILL, unless it is inside a system call that cannot be
# interrupted: a disk, a network file system.
UNKILLABLE_AFTER_S: Final = 5.0


def latest_fence(
    last_send_instant: Instant | None,
    *,
    expires_instant: Instant,
    failover_s: float,
    now: Instant,
) -> Instant:
    """When a process that cannot be killed starts no batch any more, whatever happens to it [P5].

    It may claim until its start command expires, and each write that it sent may have been granted
    it a `failover_s`. A last send that cannot be read (None) may have been sent just now.
    """
    sent_instant = now if last_send_instant is None else last_send_instant
    return max(expires_instant, Instant(sent_instant + failover_s))


def leave_at(force_instant: Instant | None) -> Instant | None:
    """When to exit, whatever is still open: rows of ours then expire."""
    if force_instant is None:
        return None
    return Instant(force_instant + _ABORT_TO_KILL_S + _LAST_WRITES_S)


def left_undone(status: LeaseStatus | None) -> bool:
    """Whether a lease process that ended during a stop left records given to user code that no
    checkpoint covers: a full disk, a table that takes no write, a crash. Such a stop does not exit
    with 0.

    False for a lease that halts: it keeps its failed batch by decision, and is reported as halted.
    """
    return status is not None and status.has_undone and status.state is not WorkerState.HALTED


class DueSignal(NamedTuple):
    """A signal for a process, and when it is due."""

    number: signal.Signals
    due: Instant


def next_force(force_instant: Instant | None, forced: Sequence[signal.Signals]) -> DueSignal | None:
    """The next signal for a process whose patience ends at `force_instant`; None if none follows.

    `force_instant` is that of the `StopPlan`. Rule: rows that are still ours then are left to
    expire.
    """
    if force_instant is None or signal.SIGKILL in forced:
        return None
    if signal.SIGABRT in forced:
        return DueSignal(signal.SIGKILL, Instant(force_instant + _ABORT_TO_KILL_S))
    return DueSignal(signal.SIGABRT, force_instant)
