"""The rows of the last scans: one that vanished may come back within a failover.

Somebody deletes the row of a live owner by hand; its next renewal finds nothing, and it writes the
row again from its last confirmed checkpoint, while its fence stands [P2]. Whoever creates it before
that begins the shard anew, or skips what lies between. May not know: what is created instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kclrun.leases.table_view import TableView
from kclrun.model.time import Instant

__all__ = ["RecentRows"]


class RecentRows:
    """Bounded by the scans of one failover: two or three, and a few more after hasty ones."""

    def __init__(self, failover_s: float) -> None:
        self._failover_s = failover_s
        self._seen: deque[tuple[Instant, Collection[str]]] = deque()

    def update(self, view: TableView) -> None:
        """Take in a whole scan."""
        self._seen.append((view.seen_instant, view.rows.keys()))
        while view.seen_instant - self._seen[0][0] >= self._failover_s:
            self._seen.popleft()

    def had(self, key: str) -> bool:
        """Whether a scan of less than a failover before the last showed it."""
        return any(key in keys for _, keys in self._seen)
