"""One shard's current search: its open request, its budget, the effect of its failures. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from kclrun.errors import ServiceError
from kclrun.model.shard import Shard
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.spark.options import SourceSettings
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.bound_search import BatchTarget, BoundSearch, Want, find_bound
from kclrun.spark.planning.read_budget import ReadBudget


class AnswerTimes(msgspec.Struct, frozen=True):
    """The circumstances of an answer: local seconds, the service's time of its request, chance."""

    now: float
    asked_ms: int
    chance: float


# A shard that is not found is asked for again, between the listings that prove why [P13].
_NOT_FOUND_REST_S: Final = 1.0


class ShardSearch:
    """A cursor, and the search for its bound, if there is one. `gone`: the service does not find
    the shard, and no request is sent until a listing was judged (`is_trimmed`)."""

    def __init__(self, cursor: shard_cursor.ShardCursor, budget: ReadBudget) -> None:
        self.cursor = cursor
        self.budget = budget
        self.target: BatchTarget | None = None
        self.throttles = 0
        self.failures = 0
        self._has_expired = False
        self.gone: shard_cursor.Gone | None = None
        self._expiry = ExpiryWatch(cursor.shard_id, None, (), gives_up_unknown=True)
        self._search: BoundSearch | None = None
        self._want: Want | None = None
        self._turn = 0
        self._in_flight = False

    @property
    def is_searching(self) -> bool:
        """Whether the search goes on."""
        return self._search is not None

    def is_held(self, now: float) -> bool:
        """Whether nothing can happen now: no answer is awaited, no call is allowed."""
        return not self._in_flight and self.ready_at(now) > now

    def ready_at(self, now: float) -> float:
        """The time of the next allowed request."""
        return float("inf") if self.gone is not None else self.budget.ready_at(now)

    def wakes_at(self, now: float) -> float:
        """The time of the next allowed request; never while an answer is awaited."""
        return float("inf") if self._in_flight else self.ready_at(now)

    def begin(self, target: BatchTarget) -> None:
        """Start a search; a search under way continues with its own target."""
        if self._search is None and self.gone is None:
            self.target = target
            self._search = find_bound(self.cursor, target)
            self._step(None)

    def stop(self) -> None:
        """Drop the search: the shard has another position now. A late answer is ignored."""
        if self._search is not None:
            self._search.close()
        self._search = self._want = self.target = None
        self._in_flight = False
        self._turn += 1

    def ask(self, now: float) -> shard_cursor.AskPage | None:
        """The next request, if there is one and the budget allows it."""
        if self._want is None or self._in_flight or self.ready_at(now) > now:
            return None
        self.budget.spend(now)
        self._in_flight = True
        self._turn += 1
        read = self._want.page_run.read(self._want.limit, now)
        return shard_cursor.AskPage(self.cursor.shard_id, self._turn, read)

    def take(
        self, turn: int, outcome: shard_cursor.Outcome, at: AnswerTimes, settings: SourceSettings
    ) -> None:
        """Take in the answer to the request `turn`; an answer to an older request is ignored.

        Raises: ServiceError once `retry_attempts` in a row have failed.
        """
        if turn != self._turn or self._want is None:
            return
        self._in_flight = False
        page_run = self._want.page_run
        match outcome:
            case shard_cursor.Paged() | shard_cursor.Refused():
                if isinstance(outcome, shard_cursor.Paged) and outcome.page.is_pushed:
                    self.budget.refund()
                self.failures, self._has_expired = 0, False
                self._expiry.page_came()
                self._step((outcome, at.asked_ms))
            case shard_cursor.Expired(error):
                page_run.forget_token()
                # The first one was not used for five minutes; a new one that has expired is a
                # failure.
                if self._has_expired:
                    self._failed(error, at, settings)
                self._has_expired = True
            case shard_cursor.Slowed(token, error) | shard_cursor.Delayed(token, error):
                self.throttles += isinstance(outcome, shard_cursor.Slowed)
                self._failed(error, at, settings)
                page_run.hold(token, at.now)
            case shard_cursor.Gone():
                self.gone = outcome

    def is_trimmed(self, known: Shard | None, listed: Collection[Shard], now: float) -> bool:
        """Judge a complete listing that follows `gone`: whether the shard was trimmed. If that is
        not proven, the shard is asked for again. `known`: the shard as listings or the last page of
        a parent showed it."""
        if known is not None:
            self._expiry.learn(known)
        if self._expiry.listing_came(listed, Instant(now)):
            return True
        self.gone = None
        if not any(shard.shard_id == self.cursor.shard_id for shard in listed):
            self.budget.rest(now + _NOT_FOUND_REST_S)
        return False

    def _failed(self, error: ServiceError, at: AnswerTimes, settings: SourceSettings) -> None:
        self.failures += 1
        attempts_max = settings.retry_attempts
        if attempts_max is not None and self.failures >= attempts_max:
            raise error
        rest_s = backoff_s(self.failures, at.chance, max_s=settings.retry_backoff_max_s)
        self.budget.rest(at.now + rest_s)

    def report(self) -> dict[str, Any]:
        """The shard as plain JSON values."""
        density = self.cursor.density
        return {
            "lagMs": self.cursor.lag_ms,
            "recordsPerSecond": None if density is None else round(density.records_per_second, 3),
            "bytesPerSecond": None if density is None else round(density.bytes_per_second, 1),
            "throttles": self.throttles,
            "atTip": self.cursor.tip_at_bound_ms is not None,
        }

    def _step(self, answer: tuple[shard_cursor.Paged | shard_cursor.Refused, int] | None) -> None:
        assert self._search is not None
        try:
            self._want = next(self._search) if answer is None else self._search.send(answer)
        except StopIteration:
            self._search = self._want = None
