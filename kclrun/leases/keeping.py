"""What happens to the leases in our hands, from the take to the day they are not ours.

Knows: each lease's `Custody`, and one rule above all: the row has one writer at a time. While a
process lives, that is the process; before its first start, between two starts, halted or waiting
for parents, it is this manager, which keeps renewing and answers who asks [P5, P15, P16].
May not know: other owners, shards, the scan. Look next: `custody.py` (the states), `writing.py`,
`process_reports.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases import process_reports as reports
from kclrun.leases.commands import Command, DrainProcess, Note, ReadParents, ReadRow, StartProcess
from kclrun.leases.custody import WITH_PROCESS, Custody, State, Step
from kclrun.leases.events import ParentsRead, ProcessReport, RowRead, WriteResolved
from kclrun.leases.lineage import have_ended, parent_keys, seem_over
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.writing import Forgone, Landed, Lost, RowWriter, Settled, Stale
from kclrun.model.changes import CreateLease, HaltLease, Offer, Release, Renew, Take
from kclrun.model.lease import ANYBODY, WRITTEN_AGAIN_AHEAD, Halt, Lease, LeaseKey
from kclrun.model.time import Instant, WallTime

__all__ = ["Keeper"]

# States without a process and without a task of their own: a drain gives them up at once.
_IDLE = frozenset({State.RESTING, State.WAITING, State.READYING, State.OUTWAITING, State.HALTED})


class Keeper:
    """All leases in our hands. `out` collects the commands; `wall` dates a halt; `is_ask_stale`
    says that the ask on a row of ours stood there for too long.

    `are_others_in_sight`: another kclrun owner is there to take what we give away [P17].
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

    @property
    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return tuple(c.key for c in self.custodies.values() if c.counts_as_held)

    @property
    def is_full(self) -> bool:
        """Whether every place is filled. Asked at each event, so counted only where it is close."""
        places = self._policy.leases_max
        return len(self.custodies) >= places and len(self.held) >= places

    def take(self, change: Take, now: Instant) -> None:
        custody = Custody(key=change.key, state=State.TAKING)
        self.custodies[change.key] = custody
        self._writer.send(custody, change, now)

    def adopt(self, key: LeaseKey, now: Instant) -> None:
        """A scan shows a row as ours that is not in our hands: read what it says now."""
        self.custodies[key] = Custody(key=key, state=State.EXAMINING)
        self._settle(self.custodies[key], now)

    def drain(self, reason: str, now: Instant) -> None:
        """Give everything up in good order: processes are told, idle rows given away."""
        self.is_draining = self._writer.is_draining = True
        for custody in tuple(self.custodies.values()):
            if custody.state in (State.STARTING, State.RUNNING):
                custody.step(Step.TOLD_TO_DRAIN)
                self._out.append(DrainProcess(custody.key, reason))
            self._settle(custody, now)

    def tick(self, now: Instant) -> None:
        """Time passed. What has a process waits for that process, not for time."""
        for custody in tuple(self.custodies.values()):
            if custody.state not in WITH_PROCESS:
                self._settle(custody, now)

    def hint_parents(
        self, rows: Mapping[LeaseKey, Lease], broken: frozenset[str], now: Instant
    ) -> None:
        """A scan: where all parents seem over now, ask for the consistent reads that decide."""
        for custody in self._waiting():
            row = rows.get(custody.key)
            if row is not None and seem_over(row, rows, broken):
                custody.should_ask_parents = True
                self._settle(custody, now)

    def hint_ended(self, parent: LeaseKey, now: Instant) -> None:
        """A shard ended here: its children in our hands need not wait for a scan."""
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

    def on_parents(self, event: ParentsRead, now: Instant) -> None:
        """Consistent reads. An answer that comes too late for its lease changes nothing."""
        custody = self.custodies.get(event.key)
        if custody is None or not custody.is_asking_parents:
            return
        custody.is_asking_parents = False
        custody.are_parents_over = have_ended(event.parents)
        self._settle(custody, now)

    def on_report(self, event: ProcessReport, now: Instant) -> None:
        custody = self.custodies.get(event.key)
        if custody is None or not custody.has_process:
            reports.take_in_late(event, custody)
            return
        reports.take_in(event, custody, self._note, now)
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

    def _waiting(self) -> Iterable[Custody]:
        return tuple(c for c in self.custodies.values() if c.state is State.WAITING)

    def _examined(self, custody: Custody, row: Lease | None, now: Instant) -> None:
        """No process lives and the row was read: go on from what it says, if it is ours."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(custody, row)
            return
        custody.row = row
        custody.ours_instant = now if custody.ours_instant is None else custody.ours_instant
        custody.rest_until = Instant(now + custody.restarts.pause_s)
        if row.halt is not None:
            custody.step(Step.FOUND_HALTED)
        elif custody.failure is not None:
            custody.step(Step.TO_BE_HALTED)
        else:
            custody.step(Step.STILL_OURS)

    def _outwaited(self, custody: Custody, row: Lease | None) -> None:
        """A failover after a take by force, the row was read again: nobody else is at it [P18]."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(custody, row)
            return
        custody.row = row
        custody.has_waited = True
        custody.step(Step.FOUND_HALTED if row.halt is not None else Step.OUTWAITED)

    def _take_in(self, custody: Custody, settled: Settled | None, now: Instant) -> None:
        match settled:
            case Landed(row=row) | Stale(row=row) if row.is_ended:
                custody.step(Step.NOT_OURS)  # a dead process's last write ended it [H1]
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
        """A write of ours applied. Only a reply (or a take) proves that no zombie wrote it."""
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
        """Not ours any more. A take that came second and an adoption that was late are no news."""
        was_ours = custody.row is not None
        was_given = custody.state is State.RELEASING  # and taken, before we heard that it applied
        custody.step(Step.NOT_OURS)
        if row is None:
            if was_ours:
                self._note("row_vanished", custody, "error")
        elif was_ours and not row.is_ended and not was_given:
            self._note("lease_lost", custody, "warning", owner=row.owner)

    def _may_restore(self, custody: Custody, now: Instant) -> bool:
        """Once, and only while nobody can have had reason to take it for abandoned."""
        fresh_until = custody.confirmed_instant + self._policy.failover_s
        return not custody.was_restored and now < fresh_until

    def _restore(self, custody: Custody, row: Lease, now: Instant) -> None:
        """Our row vanished under our hands: write it again as it was, for its position is known.
        Else the shard would be found without a lease and read again from the start position."""
        custody.was_restored = True
        self._note("row_vanished", custody, "error")
        counter = row.counter + WRITTEN_AGAIN_AHEAD
        again = msgspec.structs.replace(row, counter=counter, handoff=None)
        self._writer.send(custody, CreateLease(again), now)

    def _settle(self, custody: Custody, now: Instant) -> None:
        """Do all that this lease can do now; drop it once it is gone."""
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
        elif custody.state is State.HALTING:
            halt = Halt(custody.failure or "", self._wall(now))
            self._writer.send(custody, HaltLease(custody.key, me, row.counter, halt), now)
        elif custody.state is State.RELEASING:
            self._writer.send(custody, self._gift(row, now), now)
        else:
            return self._idles(custody, row, now)
        return True

    def _idles(self, custody: Custody, row: Lease, now: Instant) -> bool:
        """Ours without a process: on towards the start when possible, else keep renewing."""
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
        """Taken by force, by us or by whoever had it before: its former owner may work on until
        its own renewals have failed for a failover. True if the lease went on [P18]."""
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

    def _gift(self, row: Lease, now: Instant) -> Offer | Release:
        """The row given away as it stands: to the asker, to whoever comes, or to nobody. A halt
        stays on the row and travels with it [P17]."""
        me, at = self._policy.me, row.checkpoint
        if row.handoff is not None and self._is_asked_for(row, now):
            to = None if row.handoff.to == ANYBODY else row.handoff.to
            return Offer(row.key, me, row.counter, at, at, offered_to=to)
        if self.are_others_in_sight:
            return Offer(row.key, me, row.counter, at, at)
        return Release(row.key, me, row.counter, at, at)

    def _ask_parents(self, custody: Custody, row: Lease) -> None:
        if custody.should_ask_parents and not custody.is_asking_parents:
            custody.should_ask_parents = False
            custody.is_asking_parents = True
            self._out.append(ReadParents(custody.key, parent_keys(row)))

    def _start(self, custody: Custody, row: Lease, now: Instant) -> None:
        """Hand the row to a process. The command is void once our last write may have expired."""
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
