"""The lease manager's one `handle`: events in, commands out.

Knows: the rhythm of scans and listings, and when all is given up. What it holds is `keeping.py`'s,
what it takes and asks for `balancing.py`'s, what it creates and deletes `audits.py`'s.
May not know: clocks, chance, threads, DynamoDB, pids; `now` and `chance` are arguments.
Rule: every command's outcome comes back as an event, whatever the outcome.

    Started ─► ScanTable ─► LeasesScanned ─┬─► takes, asks, deletes
                   ▲                       └─► ListShards ─► ShardsListed ─► creates
                   │                                                             │
                   └── every half failover; at once after a creation, ───────────┘
                       a shard end, a former owner's proven death
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from kclrun.errors import InvariantViolation
from kclrun.leases import caught_up
from kclrun.leases.audits import Audits
from kclrun.leases.balancing import Balancer
from kclrun.leases.commands import Command, Finish, ListShards, Note, ScanTable
from kclrun.leases.custody import Custody, State
from kclrun.leases.events import (
    DrainRequested,
    Event,
    FormerOwnersProvenGone,
    LeasesScanned,
    OffersFound,
    ParentsRead,
    ProcessReport,
    RowRead,
    ShardEnded,
    ShardsListed,
    Started,
    Ticked,
    WriteResolved,
)
from kclrun.leases.keeping import Keeper
from kclrun.leases.observation import Observation
from kclrun.leases.pacing import Pace, lists_shards, scan_delay_s
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import TableView
from kclrun.leases.totals import TableTotals
from kclrun.model.changes import Ask, Offer, keys_of
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.stream_key import StreamKey
from kclrun.model.time import Instant, WallTime

__all__ = ["SCAN_GAP_MIN_S", "LeaseManager"]

# Shard ends, creations and the like ask for a scan at once, but never for more than four a second:
# a stream of 500 shards that all split would else cost a scan for each of them.
SCAN_GAP_MIN_S: Final = 0.25
# Managers that find the table empty look again after a random wait before they list and create, so
# that of those that start together one does and the others see its rows. P10 wants a second for
# 100 owners, but an empty table cannot say how many there are: this is enough for 30, a person does
# not notice it, and more managers than that only send some creations that do not apply.
_EMPTY_TABLE_WAIT_MAX_S: Final = 0.3
# So many scans in haste until the manager came to rest once: takes double from 8, so that 2,048
# leases are had by then. More would only load a table that throttles the takes.
_HASTY_SCANS_MAX: Final = 8


class LeaseManager:
    """All that one manager decides. `chance` gives numbers in [0, 1), as `random.random` does."""

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._out: list[Command] = []
        self._observation = Observation(policy.failover_s)
        is_stale = self._observation.is_ask_stale
        self._keeper = Keeper(policy, chance, self._out, self._wall, is_stale)
        self._audits = Audits(policy, self._out, self._keeper.custodies.__contains__)
        self._view: TableView | None = None
        self._gone: frozenset[OwnerId] = frozenset()
        self._gone_before_scan: frozenset[OwnerId] = frozenset()
        self._children_of_mine: dict[LeaseKey, Instant] = {}  # and when their parent ended
        self._balancer = Balancer(
            policy,
            self._out,
            self._keeper,
            self._observation,
            chance=chance,
            wall=self._wall,
            is_free=self._is_free,
            children=self._children_of_mine.keys(),
        )
        self._wall_offset_s = 0.0
        self._scan_instant: Instant | None = None
        self._scanned_instant = Instant(float("-inf"))  # when the last scan began
        self._viewed_instant = self._changed_instant = self._scanned_instant
        self._is_scanning = self._is_finished = self._has_waited = False
        self._lacks_phase = True
        self._hasty_scans = 0
        self._listing: set[StreamKey] = set()
        self._handlers: Mapping[type[Event], Callable[[Any, Instant], None]] = {
            Started: self._on_started,
            Ticked: lambda _, now: self._keeper.tick(now),
            LeasesScanned: self._on_scanned,
            ShardsListed: self._on_listed,
            WriteResolved: self._on_write,
            RowRead: self._keeper.on_row,
            ParentsRead: self._keeper.on_parents,
            OffersFound: self._balancer.on_offers,
            FormerOwnersProvenGone: self._on_proven_gone,
            DrainRequested: self._on_drain,
            **dict.fromkeys(get_args(ProcessReport), self._keeper.on_report),
            ShardEnded: self._on_shard_ended,
        }

    def handle(self, event: Event, now: Instant) -> tuple[Command, ...]:
        """Take in what happened; say what to do next.

        After `Finish` every event is ignored: what still arrives are scans and reads under way.
        Raises: InvariantViolation for an event that cannot happen in the state we are in.
        """
        if self._is_finished:
            return ()
        self._handlers[type(event)](event, now)
        self._balancer.tick(now)
        self._scan_when_due(now)
        self._finish_when_empty()
        commands = tuple(self._out)
        self._out.clear()
        return commands

    def next_deadline(self, now: Instant) -> Instant:
        """When `Ticked` is due at the latest; an earlier one does no harm."""
        candidates = [
            self._keeper.deadline(now),
            self._balancer.deadline(),
            Instant(now + self._policy.failover_s),
        ]
        if not self._is_scanning and not self.is_draining:
            candidates.append(self._scan_instant)
        return Instant(max(now, min(instant for instant in candidates if instant is not None)))

    def check(self) -> None:
        """The invariants over everything held; raises InvariantViolation. Cheap: run it often."""
        custodies = self._keeper.custodies
        for key, custody in custodies.items():
            custody.check()
            if custody.key != key:
                raise InvariantViolation(f"lease {key} is kept as {custody.key}")
        for key in self._audits.keys_under_way():
            if key in custodies:
                raise InvariantViolation(f"lease {key} has two writers among us")
        if self._is_finished and (self._keeper.custodies or self._audits.has_writes_under_way):
            raise InvariantViolation("finished with leases or writes of ours left")

    @property
    def is_draining(self) -> bool:
        return self._keeper.is_draining

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def leases(self) -> Mapping[LeaseKey, Lease]:
        """The readable rows of our streams at the last scan; empty before the first."""
        return self._view.rows if self._view is not None else {}

    @property
    def owners(self) -> frozenset[OwnerId]:
        """Who owned at least one live lease at the last scan, and we ourselves."""
        return self._view.owners if self._view is not None else frozenset({self._policy.me})

    def totals(self) -> TableTotals | None:
        """What the last scan and listing counted, for metrics; None before the first scan."""
        return self._audits.totals() if self._view is not None else None

    def custody(self, key: LeaseKey) -> Custody | None:
        """One lease in our hands, to look at; None if it is not."""
        return self._keeper.custodies.get(key)

    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return self._keeper.held

    def halted(self) -> tuple[LeaseKey, ...]:
        """Ours, and standing still until an operator resumes them."""
        return tuple(c.key for c in self._keeper.custodies.values() if c.state is State.HALTED)

    def caught_up_blockers(self) -> tuple[str, ...]:
        """Why this manager is not caught up, in words; empty when every lease runs or ended.

        Whether the running ones are at the tip of their shards is the shell's to ask them.
        """
        if self._view is None or not self._audits.have_synced:
            return ("the first scan and the first listing are not over",)
        if self._audits.is_creating or self._viewed_instant < self._changed_instant:
            return ("leases were created or ended since the last scan",)
        if self._children_of_mine:
            children = ", ".join(sorted(self._children_of_mine)[:5])
            return (f"children of a shard that just ended are not taken yet: {children}",)
        return caught_up.blockers(self._view, self._keeper.custodies, self._policy.me)

    # Events, in the order of a manager's life.

    def _on_started(self, event: Started, now: Instant) -> None:
        self._wall_offset_s = event.started_at - now
        self._ask_scan(now)

    def _on_scanned(self, event: LeasesScanned, now: Instant) -> None:
        self._is_scanning = False
        self._viewed_instant = self._scanned_instant
        ours = self._audits.of_ours(event)
        self._observation.update(ours.leases, now)
        view = self._view = TableView(
            ours.leases,
            ours.broken,
            self._observation,
            me=self._policy.me,
            gone=self._gone_before_scan,
            now=now,
        )
        self._audits.see(view)
        self._adopt_strays(view, now)
        self._keeper.hint_parents(view.rows, view.broken, now)
        if self.is_draining:
            return
        pace = self._balancer.after_scan(view, self._scanned_instant, self._gone_before_scan)
        self._plan_next_scan(view, pace, now)
        self._forget_children(view)
        self._audits.after_scan(view)
        self._list_when_due(view, now)
        self.check()

    def _on_listed(self, event: ShardsListed, now: Instant) -> None:
        self._listing.discard(event.stream)
        self._wall_offset_s = event.listed_at - now
        if self.is_draining or self._view is None:
            return
        if self._audits.after_listing(event, now):
            self._ask_scan(Instant(now + 1.0))  # the Java KCL's pause between its three tries

    def _on_write(self, event: WriteResolved, now: Instant) -> None:
        change = event.change
        if isinstance(change, Ask):
            self._balancer.on_ask(change, event, now)
            return
        if isinstance(change, Offer) and change.owner != self._policy.me:
            self._balancer.on_passed_on(change, event)
            return
        custody = self._keeper.custodies.get(keys_of(change)[0])
        if custody is not None:
            self._keeper.on_write(event, custody, now)
        elif self._audits.resolved(event):
            self._changed_instant = now
            self._ask_scan(now)

    def _on_proven_gone(self, event: FormerOwnersProvenGone, now: Instant) -> None:
        """Only a scan that begins after the proof may show what they left [N5]."""
        self._gone |= event.owners
        self._ask_scan(now)

    def _on_shard_ended(self, event: ShardEnded, now: Instant) -> None:
        self._keeper.on_report(event, now)
        self._keeper.hint_ended(event.key, now)
        self._children_of_mine.update((LeaseKey(child), now) for child in event.children)
        self._forget_children(None)
        self._changed_instant = now
        self._ask_scan(now)

    def _on_drain(self, event: DrainRequested, now: Instant) -> None:
        if not self.is_draining:
            self._out.append(Note("draining", fields={"reason": event.reason}))
            self._balancer.drain()
            self._keeper.drain(event.reason, now)

    # What follows from them.

    def _adopt_strays(self, view: TableView, now: Instant) -> None:
        """Rows that say me and are not in our hands, but for those that a KCL 3 leader gave us
        and their former owner still works on, until it has stopped renewing [R8]."""
        me = self._policy.me
        for lease in view.unended:
            if lease.owner == me and self._is_free(lease.key):
                is_free = lease.checkpoint_owner is None
                if is_free or self._observation.has_expired(lease, now):
                    self._keeper.adopt(lease.key, now)

    def _is_free(self, key: LeaseKey) -> bool:
        """Not in our hands, and of a stream we read: the owner index is of the whole table."""
        if key in self._keeper.custodies or not self._audits.is_ours(key):
            return False
        return not (self._audits.is_writing(key) or self._balancer.is_writing(key))

    def _forget_children(self, view: TableView | None) -> None:
        """Those that are in our hands, somebody else's, or over need no preference any more.

        A scan that began before their parent ended cannot know them, and says nothing.
        """
        for key, ended_instant in tuple(self._children_of_mine.items()):
            row = view.rows.get(key) if view is not None else None
            is_known = view is not None and self._scanned_instant >= ended_instant
            is_over = row is None or row.is_ended or row.owner in self.owners
            if key in self._keeper.custodies or (is_known and is_over):
                del self._children_of_mine[key]

    def _list_when_due(self, view: TableView, now: Instant) -> None:
        streams = self._policy.streams
        empty = {stream for stream in streams if self._audits.view_of(stream).is_empty}
        is_first = not self._has_waited
        self._has_waited = True
        if empty and is_first:
            self._scan_instant = Instant(now + _EMPTY_TABLE_WAIT_MAX_S * self._chance())
            return
        for stream in streams:
            if stream in self._listing:
                continue
            is_our_turn = lists_shards(len(view.kclrun_owners), self._chance())
            if is_our_turn or self._audits.needs_listing(stream):
                self._listing.add(stream)
                self._out.append(ListShards(with_start=stream in empty, stream=stream))

    def _plan_next_scan(self, view: TableView, pace: Pace, now: Instant) -> None:
        """Fixed delay after each scan. The first that is not in haste is cut short at random, for
        the phase: managers that grab together would else look together for ever."""
        if pace is Pace.GRAB and self._hasty_scans == _HASTY_SCANS_MAX:
            pace = Pace.MOVE
        delay_s = scan_delay_s(self._policy, view.kclrun_owners, pace)
        if pace is Pace.GRAB:
            self._lacks_phase = True
            self._hasty_scans += 1
        elif self._lacks_phase:
            self._lacks_phase = False
            delay_s *= self._chance()
        if pace is Pace.REST:
            self._hasty_scans = 0
        planned = Instant(now + delay_s)
        asked = self._scan_instant
        self._scan_instant = planned if asked is None else min(asked, planned)

    def _ask_scan(self, at: Instant) -> None:
        """A scan that begins at `at` or soon after; one under way began too early to count."""
        earliest = Instant(max(at, self._scanned_instant + SCAN_GAP_MIN_S))
        asked = self._scan_instant
        self._scan_instant = earliest if asked is None else min(asked, earliest)

    def _scan_when_due(self, now: Instant) -> None:
        if self._is_scanning or self.is_draining or self._scan_instant is None:
            return
        if now >= self._scan_instant:
            self._is_scanning = True
            self._scan_instant = None
            self._scanned_instant = now
            self._gone_before_scan = self._gone
            self._out.append(ScanTable())

    def _finish_when_empty(self) -> None:
        if not self.is_draining or self._keeper.custodies:
            return
        if not (self._audits.has_writes_under_way or self._balancer.has_writes_under_way):
            self._is_finished = True
            self._out.append(Finish())

    def _wall(self, now: Instant) -> WallTime:
        """The service's clock as the last listing showed it, for `halted_at`."""
        return WallTime(now + self._wall_offset_s)
