"""The leases that this manager holds, from the take until they are not ours any more.

Knows: each lease's `HeldLease`. Must not know: other owners, shards, the scan. Rule: a row has one
writer at a time. While a process lives, it is the process. Before its first start, between two
starts, while halted or waiting for parents, it is this manager, which renews the row and answers
asks [P5, P15, P16].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, DrainProcess, Note, ReadParents, ReadRow, StartProcess
from kclrun.leases.events import (
    LeaseClaimed,
    LeaseLost,
    LeaseReleased,
    ParentsRead,
    PositionMoved,
    ProcessBroke,
    ProcessExited,
    ProcessorFailed,
    ProcessReport,
    ProcessStarted,
    RowRead,
    RowUnreadable,
    ShardEnded,
    StartFailed,
    StartUnclaimed,
    WriteResolved,
)
from kclrun.leases.held_lease import WITH_PROCESS, HeldLease, Places, State, Step, Verdict
from kclrun.leases.policy import UNREADABLE_PAUSE_S, ManagerPolicy
from kclrun.leases.row_writer import (
    RowLost,
    RowWriter,
    Settled,
    TakeAbandoned,
    WriteApplied,
    WriteStale,
)
from kclrun.leases.table_view import TableView, have_ended, is_nobody, parent_keys, seem_over
from kclrun.model.lease import (
    ANYBODY,
    WRITTEN_AGAIN_AHEAD,
    DiedOn,
    Halt,
    Lease,
    LeaseKey,
    Owner,
    OwnerId,
)
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import CreateLease, HaltLease, Offer, Release, Renew, Take


class _Noting(Protocol):
    """Writes a line for the log: event, lease, level, fields."""

    def __call__(
        self, event: str, held_lease: HeldLease, level: str = "info", **fields: str | int | None
    ) -> None: ...


def take_in(
    event: ProcessReport, held_lease: HeldLease, note: _Noting, now: Instant, failover_s: float
) -> None:
    """Take in a report of a live process, or of its end, and its effect on the held lease.

    A process that reported its end stopped in good order; one that ended without a report crashed.
    `Restarts` decides about several crashes, and about a process that broke.
    """
    match event:
        case ProcessExited():
            _died(held_lease, event, note, now)
        case StartFailed():
            _not_started(held_lease, event, note, now)
        case LeaseClaimed():
            if held_lease.state is State.STARTING:
                held_lease.step(Step.CLAIMED)
        case PositionMoved():
            held_lease.restarts.progressed()
            held_lease.waiting_since = None
        case ShardEnded() | LeaseReleased():
            held_lease.is_over = True
            _reported_end(held_lease)
        case ProcessorFailed():
            held_lease.failure = event.reason
            _reported_end(held_lease)
        case LeaseLost():
            note("process_lost_lease", held_lease, "warning", reason=event.reason)
            _reported_end(held_lease)
        case ProcessBroke():
            held_lease.has_broken, held_lease.has_starved = True, event.at_records
            held_lease.trouble = event.reason
            _reported_end(held_lease)
        case StartUnclaimed():
            note("start_unclaimed", held_lease, "warning", reason=event.reason)
            _unclaimed(event, held_lease, now, failover_s)
            _reported_end(held_lease)
        case ProcessStarted():
            pass  # only the shell needs its pid


def take_in_late(event: ProcessReport, held_lease: HeldLease | None) -> None:
    """Ignore reports that an ended process left in its ring, except the reason of a halt."""
    if isinstance(event, ProcessStarted | StartFailed | ProcessExited):
        raise InvariantViolation(f"lease {event.key}: {type(event).__name__}, and no process")
    is_examining = held_lease is not None and held_lease.state is State.EXAMINING
    if held_lease is not None and is_examining and isinstance(event, ProcessorFailed):
        held_lease.failure = event.reason


def _unclaimed(
    event: StartUnclaimed, held_lease: HeldLease, now: Instant, failover_s: float
) -> None:
    """Decide whether the host was too slow. A start command is valid for a failover, and before it
    a write of ours came through: if the process claimed nothing in that time, its host is too slow
    [P4]."""
    if now >= held_lease.confirmed_instant + failover_s:
        held_lease.has_broken = True
        held_lease.trouble = event.reason


def _reported_end(held_lease: HeldLease) -> None:
    if held_lease.state is not State.EXITING:
        held_lease.step(Step.REPORTED_END)


def _died(held_lease: HeldLease, event: ProcessExited, note: _Noting, now: Instant) -> None:
    """The process is proven to have ended. If it had not reported its end, it crashed."""
    held_lease.waiting_since = event.waiting_since or held_lease.waiting_since
    if held_lease.is_over:
        held_lease.step(Step.GIVEN_UP)
        return
    if held_lease.has_broken:
        held_lease.has_broken = False
        held_lease.restarts.broke(now, at_records=held_lease.has_starved)
        if held_lease.has_starved:
            _note_death(held_lease, note)
        else:
            note("start_failed", held_lease, "error", reason=held_lease.trouble)
    elif held_lease.state is State.EXITING:
        held_lease.restarts.stopped(now)
    else:
        held_lease.restarts.crashed(now)
        held_lease.trouble = event.reason
        _note_death(held_lease, note)
    held_lease.is_proven = False
    held_lease.step(Step.DIED)


def _note_death(held_lease: HeldLease, note: _Noting) -> None:
    deaths = held_lease.restarts.deaths
    note("process_died", held_lease, "warning", reason=held_lease.trouble, deaths=deaths)


def _not_started(held_lease: HeldLease, event: StartFailed, note: _Noting, now: Instant) -> None:
    held_lease.restarts.failed(now)
    held_lease.trouble = event.reason
    held_lease.rest_until = Instant(now + held_lease.restarts.pause_s)
    held_lease.step(Step.NOT_STARTED)
    note("start_failed", held_lease, "error", reason=event.reason)


# States without a process and without a task of their own: a drain gives these leases up at once.
_IDLE = frozenset(
    {State.BACKING_OFF, State.WAITING, State.RENEWING_BEFORE_START, State.QUARANTINED, State.HALTED}
)


class HeldLeases:
    """All leases that this manager holds. `out` collects the commands; `wall` dates a halt;
    `is_ask_stale` says that the ask on a row of ours stood there for too long.

    `are_others_in_sight`: another kclrun owner can take the leases that we give away [P17].
    """

    def __init__(
        self,
        policy: ManagerPolicy,
        chance: Callable[[], float],
        out: list[Command],
        wall: Callable[[Instant], WallTime],
        is_ask_stale: Callable[[Lease, Instant], bool],
    ) -> None:
        self.held_leases: dict[LeaseKey, HeldLease] = {}
        self.is_draining = False
        self.are_others_in_sight = False
        self._policy = policy
        self._out = out
        self._wall = wall
        self._is_ask_stale = is_ask_stale
        self._writer = RowWriter(policy, chance, out)
        self._slot = Owner.slot_of(policy.me)
        self.host_places = Places(policy.leases_max, out)

    @property
    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return tuple(c.key for c in self.held_leases.values() if c.counts_as_held)

    @property
    def places(self) -> int:
        """How many leases we may hold: fewer than `leases.max` where our host proves able to run
        fewer, but only while another owner can take the rest."""
        return self.host_places.count if self.are_others_in_sight else self._policy.leases_max

    @property
    def is_full(self) -> bool:
        """Whether every place is filled. Called at each event, so it counts only close to full."""
        places = self.places
        return len(self.held_leases) >= places and len(self.held) >= places

    def take(self, change: Take, now: Instant) -> None:
        held_lease = HeldLease(key=change.key, state=State.TAKING)
        self.held_leases[change.key] = held_lease
        self._writer.send(held_lease, change, now)

    def adopt(self, key: LeaseKey, now: Instant) -> None:
        """A scan shows a row as ours that we do not hold: read its current state."""
        self.held_leases[key] = HeldLease(key=key, state=State.EXAMINING)
        self._settle(self.held_leases[key], now)

    def drain(self, reason: str, now: Instant) -> None:
        """Give everything up in good order: processes are asked to drain, idle rows given away."""
        self.is_draining = self._writer.is_draining = True
        for held_lease in tuple(self.held_leases.values()):
            if held_lease.state in (State.STARTING, State.RUNNING):
                held_lease.step(Step.TOLD_TO_DRAIN)
                self._out.append(DrainProcess(held_lease.key, reason))
            self._settle(held_lease, now)

    def tick(self, now: Instant) -> None:
        """Time passed. A lease with a process waits for that process, not for time."""
        for held_lease in tuple(self.held_leases.values()):
            if held_lease.state not in WITH_PROCESS:
                self._settle(held_lease, now)

    def hint_parents(
        self, rows: Mapping[LeaseKey, Lease], broken: frozenset[str], now: Instant
    ) -> None:
        """Take in a scan: where all parents seem to have ended, request the consistent reads."""
        for held_lease in self._waiting():
            row = rows.get(held_lease.key)
            if row is not None and seem_over(row, rows, broken):
                held_lease.should_ask_parents = True
                self._settle(held_lease, now)

    def give_way(self, count: int, is_work: Callable[[LeaseKey], bool], now: Instant) -> None:
        """Release up to `count` leases that wait for their parents: work needs their places."""
        waiting = [c for c in self._waiting() if not is_work(c.key) and c.unresolved is None]
        for held_lease in sorted(waiting, key=lambda each: each.key)[:count]:
            held_lease.step(Step.TO_BE_RELEASED)
            self._settle(held_lease, now)

    def hint_ended(self, parent: LeaseKey, now: Instant) -> None:
        """A shard ended here: its children that we hold need not wait for a scan."""
        for held_lease in self._waiting():
            if held_lease.row is not None and parent in held_lease.row.parents:
                held_lease.should_ask_parents = True
                self._settle(held_lease, now)

    def on_write(self, event: WriteResolved, held_lease: HeldLease, now: Instant) -> None:
        if held_lease.unresolved is None or held_lease.unresolved.change != event.change:
            raise InvariantViolation(f"lease {held_lease.key}: an outcome of no write under way")
        self._take_in(held_lease, self._writer.resolve(held_lease, event.outcome, now), now)
        self._settle(held_lease, now)

    def on_row(self, event: RowRead, now: Instant) -> None:
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.is_reading:
            raise InvariantViolation(f"lease {event.key}: a row that was not asked for")
        held_lease.is_reading = False
        if held_lease.unresolved is not None:
            self._take_in(held_lease, self._writer.read_back(held_lease, event.row, now), now)
        elif held_lease.state is State.QUARANTINED:
            self._outwaited(held_lease, event.row)
        else:
            self._examined(held_lease, event.row, now)
        self._settle(held_lease, now)

    def on_unreadable(self, event: RowUnreadable, now: Instant) -> None:
        """A broken row [P8]: its owner cannot be determined, so we only read it again. A drain does
        not wait for a person: a row that cannot be read is not given up."""
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.is_reading:
            raise InvariantViolation(f"lease {event.key}: a row that was not asked for")
        if not self.is_draining:
            self._out.append(ReadRow(event.key, Instant(now + UNREADABLE_PAUSE_S)))
            return
        held_lease.is_reading = False
        held_lease.unresolved = None
        self._note("broken_row_left", held_lease, "warning", reason=event.reason)
        held_lease.step(Step.NOT_OURS)
        self._settle(held_lease, now)

    def on_parents(self, event: ParentsRead, now: Instant) -> None:
        """Take in consistent reads. An answer that comes too late for its lease changes nothing."""
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.is_asking_parents:
            return
        held_lease.is_asking_parents = False
        held_lease.are_parents_over = have_ended(event.parents)
        self._settle(held_lease, now)

    def on_report(self, event: ProcessReport, now: Instant) -> None:
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.has_process:
            take_in_late(event, held_lease)
            return
        if isinstance(event, PositionMoved):
            self.host_places.moved(held_lease.restarts.started_instant, now)
        elif isinstance(event, LeaseClaimed):
            self.host_places.claimed()
        take_in(event, held_lease, self._note, now, self._policy.failover_s)
        has_expired = isinstance(event, StartUnclaimed) and held_lease.has_broken
        if has_expired and self.are_others_in_sight:
            self.host_places.start_expired(self._running(), held_lease.trouble, now)
        self._settle(held_lease, now)

    def deadline(self, now: Instant) -> Instant | None:
        """When the next renewal or restart is due; None if nothing waits for the clock."""
        due = []
        for held_lease in self.held_leases.values():
            if held_lease.state not in _IDLE:
                continue
            if held_lease.unresolved is None and not held_lease.is_reading:
                due.append(held_lease.renew_instant)
                if held_lease.state is State.BACKING_OFF:
                    due.append(held_lease.rest_until)
                elif held_lease.state is State.QUARANTINED and held_lease.ours_instant is not None:
                    due.append(self._quarantined_until(held_lease.ours_instant))
        return Instant(max(now, min(due))) if due else None

    def _running(self) -> int:
        return sum(1 for c in self.held_leases.values() if c.state is State.RUNNING)

    def _waiting(self) -> Iterable[HeldLease]:
        return tuple(c for c in self.held_leases.values() if c.state is State.WAITING)

    def _examined(self, held_lease: HeldLease, row: Lease | None, now: Instant) -> None:
        """The lease has no process and the row was read: go on from the row, if it is ours."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(held_lease, row)
            return
        held_lease.row = row
        held_lease.ours_instant = (
            now if held_lease.ours_instant is None else held_lease.ours_instant
        )
        held_lease.rest_until = Instant(now + held_lease.restarts.pause_s)
        if row.halt is not None:
            held_lease.step(Step.FOUND_HALTED)
            return
        if held_lease.failure is None and self._verdict(held_lease, row) is Verdict.HALT:
            held_lease.failure = self._why_halted(held_lease, row)
        held_lease.step(Step.STILL_OURS if held_lease.failure is None else Step.TO_BE_HALTED)

    def _verdict(self, held_lease: HeldLease, row: Lease) -> Verdict:
        return held_lease.restarts.verdict(
            slot=self._slot,
            failed_slot=row.failed_slot,
            are_others=self.are_others_in_sight and not self.is_draining,
        )

    def _why_halted(self, held_lease: HeldLease, row: Lease) -> str:
        before = row.failed_slot
        elsewhere = f", and on host {before} before" if before not in {None, self._slot} else ""
        return (
            f"the lease process died {held_lease.restarts.deaths} times in a row without moving the"
            f" checkpoint{elsewhere}; the last time: {held_lease.trouble}"
        )

    def _outwaited(self, held_lease: HeldLease, row: Lease | None) -> None:
        """The row was read a failover after a take by force: its former owner has stopped [P18]."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(held_lease, row)
            return
        held_lease.row = row
        held_lease.has_waited = True
        held_lease.step(Step.FOUND_HALTED if row.halt is not None else Step.QUARANTINE_OVER)

    def _take_in(self, held_lease: HeldLease, settled: Settled | None, now: Instant) -> None:
        match settled:
            case WriteApplied(row=row) | WriteStale(row=row) if row.is_ended:
                held_lease.step(Step.NOT_OURS)  # the last write of an ended process ended it [H1]
            case WriteApplied():
                self._landed(held_lease, settled, now)
            case WriteStale(row):
                held_lease.row = row
            case RowLost(None) if held_lease.row is not None and self._may_restore(held_lease, now):
                self._restore(held_lease, held_lease.row, now)
            case RowLost(row):
                self._lose(held_lease, row)
            case TakeAbandoned():
                held_lease.step(Step.NOT_OURS)
            case None:
                pass

    def _landed(self, held_lease: HeldLease, landed: WriteApplied, now: Instant) -> None:
        """A write of ours applied. A reply (or a take) proves that a zombie did not write it."""
        held_lease.row = landed.row
        held_lease.renew_instant = Instant(landed.sent_instant + self._policy.renew_every_s)
        if landed.by_reply or isinstance(landed.change, Take):
            held_lease.is_proven = True
            held_lease.confirmed_instant = landed.sent_instant
        match landed.change:
            case Take():
                held_lease.ours_instant = now
                self._taken(held_lease, landed.change, landed.row)
            case CreateLease():
                self._note(
                    "row_restored", held_lease, "warning", position=str(landed.row.checkpoint)
                )
            case HaltLease(halt=halt):
                held_lease.step(Step.HALTED)
                self._note("lease_halted", held_lease, "error", reason=halt.reason)
            case Release():
                held_lease.step(Step.RELEASED)
                self._note("lease_released", held_lease, position=str(landed.change.position))
            case Offer():
                held_lease.step(Step.RELEASED)
                offer = landed.change
                position, target = str(offer.position), offer.offered_to
                self._note("lease_offered", held_lease, position=position, target=target)
            case Renew():
                if held_lease.state is State.HALTED and landed.row.halt is None:
                    self._resumed(held_lease)

    def _taken(self, held_lease: HeldLease, change: Take, row: Lease) -> None:
        self._note(
            "lease_taken", held_lease, position=str(row.checkpoint), former=change.seen_owner
        )
        if row.halt is not None:
            held_lease.step(Step.FOUND_HALTED)
            self._note("lease_still_halted", held_lease, "warning", reason=row.halt.reason)
        else:
            held_lease.step(Step.TAKEN)

    def _resumed(self, held_lease: HeldLease) -> None:
        held_lease.failure = None
        held_lease.restarts.progressed()
        held_lease.step(Step.RESUMED)
        self._note("lease_resumed", held_lease)

    def _lose(self, held_lease: HeldLease, row: Lease | None) -> None:
        """The row is not ours any more. Losing a race for a take or an adoption is not logged."""
        was_ours = held_lease.row is not None
        was_given = held_lease.state is State.RELEASING  # and taken, before its outcome arrived
        held_lease.step(Step.NOT_OURS)
        if row is None:
            if was_ours:
                self._note("row_vanished", held_lease, "error")
        elif was_ours and not row.is_ended and not was_given:
            self._note("lease_lost", held_lease, "warning", owner=row.owner)

    def _may_restore(self, held_lease: HeldLease, now: Instant) -> bool:
        """Whether to restore a vanished row: once, and only before an owner can see it expired."""
        fresh_until = held_lease.confirmed_instant + self._policy.failover_s
        return not held_lease.was_restored and now < fresh_until

    def _restore(self, held_lease: HeldLease, row: Lease, now: Instant) -> None:
        """Our row vanished while we held it. Write it again as it was, because its position is
        known. Otherwise the shard would be found without a lease and be read again from the start
        position."""
        held_lease.was_restored = True
        self._note("row_vanished", held_lease, "error")
        counter = row.counter + WRITTEN_AGAIN_AHEAD
        again = msgspec.structs.replace(row, counter=counter, handoff=None)
        self._writer.send(held_lease, CreateLease(again), now)

    def _settle(self, held_lease: HeldLease, now: Instant) -> None:
        """Make every step that this lease can make now; drop it once it is gone."""
        while held_lease.unresolved is None and not held_lease.is_reading:
            if not self._moves_on(held_lease, now):
                break
        if held_lease.state is State.GONE:
            self.held_leases.pop(held_lease.key, None)
        held_lease.check()

    def _moves_on(self, held_lease: HeldLease, now: Instant) -> bool:
        """Make one step or send one command; True if the lease may go further at once."""
        row, me = held_lease.row, self._policy.me
        if held_lease.state is State.EXAMINING:
            held_lease.is_reading = True
            self._out.append(ReadRow(held_lease.key))
        elif row is None or held_lease.has_process or held_lease.state is State.GONE:
            return False
        elif held_lease.state in _IDLE and (self.is_draining or self._is_asked_for(row, now)):
            held_lease.step(Step.TO_BE_RELEASED)
        elif held_lease.state is State.BACKING_OFF and self._must_leave(held_lease, row):
            self.host_places.failed(self._running(), held_lease.trouble, now)
            held_lease.step(Step.TO_BE_RELEASED)
        elif held_lease.state is State.HALTING:
            at = self._wall(now)
            # If no older record is known, the record that halts it has arrived by now.
            halt = Halt(held_lease.failure or "", at, held_lease.waiting_since or at)
            self._writer.send(held_lease, HaltLease(held_lease.key, me, row.counter, halt), now)
        elif held_lease.state is State.RELEASING:
            self._writer.send(held_lease, self._gift(held_lease, row, now), now)
        else:
            return self._idles(held_lease, row, now)
        return True

    def _idles(self, held_lease: HeldLease, row: Lease, now: Instant) -> bool:
        """Ours without a process: go on towards the start when possible, else keep renewing."""
        if held_lease.state is State.BACKING_OFF and now >= held_lease.rest_until:
            held_lease.step(Step.PAUSE_OVER)
            return True
        if held_lease.state is State.WAITING:
            held_lease.are_parents_over = held_lease.are_parents_over or not row.parents
            if held_lease.are_parents_over:
                held_lease.step(Step.PARENTS_OVER)
                return True
            self._ask_parents(held_lease, row)
        if self._quarantines(held_lease, row, now):
            return True
        fresh_until = held_lease.confirmed_instant + self._policy.renew_every_s
        renews_before_start = held_lease.state is State.RENEWING_BEFORE_START
        if renews_before_start and held_lease.is_proven and now < fresh_until:
            self._start(held_lease, row, now)
        elif renews_before_start or not held_lease.is_proven or now >= held_lease.renew_instant:
            me, drops_ask = self._policy.me, row.handoff is not None
            self._writer.send(held_lease, Renew(row.key, me, row.counter, drops_ask=drops_ask), now)
        return False

    def _quarantines(self, held_lease: HeldLease, row: Lease, now: Instant) -> bool:
        """Wait after a take by force, by us or by a previous owner: the former owner may work on
        until its own renewals have failed for a failover. Returns True if the lease went on
        [P18]."""
        if held_lease.state is State.RENEWING_BEFORE_START and row.taken_from is not None:
            if held_lease.has_waited:
                return False
            held_lease.step(Step.TO_QUARANTINE)
        is_over = (
            held_lease.state is State.QUARANTINED
            and held_lease.ours_instant is not None
            and now >= self._quarantined_until(held_lease.ours_instant)
        )
        if is_over:
            held_lease.is_reading = True
            self._out.append(ReadRow(held_lease.key))
        return is_over

    def _quarantined_until(self, ours_instant: Instant) -> Instant:
        return Instant(ours_instant + self._policy.failover_s)

    def _is_asked_for(self, row: Lease, now: Instant) -> bool:
        """Whether another owner, or an operator, waits for this row [P16]."""
        asked = row.handoff
        is_ours = asked is not None and asked.to == self._policy.me
        return asked is not None and not is_ours and not self._is_ask_stale(row, now)

    def _must_leave(self, held_lease: HeldLease, row: Lease) -> bool:
        """Whether our host cannot run it, and another owner can try."""
        return self._verdict(held_lease, row) is Verdict.GIVE_AWAY

    def _gift(self, held_lease: HeldLease, row: Lease, now: Instant) -> Offer | Release:
        """The write that gives the row away as it stands: offered to the asker, offered to any
        owner, or released. A halt stays on the row and travels with it [P17]."""
        me, at = self._policy.me, row.checkpoint
        if held_lease.restarts.has_tripped and self._must_leave(held_lease, row):
            died_on = DiedOn(self._slot, at)
            return Offer(row.key, me, row.counter, at, at, died_on=died_on)
        if row.handoff is not None and self._is_asked_for(row, now):
            to = None if row.handoff.to == ANYBODY else row.handoff.to
            return Offer(row.key, me, row.counter, at, at, offered_to=to)
        # Before its parents end, a lease is not work and is not taken. It goes back to the state
        # in which it was created.
        gives_way = not held_lease.are_parents_over and not self.is_draining
        if self.are_others_in_sight and not gives_way:
            return Offer(row.key, me, row.counter, at, at)
        return Release(row.key, me, row.counter, at, at)

    def _ask_parents(self, held_lease: HeldLease, row: Lease) -> None:
        if held_lease.should_ask_parents and not held_lease.is_asking_parents:
            held_lease.should_ask_parents = False
            held_lease.is_asking_parents = True
            self._out.append(ReadParents(held_lease.key, parent_keys(row)))

    def _start(self, held_lease: HeldLease, row: Lease, now: Instant) -> None:
        """Start a process for the row. The command is void once our last write may have expired."""
        held_lease.step(Step.STARTED)
        held_lease.restarts.started(now)
        held_lease.failure = None
        expires_instant = Instant(held_lease.confirmed_instant + self._policy.failover_s)
        has_waited = held_lease.has_waited and row.taken_from is not None
        start = StartProcess(held_lease.key, row.counter, expires_instant, has_waited=has_waited)
        self._out.append(start)

    def _note(
        self, event: str, held_lease: HeldLease, level: str = "info", **fields: str | int | None
    ) -> None:
        self._out.append(Note(event, level, held_lease.key, dict(fields)))


_SETTLED: Final = frozenset({State.RUNNING, State.HALTED})


def blockers(
    view: TableView, held_leases: Mapping[LeaseKey, HeldLease], me: OwnerId
) -> tuple[str, ...]:
    """What separates this manager from "caught up", as far as leases say: one line for each lease
    that is not running here, not ended, and not another owner's. A lease process knows whether it
    is at the tip of its shard.

    A halted lease blocks nothing: it stands still by decision, and in a job that only waits for the
    end an operator does not resume it. The end reports it (`LeaseManager.halted`).
    """
    lines = []
    for lease in view.unended:
        held_lease = held_leases.get(lease.key)
        if held_lease is not None:
            if held_lease.state not in _SETTLED and not held_lease.is_over:
                lines.append(f"{lease.key} is {held_lease.state.value}")
        elif lease.owner == me or is_nobody(lease.owner) or lease.key in view.expired:
            lines.append(f"{lease.key} is not being read by anybody")
    for lease in view.rows.values():
        if lease.is_ended:
            missing = sorted(child for child in lease.children if not view.has_row(child))
            lines += [f"{child}, a child of {lease.key}, has no lease" for child in missing]
    lines += [f"{key} has a row that cannot be read" for key in sorted(view.broken)]
    return tuple(lines)
