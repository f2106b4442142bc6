"""Lease processes that stand still: noticed, ended, and explained in one line of the log each.

Holds: `Watchdog`. May not know: what becomes of the lease; its process's proven death is an event
like any other, and the core starts the next one [P5]. Look next: `stall.py` (what counts),
`children.py` (how one is ended).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from kclrun.ipc.board import LeaseStatus
from kclrun.manager.child import Child, exit_words
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.stall import STALL_PATIENCE_S, Stall, StallWatch
from kclrun.manager.stopping import UNKILLABLE_AFTER_S
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog

__all__ = ["Watchdog"]

_STATES_OF_THE_SILENT: Final = {
    psutil.STATUS_STOPPED: "it is stopped (SIGSTOP, or a debugger)",
    psutil.STATUS_TRACING_STOP: "it is stopped (a debugger)",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel (a disk, or a network file system)",
}
_GIL: Final = "one of its threads holds the GIL, in a call into C"


@dataclass
class _Story:
    """One stall, from its notice to the end of the process."""

    stall: Stall
    words: str
    noticed_instant: Instant
    is_told: bool = False


class Watchdog:
    """Looks at the lease processes of one manager. `failover_s` is the fleet's, now."""

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
        self._stories: dict[int, _Story] = {}

    def look(self, living: Iterable[Child], now: Instant) -> None:
        """Judge all that live, by their status slots."""
        children = tuple(living)
        self._watch.look([child.incarnation for child in children], now)
        for child in children:
            if child.incarnation in self._stories:
                self._watch_the_end(child, now)
            elif child.force_instant is None:
                self._judge(child, now)

    def buried(self, child: Child) -> None:
        """A process is dead, proven: tell its story, if there is one."""
        story = self._stories.pop(child.incarnation, None)
        if story is not None and not story.is_told:
            self._tell(child, story, exit_words(child.status, child.forced))

    def _judge(self, child: Child, now: Instant) -> None:
        stall = self._watch.judge(
            child.incarnation, child.look(), failover_s=self._failover_s(), now=now
        )
        if stall is None:
            return
        words = f"{stall.what}: {_state_of_the_silent(child)}" if stall.is_silent else stall.what
        self._stories[child.incarnation] = _Story(stall, words, now)
        told = f"{words}, for {now - stall.since:.0f} s"
        self._processes.end_stalled(child, told, Instant(now + STALL_PATIENCE_S))

    def _watch_the_end(self, child: Child, now: Instant) -> None:
        story = self._stories[child.incarnation]
        if (
            not story.is_told
            and now - story.noticed_instant >= STALL_PATIENCE_S + UNKILLABLE_AFTER_S
        ):
            story.is_told = True
            self._tell(child, story, "not even KILL ends it: its host has to be looked at")

    def _tell(self, child: Child, story: _Story, end: str) -> None:
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
    """Where it stood, and where the next one begins."""
    if status is None:
        return {}
    return {"position": _shown(status.processed), "checkpoint": _shown(status.checkpointed)}


def _shown(position: ExtendedSequenceNumber | None) -> str | None:
    return str(position) if position is not None else None


def _state_of_the_silent(child: Child) -> str:
    """What the kernel says of a process that says nothing itself."""
    try:
        state = psutil.Process(child.pid).status()
    except psutil.Error:
        return "it is gone"
    return _STATES_OF_THE_SILENT.get(state, _GIL)
