"""What the manager sees of the lease process: transitions on the ring, the status slot."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from kclrun.consuming.commands import Report, ReportKind
from kclrun.consuming.life import LeaseLife
from kclrun.consuming.states import State
from kclrun.ipc import transitions as told
from kclrun.ipc.board import LeaseStatus, StatusSlot, WorkerState
from kclrun.ipc.doorbell import Doorbell
from kclrun.ipc.ring import EventRing
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.worker.clock import boottime
from kclrun.worker.desk import DeskView
from kclrun.worker.fetching import FetchView

__all__ = ["Reporter"]

_STATES: Final = {
    State.CLAIMING: WorkerState.CLAIMING,
    State.INITIALIZING: WorkerState.STARTING,
    State.PROCESSING: WorkerState.PROCESSING,
    State.CREATING: WorkerState.ENDING,
    State.NAMING: WorkerState.ENDING,
    State.CLOSING: WorkerState.ENDING,
    State.ENDING: WorkerState.ENDING,
    State.STOPPING: WorkerState.OFFERING,
    State.RELEASING: WorkerState.OFFERING,
    State.FAILING: WorkerState.HALTED,
    State.FAILED: WorkerState.HALTED,
    State.LOSING: WorkerState.LOST,
    State.LOST: WorkerState.LOST,
    State.UNCLAIMED: WorkerState.LOST,
    State.ENDED: WorkerState.FINISHED,
    State.RELEASED: WorkerState.FINISHED,
}


class Reporter:
    """Writes slot and ring of one place, and rings the doorbell."""

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

    def tell(self, transition: told.Transition) -> None:
        """Put a transition on the ring. A full ring drops it, and the manager reads the row."""
        self._ring.put(told.encode(transition))
        self._doorbell.press()

    def warn(self, text: str) -> None:
        """Something for the log; the lease goes on. Any thread may call it."""
        self.tell(told.Warned("lease_process_warned", text))

    def note_send(self, instant: Instant) -> None:
        """A write of the row is about to leave [P5]."""
        self._slot.note_send(instant)

    def report(self, report: Report) -> None:
        self.tell(_transition(report))

    def publish(self, life: LeaseLife, desk: DeskView) -> None:
        """Refresh the status slot."""
        fetch = self._fetch_view()
        ledger = life.ledger
        is_quiet = desk.is_empty and not desk.busy_since and ledger.processed >= ledger.delivered
        has_caught_up = fetch.fetched is None or ledger.processed >= fetch.fetched
        self._slot.publish(
            LeaseStatus(
                pid=self._pid,
                incarnation=self._incarnation,
                state=_STATES[life.state],
                fence_instant=life.own.fence or Instant(0.0),
                counter=life.own.counter,
                records_total=desk.records_total,
                bytes_total=desk.bytes_total,
                batches_total=desk.batches_total,
                processing_s_total=desk.processing_s_total,
                millis_behind_latest=_or_unknown(fetch.millis_behind_latest),
                fetched=_number(fetch.fetched),
                processed=_number(ledger.processed),
                checkpointed=ledger.checkpointed if life.own.row is not None else None,
                first_delivered=desk.first_delivered,
                last_fetch_instant=fetch.last_fetch_instant,
                last_batch_instant=desk.last_batch_instant,
                processing_since_instant=desk.busy_since,
                at_tip=fetch.at_tip and is_quiet and has_caught_up,
                fetching_since_instant=fetch.asking_since_instant,
                published_instant=boottime(),
            )
        )


def _number(position: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber | None:
    """A position as one of records: a sentinel says that there was none yet."""
    return None if position is None or position.is_sentinel else position


def _or_unknown(millis_behind_latest: int | None) -> int:
    return -1 if millis_behind_latest is None else millis_behind_latest


def _transition(report: Report) -> told.Transition:
    position = report.position
    match report.kind:
        case ReportKind.CLAIMED if position is not None:
            return told.Claimed(report.counter, position)
        case ReportKind.CHECKPOINTED if position is not None:
            return told.Checkpointed(position, report.counter)
        case ReportKind.RELEASED if position is not None:
            return told.Released(position, report.text)
        case ReportKind.SHARD_ENDED:
            return told.ShardEnded(report.children)
        case ReportKind.LOST:
            return told.Lost(report.text)
        case ReportKind.FAILED:
            return told.Failed(
                report.where, report.text, position, report.traceback_text, report.attempts
            )
        case ReportKind.UNCLAIMED:
            return told.Unclaimed(report.text)
        case ReportKind.GIL_HELD:
            return told.GilHeld(report.seconds)
        case _:
            return told.Warned("lease_process_warned", report.text)
