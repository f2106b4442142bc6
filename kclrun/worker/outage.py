"""An outage is one warning when it is noticed, and one with its length when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kclrun.model.time import Instant

__all__ = ["Outage"]

# A dropped connection or a single 5xx is repaired by the next try; a second of them is an outage.
NOTICED_S: Final = 1.0


class Outage:
    """Failures of one kind of work, by one thread."""

    def __init__(self, work: str, now: Callable[[], Instant], warn: Callable[[str], None]) -> None:
        self._work = work
        self._now = now
        self._warn = warn
        self._since: Instant | None = None
        self._is_told = False

    def note(self, message: str, asked: Instant) -> None:
        """A try that began at `asked` failed: a service that hangs is away from then on."""
        if self._since is None:
            self._since = asked
        if not self._is_told and self._now() - self._since >= NOTICED_S:
            self._is_told = True
            self._warn(f"{self._work} fails and is tried again: {message}")

    def end(self) -> None:
        """A try succeeded."""
        if self._is_told and self._since is not None:
            self._warn(f"{self._work} works again after {self._now() - self._since:.1f} s")
        self._since = None
        self._is_told = False
