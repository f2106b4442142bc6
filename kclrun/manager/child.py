"""One lease process as its manager knows it, from the request for a fork to its proven death."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from kclrun.ipc.board import LeaseStatus, StatusSlot
from kclrun.ipc.channel import Channel
from kclrun.ipc.exit_codes import NAMES
from kclrun.ipc.messages import NoAnswer, ToWorker
from kclrun.ipc.ring import EventRing
from kclrun.ipc.spec import StartSpec
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant

__all__ = ["Child", "exit_code_of", "exit_words"]


@dataclass
class Child:
    """`spec` is dropped once it was sent: it holds credentials.

    `pid` and `pidfd` are None until the fork is reported. `farewell` says that its ring brought
    the word with which it ends. `force_instant` is when patience ends; `forced` what was sent.
    """

    key: LeaseKey
    incarnation: int
    place: int
    slot: StatusSlot
    ring: EventRing
    channel: Channel[ToWorker, NoAnswer]
    spec: StartSpec | None
    pid: int | None = None
    pidfd: int | None = None
    status: int | None = None
    is_dead: bool = False
    farewell: bool = False
    drain_reason: str | None = None
    is_drain_sent: bool = False
    force_instant: Instant | None = None
    forced: list[signal.Signals] = field(default_factory=list)
    last_status: LeaseStatus | None = None

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


def exit_words(status: int | None) -> str:
    """A wait status for people."""
    if status is None:
        return "ended, and its exit status went to nobody"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        hint = "; out of memory? see the kernel's log" if number == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    code = os.WEXITSTATUS(status)
    return f"exit code {code} ({NAMES[code]})" if code in NAMES else f"exit code {code}"
