"""One lease process as its manager knows it, from the request for a fork to its proven death."""

from __future__ import annotations

import os
import signal
from collections.abc import Container
from dataclasses import dataclass, field

from kclrun.ipc.board import LeaseStatus, StatusSlot
from kclrun.ipc.channel import Channel
from kclrun.ipc.exit_codes import NAMES
from kclrun.ipc.messages import NoAnswer, ToWorker
from kclrun.ipc.ring import EventRing
from kclrun.leases.commands import StartProcess
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant

__all__ = ["Child", "exit_code_of", "exit_words"]


@dataclass
class Child:
    """`start` is what it was asked for.

    `pid` and `pidfd` are None until the fork is reported. `farewell` says that its ring brought
    the word with which it ends. `force_instant` is when patience ends; `forced` what was sent.
    `stall` is why its manager ends it, in words, if it stood still. `is_written_off`: not even KILL
    ends it, its fence has passed, and its lease goes on without it.
    """

    start: StartProcess
    incarnation: int
    place: int
    slot: StatusSlot
    ring: EventRing
    channel: Channel[ToWorker, NoAnswer]
    pid: int | None = None
    pidfd: int | None = None
    status: int | None = None
    is_dead: bool = False
    farewell: bool = False
    drain_reason: str | None = None
    stall: str | None = None
    is_written_off: bool = False
    force_instant: Instant | None = None
    forced: list[signal.Signals] = field(default_factory=list)
    last_status: LeaseStatus | None = None

    @property
    def key(self) -> LeaseKey:
        return self.start.key

    def look(self) -> LeaseStatus | None:
        """What its slot says now, or said when it was last readable. A former one's never."""
        status = self.slot.read()
        if isinstance(status, LeaseStatus) and status.incarnation == self.incarnation:
            self.last_status = status
        return self.last_status

    def send_signal(self, number: signal.Signals) -> None:
        """By its pidfd, so never to a later process of the same pid."""
        if self.pidfd is None or self.is_dead:
            return
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return
        self.forced.append(number)


def exit_code_of(status: int | None) -> int | None:
    """The exit code in a wait status; None for a signal or an unknown end."""
    if status is None or not os.WIFEXITED(status):
        return None
    return os.WEXITSTATUS(status)


def exit_words(status: int | None, forced: Container[signal.Signals] = ()) -> str:
    """A wait status for people. `forced` are the signals that we sent ourselves."""
    if status is None:
        return "ended, and its exit status went to nobody"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        is_riddle = number == signal.SIGKILL and number not in forced
        hint = "; out of memory? see the kernel's log" if is_riddle else ""
        return f"killed by {name}{hint}"
    code = os.WEXITSTATUS(status)
    return f"exit code {code} ({NAMES[code]})" if code in NAMES else f"exit code {code}"
