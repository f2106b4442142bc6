"""Which leases the end of a shard creates, and which facts must be known before [P12]."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from kclrun.consuming.commands import ListShards, ReadRows
from kclrun.model.lease import Lease, LeaseKey, are_children_lost
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import ChildShard, HashRange, Shard, is_too_new_for
from kclrun.model.time import Instant
from kclrun.protocol.writes import CreateChildren, ExistingParent, HeldParent

# The other parent gets its lease when its own chain of parents reaches it: minutes, seldom. One
# look a second costs one GetItem.
CHILDREN_RETRY_S: Final = 1.0


class Deferred(msgspec.Struct, frozen=True):
    """The children cannot be created yet: keep renewing, do not end, try again."""

    reason: str


class ChildrenExist(msgspec.Struct, frozen=True):
    """There is nothing to create: every child has a row already, or was trimmed like its parent."""


class ShardEnd:
    """The end of one shard: its children, their other parents, and the one write that follows.

    Made from the `ChildShards` of the last GetRecords, and completed from a listing if the service
    left them out. A child is created only if every parent's row exists, or that parent is gone from
    ListShards. The write is conditional on the rows that exist.

    If another parent's row stays away for a failover and the children have rows, then the parent's
    row was deleted: it was there when they were created, and a live owner would have written it
    again [P2]. Then the shard ends; otherwise its children would wait for ever. A trimmed shard
    (`is_expired`) ends without children if a listing shows none any more.

    Call `next_step`; after a `Deferred`, or a write that did not apply, call `begin_again`. All ids
    are lease keys: with several streams they are qualified before they come here.
    """

    def __init__(
        self, key: LeaseKey, children: Iterable[ChildShard], *, is_expired: bool = False
    ) -> None:
        self.key = key
        self._is_expired = is_expired
        self.children = tuple(children)
        self.not_before = Instant(0.0)
        self._listed: Mapping[str, Shard] | None = None
        self._rows: Mapping[LeaseKey, Lease | None] | None = None
        self._child_rows: Mapping[LeaseKey, Lease | None] | None = None
        self._waits_since: Instant | None = None
        self._has_waited = False
        self._is_loss_told = False
        self.is_looking = False

    @property
    def child_ids(self) -> tuple[str, ...]:
        return tuple(child.shard_id for child in self.children)

    def next_step(
        self, own: Lease, now: Instant, failover_s: float
    ) -> CreateChildren | ChildrenExist | ReadRows | ListShards | Deferred | None:
        """The next step now; None while an answer is awaited, or until the next look is due."""
        if now < self.not_before:
            return None
        self._count_waiting(now, failover_s)
        return self.look_up() or self.creation(own)

    def look_up(self) -> ReadRows | ListShards | None:
        """The next question to answer before the children can be created, one at a time."""
        question = self._question()
        if question is None or self.is_looking:
            return None
        self.is_looking = True
        return question

    def creation(self, own: Lease) -> CreateChildren | ChildrenExist | Deferred | None:
        """The write; or why it must wait; or None while a look-up is under way."""
        if self.is_looking:
            return None
        if not self.children and self._is_expired and self._listed and self.key not in self._listed:
            return ChildrenExist()
        if not self.children:
            return Deferred("the service names no children of the closed shard yet")
        rows = self._rows or {}
        missing = [key for key, row in rows.items() if row is None]
        waiting = self._waiting()
        if waiting and self._child_rows and None not in self._child_rows.values():
            return ChildrenExist()
        if waiting:
            return Deferred(f"the other parent {waiting[0]} has no lease yet")
        if missing and self._is_listing_old(own):
            return Deferred(f"ListShards shows neither the children yet, nor {missing[0]}")
        assert own.owner is not None, "the row at a shard's end is ours"
        held = HeldParent(own.key, own.owner, own.counter)
        others = tuple(ExistingParent(key) for key in rows if key not in missing)
        children = tuple(_lease(child, own) for child in self.children)
        return CreateChildren(children, (held, *others))

    def tells_lost_children(self, own: Lease) -> bool:
        """Whether to report that children of this shard were trimmed like it. True once."""
        ranges = [child.hash_range for child in self.children]
        is_lost = self._is_expired and are_children_lost(own.hash_range, ranges)
        is_news = is_lost and self._listed is not None and not self._is_loss_told
        self._is_loss_told = self._is_loss_told or is_news
        return is_news

    def list(self, shards: Iterable[Shard]) -> None:
        """Take in a complete listing."""
        shards = tuple(shards)
        self.is_looking = False
        self._listed = {shard.shard_id: shard for shard in shards}
        if not self.children:
            self.children = tuple(
                ChildShard(shard.shard_id, shard.parents, shard.hash_range)
                for shard in shards
                if self.key in shard.parents
            )

    def read(self, rows: Iterable[tuple[LeaseKey, Lease | None]]) -> None:
        """Take in the other parents' rows; then, if they were requested, the children's."""
        self.is_looking = False
        if self._rows is None:
            self._rows = dict(rows)
        else:
            self._child_rows = dict(rows)

    def begin_again(self, not_before: Instant) -> None:
        """The answers are old: read and list again, not before this instant."""
        self.not_before = not_before
        self.is_looking = False
        self._listed = None
        self._rows = self._child_rows = None

    def _count_waiting(self, now: Instant, failover_s: float) -> None:
        """Count how long every look has found a listed parent without a row."""
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

    def _is_listing_old(self, own: Lease) -> bool:
        """Whether the listing lags and does not show the children. Then a parent that it does not
        show may be too new for it and not gone; so may this shard, if it was split soon after it
        was made. An early end would have the child read too early."""
        listed = self._listed
        if listed is None or all(child.shard_id in listed for child in self.children):
            return False
        return self.key in listed or is_too_new_for(
            listed.values(), self.key, own.hash_range, own.parents
        )

    def _other_parents(self) -> tuple[LeaseKey, ...]:
        named = {parent for child in self.children for parent in child.parents}
        return tuple(LeaseKey(parent) for parent in sorted(named - {self.key}))


def _lease(child: ChildShard, own: Lease) -> Lease:
    """The row of a child. It is always read from its beginning, because its parents were read to
    their ends. It belongs to the stream of its parent."""
    return Lease(
        key=LeaseKey(child.shard_id),
        checkpoint=TRIM_HORIZON,
        parents=frozenset(child.parents),
        hash_range=child.hash_range,
        stream_created_at=own.stream_created_at,
    )


class ExpiryWatch:
    """The proof that the shard of this lease was trimmed: its records have expired [P13].

    One instance for each process. All ids are bare, or all are qualified. `apart_s` is the time
    between the two listings: the failover, which is two sync periods of a manager that lists shards
    in each of its cycles [P10].

    Kinesis forgets a closed shard once its last record is older than the retention: it leaves
    ListShards, and GetShardIterator returns ResourceNotFoundException. The same answer comes while
    a stream is deleted, after another one was made under its name, and for moments after a reshard.
    Then ending the lease would leave records out. So the process that holds the lease proves the
    difference alone: it needs no message, and a message could come late or to the wrong process.

        NotFound ─► listing ─► does it show that the shard was trimmed? ─► no: look again later
                                                                        ─► yes: the first of two
        NotFound ─► listing, two sync periods later, no page in between ─► yes: proven, end it

    The possible errors, and the protection against each:

    - A listing fails, or is empty (a stream that is being deleted or made): not evidence.
    - A listing lags behind a reshard and does not show a new shard yet: it shows a parent, or an
      older shard of the same hash keys. Those are trimmed before it, so the shard is new, and never
      proven.
    - A NotFound was an error of the service: a page, or a listing with the shard, begins anew.
    - The stream was made again: its shards begin at number 0 without parents. So the listing must
      name a child of the shard, or show only younger shards with parents where its hash keys were.
      A new stream with a lineage of its own has another creation time, which the manager compares.
    - The lease moves meanwhile: the proof is gone with the process, and the next owner makes its
      own. Every write of the end has the owner's condition, as the end of any shard [P2, P12].
    - Children began, or ended, already: creating them leaves an existing row as it is.
    - Parents have not ended: a child is read, and so comes to NotFound, only after them [P11].
    - Children were trimmed, too: the shard ends without any, and the lease manager creates the
      oldest shards that are still listed of its hash keys, at their beginning
      (`leases/shard_sync.py`).
    """

    def __init__(
        self,
        shard_id: str,
        hash_range: HashRange | None,
        parents: Collection[str],
        *,
        apart_s: float,
    ) -> None:
        self._shard_id = shard_id
        self._hash_range = hash_range
        self._parents = frozenset(parents)
        self._apart_s = apart_s
        self._listed_instant: Instant | None = None
        self._absent_since: Instant | None = None

    def page_came(self) -> None:
        """The shard can be read: all evidence so far is void."""
        self._absent_since = None

    def is_listing_due(self, now: Instant) -> bool:
        """The service said NotFound: whether to list the shards now. At most once in `apart_s`."""
        listed = self._listed_instant
        return listed is None or now - listed >= self._apart_s

    def is_proven(self, shards: Collection[Shard], now: Instant) -> bool:
        """Take in a complete listing that follows a NotFound: True if the shard was trimmed."""
        self._listed_instant = now
        if not self._shows_trimmed(shards):
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        return self._absent_since is not None and now - self._absent_since >= self._apart_s

    def listing_failed(self, now: Instant) -> None:
        """A listing failed and proves nothing. The next one is due after the same time."""
        self._listed_instant = now

    def _shows_trimmed(self, shards: Collection[Shard]) -> bool:
        mine = self._hash_range
        if any(shard.shard_id == self._shard_id for shard in shards):
            return False
        if is_too_new_for(shards, self._shard_id, mine, self._parents):
            return False
        heirs = [shard for shard in shards if mine is not None and shard.hash_range.overlaps(mine)]
        if any(self._shard_id in shard.parents for shard in shards):
            return True
        return bool(heirs) and all(shard.parents for shard in heirs)
