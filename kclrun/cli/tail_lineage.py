"""Which shards of a tail may be read: children wait until their parents were read to the end.

Pure. Rule: what was not listed at the start keeps nobody waiting; what comes later waits for every
parent, also for one that is not known yet (a child of a shard that is still being read). So the
records of one key come in their order across splits and merges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["TailLineage"]


class TailLineage:
    """The shards of one tail, by their state: waiting for parents, being read, over."""

    def __init__(self, parents_of: Mapping[str, Sequence[str]]) -> None:
        self._known = set(parents_of)
        self._waiting = {
            shard_id: frozenset(parents) & self._known for shard_id, parents in parents_of.items()
        }
        self._over: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Every shard was read to its end: nothing more can come."""
        return self._over >= self._known

    def may_begin(self) -> tuple[str, ...]:
        """The shards that may be read from now on, each named once."""
        ready = tuple(
            shard_id for shard_id, parents in self._waiting.items() if parents <= self._over
        )
        for shard_id in ready:
            del self._waiting[shard_id]
        return ready

    def add(self, parents_of: Mapping[str, Sequence[str]]) -> None:
        """Children that were named by an ended shard; those that are known already stay."""
        for shard_id, parents in parents_of.items():
            if shard_id not in self._known:
                self._known.add(shard_id)
                self._waiting[shard_id] = frozenset(parents)

    def end(self, shard_id: str) -> None:
        """A shard was read to its end."""
        self._over.add(shard_id)

    def trim(self, listed: Collection[str]) -> None:
        """The stream's shards, all of them: a parent that is neither listed nor known is gone past
        retention, and nobody will ever name it."""
        for parents in self._waiting.values():
            self._over |= parents - self._known - frozenset(listed)
