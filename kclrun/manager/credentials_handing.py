"""Keys for the lease processes: had once here, handed to all of them before the old ones expire.

Rule: asking may wait on the network, so it happens on the pool; a failure leaves the old keys in
use and is one warning. A lease process never asks for itself [DESIGN 7].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kclrun.manager.io_pool import IoPool
from kclrun.manager.loop import Loop
from kclrun.manager.world import CredentialSource
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog

__all__ = ["CredentialHanding"]

# botocore renews 15 minutes before expiry at the earliest and 10 at the latest, instance metadata
# five: every half minute leaves ten tries even to the last.
_LOOK_EVERY_S: Final = 30.0


class CredentialHanding:
    """Looks for new keys from `open` on; `hand_over` is called with each new set."""

    def __init__(
        self,
        source: CredentialSource,
        *,
        loop: Loop,
        pool: IoPool,
        log: EventLog,
        hand_over: Callable[[WireCredentials], None],
    ) -> None:
        self._source = source
        self._loop = loop
        self._pool = pool
        self._log = log
        self._hand_over = hand_over
        self._is_failing = False
        self.held = source.current()

    def open(self) -> None:
        self._loop.after(_LOOK_EVERY_S, self.look)

    def look(self) -> None:
        """Ask once, and again after a pause."""
        self._pool.run(self._source.current, self._had, self._missed)

    def _had(self, credentials: WireCredentials) -> None:
        self._is_failing = False
        if credentials != self.held:
            self.held = credentials
            self._hand_over(credentials)
        self.open()

    def _missed(self, error: Exception) -> None:
        if not self._is_failing:
            # Only the kind: the texts of credential providers may quote what they read.
            self._log.note("credentials_not_renewed", error=type(error).__name__)
        self._is_failing = True
        self.open()
