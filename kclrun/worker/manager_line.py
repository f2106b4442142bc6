"""The line to the manager: its messages come in, reports and the status go out."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from typing import Final, TextIO

from kclrun.ipc import messages
from kclrun.ipc.board import StatusSlot, boottime
from kclrun.ipc.channel import Channel, Doorbell, NoMessage, PeerGone
from kclrun.ipc.ring import EventRing
from kclrun.lease import events
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import WORKER_STATES
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus
from kclrun.worker.delivery_queue import QueueView
from kclrun.worker.fetching import FetchView

STDERR_FD: Final = 2


class ManagerChannel:
    """The lease process's end of the control channel, once the start command was read."""

    def __init__(
        self,
        channel: Channel[messages.Left, messages.ToWorker],
        renew: Callable[[WireCredentials], None],
        write_coroutines: Callable[[TextIO], None] | None = None,
    ) -> None:
        """`write_coroutines` writes where coroutines wait, which the stack of no thread shows."""
        self._channel = channel
        self._renew = renew
        self._write_coroutines = write_coroutines
        self._is_gone = False

    def filenos(self) -> tuple[int, ...]:
        """For a selector; none once the manager is gone: its end would be readable for ever."""
        return () if self._is_gone else (self._channel.fileno(),)

    def receive(self) -> list[events.Event]:
        """The events from all messages that have come. Raises: MalformedFrame."""
        received: list[events.Event] = []
        while not self._is_gone:
            match self._channel.receive():
                case NoMessage():
                    break
                case PeerGone():
                    self._is_gone = True
                    received.append(events.ManagerGone())
                case messages.Drain(reason):
                    received.append(events.DrainRequested(reason))
                case messages.FailoverChanged(failover_s):
                    received.append(events.FailoverChanged(failover_s))
                case messages.OthersInSight(others):
                    received.append(events.OthersInSight(others))
                case messages.RenewCredentials(credentials):
                    self._renew(credentials)
                case messages.DumpStacks():
                    self._dump_stacks()
                case messages.Restart():
                    received.append(events.RestartRequested())
                case messages.Begin() | messages.Admit():
                    pass  # Only the first one counts, and it was read before.
        return received

    def _dump_stacks(self) -> None:
        """Standard error may be full, or its reader may be gone: the drain that follows matters
        more than the stacks."""
        faulthandler.dump_traceback(file=STDERR_FD, all_threads=True)
        if self._write_coroutines is not None:
            with (
                contextlib.suppress(OSError),
                open(STDERR_FD, "w", errors="backslashreplace", closefd=False) as file,
            ):
                self._write_coroutines(file)


class Reporter:
    """Writes the status slot and the ring of one place, and presses the doorbell."""

    def __init__(
        self,
        slot: StatusSlot,
        ring: EventRing,
        doorbell: Doorbell,
        incarnation: int,
        fetch_view: Callable[[], FetchView],
    ) -> None:
        self._slot = slot
        self._ring = ring
        self._doorbell = doorbell
        self._incarnation = incarnation
        self._fetch_view = fetch_view
        self._pid = os.getpid()
        self._retries = self._dead_letters = self._skipped = 0
        self._reporting = threading.Lock()
        self._is_closed = False

    def report(self, report: reports.Report) -> None:
        """Put a report on the ring. A full ring drops it, and the manager reads the row."""
        with self._reporting:
            match report:
                case reports.ProcessorRaised(where) if where != reports.DEAD_LETTER:
                    self._retries += 1
                case reports.RecordGivenUp(is_skipped=True):
                    self._skipped += 1
                case reports.RecordGivenUp():
                    self._dead_letters += 1
            if not self._is_closed:
                self._ring.put(messages.encode_report(report))
        self._doorbell.press()

    def close(self) -> None:
        """Write nothing from now on: in a shared process another lease soon gets the place, while
        the fetch thread of this one may still wait for an answer."""
        with self._reporting:
            self._is_closed = True

    def warn(self, text: str) -> None:
        """A warning for the log; the lease continues. Any thread may call it."""
        self.report(reports.ProcessWarned(text))

    def records_lost(self, position: ExtendedSequenceNumber, text: str) -> None:
        """Records above `position` may have expired unread; the lease continues. Any thread."""
        self.report(reports.RecordsExpired(position, text))

    def note_send(self, instant: Instant) -> None:
        """A write of the row is about to be sent [P5]."""
        self._slot.note_send(instant)

    def publish(
        self,
        machine: LeaseStateMachine,
        queue: QueueView,
        output_waiting_since: Instant,
        commits_at_tip: Callable[[], bool] = lambda: False,
    ) -> None:
        """Refresh the status slot. `commits_at_tip` is as in `Rows`."""
        fetch = self._fetch_view()
        ledger, behind_ms = machine.ledger, fetch.millis_behind_latest
        is_quiet = queue.is_empty and not queue.busy_since and ledger.processed >= ledger.delivered
        has_caught_up = fetch.fetched is None or ledger.processed >= fetch.fetched
        self._slot.publish(
            LeaseStatus(
                pid=self._pid,
                incarnation=self._incarnation,
                state=WORKER_STATES[machine.state],
                fence_instant=machine.own.fence or Instant(0.0),
                counter=machine.own.counter,
                records_total=queue.records_total,
                bytes_total=queue.bytes_total,
                batches_total=queue.batches_total,
                processing_s_total=queue.processing_s_total,
                millis_behind_latest=-1 if behind_ms is None else behind_ms,
                fetched=_number(fetch.fetched),
                processed=_number(ledger.processed),
                checkpointed=ledger.checkpointed if machine.own.row is not None else None,
                first_delivered=queue.first_delivered,
                last_fetch_instant=fetch.last_fetch_instant,
                last_batch_instant=queue.last_batch_instant,
                processing_since_instant=queue.busy_since,
                at_tip=fetch.at_tip and is_quiet and has_caught_up and not commits_at_tip(),
                fetching_since_instant=fetch.asking_since_instant,
                published_instant=boottime(),
                has_undone=machine.has_undone,
                unprocessed_since=queue.unprocessed_since or WallTime(0.0),
                retries_total=self._retries,
                dead_letters_total=self._dead_letters,
                skipped_total=self._skipped,
                output_waiting_since_instant=output_waiting_since,
                passed_over_total=fetch.passed_over_total,
                destination_since_instant=queue.destinations.since,
                destination_waited_instant=queue.destinations.waited_until,
            )
        )


def _number(position: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber | None:
    """The position of a record; None for a sentinel, where there was no record yet."""
    return None if position is None or position.is_sentinel else position
