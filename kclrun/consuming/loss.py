"""A lost lease on its way out: how long it waits, and its late checkpoint [P19].

Nothing here may write as owner. May not know: whose the lease is now. Look next: `life.py`.
"""

from __future__ import annotations

from typing import Final

from kclrun.consuming.commands import SendLateCheckpoint
from kclrun.model.backoff import backoff_s
from kclrun.model.changes import LateCheckpoint
from kclrun.model.outcomes import Applied, Outcome, Throttled, Unavailable
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import Instant

__all__ = ["LET_GO_S", "LateWriting", "Loss"]

# How long a lost lease waits for the batch under way before the process is ended with it inside.
# Nothing it does counts any more; half a minute lets most work reach a clean end.
LET_GO_S: Final = 30.0
# The next owner begins within a second or two of its take: a late checkpoint that comes after its
# first own one saves nobody any work. A throttled table gets some four tries in this time.
LATE_CHECKPOINT_S: Final = 3.0


class LateWriting:
    """One late checkpoint: sent once, and again only while it surely was not applied [P19].

    An unknown outcome is left unknown: only the row of somebody else could tell, and neither
    answer would change what happens next. A condition that failed is an answer too: the owner is
    no kclrun owner, the shard has ended, or the position is passed already.
    """

    def __init__(self, change: LateCheckpoint, now: Instant) -> None:
        assert change.position != SHARD_END, "a late checkpoint never ends a shard (trace N6)"
        self.change = change
        self.until = Instant(now + LATE_CHECKPOINT_S)
        self.is_resolved = False
        self.has_applied = False
        self._attempts = 1

    def resolve(
        self, outcome: Outcome, now: Instant, chance: float
    ) -> tuple[SendLateCheckpoint, ...]:
        """Take in the outcome; say whether to send it again."""
        pause_s = backoff_s(self._attempts, chance, max_s=LATE_CHECKPOINT_S)
        is_unsent = isinstance(outcome, Throttled | Unavailable)
        if is_unsent and now + pause_s < self.until:
            self._attempts += 1
            return (SendLateCheckpoint(self.change, Instant(now + pause_s)),)
        self.is_resolved = True
        self.has_applied = isinstance(outcome, Applied)
        return ()


class Loss:
    """Why the lease was lost, and what the process still waits for before it lets go."""

    def __init__(self, reason: str, let_go_instant: Instant) -> None:
        self.reason = reason
        self.user_code_is_done = False
        self.late: LateWriting | None = None
        self._let_go_instant = let_go_instant

    def save_late(self, change: LateCheckpoint, now: Instant) -> SendLateCheckpoint:
        """User code has come to rest: write once what it had processed."""
        self.late = LateWriting(change, now)
        return SendLateCheckpoint(change)

    @property
    def deadline(self) -> Instant:
        """When to let go at the latest."""
        late = self.late
        if self.user_code_is_done and late is not None:
            return min(late.until, self._let_go_instant)
        return self._let_go_instant

    def is_over(self, now: Instant) -> bool:
        """Whether nothing is waited for any more."""
        is_writing = self.late is not None and not self.late.is_resolved
        return now >= self.deadline or (self.user_code_is_done and not is_writing)

    @property
    def words(self) -> str:
        """The reason, and where the late checkpoint left the row."""
        if self.late is None or not self.late.has_applied:
            return self.reason
        position = self.late.change.position
        return f"{self.reason}; what it had processed was checkpointed late, at {position}"
