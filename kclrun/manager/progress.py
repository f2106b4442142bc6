"""What a lease's slot says of its progress: when it last got on, and how far behind it is.

Pure. Rule: progress is a batch that returned, or a look at the stream that found nothing to do. A
request for records that came back is none while records wait: a process that is restarted again
and again reads each time, and gets nowhere.
"""

from __future__ import annotations

from kclrun.ipc.board import LeaseStatus
from kclrun.model.time import Instant

__all__ = ["lag_ms", "progressed_instant"]


def progressed_instant(status: LeaseStatus) -> Instant:
    """When this lease process last got on; 0 if it has not yet."""
    fetched, processed = status.fetched, status.processed
    has_all = fetched is None or (processed is not None and processed >= fetched)
    is_idle = has_all and status.processing_since_instant == 0.0
    return max(status.last_batch_instant, status.last_fetch_instant if is_idle else Instant(0.0))


def lag_ms(status: LeaseStatus, now: Instant) -> int | None:
    """How far the read position is behind the present; None before the first read.

    MillisBehindLatest is of the moment of the read. Where it was not 0, records waited behind the
    position, and each of them has grown older since; so a lease that reads no more (its buffer is
    full, its requests fail) does not look better than it is. At 0 nothing is known to wait.
    """
    behind_ms = status.millis_behind_latest
    if behind_ms <= 0:
        return 0 if behind_ms == 0 else None
    return behind_ms + max(0, round((now - status.last_fetch_instant) * 1000))
