"""Whether all work is done for now: the end of a run with `--until caught-up`.

Pure. Rule: a single look that finds no work is not enough. It may have come between two records, or
between the end of a source and the arrival of its last record. So two looks must find no work, far
enough apart, and no look between them may find any. Each shard must have been read lately.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kclrun.model.time import Instant
from kclrun.protocol.status import LeaseStatus, WorkerState

# As a rule a record becomes readable within 200 ms after it was put. A poll at the default
# `fetch.idle` takes a second to see it, and a status is up to a second old
# (`worker/lease_thread.py`).
LOOK_APART_S: Final = 2.5
# An idle shard is read each second, a subscription is answered each five. With a longer
# `fetch.idle` a read since the first of the two looks is waited for.
READ_WITHIN_S: Final = 30.0


def is_at_tip(status: LeaseStatus | None) -> bool:
    """Whether a process has read its shard to the tip and given every record to user code."""
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
    """Takes looks; true once two of them, far enough apart, found no work."""

    def __init__(self) -> None:
        self._since: Instant | None = None
        self._records: int | None = None

    def look(
        self,
        now: Instant,
        *,
        is_source_done: bool,
        blockers: Iterable[str],
        statuses: Iterable[LeaseStatus | None],
    ) -> bool:
        """`blockers` are the core's reasons against it; `statuses` has one for each process."""
        seen = tuple(statuses)
        records = sum(status.records_total for status in seen if status is not None)
        is_idle = is_source_done and not tuple(blockers) and all(map(is_at_tip, seen))
        if not is_idle or records != self._records:
            # Records processed since the last look may have been followed by more records.
            self._since = now if is_idle else None
            self._records = records
            return False
        if self._since is None:
            self._since = now
        since = min(self._since, Instant(now - READ_WITHIN_S))
        return now - self._since >= LOOK_APART_S and not _are_unread(seen, since)


def _are_unread(statuses: Iterable[LeaseStatus | None], since: Instant) -> bool:
    """Whether a shard was not read since then. A process whose requests fail keeps its last answer:
    the tip of before the outage says nothing about now."""
    return any(
        status is not None and 0.0 < status.last_fetch_instant < since for status in statuses
    )
