"""One shard's walk under way: its open question, its budget, and what its failures mean. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kclrun.ports import backoff_s
from kclrun.spark.scout.asks import AskPage, Delayed, Expired, Gone, Outcome, Paged, Refused, Slowed
from kclrun.spark.scout.budget import ReadBudget
from kclrun.spark.scout.track import Track
from kclrun.spark.scout.walk import Aim, Walk, Want, walk
from kclrun.spark.settings import SourceSettings

__all__ = ["Moment", "Running"]


class Moment(msgspec.Struct, frozen=True):
    """When an answer came: local seconds, the service's time when it was asked for, chance."""

    now: float
    asked_ms: int
    chance: float


class Running:
    """A track, and the walk that is looking for its bound, if one is."""

    def __init__(self, track: Track, budget: ReadBudget) -> None:
        self.track = track
        self.budget = budget
        self.aim: Aim | None = None
        self.throttles = 0
        self.failures = 0
        self.gone: Gone | None = None
        self._walk: Walk | None = None
        self._want: Want | None = None
        self._turn = 0
        self._in_flight = False

    @property
    def is_walking(self) -> bool:
        """Whether the bound is still being looked for."""
        return self._walk is not None

    def is_held(self, now: float) -> bool:
        """Whether nothing can happen right now: no answer is awaited, no call is allowed."""
        return not self._in_flight and self.ready_at(now) > now

    def ready_at(self, now: float) -> float:
        """When the walk may ask again."""
        return float("inf") if self.gone is not None else self.budget.ready_at(now)

    def wakes_at(self, now: float) -> float:
        """When it may ask again, if no answer comes before; never while one is awaited."""
        return float("inf") if self._in_flight else self.ready_at(now)

    def begin(self, aim: Aim) -> None:
        """Start a walk; one that is under way goes on with its own aim."""
        if self._walk is None and self.gone is None:
            self.aim = aim
            self._walk = walk(self.track, aim)
            self._step(None)

    def stop(self) -> None:
        """Forget the walk: the shard stands elsewhere now. An answer still under way is dropped."""
        if self._walk is not None:
            self._walk.close()
        self._walk = self._want = self.aim = None
        self._in_flight = False
        self._turn += 1

    def ask(self, now: float) -> AskPage | None:
        """The next question, if there is one and the budget allows it."""
        if self._want is None or self._in_flight or self.ready_at(now) > now:
            return None
        self.budget.spend(now)
        self._in_flight = True
        self._turn += 1
        read = self._want.stretch.read(self._want.limit, now)
        return AskPage(self.track.shard_id, self._turn, read)

    def take(self, turn: int, outcome: Outcome, at: Moment, settings: SourceSettings) -> None:
        """Take in the answer to the question `turn`; one to an older question is ignored.

        Raises: ServiceError after as many failures in a row as the settings allow.
        """
        if turn != self._turn or self._want is None:
            return
        self._in_flight = False
        stretch = self._want.stretch
        match outcome:
            case Paged() | Refused():
                self.failures = 0
                self._step((outcome, at.asked_ms))
            case Expired():
                stretch.forget_token()
            case Slowed(token, error) | Delayed(token, error):
                self.failures += 1
                self.throttles += isinstance(outcome, Slowed)
                if settings.retry_attempts is not None and self.failures > settings.retry_attempts:
                    raise error
                stretch.hold(token, at.now)
                rest_s = backoff_s(self.failures, at.chance, max_s=settings.retry_backoff_max_s)
                self.budget.rest(at.now + rest_s)
            case Gone():
                self.gone = outcome

    def report(self) -> dict[str, Any]:
        """The shard as plain JSON values."""
        density = self.track.density
        return {
            "position": str(self.track.bound),
            "lagMs": self.track.lag_ms,
            "recordsPerSecond": None if density is None else round(density.records_per_second, 3),
            "bytesPerSecond": None if density is None else round(density.bytes_per_second, 1),
            "throttles": self.throttles,
            "atTip": self.track.tip_at_bound_ms is not None,
        }

    def _step(self, answer: tuple[Paged | Refused, int] | None) -> None:
        assert self._walk is not None
        try:
            self._want = next(self._walk) if answer is None else self._walk.send(answer)
        except StopIteration:
            self._walk = self._want = None
