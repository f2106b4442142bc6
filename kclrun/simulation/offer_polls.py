"""A manager's looks for offered rows: two a second, and nearly all of them find nothing.

Rule: a look that finds nothing, after one that found nothing, is no event; it is counted. Nothing
was known, nothing is learned, and the core would only ask again after the same pause. So such a
look stays under way until a row is offered, and goes out when the next one would have; where looks
may fail, until one does, which is drawn beforehand. When the next one would have, two equal pauses
tell: a single one may be of a manager that stood still, or had no free place, for minutes.
May not know: the core, the rows. Look next: `performing.py`, `uplink.py`, `table.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kclrun.model.lease import Lease
from kclrun.simulation.table import LEG_MEAN_S
from kclrun.simulation.uplink import Uplink

__all__ = ["OfferPolls"]

# Clocks that drift and are set do not change a pause by more; it is a hundredth of one.
_EQUAL_WITHIN_S: Final = 0.005


class OfferPolls:
    """Of one host. `after` schedules for it; `looked` takes what a look brought, None if it
    failed."""

    def __init__(
        self,
        uplink: Uplink,
        *,
        now: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        looked: Callable[[tuple[Lease, ...] | None], None],
    ) -> None:
        self._uplink = uplink
        self._now = now
        self._after = after
        self._looked = looked
        self._rows_max = 0
        self._found_nothing = False
        self._answered_at = 0.0
        self._pause_s = 0.0
        # While idle: when the next look would go out, and how far they are apart.
        self._next_at = 0.0
        self._every_s = 0.0
        self._idle_times = 0

    def look(self, rows_max: int) -> None:
        """The core asks for it."""
        self._rows_max = rows_max
        before_s, self._pause_s = self._pause_s, self._now() - self._answered_at
        is_steady = abs(self._pause_s - before_s) < _EQUAL_WITHIN_S
        if self._found_nothing and is_steady and self._uplink.let_idle(self):
            self._next_at = self._now()
            self._every_s = self._pause_s + 2 * LEG_MEAN_S
            self._fail_after(self._uplink.reads_until_failure())
        else:
            self._send()

    def wake(self) -> None:
        """By the table, which knows it no longer: a row is offered, or looks fail more or less
        often from now on. By the uplink that is cut, and by the host that stands still."""
        self._after(max(0.0, self._next_at - self._now()), self._send)

    def count(self) -> int:
        """How many looks have found nothing since it idles, or since this was asked last."""
        looks = max(0, math.ceil((self._now() - LEG_MEAN_S - self._next_at) / self._every_s))
        self._next_at += looks * self._every_s
        return looks

    def _fail_after(self, looks: float) -> None:
        """Who is woken before draws anew: a look does not know how many were answered before it."""
        self._idle_times += 1
        if math.isfinite(looks):
            number = self._idle_times
            self._after(looks * self._every_s, lambda: self._fail(number))

    def _fail(self, number: int) -> None:
        if number == self._idle_times and self._uplink.idle_no_more(self):
            self._uplink.offered_in_vain(lambda _: self._answered(None))

    def _send(self) -> None:
        self._uplink.offered(self._rows_max, self._answered, lambda _: self._answered(None))

    def _answered(self, rows: tuple[Lease, ...] | None) -> None:
        self._found_nothing = rows == ()
        self._answered_at = self._now()
        self._looked(rows)
