"""A manager's requests to the services, as its shell makes them: each ends in an event.

Reads are repeated until they succeed, writes are sent once; of one key, one write is under way at a
time. May not know: why something is asked. Look next: `host.py`, `uplink.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kclrun.leases import events as on
from kclrun.model.backoff import backoff_s
from kclrun.model.changes import LeaseChange, keys_of
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Outcome
from kclrun.model.time import Instant, WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.offer_polls import OfferPolls
from kclrun.simulation.table import Failed
from kclrun.simulation.uplink import Uplink
from kclrun.simulation.world import World

__all__ = ["Performer"]

Answer = TypeVar("Answer")
Ask = Callable[[Callable[[Answer], None], Failed], None]


class Performer:
    """For one manager, in its process. `check_write` may refuse a write that must not happen."""

    def __init__(
        self,
        name: str,
        world: World,
        os: OsProcess,
        *,
        feed: Callable[[on.Event], None],
        chance: Callable[[], float],
        check_write: Callable[[LeaseKey], None],
    ) -> None:
        self._name = name
        self._world = world
        self._os = os
        self._uplink: Uplink = os.machine.uplink
        self._feed = feed
        self._chance = chance
        self._check_write = check_write
        # The keys with a write under way, and the changes that wait for it.
        self._writes: dict[LeaseKey, deque[LeaseChange]] = {}
        self._offer_polls = OfferPolls(
            self._uplink,
            now=world.scheduler.clock,
            after=os.after,
            looked=lambda rows: os.act(lambda: feed(on.OffersFound(rows))),
        )

    def stand_still(self) -> None:
        """Its process does: it looks for offers when it would have, or as soon as it can."""
        self._uplink.wake(self._offer_polls)

    def cease(self) -> None:
        """Its process is dead."""
        self._uplink.idle_no_more(self._offer_polls)

    def scan_table(self) -> None:
        self._read(self._uplink.scan, on.LeasesScanned)

    def list_shards(self, *, with_start: bool) -> None:
        world = self._world

        def ask() -> on.ShardsListed:
            now = world.scheduler.now
            at_start = world.stream.at_trim_horizon(now) if with_start else None
            return on.ShardsListed(
                world.stream.listing(now), WallTime(WORLD_BEGAN_AT + now), at_start
            )

        self._read(
            lambda reply, failed: self._uplink.ask_kinesis(ask, reply, failed), lambda event: event
        )

    def read_row(self, key: LeaseKey) -> None:
        def read(reply: Callable[[Lease | None], None], failed: Failed) -> None:
            self._uplink.read(key, reply, failed)

        self._read(read, lambda row: on.RowRead(key, row))

    def read_parents(
        self,
        key: LeaseKey,
        parents: tuple[LeaseKey, ...],
        found: tuple[Lease | None, ...] = (),
    ) -> None:
        if len(found) == len(parents):
            self._feed(on.ParentsRead(key, found))
            return
        parent = parents[len(found)]

        def read(reply: Callable[[Lease | None], None], failed: Failed) -> None:
            self._uplink.read(parent, reply, failed)

        self._read_until(read, lambda row: self.read_parents(key, parents, (*found, row)))

    def find_offers(self, rows_max: int) -> None:
        """Once: the next look is soon."""
        self._offer_polls.look(rows_max)

    def write_row(self, change: LeaseChange, not_before: Instant | None) -> None:
        """Once, when it is due; children are created in the name of the first."""
        machine = self._os.machine
        if not_before is not None and not_before > machine.instant():
            due_s = machine.clock.time_of(not_before)
            self._os.after(due_s - self._world.scheduler.now, lambda: self.write_row(change, None))
            return
        key = keys_of(change)[0]
        if key in self._writes:
            self._writes[key].append(change)
            return
        self._writes[key] = deque()
        self._send(key, change)

    def _send(self, key: LeaseKey, change: LeaseChange) -> None:
        self._check_write(key)

        def resolved(outcome: Outcome) -> None:
            waiting = self._writes[key]
            if waiting:
                self._send(key, waiting.popleft())
            else:
                del self._writes[key]
            self._feed(on.WriteResolved(change, outcome))

        self._uplink.write(
            self._name, change, lambda outcome: self._os.act(lambda: resolved(outcome))
        )

    def _read(self, ask: Ask[Answer], as_event: Callable[[Answer], on.Event]) -> None:
        self._read_until(ask, lambda answer: self._feed(as_event(answer)))

    def _read_until(
        self, ask: Ask[Answer], succeeded: Callable[[Answer], None], attempt: int = 1
    ) -> None:
        """Again after a pause until it succeeds."""

        def again(_: str) -> None:
            pause_s = backoff_s(attempt, self._chance())
            self._os.after(pause_s, lambda: self._read_until(ask, succeeded, attempt + 1))

        ask(lambda answer: self._os.act(lambda: succeeded(answer)), again)
