"""The manager's messages, as events; and its death, which is one too."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from typing import Final

from kclrun.consuming import events as on
from kclrun.ipc.channel import Channel, PeerGone, Quiet
from kclrun.ipc.messages import (
    Begin,
    Drain,
    DumpStacks,
    FailoverChanged,
    NoAnswer,
    OthersInSight,
    RenewCredentials,
    ToWorker,
)
from kclrun.model.wire import WireCredentials

__all__ = ["ManagerLine"]

STDERR_FD: Final = 2


class ManagerLine:
    """The lease process's end of the control channel, once the start command was read."""

    def __init__(
        self, channel: Channel[NoAnswer, ToWorker], renew: Callable[[WireCredentials], None]
    ) -> None:
        self._channel = channel
        self._renew = renew
        self._is_gone = False

    def filenos(self) -> tuple[int, ...]:
        """For a selector; none once the manager is gone, or its end would be ready for ever."""
        return () if self._is_gone else (self._channel.fileno(),)

    def hear(self) -> list[on.Event]:
        """All that has come. Raises: MalformedFrame."""
        events: list[on.Event] = []
        while not self._is_gone:
            match self._channel.receive():
                case Quiet():
                    break
                case PeerGone():
                    self._is_gone = True
                    events.append(on.ManagerGone())
                case Drain(reason):
                    events.append(on.DrainRequested(reason))
                case FailoverChanged(failover_s):
                    events.append(on.FailoverChanged(failover_s))
                case OthersInSight(others):
                    events.append(on.OthersInSight(others))
                case RenewCredentials(credentials):
                    self._renew(credentials)
                case DumpStacks():
                    faulthandler.dump_traceback(file=STDERR_FD, all_threads=True)
                case Begin():
                    pass  # Only the first one counts, and that was read before.
        return events
