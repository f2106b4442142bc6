"""What to do when user code raises: again after a pause, or give up and halt the lease.

Nothing is skipped silently [I9]. Isolating the record by bisection and dead letters will be
further answers of `decide`; callers match on the type, so they will have to say what they do.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["ErrorDecision", "ErrorPolicy", "GiveUp", "RetryAfter"]

# A shard that fails for long is looked at twice a minute, not hammered.
BACKOFF_MAX_S: Final = 30.0
DOUBLINGS_MAX: Final = 16


class RetryAfter(msgspec.Struct, frozen=True):
    """Call again with the same batch after so many seconds."""

    pause_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """Halt the lease: owned and renewed, not processed, until an operator resumes it."""


ErrorDecision = RetryAfter | GiveUp


class ErrorPolicy(msgspec.Struct, frozen=True):
    """`on_error` of the settings."""

    retries: int
    backoff_s: float

    def decide(self, attempts: int) -> ErrorDecision:
        """After the `attempts`-th call (from 1) of the same thing raised."""
        if attempts > self.retries:
            return GiveUp()
        doubled = self.backoff_s * 2.0 ** min(attempts - 1, DOUBLINGS_MAX)
        return RetryAfter(min(doubled, BACKOFF_MAX_S))
