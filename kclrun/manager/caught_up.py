"""Whether there is nothing left to do for now: the end of a run with `--until caught-up`.

Pure. Rule: a look that finds nothing to do may have come between two records, or between the end
of a source and its last record's arrival; so two looks must find it, far enough apart, and none
between them anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kclrun.ipc.board import LeaseStatus, WorkerState
from kclrun.model.time import Instant

__all__ = ["LOOK_APART_S", "CaughtUp", "is_at_tip"]

# A record that was put becomes readable within 200 ms as a rule, a poll at the default `fetch.idle`
# takes a second to see it, and a status is up to a second old (`worker/lease_thread.py`).
LOOK_APART_S: Final = 2.5


def is_at_tip(status: LeaseStatus | None) -> bool:
    """Whether a process has read its shard to the tip and given everything to user code."""
    return (
        status is not None
        and status.state is WorkerState.PROCESSING
        and status.at_tip
        and _has_processed_all(status)
        and status.processing_since_instant <= 0.0
    )


def _has_processed_all(status: LeaseStatus) -> bool:
    if status.fetched is None:
        return True
    return status.processed is not None and status.processed >= status.fetched


class CaughtUp:
    """Takes looks; true once two of them, far enough apart, found nothing to do."""

    def __init__(self) -> None:
        self._since: Instant | None = None
        self._records = -1

    def look(
        self,
        now: Instant,
        *,
        is_source_done: bool,
        blockers: Iterable[str],
        statuses: Iterable[LeaseStatus | None],
    ) -> bool:
        """`blockers` are the core's reasons against it; `statuses` one a living process."""
        seen = tuple(statuses)
        records = sum(status.records_total for status in seen if status is not None)
        is_idle = is_source_done and not tuple(blockers) and all(map(is_at_tip, seen))
        if not is_idle or records != self._records:
            # What was processed since the last look may have been followed by more.
            self._since = now if is_idle else None
            self._records = records
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= LOOK_APART_S
