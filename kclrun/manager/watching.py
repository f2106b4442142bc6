"""Checks, twice a second: stalled processes, the fleet's failover, caught up; and samples.

A check reads status slots and the state of the core. It never waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from kclrun.ipc.messages import FailoverChanged
from kclrun.lifecycle.caught_up import CaughtUp
from kclrun.lifecycle.stall import STALL_PATIENCE_S, Stall, StallWatch
from kclrun.lifecycle.stopping import UNKILLABLE_AFTER_S
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.loop import Loop
from kclrun.manager.manager import Manager
from kclrun.manager.ring_reader import Child, exit_words
from kclrun.manager.sampling import Sampler
from kclrun.manager.world import ExitReason
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.observe.logs import EventLog
from kclrun.observe.sample import ManagerSample
from kclrun.protocol.status import LeaseStatus

SampleReader = Callable[[ManagerSample], None]

# The states of a process that publishes nothing, in words for the log.
_STATES_OF_THE_SILENT: Final = {
    psutil.STATUS_STOPPED: "it is stopped (SIGSTOP, or a debugger)",
    psutil.STATUS_TRACING_STOP: "it is stopped (a debugger)",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel (a disk, or a network file system)",
}
_GIL: Final = "one of its threads holds the GIL, in a call into C"


@dataclass
class _Story:
    """One stall, from its detection to the exit of the process."""

    stall: Stall
    words: str
    noticed_instant: Instant
    is_told: bool = False


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
        self._stories: dict[int, _Story] = {}

    def look(self, living: Iterable[Child], now: Instant) -> None:
        """Check all living processes by their status slots."""
        children = tuple(living)
        self._watch.look([child.incarnation for child in children], now)
        for child in children:
            if child.incarnation in self._stories:
                self._watch_the_end(child, now)
            elif child.force_instant is None:
                self._judge(child, now)

    def buried(self, child: Child) -> None:
        """A process has exited: log its stall, if there was one."""
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
        return f"this host does not tell its state now ({error.strerror})"
    return _STATES_OF_THE_SILENT.get(state, _GIL)


# Twice a second: two checks that are a second apart end a run at most half a second late.
_LOOK_EVERY_S: Final = 0.5


class Watch:
    """The one timer of a manager: its checks, and the samples for the live table and the metrics.

    `readers` get the samples; each is named with the seconds between two of its samples.
    `source_is_done` comes from the caller.
    """

    def __init__(
        self,
        manager: Manager,
        sampler: Sampler,
        *,
        loop: Loop,
        log: EventLog,
        watchdog: Watchdog,
        failover_s: float,
        readers: Sequence[tuple[float, SampleReader]],
        is_until_caught_up: bool,
        source_is_done: Callable[[], bool],
    ) -> None:
        self._manager = manager
        self._sampler = sampler
        self._loop = loop
        self._log = log
        self._watchdog = watchdog
        self._own_failover_s = failover_s
        self._readers = [(round(each_s / _LOOK_EVERY_S), reader) for each_s, reader in readers]
        self._is_until_caught_up = is_until_caught_up
        self._source_is_done = source_is_done
        self._caught_up = CaughtUp()
        self._looks = 0
        self.failover_s = failover_s

    def look(self) -> None:
        """Check now, and again after a pause."""
        now = self._loop.now()
        statuses = self._look_at_processes(now)
        self._look_at_failover()
        self._sample(now)
        if self._is_until_caught_up and self._manager.is_running:
            self._look_for_the_end(now, statuses)
        self._loop.after(_LOOK_EVERY_S, self.look)

    def _sample(self, now: Instant) -> None:
        due = [reader for every, reader in self._readers if self._looks % every == 0]
        self._looks += 1
        if due:
            sample = self._sampler.take(now)
            for reader in due:
                reader(sample)

    def _look_at_processes(self, now: Instant) -> list[LeaseStatus | None]:
        living = tuple(self._manager.processes.living())
        self._watchdog.look(living, now)
        return [child.look() for child in living]

    def _look_at_failover(self) -> None:
        """The smallest failover of the fleet bounds every fence [P7]."""
        failover_s = fleet_failover_s(self._manager, self._own_failover_s)
        if failover_s != self.failover_s:
            self.failover_s = failover_s
            self._manager.processes.broadcast(FailoverChanged(failover_s))

    def _look_for_the_end(self, now: Instant, statuses: list[LeaseStatus | None]) -> None:
        is_caught_up = self._caught_up.look(
            now,
            is_source_done=self._source_is_done(),
            blockers=self._manager.core.caught_up_blockers(),
            statuses=statuses,
        )
        if is_caught_up:
            halted = self._manager.core.halted()
            self._log.note("caught_up", halted=len(halted))
            reason = ExitReason.HALTED if halted else ExitReason.CAUGHT_UP
            self._manager.drain(reason.value, at_its_end=reason)


def fleet_failover_s(manager: Manager, own_s: float) -> float:
    """The smallest failover that a live owner has published, or our own if that is smaller."""
    core = manager.core
    owners = core.owners
    published = (
        row.failover_s
        for row in core.leases.values()
        if row.failover_s is not None and row.owner in owners and not row.is_ended
    )
    return min(own_s, min(published, default=own_s))
