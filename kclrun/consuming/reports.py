"""What the manager is told, built in one place: each report with the fields its kind carries."""

from __future__ import annotations

from typing import Final

from kclrun.consuming.commands import Report, ReportKind
from kclrun.consuming.events import ProcessorFailed
from kclrun.consuming.giving_away import words_of
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.consuming.row_evidence import GivingAway
from kclrun.model.lease import Lease

__all__ = [
    "UNSAVED_END",
    "Warnings",
    "claimed",
    "failed",
    "given_away",
    "lost",
    "saved",
    "stalled",
    "stuck_at_cap",
    "unclaimed",
    "why_not_begun",
    "written_again",
]

UNSAVED_END: Final = ProcessorFailed(
    "shard_ended",
    "returned without checkpointer.checkpoint(), which checkpoint: manual asks for",
    attempts=1,
)


def claimed(row: Lease) -> Report:
    return Report(ReportKind.CLAIMED, position=row.checkpoint, counter=row.counter)


def saved(row: Lease) -> Report:
    return Report(ReportKind.CHECKPOINTED, position=row.checkpoint, counter=row.counter)


def why_not_begun(row: Lease, *, has_waited: bool) -> str | None:
    """Why a lease that was claimed is not processed, if it is not."""
    if row.is_ended:  # by a write of the former process that landed late (trace H1)
        return "its shard has ended already"
    if row.taken_from is not None and not has_waited:
        return (
            f"it was taken by force from {row.taken_from}, which may still process it: the manager"
            " waits a failover and starts again [P18]"
        )
    return None


def given_away(change: GivingAway) -> Report:
    return Report(ReportKind.RELEASED, position=change.position, text=words_of(change))


def written_again(row: Lease) -> Report:
    return Report(
        ReportKind.WARNED,
        text="its row had vanished from the table and was written again, at"
        f" {row.checkpoint}: see who deletes rows of a running application",
    )


def failed(failure: ProcessorFailed) -> Report:
    return Report(
        ReportKind.FAILED,
        position=failure.position,
        text=failure.error,
        where=failure.where,
        attempts=failure.attempts,
        traceback_text=failure.traceback_text,
    )


def lost(reason: str) -> Report:
    return Report(ReportKind.LOST, text=reason)


def unclaimed(reason: str) -> Report:
    return Report(ReportKind.UNCLAIMED, text=reason)


def stuck_at_cap(ledger: CheckpointLedger) -> ProcessorFailed:
    """With manual checkpoints, nobody but the processor can make room [I7]."""
    return ProcessorFailed(
        "process_records",
        f"{ledger.uncheckpointed} records were processed and none checkpointed:"
        " checkpoint: manual asks for checkpointer.checkpoint() before"
        " checkpoint.uncheckpointed_max is reached",
        attempts=1,
        position=ledger.processed,
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
