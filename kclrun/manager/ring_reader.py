"""Turns the reports in a process's ring into events for the core and lines for the log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final, assert_never

from kclrun.errors import MalformedFrame
from kclrun.ipc.board import StatusSlot, boottime
from kclrun.ipc.channel import Channel
from kclrun.ipc.exit_codes import FAILED, LOST, NAMES, REPLACED, UNCLAIMED
from kclrun.ipc.messages import Left, RingReport, ToWorker, decode_report
from kclrun.ipc.ring import EventRing
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import ProcessReported
from kclrun.model.lease import LeaseKey
from kclrun.model.output import RowTrial
from kclrun.model.time import WALL_TIME_MAX, Instant, WallTime
from kclrun.observe.logs import EventLog
from kclrun.protocol import reports
from kclrun.protocol.reports import CoreReport, EndReport, reason_of
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.traffic.hot_keys import ShardHeat

# Kinesis keeps records for 365 days at most.
_RETENTION_MS_MAX: Final = 366 * 86_400_000


def waiting_since(status: LeaseStatus | None) -> WallTime | None:
    """The arrival time of the oldest record that a process read and did not process. If there was
    none, and its last read was behind the present: that of the record at its position, by this
    host's clock."""
    if status is None:
        return None
    # User code shares the memory with the slot, and may have written any value.
    if 0.0 < status.unprocessed_since < WALL_TIME_MAX:
        return status.unprocessed_since
    if not 0 < status.millis_behind_latest < _RETENTION_MS_MAX:
        return None
    read_s = boottime() - status.last_fetch_instant
    return WallTime(time.time() - max(0.0, read_s) - status.millis_behind_latest / 1000)


@dataclass
class Child:
    """One lease process, from the request of its fork; `start` is the command that requested it.

    `pid` and `pidfd` are None until the fork is reported. `has_reported_end`: its ring contained
    the last report of its life. `force_instant` is when patience ends; `forced` are the signals
    sent. `trouble` is the exception of user code, in words, while the call is retried. `awaited` is
    the last error of the destination that a call waits for, in words. `warning` is its
    last warning. `stall`: the reason, in words, if its manager ends it because it stalled.
    `is_written_off`: not even KILL ends it, its fence has passed, and its lease continues
    without it. `heat` is the last report of its shard's traffic. `is_sharing`: other leases may
    run in its process. `has_left`: it ended there, and the process goes on. `unsent` are the
    messages that wait for a process that does not read, in order: of each kind only the last,
    for an old failover or old credentials must not replace newer ones."""

    start: StartProcess
    incarnation: int
    place: int
    slot: StatusSlot
    ring: EventRing
    channel: Channel[ToWorker, Left]
    pid: int | None = None
    pidfd: int | None = None
    status: int | None = None
    has_exited: bool = False
    has_reported_end: bool = False
    drain_reason: str | None = None
    trouble: str = ""
    awaited: str = ""
    warning: str = ""
    stall: str | None = None
    is_written_off: bool = False
    force_instant: Instant | None = None
    forced: list[signal.Signals] = field(default_factory=list)
    unsent: dict[type[ToWorker], tuple[ToWorker, tuple[int, ...]]] = field(default_factory=dict)
    last_status: LeaseStatus | None = None
    heat: ShardHeat | None = None
    is_sharing: bool = False
    has_left: bool = False

    @property
    def key(self) -> LeaseKey:
        return self.start.key

    def note_trouble(self, where: str, words: str) -> None:
        """A call failed in `where`, as these words say; empty: it goes on."""
        if where in reports.DESTINATIONS:
            self.awaited = words
        else:
            self.trouble = words

    def look(self) -> LeaseStatus | None:
        """Its status now, or when its slot was last readable. Never that of a former process."""
        status = self.slot.read()
        if isinstance(status, LeaseStatus) and status.incarnation == self.incarnation:
            self.last_status = status
        return self.last_status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it by the pidfd, so never to a later process of the same pid."""
        if self.pidfd is None or self.has_exited:
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
        return "ended, and its exit status was lost"
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


class RingReader:
    """Turns reports into events, and logs those that the core does not log itself.

    A lease process runs user code, so its reports are checked like input from a stranger: bytes
    that are not a report make the manager kill the process. A report that found no room in the
    ring is replaced from the slot, which holds the last state under a checksum. The exit code alone
    is never used for this, because user code can choose it (`os._exit(3)`).
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        # The leases whose rows a destination refused, until a checkpoint passes these rows.
        self.row_trials: dict[LeaseKey, RowTrial] = {}

    def read(self, child: Child) -> list[ProcessReported]:
        """The events from the child's ring now.

        Raises: MalformedFrame if it wrote bytes that are not a report; end the process.
        """
        events: list[ProcessReported] = []
        for payload in child.ring.drain():
            report = decode_report(payload)
            self._note(child, report)
            child.has_reported_end |= isinstance(report, EndReport)
            if isinstance(report, CoreReport):
                events.append(ProcessReported(child.key, report))
        if child.ring.gap():
            events += self._made_up_position(child)
        return events

    def read_last(self, child: Child) -> list[ProcessReported]:
        """All events that an exited child left. A missing last report is made up from its slot."""
        events: list[ProcessReported] = []
        try:
            for _ in range(_DRAINS_MAX):
                events += self.read(child)
        except MalformedFrame as error:
            self._log.note("process_condemned", shard=child.key, error=str(error))
        if not child.has_reported_end and (report := _assumed_end_report(child)) is not None:
            events.append(ProcessReported(child.key, report))
        return events

    def _note(self, child: Child, report: RingReport) -> None:
        """Log the report. An exception of user code is its lease's trouble until a call returns."""
        key = child.key
        self._note_trial(key, report)
        match report:
            case reports.LeaseClaimed(counter, position):
                self._log.note("lease_claimed", shard=key, counter=counter, position=str(position))
            case reports.ShardEnded(children):
                self._log.note("shard_ended", shard=key, children=", ".join(children))
            case reports.LeaseReleased(position):
                self._log.note("lease_released", shard=key, position=str(position))
            case reports.ProcessorFailed():
                self._note_failed(key, report)
            case reports.ProcessorRaised(where):
                child.note_trouble(where, reason_of(report))
                self._note_raised(key, report)
            case reports.ProcessorWaited(where) | reports.ProcessorRecovered(where):
                child.note_trouble(where, "")
                self._note_end_of_trouble(key, report)
            case ShardHeat():
                child.heat = report
            case reports.RecordGivenUp():
                self._note_given_up(key, report)
            case reports.GilHeld(seconds):
                self._log.note("gil_held", shard=key, seconds=seconds)
            case reports.RecordsExpired(position, detail):
                expired = str(position)
                self._log.note("records_expired", shard=key, position=expired, detail=detail)
            case reports.ProcessWarned(detail):
                child.warning = detail
                self._log.note("lease_process_warned", shard=key, detail=detail)
            case _:
                pass  # The core logs it, or it is progress.

    def _note_trial(self, key: LeaseKey, report: RingReport) -> None:
        match report:
            case reports.RowsWereRefused(upto, rounds, error, outputs):
                self.row_trials[key] = RowTrial(upto, outputs, rounds)
                self._log.note("rows_refused", shard=key, position=str(upto), error=error)
            case reports.Checkpointed(position):
                if key in self.row_trials and self.row_trials[key].upto <= position:
                    del self.row_trials[key]
            case reports.ShardEnded() | reports.LeaseReleased():
                self.row_trials.pop(key, None)
            case _:
                pass

    def _note_failed(self, key: LeaseKey, failed: reports.ProcessorFailed) -> None:
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

    def _note_raised(self, key: LeaseKey, raised: reports.ProcessorRaised) -> None:
        """The first time in full; a repetition in brief. Of RetryLater only the first in a row."""
        if raised.waits:
            if raised.waits == 1:
                self._log.note(
                    "retry_later_began",
                    shard=key,
                    where=raised.where,
                    error=raised.error,
                    pause_s=raised.pause_s,
                )
            return
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

    def _note_end_of_trouble(
        self, key: LeaseKey, report: reports.ProcessorWaited | reports.ProcessorRecovered
    ) -> None:
        match report:
            case reports.ProcessorWaited(where, tries, waited_s):
                self._log.note(
                    "retry_later_ended", shard=key, where=where, attempts=tries, waited_s=waited_s
                )
            case reports.ProcessorRecovered(where, attempts):
                self._log.note("processor_recovered", shard=key, where=where, attempts=attempts)
            case _:
                assert_never(report)

    def _note_given_up(self, key: LeaseKey, given_up: reports.RecordGivenUp) -> None:
        fields = {"raised_at": given_up.raised_at, "traceback": given_up.traceback_text}
        self._log.note(
            "record_skipped" if given_up.is_skipped else "record_dead_lettered",
            shard=key,
            position=str(given_up.position),
            attempts=given_up.calls,
            error=given_up.error,
            **{name: text for name, text in fields.items() if text},
        )

    def _made_up_position(self, child: Child) -> list[ProcessReported]:
        self._log.note("transitions_missed", shard=child.key)
        status = child.look()
        if status is None or status.checkpointed is None:
            return []
        made_up = reports.Checkpointed(status.checkpointed, status.counter)
        return [ProcessReported(child.key, made_up)]


def _assumed_end_report(child: Child) -> EndReport | None:
    """The last report, if the last state in the slot and the exit code agree. Not for DONE: the
    core reads from the row whether the lease was ended or released."""
    status = child.look()
    reason = "its report was lost; by its status"
    match exit_code_of(child.status), status.state if status is not None else None:
        case code, WorkerState.LOST if code == UNCLAIMED:
            return reports.StartUnclaimed(reason)
        case code, WorkerState.LOST if code == LOST:
            return reports.LeaseLost(reason)
        case code, WorkerState.LOST if code == REPLACED:
            return reports.ProcessReplaced(reason)
        case code, WorkerState.HALTED if code == FAILED:
            return reports.ProcessorFailed("", reason, attempts=1)
        case _:
            return None
