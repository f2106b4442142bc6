"""The content of one scan, computed once: the rows, the work, the owners, the holes.

Holds facts only; `assignment.py` and `shard_sync.py` draw the conclusions. Rule: one pass over the
rows and nothing quadratic; a table may have 10,000 rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import cached_property
from itertools import compress
from operator import eq
from typing import Final, cast

from kclrun.model.lease import (
    ASK_STALE_AFTER_S,
    LOAD_MEAN_S,
    OFFERED,
    OWNER_PREFIX,
    Handoff,
    Lease,
    LeaseKey,
    OwnerId,
)
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.stream import StreamKey, stream_of
from kclrun.model.time import Instant, WallTime

# From so long after its move on, the load on a row is what its present owner measured: the mean
# over two minutes, and one for the start of a process, for renewals and for the scans that show it.
STEADY_AFTER_S: Final = LOAD_MEAN_S + 60.0


def parent_keys(lease: Lease) -> tuple[LeaseKey, ...]:
    """The keys of the parents' rows, in their order."""
    return tuple(LeaseKey(parent) for parent in sorted(lease.parents))


def have_ended(parents: Iterable[Lease | None]) -> bool:
    """Judge consistent reads: whether every parent's row is SHARD_END, or absent [P11].

    Rule: the rows of a scan only suggest which leases to take. A child is *started* only after
    consistent reads (`ReadParents`), which this function judges.

    An absent parent was never ours to read, or was cleaned up: rows come only from the first
    sync, or together with their parents' [P12].
    """
    return all(parent is None or parent.is_ended for parent in parents)


def seem_over(
    lease: Lease, rows: Mapping[LeaseKey, Lease], broken: Collection[str] = frozenset()
) -> bool:
    """Judge the rows of a scan. A parent whose row cannot be read is not over."""
    for shard_id in lease.parents:
        parent = rows.get(LeaseKey(shard_id))
        if parent is not None:
            if not parent.is_ended:
                return False
        elif shard_id in broken:
            return False
    return True


def is_unowned(owner: OwnerId | None) -> bool:
    """Whether the row has no owner. Unowned and offered rows can be taken and count for no
    owner."""
    return owner is None or owner == OFFERED


class Observation:
    """When the counter of each lease was last seen to move. Expiry is observed, never stored [P9].
    Also the service's clock, as of the last listing.

    Rule: a row that is new to us counts as renewed just now, however old it may be. So a live lease
    never counts as expired.

    One instance for each manager; it grows and shrinks with the table.
    """

    def __init__(self, failover_s: float) -> None:
        self.wall_offset_s = 0.0  # between `now` and the service's clock
        self._failover_s = failover_s
        # As columns, because a scan of 10,000 rows is compared in one pass of C code.
        self._keys: list[LeaseKey] = []
        self._owners: list[OwnerId | None] = []
        self._counters: list[int] = []
        # The last scan, and the rows that it did not show as moved: since when, and whether they
        # have moved before our eyes. All others moved by the last scan.
        self._seen_instant = Instant(0.0)
        self._still: dict[LeaseKey, tuple[Instant, bool]] = {}
        self._asks: dict[LeaseKey, tuple[Handoff, Instant]] = {}
        self._moved: dict[LeaseKey, Instant] = {}  # rows that were new to us, or changed owner

    def update(self, leases: Iterable[Lease], now: Instant) -> None:
        """Take in a whole scan; rows that are not there any more are forgotten.

        `now` is when the scan was over, which is after each row was read. That is safe: a take
        names the counter, so it fails if the owner renewed in between.
        """
        leases = tuple(leases)
        keys = [lease.key for lease in leases]
        owners = [lease.owner for lease in leases]
        counters = [lease.counter for lease in leases]
        before, at = self._still, self._seen_instant
        if self._moved:
            moved = self._moved.items()
            self._moved = {key: at for key, at in moved if now - at < STEADY_AFTER_S}
        if keys == self._keys and owners == self._owners:  # the usual case
            same = list(compress(keys, map(eq, counters, self._counters)))
            self._still = {key: before.get(key, (at, True)) for key in same}
        else:
            self._still = self._compare(keys, owners, counters, now)
        self._keys, self._owners, self._counters = keys, owners, counters
        self._seen_instant = now
        self._asks = self._asked(leases, now)

    def _compare(
        self,
        keys: list[LeaseKey],
        owners: list[OwnerId | None],
        counters: list[int],
        now: Instant,
    ) -> dict[LeaseKey, tuple[Instant, bool]]:
        """The rows that did not move since the last scan, and those that are new. Notes changes of
        the owner, too."""
        before = dict(zip(self._keys, zip(self._owners, self._counters, strict=True), strict=True))
        still: dict[LeaseKey, tuple[Instant, bool]] = {}
        for key, owner, counter in zip(keys, owners, counters, strict=True):
            seen = before.get(key)
            if seen is None or seen[0] != owner:
                self._moved[key] = now
            if seen is None:
                still[key] = (now, False)
            elif seen == (owner, counter):
                still[key] = self._still.get(key, (self._seen_instant, True))
        return still

    def _asked(
        self, leases: tuple[Lease, ...], now: Instant
    ) -> dict[LeaseKey, tuple[Handoff, Instant]]:
        asks: dict[LeaseKey, tuple[Handoff, Instant]] = {}
        for lease in [lease for lease in leases if lease.handoff is not None]:
            asked = self._asks.get(lease.key)
            if asked is None or asked[0] != lease.handoff:
                assert lease.handoff is not None, "chosen by it"
                asked = (lease.handoff, now)
            asks[lease.key] = asked
        return asks

    @property
    def moved(self) -> Set[LeaseKey]:
        """The rows that we saw change their owner, or appear, in the last `STEADY_AFTER_S`."""
        return self._moved.keys()

    def wall_time(self, now: Instant) -> WallTime:
        """The service's clock: for `halted_at`, and for ages."""
        return WallTime(now + self.wall_offset_s)

    def unchanged_s(self, lease: Lease, now: Instant) -> float:
        """How long we have seen this owner and this counter on the row."""
        return now - self._since(lease.key)[0]

    def _since(self, key: LeaseKey) -> tuple[Instant, bool]:
        return self._still.get(key, (self._seen_instant, True))

    def is_seen_alive(self, lease: Lease) -> bool:
        """Whether the row was seen to move: its owner wrote it since our first scan."""
        return self._since(lease.key)[1]

    def is_ask_stale(self, lease: Lease, now: Instant) -> bool:
        """Whether this same ask has stood on this row for 30 s, as far as we have seen [P16].

        The time on the row is never used: hosts with a wrong wall clock must not stop the
        balancing.
        """
        seen = self._asks.get(lease.key)
        return seen is not None and seen[0] == lease.handoff and now - seen[1] >= ASK_STALE_AFTER_S

    def is_asked_for(self, lease: Lease, me: OwnerId, now: Instant) -> bool:
        """Whether another owner than `me`, or an operator, waits for this row [P16]."""
        if lease.handoff is None or lease.handoff.to == me:
            return False
        return not self.is_ask_stale(lease, now)

    def has_expired(self, lease: Lease, now: Instant) -> bool:
        """Whether its counter stood still for a failover: the larger of ours and the row's."""
        failover_s = max(self._failover_s, lease.failover_s or 0.0)
        return self.unchanged_s(lease, now) >= failover_s

    def owners_of_ended(self, ended: Iterable[Lease], now: Instant) -> frozenset[OwnerId]:
        """The owners that wrote an ended row within the last failover, and so are alive without
        work.

        A Java worker renews its ended rows until they are deleted, so each of its rows is judged
        like an unended one. A kclrun owner writes SHARD_END and then leaves the row: only a scan
        that saw the row move proves that the owner lived a failover ago. Otherwise the rows of a
        fleet that was stopped long ago would count as owners for the first failover of every new
        manager.
        """
        owners = set()
        for lease in ended:
            owner = lease.owner
            if owner is None or owner == OFFERED or owner in owners:
                continue
            has_moved = self._since(lease.key)[1]
            may_live = has_moved or not owner.startswith(OWNER_PREFIX)
            if may_live and not self.has_expired(lease, now):
                owners.add(owner)
        return frozenset(owners)

    def expired(self, leases: Iterable[Lease], now: Instant) -> frozenset[LeaseKey]:
        """The keys of those that have expired: `has_expired` for a whole table, in one pass."""
        shortest_s = self._failover_s
        still = {key for key, (at, _) in self._still.items() if now - at >= shortest_s}
        candidates = [lease for lease in leases if lease.key in still] if still else []
        return frozenset(lease.key for lease in candidates if self.has_expired(lease, now))


class TableView:
    """The table as one scan showed it at `seen_instant`.

    `rows` are the readable leases by key, `unended` and `ended` the two parts of them; `broken` are
    the keys of the others. `work` are the unended leases whose parents have ended or are absent.

    `owners` own at least one unexpired lease. `me` is always among them; former owners that are
    proven gone never are. An ended lease counts while its owner is seen to write it. When all
    shards of an owner end at once, as in a doubled stream, the owner holds no work for a moment. If
    it did not count, the first manager to look would take all the children. Owners that own only
    ended leases are `owners_of_ended`. `kclrun_owners` are the owners that are not Java workers.
    `silent` are owners with only expired leases left.
    """

    def __init__(
        self,
        leases: tuple[Lease, ...],
        broken: tuple[str, ...],
        observation: Observation,
        *,
        me: OwnerId,
        gone: Set[OwnerId],
        now: Instant,
    ) -> None:
        self.seen_instant = now
        self.rows: dict[LeaseKey, Lease] = {lease.key: lease for lease in leases}
        self.broken = frozenset(broken)
        self._part(leases)
        rows, unreadable = self.rows, self.broken
        self.work = tuple(
            [
                lease
                for lease in self.unended
                if not lease.parents or seem_over(lease, rows, unreadable)
            ]
        )
        lapsed = observation.expired(self.unended, now)
        named = {lease.owner for lease in self.unended}
        others = cast("set[OwnerId]", named - {None, me, OFFERED})
        expired = set[LeaseKey]()
        if lapsed or not gone.isdisjoint(others):
            expired.update(
                lease.key
                for lease in self.unended
                if lease.owner in others and (lease.key in lapsed or lease.owner in gone)
            )
            renewed = {lease.owner for lease in self.unended if lease.key not in expired}
            others &= renewed
        owners = {me, *others}
        with_ended = observation.owners_of_ended(self.ended, now) - gone
        self.owners_of_ended = frozenset(with_ended - owners)
        self.owners = frozenset(owners | with_ended)
        self.kclrun_owners = frozenset(o for o in self.owners if o.startswith(OWNER_PREFIX))
        self.expired = frozenset(expired)
        owners_expired = (self.rows[key].owner for key in expired)
        self.silent = (
            frozenset(owner for owner in owners_expired if owner is not None) - self.owners
        )

    def _part(self, leases: Iterable[Lease]) -> None:
        """Separate ended leases from unended ones."""
        end = SHARD_END.sequence_number
        leases = tuple(leases)
        ended = tuple([row for row in leases if row.checkpoint.sequence_number == end])
        if ended:
            over = {row.key for row in ended}
            leases = tuple([row for row in leases if row.key not in over])
        self.unended, self.ended = leases, ended

    def by_stream(self, streams: Collection[StreamKey]) -> dict[StreamKey, TableView]:
        """The view of each stream: its rows, work and expired leases. The owners are those of the
        whole table.

        `streams` must contain the streams of all rows.
        """
        if len(streams) == 1:
            return dict.fromkeys(streams, self)
        keys: dict[StreamKey, list[str]] = {stream: [] for stream in streams}
        for key in (*self.rows, *self.broken):
            keys[stream_of(key)].append(key)
        return {stream: self._of_keys(own) for stream, own in keys.items()}

    def _of_keys(self, keys: Iterable[str]) -> TableView:
        view = copy.copy(self)
        view.rows = {LeaseKey(key): self.rows[LeaseKey(key)] for key in keys if key in self.rows}
        view.broken = self.broken.intersection(keys)
        view.expired = self.expired.intersection(view.rows)
        view._part(view.rows.values())  # noqa: SLF001 - a copy of ourselves
        at_work = self.work_keys
        view.work = tuple(lease for lease in view.unended if lease.key in at_work)
        for name in ("work_keys", "asked"):
            view.__dict__.pop(name, None)
        return view

    @cached_property
    def work_keys(self) -> Set[LeaseKey]:
        if len(self.work) == len(self.rows):  # the usual case
            return self.rows.keys()
        return frozenset([lease.key for lease in self.work])

    @cached_property
    def asked(self) -> list[Lease]:
        """The work with a handoff request on its row, stale ones too."""
        return [lease for lease in self.work if lease.handoff is not None]

    @property
    def is_empty(self) -> bool:
        """The table has no row, readable or not: it has never been synced."""
        return not self.rows and not self.broken

    def has_row(self, shard_id: str) -> bool:
        """Whether a row with this key exists, readable or not."""
        return shard_id in self.rows or shard_id in self.broken

    def has_begun(self, shard_ids: Iterable[str]) -> bool:
        """Whether one of these shards has a row that has begun."""
        found = (self.rows.get(LeaseKey(shard_id)) for shard_id in shard_ids)
        return any(row is not None and row.has_begun for row in found)

    def lacks_children(self) -> bool:
        """Whether a row names a child that has no row: a waiting merge, or an end cut short."""
        named = [lease.children for lease in self.rows.values() if lease.children]
        return any(not self.has_row(child) for children in named for child in children)

    def has_hole(self, range_of: Callable[[str], HashRange | None]) -> bool:
        """Whether a hash key belongs to no unended lease. `range_of` helps where a row lacks its
        range.

        A lease without any known range (rows of other KCLs may lack it) leaves a hole, so that the
        shards are listed and its range becomes known.
        """
        return not covers_all_hash_keys(self.hash_ranges(range_of))

    def hash_ranges(self, range_of: Callable[[str], HashRange | None]) -> list[HashRange]:
        """The known ranges of the unended leases, in the order of the rows."""
        ranges = [lease.hash_range or range_of(lease.key) for lease in self.unended]
        return [known for known in ranges if known is not None]


def covers_all_hash_keys(ranges: list[HashRange]) -> bool:
    """Whether the ranges, which may overlap, leave no hash key out."""
    covered_to = -1
    for hash_range in sorted(ranges):
        if hash_range.start > covered_to + 1:
            return False
        covered_to = max(covered_to, hash_range.end)
    return covered_to >= HASH_KEY_MAX


class LastScan:
    """What the last scan showed. `view` is None before the first scan. `began_instant` is when that
    scan began, and `changed_instant` when leases of ours were last created or ended."""

    def __init__(self) -> None:
        self.view: TableView | None = None
        self.began_instant = self.changed_instant = Instant(float("-inf"))
