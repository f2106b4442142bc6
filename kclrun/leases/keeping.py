"""The leases that this manager holds, from the take until they are not ours any more.

Knows: each lease's `Custody`. Must not know: other owners, shards, the scan. Rule: a row has one
writer at a time. While a process lives, it is the process. Before its first start, between two
starts, while halted or waiting for parents, it is this manager, which renews the row and answers
asks [P5, P15, P16].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, DrainProcess, Note, ReadParents, ReadRow, StartProcess
from kclrun.leases.custody import WITH_PROCESS, Custody, Places, State, Step, Verdict
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
from kclrun.leases.policy import UNREADABLE_PAUSE_S, ManagerPolicy
from kclrun.leases.table_view import have_ended, parent_keys, seem_over
from kclrun.leases.writing import Forgone, Landed, Lost, RowWriter, Settled, Stale
from kclrun.model.lease import (
    ANYBODY,
    WRITTEN_AGAIN_AHEAD,
    DiedOn,
    Halt,
    Lease,
    LeaseKey,
    Owner,
)
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import CreateLease, HaltLease, Offer, Release, Renew, Take


class _Noting(Protocol):
    """Writes a line for the log: event, custody, level, fields."""

    def __call__(
        self, event: str, custody: Custody, level: str = "info", **fields: str | int | None
    ) -> None: ...


def take_in(
    event: ProcessReport, custody: Custody, note: _Noting, now: Instant, failover_s: float
) -> None:
    """Take in a report of a live process, or of its end, and its effect on the lease's custody.

    A process that reported its end stopped in good order; one that ended without a report crashed.
    `Restarts` decides about several crashes, and about a process that broke.
    """
    match event:
        case ProcessExited():
            _died(custody, event, note, now)
        case StartFailed():
            _not_started(custody, event, note, now)
        case LeaseClaimed():
            if custody.state is State.STARTING:
                custody.step(Step.CLAIMED)
        case PositionMoved():
            custody.restarts.progressed()
            custody.waiting_since = None
        case ShardEnded() | LeaseReleased():
            custody.is_over = True
            _said_farewell(custody)
        case ProcessorFailed():
            custody.failure = event.reason
            _said_farewell(custody)
        case LeaseLost():
            note("process_lost_lease", custody, "warning", reason=event.reason)
            _said_farewell(custody)
        case ProcessBroke():
            custody.has_broken, custody.has_starved = True, event.at_records
            custody.trouble = event.reason
            _said_farewell(custody)
        case StartUnclaimed():
            note("start_unclaimed", custody, "warning", reason=event.reason)
            _unclaimed(event, custody, now, failover_s)
            _said_farewell(custody)
        case ProcessStarted():
            pass  # only the shell needs its pid


def take_in_late(event: ProcessReport, custody: Custody | None) -> None:
    """Ignore reports that an ended process left in its ring, except the reason of a halt."""
    if isinstance(event, ProcessStarted | StartFailed | ProcessExited):
        raise InvariantViolation(f"lease {event.key}: {type(event).__name__}, and no process")
    is_examining = custody is not None and custody.state is State.EXAMINING
    if custody is not None and is_examining and isinstance(event, ProcessorFailed):
        custody.failure = event.reason


def _unclaimed(event: StartUnclaimed, custody: Custody, now: Instant, failover_s: float) -> None:
    """Decide whether the host was too slow. A start command is valid for a failover, and before it
    a write of ours came through: if the process claimed nothing in that time, its host is too slow
    [P4]."""
    if now >= custody.confirmed_instant + failover_s:
        custody.has_broken = True
        custody.trouble = event.reason


def _said_farewell(custody: Custody) -> None:
    if custody.state is not State.LEAVING:
        custody.step(Step.SAID_FAREWELL)


def _died(custody: Custody, event: ProcessExited, note: _Noting, now: Instant) -> None:
    """The process is proven to have ended. If it had not reported its end, it crashed."""
    custody.waiting_since = event.waiting_since or custody.waiting_since
    if custody.is_over:
        custody.step(Step.GIVEN_UP)
        return
    if custody.has_broken:
        custody.has_broken = False
        custody.restarts.broke(now, at_records=custody.has_starved)
        if custody.has_starved:
            _note_death(custody, note)
        else:
            note("start_failed", custody, "error", reason=custody.trouble)
    elif custody.state is State.LEAVING:
        custody.restarts.stopped(now)
    else:
        custody.restarts.crashed(now)
        custody.trouble = event.reason
        _note_death(custody, note)
    custody.is_proven = False
    custody.step(Step.DIED)


def _note_death(custody: Custody, note: _Noting) -> None:
    deaths = custody.restarts.deaths
    note("process_died", custody, "warning", reason=custody.trouble, deaths=deaths)


def _not_started(custody: Custody, event: StartFailed, note: _Noting, now: Instant) -> None:
    custody.restarts.failed(now)
    custody.trouble = event.reason
    custody.rest_until = Instant(now + custody.restarts.pause_s)
    custody.step(Step.NOT_STARTED)
    note("start_failed", custody, "error", reason=event.reason)


# States without a process and without a task of their own: a drain gives these leases up at once.
_IDLE = frozenset({State.RESTING, State.WAITING, State.READYING, State.OUTWAITING, State.HALTED})


class Keeper:
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
        self.custodies: dict[LeaseKey, Custody] = {}
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
        return tuple(c.key for c in self.custodies.values() if c.counts_as_held)

    @property
    def places(self) -> int:
        """How many leases we may hold: fewer than `leases.max` where our host proves able to run
        fewer, but only while another owner can take the rest."""
        return self.host_places.count if self.are_others_in_sight else self._policy.leases_max

    @property
    def is_full(self) -> bool:
        """Whether every place is filled. Called at each event, so it counts only close to full."""
        places = self.places
        return len(self.custodies) >= places and len(self.held) >= places

    def take(self, change: Take, now: Instant) -> None:
        custody = Custody(key=change.key, state=State.TAKING)
        self.custodies[change.key] = custody
        self._writer.send(custody, change, now)

    def adopt(self, key: LeaseKey, now: Instant) -> None:
        """A scan shows a row as ours that we do not hold: read its current state."""
        self.custodies[key] = Custody(key=key, state=State.EXAMINING)
        self._settle(self.custodies[key], now)

    def drain(self, reason: str, now: Instant) -> None:
        """Give everything up in good order: processes are asked to drain, idle rows given away."""
        self.is_draining = self._writer.is_draining = True
        for custody in tuple(self.custodies.values()):
            if custody.state in (State.STARTING, State.RUNNING):
                custody.step(Step.TOLD_TO_DRAIN)
                self._out.append(DrainProcess(custody.key, reason))
            self._settle(custody, now)

    def tick(self, now: Instant) -> None:
        """Time passed. A lease with a process waits for that process, not for time."""
        for custody in tuple(self.custodies.values()):
            if custody.state not in WITH_PROCESS:
                self._settle(custody, now)

    def hint_parents(
        self, rows: Mapping[LeaseKey, Lease], broken: frozenset[str], now: Instant
    ) -> None:
        """Take in a scan: where all parents seem to have ended, request the consistent reads."""
        for custody in self._waiting():
            row = rows.get(custody.key)
            if row is not None and seem_over(row, rows, broken):
                custody.should_ask_parents = True
                self._settle(custody, now)

    def give_way(self, count: int, is_work: Callable[[LeaseKey], bool], now: Instant) -> None:
        """Release up to `count` leases that wait for their parents: work needs their places."""
        waiting = [c for c in self._waiting() if not is_work(c.key) and c.unresolved is None]
        for custody in sorted(waiting, key=lambda each: each.key)[:count]:
            custody.step(Step.TO_BE_RELEASED)
            self._settle(custody, now)

    def hint_ended(self, parent: LeaseKey, now: Instant) -> None:
        """A shard ended here: its children that we hold need not wait for a scan."""
        for custody in self._waiting():
            if custody.row is not None and parent in custody.row.parents:
                custody.should_ask_parents = True
                self._settle(custody, now)

    def on_write(self, event: WriteResolved, custody: Custody, now: Instant) -> None:
        if custody.unresolved is None or custody.unresolved.change != event.change:
            raise InvariantViolation(f"lease {custody.key}: an outcome of no write under way")
        self._take_in(custody, self._writer.resolve(custody, event.outcome, now), now)
        self._settle(custody, now)

    def on_row(self, event: RowRead, now: Instant) -> None:
        custody = self.custodies.get(event.key)
        if custody is None or not custody.is_reading:
            raise InvariantViolation(f"lease {event.key}: a row that was not asked for")
        custody.is_reading = False
        if custody.unresolved is not None:
            self._take_in(custody, self._writer.read_back(custody, event.row, now), now)
        elif custody.state is State.OUTWAITING:
            self._outwaited(custody, event.row)
        else:
            self._examined(custody, event.row, now)
        self._settle(custody, now)

    def on_unreadable(self, event: RowUnreadable, now: Instant) -> None:
        """A broken row [P8]: its owner cannot be determined, so we only read it again. A drain does
        not wait for a person: a row that cannot be read is not given up."""
        custody = self.custodies.get(event.key)
        if custody is None or not custody.is_reading:
            raise InvariantViolation(f"lease {event.key}: a row that was not asked for")
        if not self.is_draining:
            self._out.append(ReadRow(event.key, Instant(now + UNREADABLE_PAUSE_S)))
            return
        custody.is_reading = False
        custody.unresolved = None
        self._note("broken_row_left", custody, "warning", reason=event.reason)
        custody.step(Step.NOT_OURS)
        self._settle(custody, now)

    def on_parents(self, event: ParentsRead, now: Instant) -> None:
        """Take in consistent reads. An answer that comes too late for its lease changes nothing."""
        custody = self.custodies.get(event.key)
        if custody is None or not custody.is_asking_parents:
            return
        custody.is_asking_parents = False
        custody.are_parents_over = have_ended(event.parents)
        self._settle(custody, now)

    def on_report(self, event: ProcessReport, now: Instant) -> None:
        custody = self.custodies.get(event.key)
        if custody is None or not custody.has_process:
            take_in_late(event, custody)
            return
        if isinstance(event, PositionMoved):
            self.host_places.moved(custody.restarts.started_instant, now)
        elif isinstance(event, LeaseClaimed):
            self.host_places.claimed()
        take_in(event, custody, self._note, now, self._policy.failover_s)
        has_expired = isinstance(event, StartUnclaimed) and custody.has_broken
        if has_expired and self.are_others_in_sight:
            self.host_places.start_expired(self._running(), custody.trouble, now)
        self._settle(custody, now)

    def deadline(self, now: Instant) -> Instant | None:
        """When the next renewal or restart is due; None if nothing waits for the clock."""
        due = []
        for custody in self.custodies.values():
            if custody.state not in _IDLE:
                continue
            if custody.unresolved is None and not custody.is_reading:
                due.append(custody.renew_instant)
                if custody.state is State.RESTING:
                    due.append(custody.rest_until)
                elif custody.state is State.OUTWAITING and custody.ours_instant is not None:
                    due.append(self._outwaits_until(custody.ours_instant))
        return Instant(max(now, min(due))) if due else None

    def _running(self) -> int:
        return sum(1 for c in self.custodies.values() if c.state is State.RUNNING)

    def _waiting(self) -> Iterable[Custody]:
        return tuple(c for c in self.custodies.values() if c.state is State.WAITING)

    def _examined(self, custody: Custody, row: Lease | None, now: Instant) -> None:
        """The lease has no process and the row was read: go on from the row, if it is ours."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(custody, row)
            return
        custody.row = row
        custody.ours_instant = now if custody.ours_instant is None else custody.ours_instant
        custody.rest_until = Instant(now + custody.restarts.pause_s)
        if row.halt is not None:
            custody.step(Step.FOUND_HALTED)
            return
        if custody.failure is None and self._verdict(custody, row) is Verdict.HALT:
            custody.failure = self._why_halted(custody, row)
        custody.step(Step.STILL_OURS if custody.failure is None else Step.TO_BE_HALTED)

    def _verdict(self, custody: Custody, row: Lease) -> Verdict:
        return custody.restarts.verdict(
            slot=self._slot,
            failed_slot=row.failed_slot,
            are_others=self.are_others_in_sight and not self.is_draining,
        )

    def _why_halted(self, custody: Custody, row: Lease) -> str:
        before = row.failed_slot
        elsewhere = f", and on host {before} before" if before not in {None, self._slot} else ""
        return (
            f"the lease process died {custody.restarts.deaths} times in a row without moving the"
            f" checkpoint{elsewhere}; the last time: {custody.trouble}"
        )

    def _outwaited(self, custody: Custody, row: Lease | None) -> None:
        """The row was read a failover after a take by force: its former owner has stopped [P18]."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(custody, row)
            return
        custody.row = row
        custody.has_waited = True
        custody.step(Step.FOUND_HALTED if row.halt is not None else Step.OUTWAITED)

    def _take_in(self, custody: Custody, settled: Settled | None, now: Instant) -> None:
        match settled:
            case Landed(row=row) | Stale(row=row) if row.is_ended:
                custody.step(Step.NOT_OURS)  # the last write of an ended process ended it [H1]
            case Landed():
                self._landed(custody, settled, now)
            case Stale(row):
                custody.row = row
            case Lost(None) if custody.row is not None and self._may_restore(custody, now):
                self._restore(custody, custody.row, now)
            case Lost(row):
                self._lose(custody, row)
            case Forgone():
                custody.step(Step.NOT_OURS)
            case None:
                pass

    def _landed(self, custody: Custody, landed: Landed, now: Instant) -> None:
        """A write of ours applied. A reply (or a take) proves that a zombie did not write it."""
        custody.row = landed.row
        custody.renew_instant = Instant(landed.sent_instant + self._policy.renew_every_s)
        if landed.by_reply or isinstance(landed.change, Take):
            custody.is_proven = True
            custody.confirmed_instant = landed.sent_instant
        match landed.change:
            case Take():
                custody.ours_instant = now
                self._taken(custody, landed.change, landed.row)
            case CreateLease():
                self._note("row_restored", custody, "warning", position=str(landed.row.checkpoint))
            case HaltLease(halt=halt):
                custody.step(Step.HALTED)
                self._note("lease_halted", custody, "error", reason=halt.reason)
            case Release():
                custody.step(Step.RELEASED)
                self._note("lease_released", custody, position=str(landed.change.position))
            case Offer():
                custody.step(Step.RELEASED)
                offer = landed.change
                position, target = str(offer.position), offer.offered_to
                self._note("lease_offered", custody, position=position, target=target)
            case Renew():
                if custody.state is State.HALTED and landed.row.halt is None:
                    self._resumed(custody)

    def _taken(self, custody: Custody, change: Take, row: Lease) -> None:
        self._note("lease_taken", custody, position=str(row.checkpoint), former=change.seen_owner)
        if row.halt is not None:
            custody.step(Step.FOUND_HALTED)
            self._note("lease_still_halted", custody, "warning", reason=row.halt.reason)
        else:
            custody.step(Step.TAKEN)

    def _resumed(self, custody: Custody) -> None:
        custody.failure = None
        custody.restarts.progressed()
        custody.step(Step.RESUMED)
        self._note("lease_resumed", custody)

    def _lose(self, custody: Custody, row: Lease | None) -> None:
        """The row is not ours any more. Losing a race for a take or an adoption is not logged."""
        was_ours = custody.row is not None
        was_given = custody.state is State.RELEASING  # and taken, before its outcome arrived
        custody.step(Step.NOT_OURS)
        if row is None:
            if was_ours:
                self._note("row_vanished", custody, "error")
        elif was_ours and not row.is_ended and not was_given:
            self._note("lease_lost", custody, "warning", owner=row.owner)

    def _may_restore(self, custody: Custody, now: Instant) -> bool:
        """Whether to restore a vanished row: once, and only before an owner can see it expired."""
        fresh_until = custody.confirmed_instant + self._policy.failover_s
        return not custody.was_restored and now < fresh_until

    def _restore(self, custody: Custody, row: Lease, now: Instant) -> None:
        """Our row vanished while we held it. Write it again as it was, because its position is
        known. Otherwise the shard would be found without a lease and be read again from the start
        position."""
        custody.was_restored = True
        self._note("row_vanished", custody, "error")
        counter = row.counter + WRITTEN_AGAIN_AHEAD
        again = msgspec.structs.replace(row, counter=counter, handoff=None)
        self._writer.send(custody, CreateLease(again), now)

    def _settle(self, custody: Custody, now: Instant) -> None:
        """Make every step that this lease can make now; drop it once it is gone."""
        while custody.unresolved is None and not custody.is_reading:
            if not self._moves_on(custody, now):
                break
        if custody.state is State.GONE:
            self.custodies.pop(custody.key, None)
        custody.check()

    def _moves_on(self, custody: Custody, now: Instant) -> bool:
        """Make one step or send one command; True if the lease may go further at once."""
        row, me = custody.row, self._policy.me
        if custody.state is State.EXAMINING:
            custody.is_reading = True
            self._out.append(ReadRow(custody.key))
        elif row is None or custody.has_process or custody.state is State.GONE:
            return False
        elif custody.state in _IDLE and (self.is_draining or self._is_asked_for(row, now)):
            custody.step(Step.TO_BE_RELEASED)
        elif custody.state is State.RESTING and self._must_leave(custody, row):
            self.host_places.failed(self._running(), custody.trouble, now)
            custody.step(Step.TO_BE_RELEASED)
        elif custody.state is State.HALTING:
            at = self._wall(now)
            # If no older record is known, the record that halts it has arrived by now.
            halt = Halt(custody.failure or "", at, custody.waiting_since or at)
            self._writer.send(custody, HaltLease(custody.key, me, row.counter, halt), now)
        elif custody.state is State.RELEASING:
            self._writer.send(custody, self._gift(custody, row, now), now)
        else:
            return self._idles(custody, row, now)
        return True

    def _idles(self, custody: Custody, row: Lease, now: Instant) -> bool:
        """Ours without a process: go on towards the start when possible, else keep renewing."""
        if custody.state is State.RESTING and now >= custody.rest_until:
            custody.step(Step.RESTED)
            return True
        if custody.state is State.WAITING:
            custody.are_parents_over = custody.are_parents_over or not row.parents
            if custody.are_parents_over:
                custody.step(Step.PARENTS_OVER)
                return True
            self._ask_parents(custody, row)
        if self._outwaits(custody, row, now):
            return True
        fresh_until = custody.confirmed_instant + self._policy.renew_every_s
        is_readying = custody.state is State.READYING
        if is_readying and custody.is_proven and now < fresh_until:
            self._start(custody, row, now)
        elif is_readying or not custody.is_proven or now >= custody.renew_instant:
            me, drops_ask = self._policy.me, row.handoff is not None
            self._writer.send(custody, Renew(row.key, me, row.counter, drops_ask=drops_ask), now)
        return False

    def _outwaits(self, custody: Custody, row: Lease, now: Instant) -> bool:
        """Wait after a take by force, by us or by a previous owner: the former owner may work on
        until its own renewals have failed for a failover. Returns True if the lease went on
        [P18]."""
        if custody.state is State.READYING and row.taken_from is not None:
            if custody.has_waited:
                return False
            custody.step(Step.TO_OUTWAIT)
        is_over = (
            custody.state is State.OUTWAITING
            and custody.ours_instant is not None
            and now >= self._outwaits_until(custody.ours_instant)
        )
        if is_over:
            custody.is_reading = True
            self._out.append(ReadRow(custody.key))
        return is_over

    def _outwaits_until(self, ours_instant: Instant) -> Instant:
        return Instant(ours_instant + self._policy.failover_s)

    def _is_asked_for(self, row: Lease, now: Instant) -> bool:
        """Whether another owner, or an operator, waits for this row [P16]."""
        asked = row.handoff
        is_ours = asked is not None and asked.to == self._policy.me
        return asked is not None and not is_ours and not self._is_ask_stale(row, now)

    def _must_leave(self, custody: Custody, row: Lease) -> bool:
        """Whether our host cannot run it, and another owner can try."""
        return self._verdict(custody, row) is Verdict.GIVE_AWAY

    def _gift(self, custody: Custody, row: Lease, now: Instant) -> Offer | Release:
        """The write that gives the row away as it stands: offered to the asker, offered to any
        owner, or released. A halt stays on the row and travels with it [P17]."""
        me, at = self._policy.me, row.checkpoint
        if custody.restarts.has_tripped and self._must_leave(custody, row):
            died_on = DiedOn(self._slot, at)
            return Offer(row.key, me, row.counter, at, at, died_on=died_on)
        if row.handoff is not None and self._is_asked_for(row, now):
            to = None if row.handoff.to == ANYBODY else row.handoff.to
            return Offer(row.key, me, row.counter, at, at, offered_to=to)
        # Before its parents end, a lease is not work and is not taken. It goes back to the state
        # in which it was created.
        gives_way = not custody.are_parents_over and not self.is_draining
        if self.are_others_in_sight and not gives_way:
            return Offer(row.key, me, row.counter, at, at)
        return Release(row.key, me, row.counter, at, at)

    def _ask_parents(self, custody: Custody, row: Lease) -> None:
        if custody.should_ask_parents and not custody.is_asking_parents:
            custody.should_ask_parents = False
            custody.is_asking_parents = True
            self._out.append(ReadParents(custody.key, parent_keys(row)))

    def _start(self, custody: Custody, row: Lease, now: Instant) -> None:
        """Start a process for the row. The command is void once our last write may have expired."""
        custody.step(Step.STARTED)
        custody.restarts.started(now)
        custody.failure = None
        expires_instant = Instant(custody.confirmed_instant + self._policy.failover_s)
        has_waited = custody.has_waited and row.taken_from is not None
        start = StartProcess(custody.key, row.counter, expires_instant, has_waited=has_waited)
        self._out.append(start)

    def _note(
        self, event: str, custody: Custody, level: str = "info", **fields: str | int | None
    ) -> None:
        self._out.append(Note(event, level, custody.key, dict(fields)))
