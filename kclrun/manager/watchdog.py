"""Detects stalled lease processes by their status slots, ends them and logs each stall."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from kclrun.lifecycle.stall import STALL_PATIENCE_S, Stall, StallWatch
from kclrun.lifecycle.stopping import UNKILLABLE_AFTER_S
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.ring_reader import Child, exit_words
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog
from kclrun.protocol.status import LeaseStatus

# The states of a process that publishes nothing, in words for the log.
_STATES_OF_THE_SILENT: Final = {
    psutil.STATUS_STOPPED: "it is stopped (SIGSTOP, or a debugger)",
    psutil.STATUS_TRACING_STOP: "it is stopped (a debugger)",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel (a disk, or a network file system)",
}
_GIL: Final = "one of its threads holds the GIL, in a call into C"


@dataclass
class _NotedStall:
    """One stall, from its detection to the exit of the process."""

    stall: Stall
    words: str
    noticed_instant: Instant
    is_logged: bool = False


class Watchdog:
    """Detects stalled lease processes of one manager, ends them and logs one line for each.

    `failover_s` gives the fleet's failover of this moment.
    """

    def __init__(
        self,
        processes: LeaseProcesses,
        *,
        log: EventLog,
        stall_s: float,
        failover_s: Callable[[], float],
    ) -> None:
        self._processes = processes
        self._log = log
        self._failover_s = failover_s
        self._watch = StallWatch(stall_s)
        self._stories: dict[int, _NotedStall] = {}

    def look(self, living: Iterable[Child], now: Instant) -> None:
        """Check all living processes by their status slots."""
        children = tuple(living)
        self._watch.look([child.incarnation for child in children], now)
        for child in children:
            if child.incarnation in self._stories:
                self._watch_the_end(child, now)
            elif child.force_instant is None:
                self._judge(child, now)

    def exited(self, child: Child) -> None:
        """A process has exited: log its stall, if there was one."""
        story = self._stories.pop(child.incarnation, None)
        if story is not None and not story.is_logged:
            self._log_stall(child, story, exit_words(child.status, child.forced))

    def _judge(self, child: Child, now: Instant) -> None:
        stall = self._watch.judge(
            child.incarnation, child.look(), failover_s=self._failover_s(), now=now
        )
        if stall is None:
            return
        words = f"{stall.what}: {_state_of_the_silent(child)}" if stall.is_silent else stall.what
        self._stories[child.incarnation] = _NotedStall(stall, words, now)
        stalled = f"{words}, for {now - stall.since:.0f} s"
        self._processes.end_stalled(child, stalled, Instant(now + STALL_PATIENCE_S))

    def _watch_the_end(self, child: Child, now: Instant) -> None:
        story = self._stories[child.incarnation]
        if (
            not story.is_logged
            and now - story.noticed_instant >= STALL_PATIENCE_S + UNKILLABLE_AFTER_S
        ):
            story.is_logged = True
            self._log_stall(child, story, "not even KILL ends it: look at its host")

    def _log_stall(self, child: Child, story: _NotedStall, end: str) -> None:
        signals = ", ".join(signal.Signals(number).name for number in child.forced)
        asked = "asked for its stacks (on stderr) and to leave"
        status = child.last_status
        self._log.note(
            "process_stalled",
            shard=child.key,
            process=child.pid,
            reason=story.words,
            waited_s=story.noticed_instant - story.stall.since,
            action=f"{asked}, then {signals}" if signals else asked,
            status=end,
            **_positions(status),
        )


def _positions(status: LeaseStatus | None) -> dict[str, str | None]:
    """The position that the process had reached, and where the next one begins."""
    if status is None:
        return {}
    return {"position": _shown(status.processed), "checkpoint": _shown(status.checkpointed)}


def _shown(position: ExtendedSequenceNumber | None) -> str | None:
    return str(position) if position is not None else None


def _state_of_the_silent(child: Child) -> str:
    """The state that the kernel reports for a process that publishes nothing."""
    try:
        state = psutil.Process(child.pid).status()
    except psutil.Error:
        return "it is gone"
    except OSError as error:
        return f"this host does not show its state now ({error.strerror})"
    return _STATES_OF_THE_SILENT.get(state, _GIL)
