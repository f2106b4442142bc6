"""Where a lease process begins to read, and where it goes on after an expired iterator.

A checkpoint inside an aggregate is read again from its record, and what is at or below it dropped
after opening, as the Java KCL does (`IteratorBuilder`). Within a session reading goes on after
the last record *received*; a start that has received nothing yet repeats itself, which is why a
LATEST is pinned to a time: the sentinel asked for twice would skip what came between [P14].
"""

from __future__ import annotations

from kclrun.errors import SettingsError
from kclrun.model.lease import Lease
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.time import WallTime

__all__ = ["first_start", "resumed_start"]


def first_start(row: Lease, start_at: WallTime | None, now_at: WallTime) -> StartPoint:
    """The start for a claimed row.

    `start_at` is the instant of `start:`, `now_at` the wall clock, which pins a LATEST that
    somebody else's row carries without a time.
    Raises: SettingsError for an AT_TIMESTAMP row whose instant nobody knows.
    """
    position = row.checkpoint
    match position.sequence_number:
        case TRIM_HORIZON.sequence_number:
            return StartPoint(IteratorType.TRIM_HORIZON)
        case LATEST.sequence_number:
            return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=row.latest_pinned_at or now_at)
        case AT_TIMESTAMP.sequence_number:
            return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=_instant_of(row, start_at))
        case number:
            return StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number=number)


def resumed_start(last_received: str | None, first: StartPoint) -> StartPoint:
    """The start after an iterator expired or failed."""
    if last_received is None:
        return first
    return StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, sequence_number=last_received)


def _instant_of(row: Lease, start_at: WallTime | None) -> WallTime:
    # kcl-rust keeps the instant, in milliseconds, where the sub-sequence number belongs.
    if row.checkpoint.sub_sequence_number:
        return WallTime(row.checkpoint.sub_sequence_number / 1000)
    if start_at is None:
        raise SettingsError(
            f"lease {row.key} is to be read from an instant (AT_TIMESTAMP), and `start:` names"
            " none: give `start:` the instant the application was first started with"
        )
    return start_at
