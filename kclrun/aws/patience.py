"""The first requests of a program, sent with patience while AWS is away or throttles."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from kclrun.errors import ExpiredKeys, NothingListens, ServiceError, Throttled, Unavailable
from kclrun.model.retries import PASSING, Retries, repeated
from kclrun.model.time import Instant

T = TypeVar("T")

# 120 s in all at the default of `aws.start_timeout`. This is twice the time that 1,000 managers
# need, and below the 4 minutes of the unit file, also if the table must be created.
THROTTLED_PATIENCES: Final = 2
# An account may send 20 DescribeStreamSummary a second. 1,000 managers that start together are
# served after 50 s at best. With these pauses the last one is served after 65 s, with 5,000 calls
# in all: 67 a second, three times the account's limit. With the pauses for an unavailable service
# it takes as long, but with 15,000 calls, which delay the calls of other applications.
WHILE_THROTTLED: Final = Retries(base_s=0.25, max_s=20.0)
_AT_ONCE: Final = (NothingListens, ExpiredKeys)


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
    limit_s = deadline - time.monotonic()
    throttled_s = limit_s + patience_s * (THROTTLED_PATIENCES - 1)
    retries = Retries(
        lasts_s=limit_s,
        at_once=_AT_ONCE,
        throttled=msgspec.structs.replace(WHILE_THROTTLED, lasts_s=throttled_s),
    )

    def note(error: ServiceError, elapsed_s: float) -> None:
        is_throttled = isinstance(error, Throttled)
        failed(error, (throttled_s if is_throttled else limit_s) - elapsed_s)

    try:
        return repeated(
            call, retries, wait=time.sleep, chance=random.random, clock=time.monotonic, failed=note
        )
    except _AT_ONCE:
        raise
    except PASSING as error:
        who = "AWS" if error.operation else "The destination"
        raise error.reworded(
            f"{who} has not answered for {patience_s:g} s (aws.start_timeout)\n"
            f"The last attempt: {error}",
            Unavailable,
        ) from None
