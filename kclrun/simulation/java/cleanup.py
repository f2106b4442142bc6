"""`LeaseCleanupManager`: rows of ended shards go once their children have begun.

Only the worker that shut a shard down has it on its list, whoever owns the row by now. May not
know: consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.model.shard import ChildShard
from kclrun.simulation.java import rows
from kclrun.simulation.java.client import DependencyFailed, JavaClient, ThroughputExceeded
from kclrun.simulation.java.held import HeldLease
from kclrun.simulation.java.threads import Steps, sleep
from kclrun.simulation.machine import OsProcess

__all__ = ["Cleanup"]

# `completedLeaseCleanupIntervalMillis`.
_EVERY_S: Final = 300.0


class Cleanup:
    """The list of one worker, by lease key."""

    def __init__(self, jvm: OsProcess, client: JavaClient) -> None:
        self._jvm = jvm
        self._client = client
        self._pending: dict[LeaseKey, tuple[frozenset[str], tuple[str, ...]]] = {}

    def enqueue(self, lease: HeldLease, children: Sequence[ChildShard]) -> None:
        """Ended by us, or found ended when we took it."""
        names = tuple(child.shard_id for child in children)
        self._pending[lease.key] = (lease.parents, names)

    def run(self, is_running: Callable[[], bool]) -> Steps[None]:
        while is_running():
            yield from sleep(self._jvm, _EVERY_S)
            for key, (parents, children) in tuple(self._pending.items()):
                try:
                    is_over = yield from self._clean(key, parents, children)
                except (ThroughputExceeded, DependencyFailed):
                    continue
                if is_over:
                    del self._pending[key]

    def _clean(
        self, key: LeaseKey, parents: frozenset[str], children: tuple[str, ...]
    ) -> Steps[bool]:
        """Whether nothing is left to do."""
        if (yield from self._client.row(key)) is None:
            return True
        for child in children:
            row = yield from self._client.row(LeaseKey(child))
            if row is None or row.checkpoint in {TRIM_HORIZON, AT_TIMESTAMP}:
                return False
        for parent in sorted(parents):
            if (yield from self._client.row(LeaseKey(parent))) is not None:
                return False
        yield from self._client.write(rows.delete(key))
        return True
