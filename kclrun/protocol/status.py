"""The status that a lease process publishes for its manager, the simulator and observers. Pure."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime

_NEVER: Final = Instant(0.0)


class WorkerState(enum.IntEnum):
    """The state of a lease process; the numbers are stored."""

    STARTING = 1
    CLAIMING = 2
    PROCESSING = 3
    ENDING = 4
    OFFERING = 5
    HALTED = 6
    LOST = 7
    FINISHED = 8


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that a lease process publishes. Instants are CLOCK_BOOTTIME seconds, 0 for never.

    `counter` is the lease counter last confirmed; `fence_instant` the moment after which no batch
    starts [P7]. Totals count from the start of this incarnation. `fetched`, `processed` and
    `checkpointed` are the last positions of each kind, `first_delivered` the first one; None for
    not yet. `processing_since_instant` is 0 while user code is not running,
    `fetching_since_instant` while no request to the stream is open. `published_instant` is when
    this was written: every two seconds while the lease thread lives. `has_undone`: records were
    given to user code, or processed, that no checkpoint covers yet. `unprocessed_since` is the
    arrival time, by the service's clock, of the oldest record that was read and not processed; 0
    for none known. `retries_total` counts calls that raised and were, or were to be, repeated; the
    other two count records that were given up. `output_waiting_since_instant` is since when rows of
    processed records wait for an output, 0 while none do. `passed_over_total` counts records of
    other keys than those of a replay. `destination_since_instant` is since when a destination (an
    output, the store of the state, the place of dead letters) fails, 0 for none;
    `destination_waited_instant` is until when a call last waited for one, at a pause or at the
    start of the attempt under way. The last send is not in here: `StatusSlot.last_send_instant`.
    """

    pid: int
    incarnation: int
    state: WorkerState
    fence_instant: Instant = _NEVER
    counter: int = 0
    records_total: int = 0
    bytes_total: int = 0
    batches_total: int = 0
    processing_s_total: float = 0.0
    millis_behind_latest: int = -1
    fetched: ExtendedSequenceNumber | None = None
    processed: ExtendedSequenceNumber | None = None
    checkpointed: ExtendedSequenceNumber | None = None
    first_delivered: ExtendedSequenceNumber | None = None
    last_fetch_instant: Instant = _NEVER
    last_batch_instant: Instant = _NEVER
    processing_since_instant: Instant = _NEVER
    at_tip: bool = False
    fetching_since_instant: Instant = _NEVER
    published_instant: Instant = _NEVER
    has_undone: bool = False
    unprocessed_since: WallTime = WallTime(0.0)
    retries_total: int = 0
    dead_letters_total: int = 0
    skipped_total: int = 0
    output_waiting_since_instant: Instant = _NEVER
    passed_over_total: int = 0
    destination_since_instant: Instant = _NEVER
    destination_waited_instant: Instant = _NEVER

    def destination_away_s(self, now: Instant) -> float | None:
        """For how long a destination has failed; None if none does."""
        since = self.destination_since_instant
        return max(0.0, now - since) if since else None

    def output_lag_ms(self, now: Instant) -> int | None:
        """For how long rows of processed records wait for an output; None if none do."""
        since = self.output_waiting_since_instant
        return max(0, round((now - since) * 1000)) if since else None
