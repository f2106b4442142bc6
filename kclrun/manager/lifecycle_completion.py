"""One lifecycle action of the autoscaling group, until it is completed or given up.

Pure. Rule: a completion that may have been done already is asked again: the group answers then that
nothing waits, which is as good. Look next: `instance_life.py`.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kclrun.model.instance import LifecycleAction
from kclrun.model.time import Instant

__all__ = ["Completion", "LifecycleAnswer", "LifecycleOutcome"]

# The group's rate limit refills within seconds.
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 8.0
# The target state is told before the instance begins to wait (Terminating, then Terminating:Wait):
# nothing that waits may be too early to ask. After 1 + 2 s it is gone.
_GONE_ANSWERS_MAX: Final = 3


class LifecycleOutcome(enum.Enum):
    """What became of a request to the group."""

    DONE = "the group has taken it"
    GONE = "nothing waits there: no such hook or group, or the wait is over"
    LATER = "throttled or away: nothing happened"
    UNKNOWN = "sent, and its fate is not known"
    REFUSED = "it will never work: a permission, or a name that is none"


class LifecycleAnswer(msgspec.Struct, frozen=True):
    """An outcome, with the service's own words where it was none of the wanted."""

    outcome: LifecycleOutcome
    code: str = ""
    error: str = ""


class Completion:
    """When to ask the group to go on, and when no more. `is_over` once nothing is left to do.

    `asked_for_s` is for how long an answer is hoped for.
    """

    def __init__(self, action: LifecycleAction, now: Instant, asked_for_s: float) -> None:
        self.action = action
        self._asked_for_s = asked_for_s
        self.attempts = 0
        self.is_over = False
        self.began_instant = now
        self._due_instant = now
        self._is_under_way = False
        self._is_maybe_done = False
        self._gone_answers = 0

    def is_due(self, now: Instant) -> bool:
        return not self.is_over and not self._is_under_way and now >= self._due_instant

    def sent(self) -> None:
        """It was asked; an answer will come."""
        assert not self._is_under_way, "one request at a time"
        self._is_under_way = True
        self.attempts += 1

    def answered(self, answer: LifecycleAnswer, now: Instant) -> str | None:
        """Take the answer in; the event that tells the end of it, None while it goes on."""
        assert self._is_under_way, "an answer follows a request"
        self._is_under_way = False
        match answer.outcome:
            case LifecycleOutcome.DONE:
                return self._end("lifecycle_completed")
            case LifecycleOutcome.GONE if self._is_maybe_done:
                return self._end("lifecycle_completed")
            case LifecycleOutcome.GONE:
                self._gone_answers += 1
                if self._gone_answers >= _GONE_ANSWERS_MAX:
                    return self._end("lifecycle_gone")
            case LifecycleOutcome.REFUSED:
                return self._end("lifecycle_not_completed")
            case LifecycleOutcome.UNKNOWN:
                self._is_maybe_done = True
            case LifecycleOutcome.LATER:
                pass
        return self._again(now)

    def _again(self, now: Instant) -> str | None:
        self._due_instant = Instant(now + min(_PAUSE_S * 2 ** (self.attempts - 1), _PAUSE_S_MAX))
        if self._due_instant - self.began_instant > self._asked_for_s:
            return self._end("lifecycle_not_completed")
        return None

    def _end(self, event: str) -> str:
        self.is_over = True
        return event
