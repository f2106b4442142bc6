"""The network between a machine and the services: latency, faults, and the count of requests.

A request is sent, arrives, is applied, and answered; each fault happens between two of these steps.
A reply is a callback, and never comes in the same instant. The module does not know rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from kclrun.simulation.clocks import Scheduler

Answer = TypeVar("Answer")
Failed = Callable[[str], None]

# One way: 1.5 ms and an exponential tail of as much, so that a write takes some 6 ms, like
# DynamoDB's single-digit milliseconds from within the region.
_LEG_MIN_S: Final = 0.0015
LEG_MEAN_S: Final = 2 * _LEG_MIN_S
# The time that a client waits for a reply before its outcome is unknown.
PATIENCE_S: Final = 2.0
# A late request arrives up to two failovers after it was sent.
LATE_MAX_S: Final = 20.0


class FaultRates(msgspec.Struct, frozen=True):
    """The share of requests that each fault meets. Reads meet the sum of all as a failure.

    `lost_reply`: applied, and the sender gets no answer. `late`: arrives after the sender gave up.
    """

    throttled: float = 0.0
    unreachable: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0

    @property
    def total(self) -> float:
        return self.throttled + self.unreachable + self.lost_reply + self.late


CALM: Final = FaultRates()


class Costs(msgspec.Struct):
    """Requests, and DynamoDB's units as it counts them: 1 KB a write, 4 KB a consistent read.

    A write that changes the owner also deletes and puts an entry of the owner index.
    """

    requests: int = 0
    faults: int = 0
    write_units: float = 0.0
    read_units: float = 0.0


class Network:
    """`faults` may be changed at any time, and so may `kinesis_failing`, the share of requests to
    Kinesis that fail."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.faults = CALM
        self.kinesis_failing = 0.0
        self.costs = Costs()
        self._after = scheduler.after
        self._latency = scheduler.chance("network").random
        self._fate = scheduler.chance("faults")

    def ask(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        """A read: it is answered, or fails."""
        self.costs.requests += 1
        if self.draw_fate() is not None:
            self._after(PATIENCE_S, lambda: failed("timed out"))
        else:
            self._send(ask, reply)

    def ask_kinesis(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        """A request to the other service, on the same way."""
        self.costs.requests += 1
        if self.kinesis_failing and self._fate.random() < self.kinesis_failing:
            self.costs.faults += 1
            self._after(PATIENCE_S, lambda: failed("timed out"))
        else:
            self._send(ask, reply)

    def time_out(self, failed: Failed) -> None:
        """A read that is known to fail."""
        self.costs.requests += 1
        self.costs.faults += 1
        self._after(PATIENCE_S, lambda: failed("timed out"))

    def draw_fate(self) -> str | None:
        """The fault that the next request meets, and counts; None for none."""
        faults = self.faults
        if faults is CALM:
            return None
        drawn = self._fate.random()
        for name in faults.__struct_fields__:
            share: float = getattr(faults, name)
            if drawn < share:
                self.costs.faults += 1
                return name
            drawn -= share
        return None

    def late_s(self) -> float:
        """How late a late request arrives."""
        return self._fate.uniform(PATIENCE_S, LATE_MAX_S)

    def reads_until_failure(self) -> float:
        """The number of successful reads in a row before one fails, drawn with the current faults:
        as many as if each read were drawn by itself. Infinite in calm."""
        failing = self.faults.total
        if failing == 0.0 or failing >= 1.0:
            return math.inf if failing == 0.0 else 0
        return math.floor(math.log1p(-self._fate.random()) / math.log1p(-failing))

    def leg_s(self, legs: int = 1) -> float:
        return legs * _LEG_MIN_S * (1.0 - math.log(1.0 - self._latency()))

    def _send(self, ask: Callable[[], Answer], reply: Callable[[Answer], None]) -> None:
        self._after(self.leg_s(), partial(self._arrived, ask, reply))

    def _arrived(self, ask: Callable[[], Answer], reply: Callable[[Answer], None]) -> None:
        self._after(self.leg_s(), partial(reply, ask()))
