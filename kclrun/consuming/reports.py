"""What the manager is told, built in one place: each report with the fields its kind carries."""

from __future__ import annotations

from kclrun.consuming.commands import Report, ReportKind
from kclrun.consuming.events import ProcessorFailed
from kclrun.model.lease import Lease

__all__ = ["Warnings", "claimed", "failed", "saved", "stalled"]


def claimed(row: Lease) -> Report:
    return Report(ReportKind.CLAIMED, position=row.checkpoint, counter=row.counter)


def saved(row: Lease) -> Report:
    return Report(ReportKind.CHECKPOINTED, position=row.checkpoint, counter=row.counter)


def failed(failure: ProcessorFailed) -> Report:
    return Report(
        ReportKind.FAILED,
        position=failure.position,
        text=failure.error,
        where=failure.where,
        attempts=failure.attempts,
        traceback_text=failure.traceback_text,
    )


def stalled(stalled_s: float, *, in_user_code: bool) -> Report:
    """The lease thread stood still: because user code held the GIL, or with the whole process."""
    if in_user_code:
        return Report(ReportKind.GIL_HELD, text="gil_held", seconds=stalled_s)
    return Report(ReportKind.WARNED, text="the process stood still", seconds=stalled_s)


class Warnings:
    """Tells each new trouble once, however often it comes back in a row."""

    def __init__(self) -> None:
        self._told = ""

    def once(self, reason: str) -> tuple[Report, ...]:
        if not reason or reason == self._told:
            return ()
        self._told = reason
        return (Report(ReportKind.WARNED, text=reason),)
