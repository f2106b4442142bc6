"""A machine's way to the services; it can be cut.

While it is cut, a request does not arrive, then or later; earlier requests are answered. (A lost
reply is a fault of the network behind it: `table.py`.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, TypeVar

from kclrun.model.lease import Lease, LeaseKey
from kclrun.protocol.writes import LeaseChange, Outcome, OutcomeUnknown, Unavailable
from kclrun.simulation.network import LEG_MEAN_S, PATIENCE_S, Failed
from kclrun.simulation.table import IdlePolls, ItemWrite, SimulatedTable

Answer = TypeVar("Answer")


class Uplink:
    """The requests of `SimulatedTable`, as long as `is_cut` is not set."""

    def __init__(
        self,
        table: SimulatedTable,
        after: Callable[[float, Callable[[], None]], None],
        chance: random.Random,
    ) -> None:
        self._is_cut = False
        self._idle: dict[IdlePolls, None] = {}
        self._table = table
        self._after = after
        self._chance = chance

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        for polls in tuple(self._idle) if is_cut else ():
            self.wake(polls)

    def let_idle(self, polls: IdlePolls) -> bool:
        """As in the table; but not while the way is cut, because then each look fails."""
        if self._is_cut or not self._table.let_idle(polls):
            return False
        self._idle[polls] = None
        return True

    def reads_until_failure(self) -> float:
        """As on the network."""
        return self._table.network.reads_until_failure()

    def wake(self, polls: IdlePolls) -> None:
        """If it idles: its next look is an event again."""
        if self.idle_no_more(polls):
            polls.wake()

    def idle_no_more(self, polls: IdlePolls) -> bool:
        """As in the table."""
        self._idle.pop(polls, None)
        return self._table.idle_no_more(polls)

    def write(
        self, sender: str, change: LeaseChange | ItemWrite, reply: Callable[[Outcome], None]
    ) -> None:
        """While cut: on an existing connection the outcome is unknown; a new one is not made."""
        if not self.is_cut:
            self._table.write(sender, change, reply)
            return
        stood = self._chance.random() < 0.5
        outcome = OutcomeUnknown("timed out") if stood else Unavailable("no connection")
        self._after(PATIENCE_S, lambda: reply(outcome))

    def read(self, key: LeaseKey, reply: Callable[[Lease | None], None], failed: Failed) -> None:
        if not self._refuses(failed):
            self._table.read(key, reply, failed)

    def offered(
        self, rows_max: int, reply: Callable[[tuple[Lease, ...]], None], failed: Failed
    ) -> None:
        if not self._refuses(failed):
            self._table.offered(rows_max, reply, failed)

    def offered_in_vain(self, failed: Failed) -> None:
        """A look that idled until its failure."""
        self._table.network.time_out(failed)

    def scan(
        self,
        reply: Callable[[tuple[Lease, ...]], None],
        failed: Failed,
        *,
        consistent: bool = True,
    ) -> None:
        if not self._refuses(failed):
            self._table.scan(reply, failed, consistent=consistent)

    def ask_kinesis(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        if not self._refuses(failed):
            self._table.network.ask_kinesis(ask, reply, failed)

    def _refuses(self, failed: Failed) -> bool:
        if self.is_cut:
            self._after(PATIENCE_S, lambda: failed("timed out"))
        return self.is_cut


# A manager's looks for offered rows: two a second, and nearly all of them find nothing.
#
# A look that finds nothing, after another one that found nothing, is not an event; it is counted.
# It brings no information, and the core would only look again after the same pause. So such a look
# stays under way until a row is offered, and is sent at the time of the next regular look. Where
# looks may fail, it stays under way until one fails, which is drawn in advance. Two equal pauses
# give the time of the next look. A single pause is not enough: the manager may have stood still, or
# had no free place, for minutes.
# Drifting and adjusted clocks do not change a pause by more; it is a hundredth of a pause.
_EQUAL_WITHIN_S: Final = 0.005


class OfferPolls:
    """The looks of one host. `after` schedules for it; `looked` takes the result of a look, None if
    it failed."""

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
        # While idle: the time of the next look, and the interval of looks.
        self._next_at = 0.0
        self._every_s = 0.0
        self._idle_times = 0

    def look(self, rows_max: int) -> None:
        """The core requests a look."""
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
        """Called by the table, which then forgets it: a row is offered, or looks fail more or less
        often from now on. Also called by an uplink that is cut, and by a host that stands still."""
        self._after(max(0.0, self._next_at - self._now()), self._send)

    def count(self) -> int:
        """The number of looks without a result since it idles, or since the last call."""
        looks = max(0, math.ceil((self._now() - LEG_MEAN_S - self._next_at) / self._every_s))
        self._next_at += looks * self._every_s
        return looks

    def _fail_after(self, looks: float) -> None:
        """A poll that is woken before that draws anew: looks are independent of earlier ones."""
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
