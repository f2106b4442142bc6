"""Which leases the end of a shard creates, and what must be known before [P12]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kclrun.consuming.commands import ListShards, ReadRows
from kclrun.model.changes import CreateChildren, ExistingParent, HeldParent
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import Instant

__all__ = ["CHILDREN_RETRY_S", "ChildrenExist", "Deferred", "ShardEnd"]

# The other parent's lease appears when its own chain gets there: minutes, seldom; one look a
# second costs one GetItem.
CHILDREN_RETRY_S: Final = 1.0


class Deferred(msgspec.Struct, frozen=True):
    """The children cannot be created yet: keep renewing, do not end, try again."""

    reason: str


class ChildrenExist(msgspec.Struct, frozen=True):
    """There is nothing to create: every child has its row already."""


class ShardEnd:
    """The end of one shard: its children, their other parents, and the one write that follows.

    Made from the `ChildShards` of the last GetRecords; completed from a listing where the service
    left them out. A child is created only if every parent's row exists, or that parent is gone
    from ListShards; the write is conditional on the rows that exist. Where another parent's row
    stays away for a failover and the children have theirs, somebody deleted the parent's: it was
    there when they were created, and a live owner would have written it again [P2]. Then the shard
    ends, or its children would wait for ever. Ask for the `next_step`; after a `Deferred`, or a
    write that did not apply, `begin_again`. All ids are lease keys: with several streams, qualified
    before they come here.
    """

    def __init__(self, key: LeaseKey, children: Iterable[ChildShard]) -> None:
        self.key = key
        self.children = tuple(children)
        self.not_before = Instant(0.0)
        self._listed: frozenset[str] | None = None
        self._rows: Mapping[LeaseKey, Lease | None] | None = None
        self._child_rows: Mapping[LeaseKey, Lease | None] | None = None
        self._waits_since: Instant | None = None
        self._has_waited = False
        self.is_looking = False

    @property
    def child_ids(self) -> tuple[str, ...]:
        return tuple(child.shard_id for child in self.children)

    def next_step(
        self, own: Lease, now: Instant, failover_s: float
    ) -> CreateChildren | ChildrenExist | ReadRows | ListShards | Deferred | None:
        """What is to be done now; None while an answer, or the time, is waited for."""
        if now < self.not_before:
            return None
        self._count_waiting(now, failover_s)
        return self.look_up() or self.creation(own)

    def look_up(self) -> ReadRows | ListShards | None:
        """What must be known before the children can be created, one question at a time."""
        question = self._question()
        if question is None or self.is_looking:
            return None
        self.is_looking = True
        return question

    def creation(self, own: Lease) -> CreateChildren | ChildrenExist | Deferred | None:
        """The write; why not yet; or None while a look-up is under way."""
        if self.is_looking:
            return None
        if not self.children:
            return Deferred("the service names no children of the closed shard yet")
        rows = self._rows or {}
        missing = [key for key, row in rows.items() if row is None]
        waiting = self._waiting()
        if waiting and self._child_rows and None not in self._child_rows.values():
            return ChildrenExist()
        if waiting:
            return Deferred(f"the other parent {waiting[0]} has no lease yet")
        if missing and self._is_listing_old():
            return Deferred(f"ListShards shows neither the children yet, nor {missing[0]}")
        assert own.owner is not None, "the row at a shard's end is ours"
        held = HeldParent(own.key, own.owner, own.counter)
        others = tuple(ExistingParent(key) for key in rows if key not in missing)
        return CreateChildren(tuple(_lease(child) for child in self.children), (held, *others))

    def list(self, shards: Iterable[Shard]) -> None:
        """Take in a complete listing."""
        shards = tuple(shards)
        self.is_looking = False
        self._listed = frozenset(shard.shard_id for shard in shards)
        if not self.children:
            self.children = tuple(
                ChildShard(shard.shard_id, shard.parents, shard.hash_range)
                for shard in shards
                if self.key in shard.parents
            )

    def read(self, rows: Iterable[tuple[LeaseKey, Lease | None]]) -> None:
        """Take in the other parents' rows; then, if they are asked for, the children's."""
        self.is_looking = False
        if self._rows is None:
            self._rows = dict(rows)
        else:
            self._child_rows = dict(rows)

    def begin_again(self, not_before: Instant) -> None:
        """What was read is old: read and list again, not before this instant."""
        self.not_before = not_before
        self.is_looking = False
        self._listed = None
        self._rows = self._child_rows = None

    def _count_waiting(self, now: Instant, failover_s: float) -> None:
        """Whether look after look has found a parent that is listed and has no row."""
        if self._rows is None or self.is_looking:
            return
        if not self._waiting():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        self._has_waited = self._waits_since is not None and now >= self._waits_since + failover_s

    def _waiting(self) -> tuple[LeaseKey, ...]:
        """The other parents without a row that are not known to be gone."""
        rows = (self._rows or {}).items()
        missing = (key for key, row in rows if row is None)
        return tuple(key for key in missing if self._listed is None or key in self._listed)

    def _question(self) -> ReadRows | ListShards | None:
        others = self._other_parents()
        if not self.children:
            return ListShards() if self._listed is None else None
        if self._rows is None and others:
            return ReadRows(others)
        has_missing = any(row is None for row in (self._rows or {}).values())
        if has_missing and self._listed is None:
            return ListShards()
        asks_for_children = self._has_waited and self._waiting() and self._child_rows is None
        return ReadRows(tuple(map(LeaseKey, self.child_ids))) if asks_for_children else None

    def _is_listing_old(self) -> bool:
        """It lags and shows this shard without its children: a parent that it does not show may be
        too new for it, and not gone. Who ended too early would have the child read too early."""
        listed = self._listed
        return (
            listed is not None
            and self.key in listed
            and not all(child.shard_id in listed for child in self.children)
        )

    def _other_parents(self) -> tuple[LeaseKey, ...]:
        named = {parent for child in self.children for parent in child.parents}
        return tuple(LeaseKey(parent) for parent in sorted(named - {self.key}))


def _lease(child: ChildShard) -> Lease:
    """A child is read from its beginning, always: its parents were read to their ends."""
    return Lease(
        key=LeaseKey(child.shard_id),
        checkpoint=TRIM_HORIZON,
        parents=frozenset(child.parents),
        hash_range=child.hash_range,
    )
