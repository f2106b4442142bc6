"""The settings of one lease manager, and every interval that follows from them.

Must not know: clocks, chance, the table. Rule: each derived number stands beside its derivation.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

from kclrun.model.lease import OwnerId
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.fence import renew_interval_s


# The cache holds four times the owners of a large fleet, because every start makes new owners.
@functools.lru_cache(maxsize=4096)
def owner_hash(owner: OwnerId) -> bytes:
    """The hash of an owner, the same in every process. Cached: each plan needs all of them."""
    return hashlib.blake2b(owner.encode(), digest_size=8).digest()


# How often one manager looks at the table and the stream, so that a fleet looks often enough.
#
# Rule: a single manager does everything itself. In a crowd the sum over all managers stays the same
# [P9, P10].
#
# The reads of a fleet at rest (rows of 392 bytes, measured with a checkpoint of 56 digits, without
# the 27 bytes of a load; a read unit is 4 KB read consistently, half of one eventually): a scan of
# 500 rows is 48 units, of 10,000 rows 957. The 16 frequent scanners read consistently, 3.2 scans a
# second: 3,062 units for 10,000 rows. If all the others scanned every 2 F, 1,000 managers would
# make 49 scans a second more, 47,000 units, and a new on-demand table begins at 12,000. So beyond
# 256 owners their interval grows with the fleet. Together they make 12.6 scans a second and read
# eventually consistently: 6,027 units. With 64 of the queries for offers that is 9,153 units. A
# fleet of 50 over 500 rows reads 244.
#
# Why the others may read rows that are a moment old: every take, offer, ask, creation and deletion
# names the state that it saw, so a write that is decided from an old row does not apply. An old
# counter only delays expiry. The descendants of a deleted row are at least a minute old, so an old
# read shows them, too [P13].
#
# So many managers scan every half failover; the others rely on them to notice expired leases [P9].
FREQUENT_SCANNERS_MAX: Final = 16
# ListShards calls expected per cycle, over the whole fleet [P10].
_LISTINGS_PER_CYCLE: Final = 2
# And this many while a scan shows a hole or a waiting merge: enough to see it soon even if some are
# slow, and not more. At 10 pages for 10,000 shards these are 16 calls a second of the 1,000 that a
# stream allows. If every manager listed in each of its cycles, 1,000 of them would make 520.
_LISTINGS_IN_NEED: Final = 8

# One read unit a minute: over the whole fleet, whatever its size.
_KCL3_MODE_EVERY_S: Final = 60.0


class ScanPace(enum.Enum):
    """The reason for the time to the next scan. Only a manager that takes or asks looks again
    sooner, so a fleet at rest pays nothing for it."""

    FAST = "it took free leases or left some for a next look; others reach for them too"
    MOVE = "it asked for leases, or offered some, and may do so again"
    REST = "nothing"


def scan_delay_s(
    policy: ManagerPolicy, owners: Collection[OwnerId], pace: ScanPace = ScanPace.REST
) -> float:
    """The fixed delay to the next scan, for a manager that sees these live kclrun owners."""
    if pace is ScanPace.FAST:
        return policy.scan_soon_s
    if pace is ScanPace.REST and is_seldom(policy, owners):
        return policy.seldom_scan_every_s(len(owners))
    return policy.scan_every_s


def is_seldom(policy: ManagerPolicy, owners: Collection[OwnerId]) -> bool:
    """Whether this manager leaves the frequent scans to others. The hash selects them."""
    if len(owners) <= FREQUENT_SCANNERS_MAX:
        return False
    mine = owner_hash(policy.me)
    smaller = sum(1 for owner in owners if owner != policy.me and owner_hash(owner) < mine)
    return smaller >= FREQUENT_SCANNERS_MAX


def kcl3_mode_every_s(owners: Collection[OwnerId]) -> float:
    """How often a frequent scanner reads the mode of a KCL 3 fleet. Together they read it once a
    minute. The others never do: one error line in the fleet is enough."""
    return _KCL3_MODE_EVERY_S * max(1, min(len(owners), FREQUENT_SCANNERS_MAX))


def lists_shards(
    policy: ManagerPolicy, owners: Collection[OwnerId], chance: float, *, is_needed: bool = False
) -> bool:
    """Whether this manager lists in this cycle. A single manager always does.

    On average two of `owners` list. `is_needed` (a hole or a waiting merge): eight of the frequent
    scanners.
    """
    if is_needed and not is_seldom(policy, owners):
        frequent = min(len(owners), FREQUENT_SCANNERS_MAX)
        return chance * frequent < _LISTINGS_IN_NEED
    return chance * len(owners) < _LISTINGS_PER_CYCLE


# Asks of one manager under way at once. A newcomer to a fleet with 25 leases to spare has them in
# four cycles, and an owner that is asked for many has only a few shards in motion at a time.
MOVES_PER_CYCLE: Final = 8

# So many managers may scan every two failovers besides the frequent ones: 12.8 scans a second with
# a failover of 10 s, half of the 12,000 read units of a new table for 10,000 rows.
SELDOM_SCANNERS_MAX: Final = 256
# The Java KCL's `TAKE_RETRIES`: a take that is throttled three times is left to the next scan.
TAKE_ATTEMPTS_MAX: Final = 3
# The pause before a broken row that we hold is read again. A repaired row goes on within a second,
# and a drain, which leaves the row as it is, waits for the answer at most as long.
UNREADABLE_PAUSE_S: Final = 1.0
# A request is given up after seconds (`aws/http/`). If it is still in a queue of the kernel or of
# a proxy then, it arrives or is dropped within their own time-outs, by custom a minute.
ENDED_ROWS_STAY_S: Final = 60.0


class StreamStart(msgspec.Struct, frozen=True):
    """Where the leases of one stream begin: the text on the rows, its sentinel, its instant."""

    text: str
    sentinel: ExtendedSequenceNumber
    at: WallTime | None = None


Balance = Literal["counts", "load"]


class ManagerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one manager. The same for the whole fleet, except `me` and `leases_max`.

    `start_text` is the start position as published on the rows [P9]; `start` its sentinel
    (TRIM_HORIZON, LATEST or AT_TIMESTAMP). `leases_max` bounds the leases that we hold,
    `moves_per_cycle` how many leases of other owners we ask for at a time. `streams` are the
    streams of the application; `starts` holds the start positions of those that begin elsewhere.
    `created` holds the creation time of each, as the service reported it at the start;
    `described_instant` is when it was asked. `ended_rows_stay_s`: how long the row of an ended
    shard outlives its use. `reads_kcl3_mode`: there may be a KCL 3 fleet that keeps its mode
    outside of the lease table. `balance`: the values that are evened out, the counts of leases
    alone or also their loads. `is_bounded`: a time range is read, and children beyond its end have
    no rows.
    """

    me: OwnerId
    failover_s: float = 10.0
    start_text: str = "TRIM_HORIZON"
    start: ExtendedSequenceNumber = TRIM_HORIZON
    leases_max: int = 64
    moves_per_cycle: int = MOVES_PER_CYCLE
    cleanup: bool = True
    ended_rows_stay_s: float = ENDED_ROWS_STAY_S
    streams: tuple[StreamKey, ...] = (ONLY_STREAM,)
    starts: Mapping[StreamKey, StreamStart] = {}
    created: Mapping[StreamKey, WallTime] = {}
    described_instant: Instant | None = None
    reads_kcl3_mode: bool = False
    balance: Balance = "load"
    is_bounded: bool = False

    def of_stream(self, stream: StreamKey) -> ManagerPolicy:
        """The settings for one stream: with its own start, if it has one."""
        own = self.starts.get(stream)
        if own is None:
            return self
        return msgspec.structs.replace(self, start_text=own.text, start=own.sentinel)

    @property
    def renew_every_s(self) -> float:
        """How often this manager renews a row while no lease process does."""
        return renew_interval_s(self.failover_s)

    @property
    def scan_every_s(self) -> float:
        """Fixed delay between scans: detection takes at most 1.5 failovers."""
        return self.failover_s / 2

    @property
    def scan_soon_s(self) -> float:
        """The delay after takes of free leases. A starting fleet has written its own takes by then,
        and a manager needs only three such pauses until it holds 64 leases (8, 16, 32)."""
        return self.failover_s / 10

    def seldom_scan_every_s(self, owners: int) -> float:
        """The delay of managers that leave discovery to the frequent scanners: that of a Java
        worker's taker. With more than 256 owners it grows in proportion, so that all together never
        scan more often than 256 would (the comment at the top of this file has the sum) [P9]."""
        return self.failover_s * 2 * max(1.0, owners / SELDOM_SCANNERS_MAX)

    @property
    def overdue_after_s(self) -> float:
        """A lease that stood free for so long is taken beyond the target, as the Java KCL does."""
        return self.failover_s * 3

    @property
    def refused_pause_s(self) -> float:
        """The pause after a write that the service refuses: it is tried again, but slowly."""
        return self.failover_s
