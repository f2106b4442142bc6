"""One shard's current search: its open request, its budget, the effect of its failures. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from kclrun.errors import ServiceError
from kclrun.model.quotas import SHARD_READ_CALLS_MAX
from kclrun.model.shard import Shard
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.spark.options import SourceSettings
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.bound_search import BatchTarget, BoundSearch, Want, find_bound

# How often the source may read: per shard, and in total [A5]. Pure.
#
# Kinesis allows five GetRecords and 2 MB a second and shard, shared by all its readers.
# One Python process signs and decodes so many calls on half a core: 0.45 core at 1,000 a second.
CALLS_PER_SECOND_MAX: Final = 500.0
# Kinesis' own rule allows a second's calls at once; unused calls of quiet ticks are kept.
_BURST: Final = float(SHARD_READ_CALLS_MAX)
# Sums of fractions of a call must not cause waits that are shorter than a clock's resolution.
_ROUNDING: Final = 1e-6
# A tenth of the shard's 2 MB/s may be spent on bytes that executors read again.
_WASTED_BYTES_PER_SECOND: Final = 200_000.0
# Kinesis itself makes readers wait as long after an answer of 10 MB.
_REST_MAX_S: Final = 5.0
# Additive decrease, multiplicative increase of the pause between two ticks.
_LONGER: Final = 1.5
_SHORTER_S: Final = 0.1
# Longer ticks do not help: other applications get four fifths of the calls by then.
_TICK_MAX_S: Final = 5.0


class ReadBudget:
    """One shard's GetRecords: `rate` a second on average, by driver and executors together."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = _BURST
        self._at = now
        self._rests_until = now

    def ready_at(self, now: float) -> float:
        """The time of the next allowed call."""
        self._refill(now)
        missing = 1.0 - self._tokens
        return max(self._rests_until, now + (missing / self._rate if missing > _ROUNDING else 0.0))

    def spend(self, now: float, calls: float = 1.0) -> None:
        """Count calls; calls that executors will make may leave a debt, of at most one burst."""
        self._refill(now)
        self._tokens = max(-_BURST, self._tokens - calls)

    def refund(self) -> None:
        """A call that was counted was not made: the page came from a subscription."""
        self._tokens = min(_BURST, self._tokens + 1.0)

    def waste(self, size_bytes: int, now: float) -> None:
        """Count bytes that will be read a second time."""
        rests_until = max(self._rests_until, now) + size_bytes / _WASTED_BYTES_PER_SECOND
        self._rests_until = min(rests_until, now + _REST_MAX_S)

    def rest(self, until: float) -> None:
        """Send no request before that: the shard was throttled, or did not answer."""
        self._rests_until = max(self._rests_until, until)

    def _refill(self, now: float) -> None:
        self._tokens = min(_BURST, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)


class Tick:
    """The pause between two looks at all shards: longer after throttles, shorter in small steps."""

    def __init__(self, poll_interval_s: float) -> None:
        self._poll_interval_s = poll_interval_s
        self._added_s = 0.0
        self._throttles = 0

    def throttled(self) -> None:
        """A call of this tick was throttled."""
        self._throttles += 1

    def next_s(self, shards: int) -> float:
        """End a tick over `shards` shards. Returns: the seconds until the next one begins."""
        base = max(self._poll_interval_s, shards / CALLS_PER_SECOND_MAX)
        if self._throttles:
            longer = (base + self._added_s) * _LONGER
            self._added_s = max(0.0, min(_TICK_MAX_S, longer) - base)
        else:
            self._added_s = max(0.0, self._added_s - _SHORTER_S)
        self._throttles = 0
        return base + self._added_s


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
        if self._expiry.is_proven(listed, Instant(now)):
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
