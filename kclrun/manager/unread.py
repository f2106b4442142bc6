"""A lease of which no page is read: what was known of its lag is not known any more."""

from __future__ import annotations

from typing import Final

from kclrun.protocol.status import LeaseStatus, WorkerState

# A short outage is over by then, and a subscription is silent for ten seconds before it is given
# up.
UNREAD_S: Final = 20.0


def unread_s(status: LeaseStatus | None, still_s: float | None, max_s: float) -> float | None:
    """The time without a page, from `max_s` on; else None. `still_s` is the time without progress.

    A process that has processed all that it fetched can do nothing but read: its progress is a
    page, also one without records.
    """
    if still_s is None or still_s < max_s or status is None:
        return None
    fetched, processed = status.fetched, status.processed
    has_all = fetched is None or (processed is not None and processed >= fetched)
    is_idle = has_all and status.processing_since_instant == 0.0
    return still_s if is_idle and status.state is WorkerState.PROCESSING else None


def unread_note(seconds: float | None) -> str:
    """Why the lag of a lease is not known; empty if it is."""
    if seconds is None:
        return ""
    return f"no page of the shard was read for {seconds:.0f} s; the log says what fails"
