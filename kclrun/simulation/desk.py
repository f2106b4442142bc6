"""User code and fetching of one lease process, reduced to when something happens.

A poll each idle interval brings what has arrived; user code takes as long as it is said to. What
the gate, the fence and the order of calls allow is as in the worker's desk. May not know: leases,
rows. Rule: a poll that brings nothing is no event; it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.time import Instant
from kclrun.simulation.oracles import Oracles, Reader
from kclrun.simulation.shards import RECORD_BYTES, ShardStream

__all__ = ["SimulatedDesk"]

# A page of GetRecords, and a batch: both are 10,000 records at most.
_BATCH_MAX: Final = 10_000
# Processor made, `initialize` called: most do next to nothing.
_CALL_S: Final = 0.005
# A round trip to Kinesis.
_FETCH_S: Final = 0.012


class SimulatedDesk:
    """`post` takes events for the core; `after` schedules for the host; `batch_s` is how long user
    code takes for a batch."""

    def __init__(
        self,
        reader: Reader,
        stream: ShardStream,
        oracles: Oracles,
        *,
        world_now: Callable[[], float],
        now: Callable[[], Instant],
        after: Callable[[float, Callable[[], None]], None],
        post: Callable[[on.Event], None],
        poll_s: float,
        batch_s: float,
    ) -> None:
        self.polls = 0
        self._reader = reader
        self._key: LeaseKey = reader.key
        self._stream = stream
        self._oracles = oracles
        self._world_now = world_now
        self._now = now
        self._after = after
        self._post = post
        self._poll_s = poll_s
        self._batch_s = batch_s
        self._gate: do.OpenGate | None = None
        self._is_shut_asked = False
        self._is_busy = False
        self._call: Callable[[], None] | None = None
        self._fetched = self._delivered = self._delivered_here = 0
        self._fetched_at = 0.0
        self._fetches = 0
        self._is_told_exhausted = False

    # What the core says.

    def open_gate(self, gate: do.OpenGate) -> None:
        self._gate = gate
        self._go_on()

    def shut_gate(self) -> None:
        self._gate = None
        self._call = None
        self._is_shut_asked = True
        self._go_on()

    def initialize(self, row: Lease) -> None:
        def begun() -> None:
            self._fetched = self._delivered = self._stream.number_of(self._key, row.checkpoint)
            self._fetched_at = self._world_now()
            self._fetch_in(_FETCH_S)
            self._post(on.CallReturned())

        self._ask_for(begun)

    def call(self) -> None:
        """`shard_ended`, `shutdown_requested` or `lease_lost`."""
        self._ask_for(lambda: self._post(on.CallReturned()))

    def shard_closed(self) -> None:
        """The shard was split or merged: the next poll finds its end, whatever was to come."""
        if self._fetches:
            self._fetch_in(self._poll_s)

    # What it does.

    def _ask_for(self, returned: Callable[[], None]) -> None:
        self._call = returned
        self._go_on()

    def _fetch(self) -> None:
        """A page is here; the next one when something will have arrived by then."""
        now = self._world_now()
        self.polls += max(1, round((now - self._fetched_at) / self._poll_s))
        self._fetched_at = now
        self._fetched = max(self._fetched, self._stream.arrived(self._key, now))
        self._go_on()
        if not self._is_fully_fetched():
            arrives = self._stream.arrival_of(self._key, self._fetched + 1)
            if math.isfinite(arrives):
                idle_polls = max(1, math.ceil((arrives - now) / self._poll_s))
                self._fetch_in(idle_polls * self._poll_s)

    def _fetch_in(self, pause_s: float) -> None:
        self._fetches += 1
        number = self._fetches
        self._after(pause_s, lambda: self._fetch() if number == self._fetches else None)

    def _is_fully_fetched(self) -> bool:
        return self._fetched == self._stream.total(self._key)

    def _go_on(self) -> None:
        """The next thing user code does, if it is idle and may."""
        if self._is_busy:
            return
        if self._is_shut_asked:
            self._is_shut_asked = False
            self._post(on.GateShut())
        elif self._call is not None:
            returned, self._call = self._call, None
            self._work(_CALL_S, returned)
        elif self._gate is not None and self._is_open(self._gate):
            self._take_next(self._gate)

    def _is_open(self, gate: do.OpenGate) -> bool:
        return self._now() < gate.fence

    def _take_next(self, gate: do.OpenGate) -> None:
        room = gate.delivered_max - self._delivered_here
        size = min(self._fetched - self._delivered, _BATCH_MAX, room)
        if size > 0 and self._delivered_here < gate.start_below:
            self._deliver(size)
        elif self._is_fully_fetched() and self._fetched == self._delivered:
            self._tell_exhausted()

    def _deliver(self, size: int) -> None:
        first, last = self._delivered + 1, self._delivered + size
        self._delivered = last
        self._delivered_here += size
        position = self._stream.position(self._key, last)
        self._oracles.batch_begun(self._reader, first, last)

        def processed() -> None:
            self._oracles.batch_processed(self._reader, last)
            self._post(on.BatchProcessed(position))

        self._work(self._batch_s, processed)
        self._post(on.BatchDelivered(position, size, size * RECORD_BYTES))

    def _work(self, duration_s: float, returned: Callable[[], None]) -> None:
        self._is_busy = True

        def done() -> None:
            self._is_busy = False
            returned()
            self._go_on()

        self._after(duration_s, done)

    def _tell_exhausted(self) -> None:
        if self._is_told_exhausted:
            return
        self._is_told_exhausted = True
        self._oracles.shard_exhausted(self._reader)
        self._post(on.ShardExhausted(self._stream.children_of(self._key)))
