"""The lease manager's one `handle`: events in, commands out.

Knows: the rhythm of scans and listings, and when every lease is given up. `held_leases.py` decides
about held leases, `balancing.py` about takes and asks, `auditing.py` about creations and deletions.
Must not know: clocks, chance, threads, DynamoDB, pids; `now` and `chance` are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, Final, get_args

from kclrun.errors import InvariantViolation
from kclrun.leases import events
from kclrun.leases.auditing import Audits
from kclrun.leases.balancing import Balancer
from kclrun.leases.caught_up import CaughtUp
from kclrun.leases.commands import (
    Command,
    Finish,
    ListShards,
    Note,
    ReadKcl3Mode,
    ScanTable,
    StopRefused,
)
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.policy import (
    ManagerPolicy,
    ScanPace,
    is_seldom,
    kcl3_mode_every_s,
    lists_shards,
    scan_delay_s,
)
from kclrun.leases.shard_sync import TableTotals
from kclrun.leases.table_view import LastScan, Observation, TableView
from kclrun.model.lease import (
    OWNER_PREFIX,
    Lease,
    LeaseKey,
    OwnerId,
    is_native,
    mode_advice,
)
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.reports import ShardEnded
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


class ModeWatch:
    """The mode of a KCL 3 fleet beside us [P8], from both places that may hold one: the lease
    table, which each scan shows, and the table of the early versions, which the fleet as a whole
    reads once a minute. A mode in the lease table counts before the other, as at the start."""

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._in_table: str | None = None
        self._elsewhere: str | None = None
        self._has_java = True  # until a scan shows otherwise
        self._reported_mode: str | None = None
        self._has_reported_java = True
        self._reads = policy.reads_kcl3_mode
        self._is_reading = False
        self._read_instant: Instant | None = None

    @property
    def native(self) -> str | None:
        """The state in which a KCL 3 leader assigns the leases, where it does."""
        mode = self._in_table if self._in_table is not None else self._elsewhere
        return mode if is_native(mode) else None

    def scanned(self, mode: str | None, owners: Collection[OwnerId]) -> list[Command]:
        """Take in the mode in the lease table, and the live owners, as the scan shows them."""
        self._in_table = mode
        self._has_java = not all(owner.startswith(OWNER_PREFIX) for owner in owners)
        return self._log_change()

    def on_read(self, event: events.Kcl3ModeRead, _: Instant) -> list[Command]:
        """Take in the mode in the other table."""
        self._is_reading = False
        self._elsewhere = event.mode
        return self._log_change()

    def on_unreadable(self, event: events.Kcl3ModeUnreadable, _: Instant) -> list[Command]:
        """We may not read the other table: logged once, and never read again."""
        self._reads = False
        return [Note("kcl3_mode_unreadable", fields={"reason": event.reason})]

    def read_when_due(self, owners: Collection[OwnerId], now: Instant) -> list[Command]:
        """Request a read if it is due. Called after a scan that shows these live kclrun owners. The
        start has just read the mode, so the first read is a random part of the interval later:
        managers that start together take turns.
        """
        if not self._reads or self._is_reading or is_seldom(self._policy, owners):
            return []
        every_s = kcl3_mode_every_s(owners)
        if self._read_instant is None:
            self._read_instant = Instant(now + every_s * self._chance())
        elif now >= self._read_instant:
            self._read_instant = Instant(now + every_s)
            self._is_reading = True
            return [ReadKcl3Mode()]
        return []

    def _log_change(self) -> list[Command]:
        """Log once for each change, and once more when the last Java worker has gone. In a native
        mode our leases stay ours while we renew them, Java workers get nothing, and the next kclrun
        to start is refused."""
        native = self.native
        is_new_advice = native is not None and self._has_reported_java and not self._has_java
        if native == self._reported_mode and not is_new_advice:
            return []
        self._reported_mode, self._has_reported_java = native, self._has_java
        if native is None:
            return []
        advice = mode_advice(native, has_java=self._has_java)
        fields = {"what": str([native]), "reason": advice}
        return [Note("kcl3_native", "error", fields={**fields})]


class ScanPlan:
    """When the table is scanned: a fixed delay after each scan, and at once where an event asks for
    it. `instant` is when the next scan is due, `began_instant` when the last one began. `gone` are
    the former owners proven gone, and `gone_before` those of them when the last scan began."""

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self.instant: Instant | None = None
        self.began_instant = Instant(float("-inf"))
        self.is_under_way = False
        self.gone: frozenset[OwnerId] = frozenset()
        self.gone_before: frozenset[OwnerId] = frozenset()
        self._policy = policy
        self._chance = chance
        self._lacks_phase = True
        self._may_be_old = False  # whether the next scan may be eventually consistent
        self._hasty_scans = 0

    def ask(self, at: Instant) -> None:
        """Request a scan that begins at `at` or soon after. A scan under way began too early."""
        self._may_be_old = False
        earliest = Instant(max(at, self.began_instant + SCAN_GAP_MIN_S))
        self.instant = earliest if self.instant is None else min(self.instant, earliest)

    def plan_next(self, owners: Collection[OwnerId], pace: ScanPace, now: Instant) -> None:
        """Plan the next scan, after one that shows these live kclrun owners. The first scan that is
        not hasty is cut short at random, to spread the phases: managers that take together would
        otherwise scan together for ever."""
        if pace is ScanPace.FAST and self._hasty_scans == _HASTY_SCANS_MAX:
            pace = ScanPace.MOVE
        delay_s = scan_delay_s(self._policy, owners, pace)
        if pace is ScanPace.FAST:
            self._lacks_phase = True
            self._hasty_scans += 1
        elif self._lacks_phase:
            self._lacks_phase = False
            delay_s *= self._chance()
        if pace is ScanPace.REST:
            self._hasty_scans = 0
        planned = Instant(now + delay_s)
        if self.instant is None or planned < self.instant:
            self.instant = planned
            self._may_be_old = pace is ScanPace.REST and is_seldom(self._policy, owners)

    def begin_when_due(self, now: Instant) -> list[Command]:
        """Begin the scan if it is due."""
        if self.is_under_way or self.instant is None or now < self.instant:
            return []
        self.is_under_way = True
        self.instant = None
        self.began_instant = now
        self.gone_before = self.gone
        return [ScanTable(consistent=not self._may_be_old)]


class ListingPlan:
    """Which streams are listed after a scan [P10]."""

    def __init__(
        self, policy: ManagerPolicy, chance: Callable[[], float], audits: Audits, scans: ScanPlan
    ) -> None:
        self._policy = policy
        self._chance = chance
        self._audits = audits
        self._scans = scans
        self._has_waited = False
        self._under_way: set[StreamKey] = set()

    def listed(self, stream: StreamKey) -> None:
        """A listing is answered."""
        self._under_way.discard(stream)

    def list_when_due(self, view: TableView, now: Instant) -> list[Command]:
        """The listings that begin now; the first manager of an empty table waits for others."""
        empty = self._audits.empty_streams()
        is_first = not self._has_waited
        self._has_waited = True
        if empty and is_first:
            self._scans.instant = Instant(now + _EMPTY_TABLE_WAIT_MAX_S * self._chance())
            return []
        commands: list[Command] = []
        for stream in self._policy.streams:
            if stream in self._under_way:
                continue
            is_needed = self._audits.needs_listing(stream)
            chance, owners = self._chance(), view.kclrun_owners
            if lists_shards(self._policy, owners, chance, is_needed=is_needed):
                self._under_way.add(stream)
                commands.append(ListShards(with_start=stream in empty, stream=stream))
        return commands


class ChildrenOfMine:
    """The children of shards that ended here, as long as no owner is known to have them. The values
    of `ended_instants` are when their parent ended."""

    def __init__(self, held: Container[LeaseKey]) -> None:
        self.ended_instants: dict[LeaseKey, Instant] = {}
        self._held = held

    def add(self, children: Iterable[str], now: Instant) -> None:
        """A shard with these children ended here. Those that we hold already are not added."""
        keys = (LeaseKey(child) for child in children)
        self.ended_instants.update((key, now) for key in keys if key not in self._held)

    def forget(self, view: TableView, began_instant: Instant) -> None:
        """Drop children that we hold, that another owner holds, or that have ended, as a scan
        shows: they need no preference any more.

        A scan that began before their parent ended does not count, because it cannot show them.
        """
        for key, ended_instant in tuple(self.ended_instants.items()):
            row = view.rows.get(key)
            is_over = row is None or row.is_ended or row.owner in view.owners
            if key in self._held or (began_instant >= ended_instant and is_over):
                del self.ended_instants[key]


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
        self._observation = Observation(policy.failover_s)
        self._held = HeldLeases(policy, chance, self._observation)
        self._audits = Audits(policy, self._held.held_leases)
        self._seen = LastScan()
        self._scans = ScanPlan(policy, chance)
        self._listings = ListingPlan(policy, chance, self._audits, self._scans)
        self._children = ChildrenOfMine(self._held.held_leases)
        children = self._children.ended_instants.keys()
        self.caught_up = CaughtUp(
            policy, self._seen, self._held, self._audits, self._observation, children=children
        )
        self.is_finished = False
        # How many leases our host proves able to run.
        self.host_capacity = self._held.host_capacity
        self._balancer = Balancer(
            policy,
            chance,
            self._held,
            self._audits,
            self._observation,
            children=children,
        )
        self._modes = ModeWatch(policy, chance)
        self._is_refused = False
        self._handlers: Mapping[type[events.Event], Callable[[Any, Instant], list[Command]]] = {
            events.Started: self._on_started,
            events.Ticked: lambda _, now: self._held.tick(now),
            events.LeasesScanned: self._on_scanned,
            events.ShardsListed: self._on_listed,
            events.StreamDescribed: self._on_described,
            events.Kcl3ModeRead: self._modes.on_read,
            events.Kcl3ModeUnreadable: self._modes.on_unreadable,
            events.WriteResolved: self._on_write,
            events.RowRead: self._held.on_row,
            events.RowUnreadable: self._held.on_unreadable,
            events.ParentsRead: self._held.on_parents,
            events.OffersFound: self._on_offers,
            events.FormerOwnersProvenGone: self._on_proven_gone,
            events.DrainRequested: self._on_drain,
            **dict.fromkeys(get_args(events.ProcessEvent), self._held.on_report),
            events.ProcessReported: self._on_reported,
        }

    def handle(self, event: events.Event, now: Instant) -> tuple[Command, ...]:
        """Take in an event and return the commands that follow.

        After `Finish` every event is ignored: only scans and reads under way still arrive.
        Raises: InvariantViolation for an event that cannot happen in the current state.
        """
        if self.is_finished:
            return ()
        commands = self._handlers[type(event)](event, now)
        commands += self._balancer.tick(now)
        if not self.is_draining:
            commands += self._scans.begin_when_due(now)
        commands += self._finish_when_empty()
        return tuple(commands)

    def publish(self, endpoint: str | None) -> None:
        """From now on takes name the address at which this manager serves the detail of a lease."""
        self._held.endpoint = endpoint

    def next_deadline(self, now: Instant) -> Instant:
        """When `Ticked` is due at the latest. An earlier one does no harm."""
        candidates = [
            self._held.deadline(now),
            self._balancer.deadline(),
            Instant(now + self._policy.failover_s),
        ]
        if not self._scans.is_under_way and not self.is_draining:
            candidates.append(self._scans.instant)
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
        if self.is_finished and (self._held.held_leases or self._audits.has_writes_under_way):
            raise InvariantViolation("finished with leases or writes of ours left")

    @property
    def is_draining(self) -> bool:
        return self._held.is_draining

    @property
    def leases(self) -> Mapping[LeaseKey, Lease]:
        """The readable rows of our streams at the last scan; empty before the first."""
        view = self._seen.view
        return view.rows if view is not None else {}

    @property
    def owners(self) -> frozenset[OwnerId]:
        """The owners of at least one live lease at the last scan, and this manager."""
        view = self._seen.view
        return view.owners if view is not None else frozenset({self._policy.me})

    @property
    def native_mode(self) -> str | None:
        """The mode of a KCL 3 fleet that assigns the leases of this table, as last seen."""
        return self._modes.native

    def totals(self) -> TableTotals | None:
        """The counts of the last scan and listing, for metrics; None before the first scan."""
        return self._audits.totals() if self._seen.view is not None else None

    def held_lease(self, key: LeaseKey) -> HeldLease | None:
        """The state of one held lease, to look at; None if this manager does not hold the lease."""
        return self._held.held_leases.get(key)

    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return self._held.held

    # Events, in the order of a manager's life.

    def _on_started(self, event: events.Started, now: Instant) -> list[Command]:
        self._observation.wall_offset_s = event.started_at - now
        self._scans.ask(now)
        return []

    def _on_scanned(self, event: events.LeasesScanned, now: Instant) -> list[Command]:
        self._scans.is_under_way = False
        ours, commands = self._audits.of_ours(event)
        self._observation.update(ours.leases, now)
        view = TableView(
            ours.leases,
            ours.broken,
            self._observation,
            me=self._policy.me,
            gone=self._scans.gone_before,
            now=now,
        )
        self._seen.view, self._seen.began_instant = view, self._scans.began_instant
        commands += self._modes.scanned(event.kcl3_mode, view.owners)
        commands += self._refuse(self._audits.see(view))
        if self._is_refused and not self.is_draining:
            return commands
        commands += self._adopt_strays(view, now)
        commands += self._held.hint_parents(view, now)
        if self.is_draining:
            return commands
        assigned, pace = self._balancer.after_scan(
            view, self._scans.began_instant, self._scans.gone_before
        )
        commands += assigned
        self._scans.plan_next(view.kclrun_owners, pace, now)
        self._children.forget(view, self._scans.began_instant)
        commands += self._audits.after_scan(view)
        commands += self._listings.list_when_due(view, now)
        commands += self._modes.read_when_due(view.kclrun_owners, now)
        self.check()
        return commands

    def _on_listed(self, event: events.ShardsListed, now: Instant) -> list[Command]:
        self._listings.listed(event.stream)
        self._observation.wall_offset_s = event.listed_at - now
        if self.is_draining or self._is_refused or self._seen.view is None:
            return []
        commands, should_list_soon = self._audits.after_listing(event, now)
        if should_list_soon:
            self._scans.ask(Instant(now + 1.0))  # the Java KCL's pause between its three tries
        return commands

    def _on_described(self, event: events.StreamDescribed, _: Instant) -> list[Command]:
        if self.is_draining:
            return []
        return self._refuse(self._audits.why_stream_is_refused(event))

    def _refuse(self, why: str | None) -> list[Command]:
        """Stop reading, because the stream is not the one that the rows belong to [P13]. Logged
        once. The drain that follows gives up our leases."""
        if why is None or self._is_refused or self.is_draining:
            return []
        self._is_refused = True
        note = Note("stream_recreated", "error", fields={"detail": why})
        return [note, StopRefused("the rows of the lease table are of another stream")]

    def _on_write(self, event: events.WriteResolved, now: Instant) -> list[Command]:
        change = event.change
        if isinstance(change, Ask | Withdraw | Decline) or (
            isinstance(change, Offer) and change.owner != self._policy.me
        ):
            return self._balancer.on_write(change, event.outcome, now)
        held_lease = self._held.held_leases.get(keys_of(change)[0])
        if held_lease is not None:
            return self._held.on_write(event, held_lease, now)
        commands, has_created = self._audits.resolved(event)
        if has_created:
            self._seen.changed_instant = now
            self._scans.ask(now)
        return commands

    def _on_offers(self, event: events.OffersFound, now: Instant) -> list[Command]:
        commands, is_scan_too_old = self._balancer.on_offers(event, now)
        if is_scan_too_old:
            self._scans.ask(now)
        return commands

    def _on_proven_gone(self, event: events.FormerOwnersProvenGone, now: Instant) -> list[Command]:
        """Former owners are proven gone. Only a scan that begins after the proof counts [N5]."""
        self._scans.gone |= event.owners
        self._scans.ask(now)
        return []

    def _on_reported(self, event: events.ProcessReported, now: Instant) -> list[Command]:
        commands = self._held.on_report(event, now)
        if not isinstance(event.report, ShardEnded):
            return commands
        commands += self._held.hint_ended(event.key, now)
        self._children.add(event.report.children, now)
        self._seen.changed_instant = now
        self._scans.ask(now)
        return commands

    def _on_drain(self, event: events.DrainRequested, now: Instant) -> list[Command]:
        if self.is_draining:
            return []
        note = Note("draining", fields={"reason": event.reason})
        return [note, *self._balancer.drain(), *self._held.drain(event.reason, now)]

    # Consequences of the events.

    def _adopt_strays(self, view: TableView, now: Instant) -> list[Command]:
        """Adopt rows that name us as owner and that we do not hold. A row that a KCL 3 leader gave
        us, and that its former owner still works on, waits until that owner has stopped renewing
        [R8]."""
        me, commands = self._policy.me, list[Command]()
        for lease in view.unended:
            if lease.owner == me and self._balancer.is_free(lease.key):
                is_free = lease.checkpoint_owner is None
                if is_free or self._observation.has_expired(lease, now):
                    commands += self._held.adopt(lease.key, now)
        return commands

    def _finish_when_empty(self) -> list[Command]:
        if not self.is_draining or self._held.held_leases:
            return []
        if self._audits.has_writes_under_way or self._balancer.has_writes_under_way:
            return []
        self.is_finished = True
        return [Finish()]

    def wall_time(self, now: Instant) -> WallTime:
        """The service's clock as of the last listing: for `halted_at`, and for ages."""
        return self._observation.wall_time(now)
