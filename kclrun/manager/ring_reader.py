"""Turns the transitions in a process's ring into events for the core and lines for the log."""

from __future__ import annotations

import os
import signal
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from kclrun.errors import MalformedFrame
from kclrun.ipc import transitions as said
from kclrun.ipc.board import StatusSlot
from kclrun.ipc.channel import Channel
from kclrun.ipc.exit_codes import FAILED, LOST, NAMES, UNCLAIMED
from kclrun.ipc.messages import NoAnswer, ToWorker
from kclrun.ipc.ring import EventRing
from kclrun.leases import events as heard
from kclrun.leases.commands import StartProcess
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant, WallTime
from kclrun.observe.events import CATALOGUE
from kclrun.observe.logs import EventLog
from kclrun.protocol.status import LeaseStatus, WorkerState

# Some year after 5000: user code shares the memory with the slot, and may have written any value.
_WALL_TIME_MAX: Final = WallTime(1e11)


def waiting_since(status: LeaseStatus | None) -> WallTime | None:
    """The arrival time of the oldest record that a process read and did not process."""
    if status is None or not 0.0 < status.unprocessed_since < _WALL_TIME_MAX:
        return None
    return status.unprocessed_since


@dataclass
class Child:
    """One lease process, from the request of its fork; `start` is the command that requested it.

    `pid` and `pidfd` are None until the fork is reported. `has_reported_end`: its ring contained
    the last report of its life. `force_instant` is when patience ends; `forced` are the signals
    sent. `trouble` is the exception of user code, in words, while the call is retried. `stall`: the
    reason, in words, if its manager ends it because it stalled. `is_written_off`: not even KILL
    ends it, its fence has passed, and its lease continues without it."""

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
    has_reported_end: bool = False
    drain_reason: str | None = None
    trouble: str = ""
    stall: str | None = None
    is_written_off: bool = False
    force_instant: Instant | None = None
    forced: list[signal.Signals] = field(default_factory=list)
    last_status: LeaseStatus | None = None

    @property
    def key(self) -> LeaseKey:
        return self.start.key

    def look(self) -> LeaseStatus | None:
        """Its status now, or when its slot was last readable. Never that of a former process."""
        status = self.slot.read()
        if isinstance(status, LeaseStatus) and status.incarnation == self.incarnation:
            self.last_status = status
        return self.last_status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it by the pidfd, so never to a later process of the same pid."""
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


def exit_words(
    status: int | None, forced: Container[signal.Signals] = (), *, is_vouched: bool = True
) -> str:
    """A wait status for people. `forced` are the signals that we sent ourselves. `is_vouched`: its
    report confirms how it ended, so the code is one of ours and not one that user code chose."""
    if status is None:
        return "ended, and its exit status went to nobody"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        is_riddle = number == signal.SIGKILL and number not in forced
        hint = "; out of memory? see the kernel's log" if is_riddle else ""
        return f"killed by {name}{hint}"
    code = os.WEXITSTATUS(status)
    meaning = NAMES.get(code) if is_vouched else None
    return f"exit code {code} ({meaning})" if meaning is not None else f"exit code {code}"


# A ring holds 64 KiB of entries of 40 bytes and more; the ring of an exited process is emptied.
_DRAINS_MAX: Final = 16
# Of an error, in the reason of a halt: every renewal of the row pays for it; the log has it in
# full.
_REASON_CHARACTERS_MAX: Final = 300
_END_REPORTS: Final = (
    *(said.Unclaimed, said.ShardEnded, said.Released, said.Lost, said.Failed, said.Broke),
)


class RingReader:
    """Turns transitions into events, and logs those that the core does not log itself.

    A lease process runs user code, so its reports are checked like input from a stranger: bytes
    that are not a transition make the manager kill the process. A report that found no room in the
    ring is replaced from the slot, which holds the last state under a checksum. The exit code alone
    is never used for this, because user code can choose it (`os._exit(3)`).
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def hear(self, child: Child) -> list[heard.Event]:
        """The events from the child's ring now.

        Raises: MalformedFrame if it wrote bytes that are not a transition; end the process.
        """
        events: list[heard.Event] = []
        for payload in child.ring.drain():
            events += self._heard(child, said.decode(payload))
        if child.ring.gap():
            events += self._made_up_position(child)
        return events

    def hear_last(self, child: Child) -> list[heard.Event]:
        """All events that an exited child left. A missing last report is made up from its slot."""
        events: list[heard.Event] = []
        try:
            for _ in range(_DRAINS_MAX):
                events += self.hear(child)
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
        if not child.has_reported_end:
            events += _assumed_end_report(child)
        return events

    def _heard(self, child: Child, transition: said.Transition) -> list[heard.Event]:
        key = child.key
        if isinstance(transition, _END_REPORTS):
            child.has_reported_end = True
        match transition:
            case said.Claimed(counter, position):
                self._log.note("lease_claimed", shard=key, counter=counter, position=str(position))
                return [heard.LeaseClaimed(key, counter, position)]
            case said.Checkpointed(position):
                return [heard.PositionMoved(key, position)]
            case said.ShardEnded(children):
                self._log.note("shard_ended", shard=key, children=", ".join(children))
                return [heard.ShardEnded(key, children)]
            case said.Released(position):
                self._log.note("lease_released", shard=key, position=str(position))
                return [heard.LeaseReleased(key, position)]
            case said.Unclaimed(reason):
                return [heard.StartUnclaimed(key, reason)]
            case said.Lost(reason):
                return [heard.LeaseLost(key, reason)]
            case said.Broke(reason):
                return [heard.ProcessBroke(key, reason)]
            case said.Failed():
                return [self._failed(key, transition)]
            case said.Raised():
                child.trouble = _words_of(transition)
                self._note_raised(key, transition)
                return []
            case said.Recovered(where, attempts):
                child.trouble = ""
                self._log.note("processor_recovered", shard=key, where=where, attempts=attempts)
                return []
            case _:
                self._note_only(key, transition)
                return []

    def _failed(self, key: LeaseKey, failed: said.Failed) -> heard.Event:
        fields = {
            "raised_at": failed.raised_at,
            "record": failed.record,
            "position": str(failed.position) if failed.position is not None else "",
            "traceback": failed.traceback_text,
        }
        self._log.note(
            "processor_failed",
            shard=key,
            where=failed.where,
            attempts=failed.attempts,
            error=failed.error,
            **{name: text for name, text in fields.items() if text},
        )
        words = _words_of(failed)
        if failed.is_host_fault:
            return heard.ProcessBroke(key, words, at_records=True)
        return heard.ProcessorFailed(key, words)

    def _note_raised(self, key: LeaseKey, raised: said.Raised) -> None:
        """The first time in full; a repetition in brief."""
        fields = {
            "raised_at": raised.raised_at,
            "record": raised.record,
            "traceback": raised.traceback_text,
        }
        self._log.note(
            "processor_raised",
            shard=key,
            where=raised.where,
            attempts=raised.attempts,
            error=raised.error,
            pause_s=raised.pause_s,
            **{name: text for name, text in fields.items() if text and raised.traceback_text},
        )

    def _note_only(self, key: LeaseKey, transition: said.Transition) -> None:
        match transition:
            case said.GilHeld(seconds):
                self._log.note("gil_held", shard=key, seconds=seconds)
            case said.RecordsExpired(position, detail):
                expired = str(position)
                self._log.note("records_expired", shard=key, position=expired, detail=detail)
            case said.Warned(event, detail) if event in CATALOGUE:
                self._log.note(event, level="warning", shard=key, detail=detail)
            case said.Warned(event, detail):
                self._log.note("lease_process_warned", shard=key, warning=event, detail=detail)
            case _:
                pass  # Started and Drained: the pidfd says when it began and when it ended.

    def _made_up_position(self, child: Child) -> list[heard.Event]:
        self._log.note("transitions_missed", shard=child.key)
        status = child.look()
        if status is None or status.checkpointed is None:
            return []
        return [heard.PositionMoved(child.key, status.checkpointed)]


def _words_of(failure: said.Raised | said.Failed) -> str:
    """For the lease's row, the live table and /health: the error, its place, and its record."""
    times = "once" if failure.attempts == 1 else f"{failure.attempts} times"
    where = f"{failure.where} failed {times}" if failure.where else "failed"
    error = failure.error
    if len(error) > _REASON_CHARACTERS_MAX:
        error = f"{error[:_REASON_CHARACTERS_MAX]}…"
    record = f"record {failure.record}" if failure.record else ""
    at = "; ".join(part for part in (failure.raised_at, record) if part)
    return f"{where}: {error} ({at})" if at else f"{where}: {error}"


def _assumed_end_report(child: Child) -> list[heard.Event]:
    """The last report, if the last state in the slot and the exit code agree. Not for DONE: the
    core reads from the row whether the lease was ended or released."""
    status = child.look()
    reason = "its report was lost; by its status"
    match exit_code_of(child.status), status.state if status is not None else None:
        case code, WorkerState.LOST if code == UNCLAIMED:
            return [heard.StartUnclaimed(child.key, reason)]
        case code, WorkerState.LOST if code == LOST:
            return [heard.LeaseLost(child.key, reason)]
        case code, WorkerState.HALTED if code == FAILED:
            return [heard.ProcessorFailed(child.key, f"the processor failed; {reason}")]
        case _:
            return []
