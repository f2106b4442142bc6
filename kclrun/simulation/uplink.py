"""A machine's way to the services; it can be cut.

Rule: while it is cut nothing of what is sent arrives, then or later, and what was sent before is
answered. (A reply that is lost is a fault of the network behind it: `table.py`.)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from kclrun.model.changes import LeaseChange
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Outcome, OutcomeUnknown, Unavailable
from kclrun.simulation.java.items import ItemWrite
from kclrun.simulation.table import PATIENCE_S, Failed, IdlePolls, SimulatedTable

__all__ = ["Uplink"]

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
        """As the table's; and not while each of them fails."""
        if self._is_cut or not self._table.let_idle(polls):
            return False
        self._idle[polls] = None
        return True

    def reads_until_failure(self) -> float:
        """As the table's."""
        return self._table.reads_until_failure()

    def wake(self, polls: IdlePolls) -> None:
        """If it idles: its next look is an event again."""
        if self.idle_no_more(polls):
            polls.wake()

    def idle_no_more(self, polls: IdlePolls) -> bool:
        """As the table's."""
        self._idle.pop(polls, None)
        return self._table.idle_no_more(polls)

    def write(
        self, sender: str, change: LeaseChange | ItemWrite, reply: Callable[[Outcome], None]
    ) -> None:
        """On a connection that stood, nobody knows whether it arrived; a new one is not made."""
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
        """A look that was let idle until it fails."""
        self._table.offered_in_vain(failed)

    def scan(self, reply: Callable[[tuple[Lease, ...]], None], failed: Failed) -> None:
        if not self._refuses(failed):
            self._table.scan(reply, failed)

    def ask_kinesis(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        if not self._refuses(failed):
            self._table.ask_kinesis(ask, reply, failed)

    def _refuses(self, failed: Failed) -> bool:
        if self.is_cut:
            self._after(PATIENCE_S, lambda: failed("timed out"))
        return self.is_cut
