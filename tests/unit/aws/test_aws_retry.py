"""Patience with reads: without end, without noise, and not against a stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kclrun.errors import AccessDenied, ServiceError, Throttled, Unavailable
from kclrun.model.time import Instant
from tests.support.retry import Patient


class World:
    """A clock that the waiting moves, a stop, and what was reported."""

    def __init__(self, *, stop_after_s: float = 1e9) -> None:
        self.now = 0.0
        self.stop_after_s = stop_after_s
        self.pauses: list[float] = []
        self.outages: list[ServiceError] = []
        self.recoveries: list[float] = []
        self.patient = Patient(
            stop=self,
            clock=lambda: Instant(self.now),
            chance=lambda: 0.5,
            on_outage=self.outages.append,
            on_recovery=self.recoveries.append,
        )

    def is_set(self) -> bool:
        return self.now >= self.stop_after_s

    def wait(self, timeout: float) -> bool:
        self.pauses.append(timeout)
        self.now += timeout
        return self.is_set()

    def failing_until(self, until_s: float, error: ServiceError) -> Callable[[], str]:
        def call() -> str:
            if self.now < until_s:
                raise error
            return "value"

        return call


def test_a_call_that_works_is_simply_made() -> None:
    world = World()

    assert world.patient(lambda: 42) == 42
    assert world.pauses == world.outages == world.recoveries == []


@pytest.mark.parametrize("error", [Throttled("slow down"), Unavailable("gone")])
def test_a_short_trouble_is_no_outage(error: ServiceError) -> None:
    world = World()

    assert world.patient(world.failing_until(0.5, error)) == "value"
    assert world.outages == []
    assert world.recoveries == []


def test_an_outage_is_reported_once_and_then_its_length() -> None:
    world = World()
    error = Unavailable("gone")

    assert world.patient(world.failing_until(600.0, error)) == "value"

    assert world.outages == [error]
    assert len(world.recoveries) == 1
    assert 600.0 <= world.recoveries[0] <= 603.0


def test_pauses_grow_to_three_seconds_and_no_further() -> None:
    world = World()

    world.patient(world.failing_until(600.0, Unavailable("gone")))

    assert world.pauses == sorted(world.pauses)
    assert world.pauses[0] < 0.2
    assert 1.5 <= max(world.pauses) <= 3.0


def test_what_repeating_will_not_help_is_raised_at_once() -> None:
    world = World()

    with pytest.raises(AccessDenied):
        world.patient(world.failing_until(1.0, AccessDenied("no")))
    assert world.pauses == []


def test_a_stop_ends_the_patience_with_the_last_error() -> None:
    world = World(stop_after_s=5.0)

    with pytest.raises(Unavailable):
        world.patient(world.failing_until(600.0, Unavailable("gone")))

    assert world.now < 9.0
    assert world.recoveries == []
