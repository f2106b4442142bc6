"""The lease manager's one `handle`: events in, commands out.

Knows: the rhythm of scans and listings, and when every lease is given up. `held_leases.py` decides
about held leases, `balancing.py` about takes and asks, `auditing.py` about creations and deletions.
Must not know: clocks, chance, threads, DynamoDB, pids; `now` and `chance` are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from kclrun.errors import InvariantViolation
from kclrun.leases.auditing import Audits
from kclrun.leases.balancing import Balancer
from kclrun.leases.commands import Command, Finish, ListShards, Note, ScanTable, StopRefused
from kclrun.leases.events import (
    DrainRequested,
    Event,
    FormerOwnersProvenGone,
    Kcl3ModeRead,
    Kcl3ModeUnreadable,
    LeasesScanned,
    OffersFound,
    ParentsRead,
    ProcessReport,
    RowRead,
    RowUnreadable,
    ShardEnded,
    ShardsListed,
    Started,
    StreamDescribed,
    Ticked,
    WriteResolved,
)
from kclrun.leases.explaining import ModeWatch
from kclrun.leases.held_lease import HeldLease, Places, State
from kclrun.leases.held_leases import HeldLeases, blockers
from kclrun.leases.policy import ManagerPolicy, Pace, is_seldom, lists_shards, scan_delay_s
from kclrun.leases.shard_sync import TableTotals
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import Ask, Decline, Offer, Withdraw, keys_of

# Shard ends, creations and similar events request a scan at once, but at most four a second: a
# stream of 500 shards that all split would otherwise cost a scan for each of them.
SCAN_GAP_MIN_S: Final = 0.25
# Managers that find the table empty scan again after a random wait before they list and create. So
# of several managers that start together one creates, and the others see its rows. P10 wants a
# second for 100 owners, but an empty table does not show how many there are. This wait is enough
# for 30, and a person does not notice it. Larger fleets only send some creations that do not apply.
_EMPTY_TABLE_WAIT_MAX_S: Final = 0.3
# At most so many hasty scans until the manager came to rest once. Takes double from 8, so 2,048
# leases are taken by then. More scans would only load a table that throttles the takes.
_HASTY_SCANS_MAX: Final = 8


class LeaseManager:
    """All decisions of one manager. `chance` gives numbers in [0, 1), as `random.random` does.

    Rule: the outcome of every command comes back as an event, whatever the outcome.

        Started ─► ScanTable ─► LeasesScanned ─┬─► takes, asks, deletes
                       ▲                       └─► ListShards ─► ShardsListed ─► creates
                       │                                                             │
                       └── every half failover; at once after a creation, ───────────┘
                           a shard end, a former owner's proven death
    """

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._out: list[Command] = []
        self._observation = Observation(policy.failover_s)
        is_stale = self._observation.is_ask_stale
        self._held = HeldLeases(policy, chance, self._out, self.wall_time, is_stale)
        self._audits = Audits(policy, self._out, self._held.held_leases.__contains__)
        self._view: TableView | None = None
        self._gone: frozenset[OwnerId] = frozenset()
        self._gone_before_scan: frozenset[OwnerId] = frozenset()
        self._children_of_mine: dict[LeaseKey, Instant] = {}  # the value: when their parent ended
        self._balancer = Balancer(
            policy,
            self._out,
            self._held,
            self._observation,
            chance=chance,
            wall=self.wall_time,
            is_free=self._is_free,
            children=self._children_of_mine.keys(),
        )
        self._wall_offset_s = 0.0
        self._modes = ModeWatch(policy, self._out, chance)
        self._scan_instant: Instant | None = None
        self._scanned_instant = Instant(float("-inf"))  # when the last scan began
        self._viewed_instant = self._changed_instant = self._scanned_instant
        self._is_scanning = self._is_finished = self._has_waited = self._is_refused = False
        self._lacks_phase = True
        self._may_be_old = False  # whether the next scan may be eventually consistent
        self._hasty_scans = 0
        self._listing: set[StreamKey] = set()
        self._handlers: Mapping[type[Event], Callable[[Any, Instant], None]] = {
            Started: self._on_started,
            Ticked: lambda _, now: self._held.tick(now),
            LeasesScanned: self._on_scanned,
            ShardsListed: self._on_listed,
            StreamDescribed: self._on_described,
            Kcl3ModeRead: lambda event, _: self._modes.read(event),
            Kcl3ModeUnreadable: lambda event, _: self._modes.unreadable(event),
            WriteResolved: self._on_write,
            RowRead: self._held.on_row,
            RowUnreadable: self._held.on_unreadable,
            ParentsRead: self._held.on_parents,
            OffersFound: self._on_offers,
            FormerOwnersProvenGone: self._on_proven_gone,
            DrainRequested: self._on_drain,
            **dict.fromkeys(get_args(ProcessReport), self._held.on_report),
            ShardEnded: self._on_shard_ended,
        }

    def handle(self, event: Event, now: Instant) -> tuple[Command, ...]:
        """Take in an event and return the commands that follow.

        After `Finish` every event is ignored: only scans and reads under way still arrive.
        Raises: InvariantViolation for an event that cannot happen in the current state.
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
        """When `Ticked` is due at the latest. An earlier one does no harm."""
        candidates = [
            self._held.deadline(now),
            self._balancer.deadline(),
            Instant(now + self._policy.failover_s),
        ]
        if not self._is_scanning and not self.is_draining:
            candidates.append(self._scan_instant)
        return Instant(max(now, min(instant for instant in candidates if instant is not None)))

    def check(self) -> None:
        """Check all invariants. Raises: InvariantViolation. Cheap: run it often."""
        held_leases = self._held.held_leases
        for key, held_lease in held_leases.items():
            held_lease.check()
            if held_lease.key != key:
                raise InvariantViolation(f"lease {key} is kept as {held_lease.key}")
        for key in self._audits.keys_under_way():
            if key in held_leases:
                raise InvariantViolation(f"lease {key} has two writers among us")
        if self._is_finished and (self._held.held_leases or self._audits.has_writes_under_way):
            raise InvariantViolation("finished with leases or writes of ours left")

    @property
    def is_draining(self) -> bool:
        return self._held.is_draining

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def leases(self) -> Mapping[LeaseKey, Lease]:
        """The readable rows of our streams at the last scan; empty before the first."""
        return self._view.rows if self._view is not None else {}

    @property
    def owners(self) -> frozenset[OwnerId]:
        """The owners of at least one live lease at the last scan, and this manager."""
        return self._view.owners if self._view is not None else frozenset({self._policy.me})

    @property
    def native_mode(self) -> str | None:
        """The mode of a KCL 3 fleet that assigns the leases of this table, as last seen."""
        return self._modes.native

    def totals(self) -> TableTotals | None:
        """The counts of the last scan and listing, for metrics; None before the first scan."""
        return self._audits.totals() if self._view is not None else None

    def held_lease(self, key: LeaseKey) -> HeldLease | None:
        """The state of one held lease, to look at; None if this manager does not hold the lease."""
        return self._held.held_leases.get(key)

    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return self._held.held

    @property
    def host_places(self) -> Places:
        """How many leases our host proves able to run."""
        return self._held.host_places

    def halted(self) -> tuple[LeaseKey, ...]:
        """Our leases that stand still until an operator resumes them."""
        return tuple(c.key for c in self._held.held_leases.values() if c.state is State.HALTED)

    def caught_up_blockers(self) -> tuple[str, ...]:
        """Why this manager is not caught up, in words; empty when every lease runs or ended.

        The shell checks whether the running leases are at the tip of their shards.
        """
        if self._view is None or not self._audits.have_synced:
            return ("the first scan and the first listing are not over",)
        if self._audits.is_creating or self._viewed_instant < self._changed_instant:
            return ("leases were created or ended since the last scan",)
        if self._children_of_mine:
            children = ", ".join(sorted(self._children_of_mine)[:5])
            return (f"children of a shard that just ended are not taken yet: {children}",)
        return blockers(self._view, self._held.held_leases, self._policy.me)

    # Events, in the order of a manager's life.

    def _on_started(self, event: Started, now: Instant) -> None:
        self._wall_offset_s = event.started_at - now
        self._ask_scan(now)

    def _on_scanned(self, event: LeasesScanned, now: Instant) -> None:
        self._is_scanning = False
        self._viewed_instant = self._scanned_instant
        ours = self._audits.of_ours(event)
        self._modes.scanned(event.kcl3_mode)
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
        if self._is_refusing(self._audits.why_refused()):
            return
        self._adopt_strays(view, now)
        self._held.hint_parents(view.rows, view.broken, now)
        if self.is_draining:
            return
        pace = self._balancer.after_scan(view, self._scanned_instant, self._gone_before_scan)
        self._plan_next_scan(view, pace, now)
        self._forget_children(view)
        self._audits.after_scan(view)
        self._list_when_due(view, now)
        self._modes.read_when_due(view.kclrun_owners, now)
        self.check()

    def _on_listed(self, event: ShardsListed, now: Instant) -> None:
        self._listing.discard(event.stream)
        self._wall_offset_s = event.listed_at - now
        if self.is_draining or self._is_refused or self._view is None:
            return
        if self._audits.after_listing(event, now):
            self._ask_scan(Instant(now + 1.0))  # the Java KCL's pause between its three tries

    def _on_described(self, event: StreamDescribed, _: Instant) -> None:
        if not self.is_draining:
            self._is_refusing(self._audits.why_stream_is_refused(event))

    def _is_refusing(self, why: str | None) -> bool:
        """Whether reading stops because the stream is not the one that the rows belong to [P13].
        Logged once. The drain that follows gives up our leases."""
        if why is not None and not self._is_refused and not self.is_draining:
            self._is_refused = True
            self._out.append(Note("stream_recreated", "error", fields={"detail": why}))
            self._out.append(StopRefused("the stream was deleted and made again"))
        return self._is_refused and not self.is_draining

    def _on_write(self, event: WriteResolved, now: Instant) -> None:
        change = event.change
        if isinstance(change, Ask):
            self._balancer.on_ask(change, event, now)
            return
        if isinstance(change, Withdraw | Decline):
            self._balancer.on_ask_ended(change, event)
            return
        if isinstance(change, Offer) and change.owner != self._policy.me:
            self._balancer.on_passed_on(change, event)
            return
        held_lease = self._held.held_leases.get(keys_of(change)[0])
        if held_lease is not None:
            self._held.on_write(event, held_lease, now)
        elif self._audits.resolved(event):
            self._changed_instant = now
            self._ask_scan(now)

    def _on_offers(self, event: OffersFound, now: Instant) -> None:
        if self._balancer.on_offers(event, now):
            self._ask_scan(now)

    def _on_proven_gone(self, event: FormerOwnersProvenGone, now: Instant) -> None:
        """Former owners are proven gone. Only a scan that begins after the proof counts [N5]."""
        self._gone |= event.owners
        self._ask_scan(now)

    def _on_shard_ended(self, event: ShardEnded, now: Instant) -> None:
        self._held.on_report(event, now)
        self._held.hint_ended(event.key, now)
        self._children_of_mine.update((LeaseKey(child), now) for child in event.children)
        self._forget_children(None)
        self._changed_instant = now
        self._ask_scan(now)

    def _on_drain(self, event: DrainRequested, now: Instant) -> None:
        if not self.is_draining:
            self._out.append(Note("draining", fields={"reason": event.reason}))
            self._balancer.drain()
            self._held.drain(event.reason, now)

    # Consequences of the events.

    def _adopt_strays(self, view: TableView, now: Instant) -> None:
        """Adopt rows that name us as owner and that we do not hold. A row that a KCL 3 leader gave
        us, and that its former owner still works on, waits until that owner has stopped renewing
        [R8]."""
        me = self._policy.me
        for lease in view.unended:
            if lease.owner == me and self._is_free(lease.key):
                is_free = lease.checkpoint_owner is None
                if is_free or self._observation.has_expired(lease, now):
                    self._held.adopt(lease.key, now)

    def _is_free(self, key: LeaseKey) -> bool:
        """Whether the row is not held, not being written, and of a stream that we read. The owner
        index covers the whole table."""
        if key in self._held.held_leases or not self._audits.is_ours(key):
            return False
        return not (self._audits.is_writing(key) or self._balancer.is_writing(key))

    def _forget_children(self, view: TableView | None) -> None:
        """Drop children that we hold, that another owner holds, or that have ended: they need no
        preference any more.

        A scan that began before their parent ended does not count, because it cannot show them.
        """
        for key, ended_instant in tuple(self._children_of_mine.items()):
            row = view.rows.get(key) if view is not None else None
            is_known = view is not None and self._scanned_instant >= ended_instant
            is_over = row is None or row.is_ended or row.owner in self.owners
            if key in self._held.held_leases or (is_known and is_over):
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
            is_needed = self._audits.needs_listing(stream)
            chance, owners = self._chance(), view.kclrun_owners
            is_our_turn = lists_shards(self._policy, owners, chance, is_needed=is_needed)
            if is_our_turn:
                self._listing.add(stream)
                self._out.append(ListShards(with_start=stream in empty, stream=stream))

    def _plan_next_scan(self, view: TableView, pace: Pace, now: Instant) -> None:
        """Plan the next scan: a fixed delay after each scan. The first scan that is not hasty is
        cut short at random, to spread the phases: managers that take together would otherwise scan
        together for ever."""
        if pace is Pace.FAST and self._hasty_scans == _HASTY_SCANS_MAX:
            pace = Pace.MOVE
        delay_s = scan_delay_s(self._policy, view.kclrun_owners, pace)
        if pace is Pace.FAST:
            self._lacks_phase = True
            self._hasty_scans += 1
        elif self._lacks_phase:
            self._lacks_phase = False
            delay_s *= self._chance()
        if pace is Pace.REST:
            self._hasty_scans = 0
        planned = Instant(now + delay_s)
        asked = self._scan_instant
        if asked is None or planned < asked:
            self._scan_instant = planned
            self._may_be_old = pace is Pace.REST and is_seldom(self._policy, view.kclrun_owners)

    def _ask_scan(self, at: Instant) -> None:
        """Request a scan that begins at `at` or soon after. A scan under way began too early."""
        self._may_be_old = False
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
            self._out.append(ScanTable(consistent=not self._may_be_old))

    def _finish_when_empty(self) -> None:
        if not self.is_draining or self._held.held_leases:
            return
        if not (self._audits.has_writes_under_way or self._balancer.has_writes_under_way):
            self._is_finished = True
            self._out.append(Finish())

    def wall_time(self, now: Instant) -> WallTime:
        """The service's clock as of the last listing: for `halted_at`, and for ages."""
        return WallTime(now + self._wall_offset_s)
