"""Which states are the same: what is kept of a state, and what is not.

Kept exactly: the state of every core and of every life in all that decides something; rows; what
is under way and in which order; who may read until when; what was processed.
Kept up to what rules can tell apart:
- instants as distances to now, by the host's own clock. What is due counts by the step of time in
  which it will be noticed, and in the past not at all; an age as far as a rule asks for it: one
  failover and a step (freshness), three failovers (expiry, and long overdue), 31 s (stale asks).
- counters by order and by distance up to three: all that is asked of them is whether they are
  equal, one or two apart, or which is greater. The times on asks by equality alone.
- the two hosts, where they are alike: a state and its mirror image are one.
Lost: throughput (no bytes are counted here), owner switches (shown, never asked for), what keeps a
line of the log from being repeated, attempts that only lengthen pauses below one step, and lives
longer than 480 s (they forgive crashes; three faults make no crash loop).
A test compares what follows from states that are taken for the same.

Two states with the same 64-bit hash are taken for the same, too: among a million states the chance
that any is lost by that is below one in ten million.
"""

from math import ceil, inf

from kclrun.lease.states import State as LifeState
from kclrun.model.lease import ANYBODY, OFFERED
from kclrun.protocol.reports import GilHeld, ProcessWarned
from tests.simulation.tiny_worlds.sheets import AGE, ASK_AGE, ASKED, FRESH, Sheet
from tests.simulation.tiny_worlds.shells import Shells
from tests.simulation.tiny_worlds.states import State
from tests.simulation.tiny_worlds.worlds import OWNERS

# Positive, whatever the instant: hash(-1) == hash(-2) in CPython.
_OFFSET_S = 1000.0
_GAP_MAX = 3
_NAMES = tuple(
    {me: 0, another: 1, OFFERED: 2, ANYBODY: 3, None: None}
    for me, another in (OWNERS, reversed(OWNERS))
)


class Shapes:
    """Makes the keys of states of one world."""

    def __init__(self, shells: Shells) -> None:
        self._shells = shells
        self._index = [core.index for core in shells.cores]

    def key(self, state: State) -> int:
        """The same for states that are the same."""
        shells, ticks = self._shells, state.ticks
        hosts = []
        for index, host in enumerate(state.hosts):
            shape = host.shape
            if shape is None:
                shape = host.shape = self._shape_of_host(index, host)
            parts, instants, counters = shape
            hosts.append(
                (
                    parts,
                    _ages(instants, shells.instant(index, ticks), shells.clocks[index]),
                    counters,
                )
            )
        order = (0, 1)
        if shells.world.is_symmetric:
            codes = [hash((parts, ages)) for parts, ages, _ in hosts]
            if codes[0] == codes[1]:
                mirrored = self._key_in((1, 0), hosts, state)
                return min(self._key_in(order, hosts, state), mirrored)
            order = (0, 1) if codes[0] < codes[1] else (1, 0)
        return self._key_in(order, hosts, state)

    def _key_in(self, order, hosts, state: State) -> int:
        """With the hosts in this order."""
        sheet = Sheet(_NAMES[order[0]])
        rows = tuple(sheet.lease(state.rows.get(key)) for key in self._shells.keys)
        mentions = [sheet.counters, *(hosts[place][2] for place in order)]
        return hash(
            (
                rows,
                tuple(state.ledgers[key] for key in self._shells.keys),
                state.faults_left,
                state.drains_left,
                tuple(hosts[place][:2] for place in order),
                _ranks(mentions),
            )
        )

    def _shape_of_host(self, index: int, host):
        sheet = Sheet(_NAMES[index])
        is_alive = host.has_manager and not host.is_finished
        if is_alive:
            sheet.at(host.alarm)
        for at, _ in host.timed:
            sheet.at(at)
        parts = (
            is_alive and self._shape_of_core(sheet, self._index[index], host.mind),
            host.has_manager,
            host.is_finished,
            host.is_draining,
            host.others_in_sight,
            tuple(self._shape_of_process(sheet, each) for each in _in_order(host)),
            tuple(map(sheet.request, host.requests)),
            tuple(sheet.change(change) for _, change in host.timed),
            tuple(map(sheet.change, host.waiting)),
            tuple(key for key, _, _ in host.reaps),
            tuple(sheet.change(change) for change, _ in host.orphans),
        )
        return hash(parts), sheet.instants, sheet.counters

    def _shape_of_core(self, sheet: Sheet, index, mind):
        def of(part, name):
            return mind[index[part, name]]

        names = sheet.names
        sheet.at(of("ScanPlan", "instant"))
        sheet.at(of("ScanPlan", "began_instant"), 1.0)
        sheet.at(of("OfferWatch", "_find_instant"))
        children = of("ChildrenOfMine", "ended_instants")
        for ended in children.values():
            sheet.at(ended, FRESH)
        rows = [of("Observation", column) for column in ("_keys", "_owners", "_counters")]
        moved = of("Observation", "_seen_instant"), True
        still = of("Observation", "_still")
        since = [(*row, *still.get(row[0], moved)) for row in zip(*rows, strict=True)]
        for key, _, counter, instant, _ in since:
            sheet.counters.append((key, counter))
            sheet.at(instant, AGE)
        asks = of("Observation", "_asks")
        for _, instant in asks.values():
            sheet.at(instant, ASK_AGE)
        vanishing = {**of("TrimWatch", "_absent_since"), **of("EndWatch", "_since")}
        for instant in vanishing.values():
            sheet.at(instant, AGE)
        still = of("TrimWatch", "_still_since")
        for key, (counter, instant) in still.items():
            sheet.counters.append((key, counter))
            sheet.at(instant, AGE)
        unanswered = of("Asker", "_unanswered")
        for instant in unanswered.values():
            sheet.at(instant)
        asked = of("Asker", "_asks")
        for each in asked.values():
            sheet.at(each.since_instant, ASK_AGE)
        turn = of("OfferWatch", "_turn_instant")
        sheet.at(turn if turn < inf else None)
        recent = of("RecentRows", "_seen")
        for instant, _ in recent:
            sheet.at(instant, FRESH)
        scanned_for = of("Balancer", "_scanned_for")
        for scanned in scanned_for.items():
            sheet.counters.append(scanned)
        waiting = of("OfferWatch", "_waiting")
        for each in waiting.values():
            sheet.at(each.due_instant)
            sheet.at(each.left_instant)
        listing = of("Auditor", "listing")
        return (
            of("LastScan", "view") is None,
            of("ScanPlan", "instant") is None,
            of("ScanPlan", "is_under_way"),
            of("ListingPlan", "_has_waited"),
            of("ScanPlan", "_lacks_phase"),
            of("ScanPlan", "_hasty_scans"),
            turn < inf,
            of("Balancer", "_holdings_at_look"),
            tuple(frozenset(keys) for _, keys in recent),
            of("OfferWatch", "_find_instant") is None,
            tuple(children),
            tuple((key, names[owner], has_moved) for key, owner, *_, has_moved in since),
            tuple((key, sheet.handoff(handoff)) for key, (handoff, _) in asks.items()),
            tuple(vanishing),
            tuple(still),
            tuple(unanswered),
            tuple((sheet.change(e.change), e.since_instant is None) for e in asked.values()),
            tuple(sheet.lease(each.lease) for each in waiting.values()),
            listing is not None,
            tuple(map(sheet.change, of("Auditor", "under_way").values())),
            tuple(sorted(of("ExpiredLeaseOffers", "under_way"))),
            tuple(sorted(of("Asker", "_ending"))),
            tuple(scanned_for),
            of("Auditor", "_has_seen_rows"),
            of("HeldLeases", "are_others_in_sight"),
            self._shape_of_loads(names, of("Balancer", "_loads")),
            tuple(
                self._shape_of_held_lease(sheet, c)
                for c in of("HeldLeases", "held_leases").values()
            ),
        )

    def _shape_of_loads(self, names, saved):
        if saved is None:
            return None
        loads, leaving, owners, _ = saved
        view = loads.view
        return (
            frozenset(view.rows),
            frozenset(loads._work_keys),
            frozenset(loads._promised),
            frozenset(loads._asked_away),
            frozenset(names[each] for each in leaving),
            frozenset(names[each] for each in owners),
            frozenset(names[each] for each in view.owners),
            frozenset(names[each] for each in view.silent),
        )

    def _shape_of_held_lease(self, sheet: Sheet, held_lease):
        requests, flight = held_lease.requests, held_lease.requests.in_flight
        sheet.at(held_lease.confirmed_instant, FRESH)
        sheet.at(held_lease.renew_instant)
        sheet.at(held_lease.rest_until)
        sheet.at(held_lease.ours_instant, FRESH)
        if flight.change is not None:
            sheet.at(requests.sent_instant, FRESH)
        return (
            held_lease.key,
            held_lease.state.value,
            sheet.lease(held_lease.row),
            flight.change and sheet.change(flight.change),
            flight.change and (min(requests.attempts, 8), bool(flight.unresolved)),
            requests.is_reading,
            min(requests.misses, 8),
            held_lease.is_proven,
            held_lease.parents.should_ask,
            held_lease.parents.is_asking,
            held_lease.parents.are_over,
            min(held_lease.restarts.deaths, 5),
            min(held_lease.restarts._stops, 7),
            held_lease.ours_instant is None,
            held_lease.has_waited,
            held_lease.was_restored,
            held_lease.is_over,
            held_lease.failure is None,
        )

    def _shape_of_process(self, sheet: Sheet, process):
        life, delivery, permit = process.life, process.delivery, process.delivery.permit
        sheet.at(process.alarm)
        for at, _ in process.timed:
            sheet.at(at)
        if permit is not None:
            sheet.at(permit.fence)
        return (
            process.key,
            permit and (permit.start_below, permit.delivered_max),
            process.delivered,
            delivery.delivered_total,
            process.busy,
            process.busy_ticks,
            process.has_claimed,
            delivery._is_end_confirmed,
            process.is_initialized,
            delivery._is_stop_asked,
            sheet.request(process.request),
            tuple(map(sheet.event, process.events)),
            tuple(
                self._shape_of_command(sheet, each)
                for each in process.commands
                if not _is_for_the_log(each)
            ),
            tuple(self._shape_of_command(sheet, each) for _, each in process.timed),
            self._shape_of_life(sheet, life),
        )

    def _shape_of_command(self, sheet: Sheet, command):
        change = getattr(command, "change", None)
        what = getattr(command, "kind", None) or getattr(command, "cause", None)
        return (type(command).__name__, change and sheet.change(change), what and what.value)

    def _shape_of_life(self, sheet: Sheet, life):
        own, ledger, late = life.own, life.ledger, life._lost and life._lost.late
        flight, graceful, permit = own.in_flight, life._graceful, life._permit
        if life.state is LifeState.CLAIMING:
            sheet.at(life.policy.expires_instant)
        sheet.at(own._permitted_since, FRESH)
        sheet.at(min(flight.unresolved, default=None), FRESH)
        sheet.at(life._saved_instant, 2.0)
        sheet.at(life._put_off_until)
        sheet.at(life._shard_end.not_before)
        sheet.at(life._shard_end._waits_since, FRESH)
        if graceful.ask is not None:
            sheet.at(graceful._asked_since, ASK_AGE)
        if permit._last_allowed is not None:
            sheet.at(permit._last_allowed.fence)
        if life._lost is not None:
            sheet.at(life._lost._let_go_instant)
        if late is not None:
            sheet.at(late.until)
        sheet.counters.append((own.key, own.counter))
        shard_end, reported = life._shard_end, permit._last_allowed
        return (
            life.state.value,
            life._is_withdrawn,
            life._keeps_lease,
            life._manager_gone,
            life._is_initialized,
            life._failure is None,
            life.policy.has_waited,
            sheet.lease(own.row),
            flight.change and sheet.change(flight.change),
            bool(flight.unresolved),
            own.is_gone,
            own._was_written_again,
            ledger.checkpointed.sequence_number,
            ledger.processed.sequence_number,
            ledger.delivered.sequence_number,
            ledger.delivered_total,
            ledger.checkpointed_total,
            graceful.others_in_sight,
            graceful.ask and sheet.handoff(graceful.ask),
            len(shard_end.children),
            shard_end._listed is None,
            shard_end.is_looking,
            shard_end._rows and tuple(row is None for row in shard_end._rows.values()),
            shard_end._child_rows and tuple(row is None for row in shard_end._child_rows.values()),
            shard_end._waits_since is None,
            shard_end._has_waited,
            reported and (reported.start_below, reported.delivered_max),
            permit.is_stopped,
            life._lost and (life._lost.user_code_is_done, late and late.is_resolved),
        )


def _is_for_the_log(command) -> bool:
    return isinstance(command, ProcessWarned | GilHeld)


def _in_order(host):
    return [host.processes[key] for key in sorted(host.processes)]


def _ages(instants, now: float, tick_s: float):
    """What is due by the tick it is due at, ages in microseconds; never older than their clips."""
    ages = []
    for instant, clip in instants:
        age = now - instant
        if clip:
            ages.append(int((min(age, clip) + _OFFSET_S) * 1e6 + 0.5))
        else:
            ages.append(0 if age >= 0 else ceil(-age / tick_s - 1e-9))
    return tuple(ages)


def _ranks(mentions):
    """Counters of each key by order, with gaps above three cut to three; the times of asks by
    where they are named first."""
    by_key: dict[str, set] = {}
    ranks = {}
    asks = 0
    for counters in mentions:
        for each in counters:
            key, counter = each
            if key is not ASKED:
                by_key.setdefault(key, set()).add(counter)
            elif each not in ranks:
                ranks[each] = asks
                asks += 1
    for key, counters in by_key.items():
        rank, last = 0, None
        for counter in sorted(counters):
            if last is not None:
                rank += min(counter - last, _GAP_MAX)
            ranks[key, counter] = rank
            last = counter
    return tuple(tuple(ranks[each] for each in counters) for counters in mentions)
