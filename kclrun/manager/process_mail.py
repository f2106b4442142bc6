"""Messages of the manager to its lease processes."""

from __future__ import annotations

from typing import Final

from kclrun.ipc import messages
from kclrun.ipc.channel import NotSent
from kclrun.manager.loop import Loop
from kclrun.manager.ring_reader import Child

_RESEND_AFTER_S: Final = 0.05


class ProcessMail:
    """Sends a message now, or in order once its process reads again. The pidfd reports a process
    that exited."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def send(self, child: Child, message: messages.ToWorker, fds: tuple[int, ...] = ()) -> None:
        """Send a message. One that waits is replaced by a later one of its kind."""
        is_first = not child.unsent
        child.unsent[type(message)] = message, fds
        if is_first:
            self._flush(child)

    def ask_to_drain(self, child: Child, reason: str) -> None:
        """Ask a process to finish before it is forced to."""
        now = self._loop.now()
        left_s = max(0.0, (child.force_instant or now) - now)
        self.send(child, messages.Drain(reason, left_s))

    def _flush(self, child: Child) -> None:
        while child.unsent and not child.has_exited:
            kind, (message, fds) = next(iter(child.unsent.items()))
            if isinstance(child.channel.send(message, fds), NotSent):
                self._loop.after(_RESEND_AFTER_S, lambda: self._flush(child))
                return
            del child.unsent[kind]
