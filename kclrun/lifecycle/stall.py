"""Whether a lease process stands still that should move [L5].

Pure. Rule: only a state that a restart can repair counts: user code that does not return, a request
that does not come back, a process that publishes no status, one that never began to read. A service
that is away is waited for, with its time-outs, and so is a destination that answers with an error;
a shard without records is idle.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from kclrun.model.time import Instant
from kclrun.protocol.status import LeaseStatus, WorkerState

# The time for the stacks of a stalled process and, if it still reacts, for it to end by itself.
STALL_PATIENCE_S: Final = 2.0
# Looks are half a second apart. After a longer gap the host was suspended, or we were stopped, and
# every status looks old. A live process writes its status at least every two seconds; twice that is
# waited for.
_GAP_S: Final = 2.0
_DOUBT_S: Final = 4.0

_BEFORE_READING: Final = (WorkerState.STARTING, WorkerState.CLAIMING)
# A process writes its status every two seconds, but not while its lease thread waits for an answer
# of a service: connecting and reading take 15 s at the most.
_SILENCE_S_MIN: Final = 20.0
# Two seconds between two statuses, and one for a busy machine.
_FRESH_S: Final = 3.0
_NOT_BEGUN: Final = "reading has not begun"
_NO_ANSWER: Final = "a request to a destination has not come back"


class Stall(msgspec.Struct, frozen=True):
    """The part that does not move, in words, and since when."""

    what: str
    since: Instant
    is_silent: bool = False


class StallWatch:
    """Looks at lease processes again and again: since when each is known, and which looks count.

    `stall_s` is the setting `stall`.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._began: dict[int, Instant] = {}
        self._looked_instant: Instant | None = None
        self._doubt_until = Instant(0.0)

    def look(self, incarnations: Collection[int], now: Instant) -> None:
        """Call before each look, with the live processes."""
        self._began = {number: self._began.get(number, now) for number in incarnations}
        if self._looked_instant is not None and now - self._looked_instant > _GAP_S:
            self._doubt_until = Instant(now + _DOUBT_S)
        self._looked_instant = now

    def judge(
        self, incarnation: int, status: LeaseStatus | None, *, failover_s: float, now: Instant
    ) -> Stall | None:
        """Why a live process counts as stalled; None if it does not, or if that is in doubt."""
        if now < self._doubt_until:
            return None
        return stalled(
            status,
            began_instant=self._began[incarnation],
            stall_s=self._stall_s,
            failover_s=failover_s,
            now=now,
        )


def silence_max_s(failover_s: float, stall_s: float) -> float:
    """How long a process may publish no status.

    After one `failover` its fence has passed. It gets another one to come back and end in good
    order, because only it can still checkpoint its processed records. After that it does no work,
    and its lease can be read again only once the process has ended.
    """
    return min(stall_s, max(2 * failover_s, _SILENCE_S_MIN))


def stalled(
    status: LeaseStatus | None,
    *,
    began_instant: Instant,
    stall_s: float,
    failover_s: float,
    now: Instant,
) -> Stall | None:
    """Why a process that began at `began_instant` counts as stalled; None if it does not."""
    if status is not None and status.published_instant > 0.0:
        silent_since = status.published_instant
        if now - silent_since >= silence_max_s(failover_s, stall_s):
            return Stall("the process publishes nothing", silent_since, is_silent=True)
        if now - silent_since >= _FRESH_S:
            return None  # an old status does not describe the current call
    if status is None:
        return _since(_NOT_BEGUN, began_instant, stall_s, now)
    if status.state in _BEFORE_READING:
        return _of_call(_NOT_BEGUN, began_instant, status, stall_s, now)
    return _of_call(
        "user code has not returned", status.processing_since_instant, status, stall_s, now
    ) or _since(
        "a request for records has not come back", status.fetching_since_instant, stall_s, now
    )


def _of_call(
    what: str, since: Instant, status: LeaseStatus, stall_s: float, now: Instant
) -> Stall | None:
    """A call that waits for a destination does not stand still. One attempt that never ends does:
    a restart makes a new connection."""
    waited = status.destination_waited_instant
    if since <= 0.0 or waited < since:
        return _since(what, since, stall_s, now)
    is_attempt = status.destination_since_instant > 0.0
    return _since(_NO_ANSWER if is_attempt else what, waited, stall_s, now)


def _since(what: str, since: Instant, stall_s: float, now: Instant) -> Stall | None:
    return Stall(what, since) if since > 0.0 and now - since >= stall_s else None
