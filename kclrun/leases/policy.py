"""What one lease manager was told, and every interval that follows from it.

May not know: clocks, chance, the table. Rule: each derived number stands beside its derivation.
Look next: `pacing.py` (how a fleet shares the scans), `restarts.py` (pauses between processes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.model.lease import OwnerId
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.stream_key import ONLY_STREAM, StreamKey
from kclrun.model.time import WallTime

__all__ = [
    "ENDED_ROWS_STAY_S",
    "MOVES_PER_CYCLE",
    "TAKE_ATTEMPTS_MAX",
    "ManagerPolicy",
    "StreamStart",
    "write_pause_s",
]

# Asks of one manager under way at once: a newcomer to a fleet with 25 leases to spare has them
# in four cycles, and an owner that is asked for many has only a few shards in motion at a time.
MOVES_PER_CYCLE: Final = 8

# The Java KCL's `TAKE_RETRIES`: a take that is throttled three times is left to the next scan.
TAKE_ATTEMPTS_MAX: Final = 3
# A request is given up after seconds (`aws/exchange.py`); what is still under way then, in a queue
# of the kernel or of a proxy, arrives or is dropped within their own time-outs, a minute by custom.
ENDED_ROWS_STAY_S: Final = 60.0
# As the Java KCL: renewals are this much early, so that three fit into one failover.
_RENEW_EPSILON_S: Final = 0.025


class StreamStart(msgspec.Struct, frozen=True):
    """Where the leases of one stream begin: as written on rows, its sentinel, its instant."""

    text: str
    sentinel: ExtendedSequenceNumber
    at: WallTime | None = None


class ManagerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one manager. The same for the whole fleet, but `me` and `leases_max`.

    `start_text` is what is published on the rows [P9]; `start` its sentinel (TRIM_HORIZON, LATEST
    or AT_TIMESTAMP); `start_at` the instant of AT_TIMESTAMP. `leases_max` bounds what we take,
    `moves_per_cycle` how many leases of other owners we ask for at a time. `streams` are those of
    the application, `starts` where some of them begin instead. `ended_rows_stay_s`: for how long
    the row of an ended shard outlives its use.
    """

    me: OwnerId
    failover_s: float = 10.0
    start_text: str = "TRIM_HORIZON"
    start: ExtendedSequenceNumber = TRIM_HORIZON
    start_at: WallTime | None = None
    leases_max: int = 64
    moves_per_cycle: int = MOVES_PER_CYCLE
    cleanup: bool = True
    ended_rows_stay_s: float = ENDED_ROWS_STAY_S
    streams: tuple[StreamKey, ...] = (ONLY_STREAM,)
    starts: Mapping[StreamKey, StreamStart] = {}

    def of_stream(self, stream: StreamKey) -> ManagerPolicy:
        """What holds for one stream: its own start, if it has one."""
        own = self.starts.get(stream)
        if own is None:
            return self
        return msgspec.structs.replace(
            self, start_text=own.text, start=own.sentinel, start_at=own.at
        )

    @property
    def renew_every_s(self) -> float:
        """Three renewals in one failover, so that two may be lost; never below half of that pace.

        10 s gives 3.308 s, the Java KCL's. The floor is for the short failovers of tests.
        """
        return max(self.failover_s / 3 - _RENEW_EPSILON_S, self.failover_s / 6)

    @property
    def scan_every_s(self) -> float:
        """Fixed delay between scans: detection takes at most 1.5 failovers (DESIGN 14: F + 7 s)."""
        return self.failover_s / 2

    @property
    def scan_soon_s(self) -> float:
        """After takes of free leases: a starting fleet has written its own by then, and three such
        pauses are all that a manager needs until it holds 64 (8, 16, 32)."""
        return self.failover_s / 10

    @property
    def seldom_scan_every_s(self) -> float:
        """The pace of those who leave discovery to the few, as a Java worker's taker [P9]."""
        return self.failover_s * 2

    @property
    def overdue_after_s(self) -> float:
        """Takeable for so long, a lease is taken beyond the target, as the Java KCL's very old."""
        return self.failover_s * 3

    @property
    def refused_pause_s(self) -> float:
        """A write that the service refuses outright is tried again, but slowly."""
        return self.failover_s


def write_pause_s(attempt: int, chance: float) -> float:
    """The pause before attempt `attempt` (from 2) at one write, with half of it left to chance.

    Doubles from 50 ms to at most 3 s, so that three tries and more fit into a failover of 10 s.
    """
    return min(3.0, 0.05 * 2.0 ** min(attempt - 2, 16)) * (0.5 + chance / 2)
