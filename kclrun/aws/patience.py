"""The first requests of a program, sent with patience while AWS is away or throttles."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from kclrun.errors import ExpiredKeys, NothingListens, ServiceError, Throttled, Unavailable
from kclrun.model.time import Instant, backoff_s

T = TypeVar("T")

# 120 s in all at the default of `aws.start_timeout`. This is twice the time that 1,000 managers
# need, and below the 4 minutes of the unit file, also if the table must be created.
THROTTLED_PATIENCES: Final = 2
# With pauses of this size, 1,000 managers send 67 requests a second, three times the account's
# limit.
_THROTTLED_PAUSE_MAX_S: Final = 20.0


def patiently(
    call: Callable[[], T],
    deadline: Instant,
    patience_s: float,
    failed: Callable[[ServiceError, float], None] = lambda _error, _left_s: None,
) -> T:
    """The value of `call`, repeated while AWS is unavailable, until `deadline`. `failed` is called
    before each pause, with the error and the seconds that are left.

    While AWS throttles, the call is repeated for twice as long. Throttling is an answer, and the
    managers of a fleet that start together are served one after the other.
    Raises: Unavailable after that, with the last error; NothingListens,
    ExpiredKeys and any other error at once.
    """
    attempt = 0
    while True:
        try:
            return call()
        except (NothingListens, ExpiredKeys):
            raise
        except (Throttled, Unavailable) as error:
            attempt += 1
            is_throttled = isinstance(error, Throttled)
            pause_s = start_pause_s(attempt, random.random(), is_throttled=is_throttled)
            patient_s = patience_s * (THROTTLED_PATIENCES - 1) if is_throttled else 0.0
            left_s = deadline + patient_s - time.monotonic()
            if pause_s >= left_s:
                who = "AWS" if error.operation else "The destination"
                raise error.reworded(
                    f"{who} has not answered for {patience_s:g} s (aws.start_timeout)\n"
                    f"The last attempt: {error}",
                    Unavailable,
                ) from None
            failed(error, left_s)
            time.sleep(pause_s)


def start_pause_s(attempt: int, chance: float, *, is_throttled: bool) -> float:
    """The pause before attempt number `attempt` (from 1) at a call of the start.

    An account may send 20 DescribeStreamSummary a second. 1,000 managers that start together are
    served after 50 s at best. With these pauses the last one is served after 65 s, with 5,000 calls
    in all. With the pauses for an unavailable service it takes as long, but with 15,000 calls,
    which delay the calls of other applications.
    """
    if is_throttled:
        return backoff_s(attempt, chance, base_s=0.25, max_s=_THROTTLED_PAUSE_MAX_S)
    return backoff_s(attempt, chance)
