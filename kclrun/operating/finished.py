"""Whether a shard was read to its end, of which the lease table may have no row any more [P13]:
decided from the rows, the listing of the stream and the recorded stories. Pure.

Each of them alone is not enough. A row is deleted after its shard was read to its end, but also
when the stream has trimmed it; and a shard from before the start of the application has no row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import Shard
from kclrun.operating.story import Entry

# The event of a story that says it.
_ENDED: Final = "shard_ended"


def ended_in_stories(entries: Iterable[Entry]) -> frozenset[str]:
    """The shards that were read to their end, as the stories say. One without children may have
    been read to the end of a time range."""
    return frozenset(
        entry.shard for entry in entries if entry.event == _ENDED and entry.fields.get("children")
    )


class FinishedShards:
    """Answers for the shards of one reading of the table and the streams. `ended` are the shards
    that the stories show as read to their end."""

    def __init__(
        self,
        leases: Mapping[str, Lease],
        shards: Mapping[str, Shard],
        ended: Collection[str] = frozenset(),
    ) -> None:
        self._leases = leases
        self._shards = shards
        self._ended = ended
        self._children: dict[str, set[str]] = {}
        for parent, child in _edges(leases, shards):
            self._children.setdefault(parent, set()).add(child)

    def is_finished(self, key: str) -> bool | None:
        """Whether the shard was read to its end; None if nothing shows it.

        Without a row and a story, a shard that the stream still lists was read to its end if those
        after it have been begun by an application that reads from TRIM_HORIZON: it is not trimmed,
        and not from before the start.
        """
        lease = self._leases.get(key)
        if lease is not None:
            return lease.is_ended
        if key in self._ended:
            return True
        rows = tuple(self._rows_after(key))
        if key not in self._shards:
            return None
        if not rows:
            return False
        return True if all(map(_is_begun_from_the_horizon, rows)) else None

    def is_named(self, key: str) -> bool:
        """Whether the table, the stream or a story has the shard, or names it as a parent."""
        known = (self._leases, self._shards, self._ended, self._children)
        return any(key in names for names in known)

    def children(self, key: str) -> tuple[str, ...]:
        return tuple(sorted(self._children.get(key, ())))

    def _rows_after(self, key: str) -> Iterator[Lease]:
        """The nearest descendants that have a row."""
        to_follow, seen = [key], {key}
        while to_follow:
            for child in self.children(to_follow.pop()):
                if child in seen:
                    continue
                seen.add(child)
                if child in self._leases:
                    yield self._leases[child]
                else:
                    to_follow.append(child)


def _is_begun_from_the_horizon(lease: Lease) -> bool:
    """A reset may have skipped what was before it."""
    has_begun = lease.is_ended or not lease.checkpoint.is_sentinel
    return has_begun and lease.start == TRIM_HORIZON.sequence_number and not lease.generation


def _edges(leases: Mapping[str, Lease], shards: Mapping[str, Shard]) -> Iterator[tuple[str, str]]:
    for key, lease in leases.items():
        yield from ((parent, key) for parent in lease.parents)
        yield from ((key, child) for child in lease.children)
    for key, shard in shards.items():
        yield from ((parent, key) for parent in shard.parents)
