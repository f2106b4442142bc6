"""What lease processes report, and what it means for the custody of their lease.

Knows: one report and the custody it concerns. May not know: the row, which no report of a process
changes here: it is read again once the process is proven dead.
Rule: a process that said farewell stopped in good order; one that died without a word crashed.
"""

from __future__ import annotations

from typing import Protocol

from kclrun.errors import InvariantViolation
from kclrun.leases.custody import Custody, State, Step
from kclrun.leases.events import (
    LeaseClaimed,
    LeaseLost,
    LeaseReleased,
    PositionMoved,
    ProcessExited,
    ProcessorFailed,
    ProcessReport,
    ProcessStarted,
    ShardEnded,
    StartFailed,
    StartUnclaimed,
)
from kclrun.leases.restarts import DEATHS_MAX
from kclrun.model.time import Instant

__all__ = ["take_in", "take_in_late"]


class _Noting(Protocol):
    """How a line for the log is written: event, custody, level, fields."""

    def __call__(
        self, event: str, custody: Custody, level: str = "info", **fields: str | int | None
    ) -> None: ...


def take_in(event: ProcessReport, custody: Custody, note: _Noting, now: Instant) -> None:
    """A report of a process that lives, or of its end."""
    match event:
        case ProcessExited():
            _died(custody, event, note, now)
        case StartFailed():
            _not_started(custody, event, note, now)
        case LeaseClaimed():
            if custody.state is State.STARTING:
                custody.step(Step.CLAIMED)
        case PositionMoved():
            custody.restarts.progressed()
        case ShardEnded() | LeaseReleased():
            custody.is_over = True
            _said_farewell(custody)
        case ProcessorFailed():
            custody.failure = event.reason
            _said_farewell(custody)
        case LeaseLost():
            note("process_lost_lease", custody, "warning", reason=event.reason)
            _said_farewell(custody)
        case StartUnclaimed():
            note("start_unclaimed", custody, "warning", reason=event.reason)
            _said_farewell(custody)
        case ProcessStarted():
            pass  # its pid is the shell's affair


def take_in_late(event: ProcessReport, custody: Custody | None) -> None:
    """What a dead process still had in its ring is ignored, but for the reason of a halt."""
    if isinstance(event, ProcessStarted | StartFailed | ProcessExited):
        raise InvariantViolation(f"lease {event.key}: {type(event).__name__}, and no process")
    is_examining = custody is not None and custody.state is State.EXAMINING
    if custody is not None and is_examining and isinstance(event, ProcessorFailed):
        custody.failure = event.reason


def _said_farewell(custody: Custody) -> None:
    if custody.state is not State.LEAVING:
        custody.step(Step.SAID_FAREWELL)


def _died(custody: Custody, event: ProcessExited, note: _Noting, now: Instant) -> None:
    """Its death is proven. Without a word before, that was a crash."""
    if custody.is_over:
        custody.step(Step.GIVEN_UP)
        return
    if custody.state is State.LEAVING:
        custody.restarts.stopped(now)
    else:
        custody.restarts.crashed(now)
        deaths = custody.restarts.deaths
        note("process_died", custody, "warning", reason=event.reason, deaths=deaths)
    if custody.restarts.has_tripped and custody.failure is None:
        custody.failure = (
            f"the lease process died {DEATHS_MAX} times in a row without moving the"
            f" checkpoint; the last time: {event.reason}"
        )
    custody.is_proven = False
    custody.step(Step.DIED)


def _not_started(custody: Custody, event: StartFailed, note: _Noting, now: Instant) -> None:
    custody.restarts.stopped(now)
    custody.rest_until = Instant(now + custody.restarts.pause_s)
    custody.step(Step.NOT_STARTED)
    note("start_failed", custody, "error", reason=event.reason)
