"""The failures of one held lease on this host, and what follows from them.

Counts deaths and failed starts in a row, and concludes whether our host tries again, another host
tries, or the lease halts [L7]. Must not know: rows, reports, other leases.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kclrun.model.time import Instant

# L7 allows five restarts of a crash loop; the fifth death in a row is the last one that counts.
DEATHS_MAX: Final = 5
# Where there is not another host to try, two deaths more, after pauses of 8 and 16 s. So an
# accident of the host that lasts for half a minute is outlasted, and a poison record halts in 31 s
# instead of 7.
DEATHS_ALONE_MAX: Final = 7
# At once, after a second, after two. If a host lacks processes, memory or descriptors for longer,
# another host is likelier to have them.
FAILED_STARTS_MAX: Final = 3
_PAUSE_FIRST_S: Final = 1.0
# Long enough that a host short of memory recovers, short enough that an operator is not paged.
_PAUSE_MAX_S: Final = 30.0
# An idle shard has nothing to checkpoint, so a life as long as this counts as progress, too. It
# is four times the default `stall` (2 min): a process that does nothing was noticed long before.
_LONG_LIFE_S: Final = 480.0


class RestartDecision(enum.Enum):
    """The conclusion from the failures of a lease's processes here."""

    TRY_AGAIN = "try again here"
    GIVE_AWAY = "another host tries"
    HALT = "stand still until an operator resumes it"


class Restarts(msgspec.Struct):
    """The failures of one lease that this manager holds, and their consequences.

    `deaths` are crashes in a row without progress. `failed_starts` are starts in a row that failed
    because of our host or of kclrun itself.

    The process is started again at once the first time (most deaths are accidents), then slower and
    slower. A lease leaves a host that fails: three starts that failed in a row, or five deaths
    without progress, give the lease to another owner, if there is one. A failed start never halts a
    lease. Deaths halt it once a second host has counted five as well, or this host two more:
    because there is not another owner to try, or because the lease came back without progress. So a
    lease that kills every process stands still after ten deaths on two hosts, or twelve if it comes
    back to the first [L7]. Each of its hosts gives it away once at most, because the first host
    writes its slot on the row.

    A lack of memory, descriptors or disk in user code at a record counts as a death, too: another
    host may have enough, and a record that needs more than any host has must not move between hosts
    for ever.
    """

    deaths: int = 0
    failed_starts: int = 0
    started_instant: Instant | None = None  # of the running process; None if none runs
    _stops: int = 0

    def progressed(self) -> None:
        """The checkpoint moved, or an operator resumed the lease: all counts are reset."""
        self.deaths = 0
        self.failed_starts = 0
        self._stops = 0

    def crashed(self, now: Instant) -> None:
        """The process ended without a report: counts towards the halt."""
        self.stopped(now)
        self.deaths += 1

    def failed(self, now: Instant) -> None:
        """The process could not be started, did not claim before its start command expired, or
        ended because of a fault of its host or of kclrun itself."""
        self.stopped(now)
        self.failed_starts += 1

    def broke(self, now: Instant, *, at_records: bool) -> None:
        """The process ended because its host, or kclrun, lacked something. Before records this
        counts as a failed start; at records as a death, since one record may need more than any
        host has."""
        if at_records:
            self.crashed(now)
        else:
            self.failed(now)

    def stopped(self, now: Instant) -> None:
        """Its claim was refused, or it lost the lease: only delays the next start."""
        if self.started_instant is not None and now - self.started_instant >= _LONG_LIFE_S:
            self.progressed()
        self.started_instant = None
        self._stops += 1

    @property
    def has_tripped(self) -> bool:
        """Whether there were too many deaths for an accident."""
        return self.deaths >= DEATHS_MAX

    def decision(self, *, slot: str, failed_slot: str | None, are_others: bool) -> RestartDecision:
        """The conclusion for our host `slot`. `failed_slot` is the host that the row names as the
        one where its processes died before, at the position where the row still stands.
        `are_others`: another owner can take the leases that we give away."""
        if self.has_tripped:
            if failed_slot not in {None, slot} or self.deaths >= DEATHS_ALONE_MAX:
                return RestartDecision.HALT
            if are_others and failed_slot is None:
                return RestartDecision.GIVE_AWAY
        is_failing = self.failed_starts >= FAILED_STARTS_MAX
        return RestartDecision.GIVE_AWAY if is_failing and are_others else RestartDecision.TRY_AGAIN

    @property
    def pause_s(self) -> float:
        """The pause before the next start: 0, then 1, 2, 4 … up to 30 seconds."""
        if self._stops <= 1:
            return 0.0
        return min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(self._stops - 2, 16))
