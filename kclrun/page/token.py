"""The token of the page's actions: compared in constant time, shown nowhere, and not to be guessed.

After a wrong token every further one waits, the right one, too: otherwise the time of an answer
would say which it was. The wait doubles with each wrong token up to a few seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from typing import Final

_PAUSE_FIRST_S: Final = 0.25
_PAUSE_MAX_S: Final = 4.0


class Token:
    """Threads may share it: tokens are compared one after the other.

    `refused` is called with the number of wrong tokens so far, for the log.
    """

    def __init__(
        self,
        token: str,
        refused: Callable[[int], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._digest = _digest(token)
        self._refused = refused
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._not_before_instant = clock()
        self._pause_s = _PAUSE_FIRST_S
        self._wrong = 0

    def check(self, token: str) -> bool:
        """Compare after the wait that earlier wrong tokens cost; True if this is the token. Digests
        have one length, so the time of their comparison says nothing about the token."""
        with self._lock:
            left_s = self._not_before_instant - self._clock()
            if left_s > 0:
                self._wait(left_s)
            if hmac.compare_digest(_digest(token), self._digest):
                self._pause_s = _PAUSE_FIRST_S
                return True
            self._wrong += 1
            self._not_before_instant = self._clock() + self._pause_s
            self._pause_s = min(_PAUSE_MAX_S, 2 * self._pause_s)
            self._refused(self._wrong)
            return False


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
