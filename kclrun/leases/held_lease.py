"""One lease that this manager holds: what is known about it, and its transitions.

`transitions.py` has the states and how they follow each other; begin to read there.
`held_leases.py` decides which transition comes when, and what became of a write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases import events
from kclrun.leases.commands import Command, Note, ReadParents, ReadRow, StartProcess, WriteRow
from kclrun.leases.restarts import RestartDecision, Restarts
from kclrun.leases.table_view import have_ended, is_unowned, parent_keys
from kclrun.leases.transitions import TRANSITIONS, WITH_PROCESS, State, Transition
from kclrun.model.lease import WRITTEN_AGAIN_AHEAD, Lease, LeaseKey
from kclrun.model.time import Instant, WallTime
from kclrun.protocol import reports, writes
from kclrun.protocol.in_flight import InFlight


class RowRequests(msgspec.Struct):
    """The reads of one row, and the one write in flight [P5].

    `attempts` counts the sends of the change in flight; `sent_instant` is the earliest that may
    have applied [P7]. `misses` counts writes in a row that no success reply settled: the next ones
    are sent slower.
    """

    in_flight: InFlight = msgspec.field(default_factory=InFlight)
    attempts: int = 0
    sent_instant: Instant = Instant(0.0)
    is_reading: bool = False
    misses: int = 0

    @property
    def awaits_answer(self) -> bool:
        """Whether a write or a read of ours is under way."""
        return self.in_flight.change is not None or self.is_reading

    def read(self, key: LeaseKey) -> ReadRow:
        """Request a consistent read of the row."""
        self.is_reading = True
        return ReadRow(key)

    def begin(self, change: writes.Change, now: Instant, not_before: Instant | None) -> WriteRow:
        """The first send of a change."""
        self.in_flight.begin(change)
        self.attempts, self.sent_instant = 1, not_before or now
        return WriteRow(change, not_before)

    def send_again(self, not_before: Instant) -> WriteRow:
        """Send the change in flight as it is, with the same expected counter [P6]."""
        if not self.in_flight.unresolved:
            self.sent_instant = not_before
        self.attempts += 1
        return WriteRow(self.in_flight.required(), not_before)

    def read_back(self, key: LeaseKey) -> ReadRow:
        """The outcome of a send is not known: the row shows it [P6]."""
        if not self.in_flight.unresolved:  # only the earliest counts
            self.in_flight.unresolved.append(self.sent_instant)
        return self.read(key)

    def abandon(self) -> None:
        """Await no answer any more."""
        self.is_reading = False
        self.in_flight.end()


class ParentReads(msgspec.Struct):
    """Whether all parents of a lease have ended, by consistent reads of their rows [P11].

    `should_ask`: another read is worth its cost.
    """

    are_over: bool = False
    should_ask: bool = True
    is_asking: bool = False

    def ask(self, row: Lease) -> ReadParents:
        """Request the reads."""
        self.should_ask = False
        self.is_asking = True
        return ReadParents(row.key, parent_keys(row))

    def on_read(self, parents: Iterable[Lease | None]) -> None:
        """Take in consistent reads of the parents' rows; None for an absent row."""
        self.is_asking = False
        self.are_over = have_ended(parents)


class HeldLease(msgspec.Struct, kw_only=True):
    """All that we know about one lease that this manager holds.

    `row` is the row as last confirmed (None until the take applied). `is_proven`: a write of ours
    succeeded since the last process of this lease was proven to have ended, so a write that the
    process left in flight can no longer apply [P5]. `confirmed_instant` is when that write was
    sent.
    `is_over`: the process ended or released the lease, acknowledged. `failure`: why the lease
    halts. `has_broken`: the process ends for a fault that is not the processor's; `has_starved`:
    that happened while user code was at records. `trouble`: the last error.
    `waiting_since` is the arrival time of the oldest record known not to be processed, or None.
    `needs_own_process`: its last process died, or it was too busy for a shared one.
    `ours_instant` is when we learned that the row is ours. `has_waited`: a failover has passed
    since then, and the row was read again [P18]. `was_restored`: the row vanished, and we wrote it
    again.
    """

    key: LeaseKey
    state: State
    row: Lease | None = None
    requests: RowRequests = msgspec.field(default_factory=RowRequests)
    parents: ParentReads = msgspec.field(default_factory=ParentReads)
    is_proven: bool = False
    confirmed_instant: Instant = Instant(0.0)
    renew_instant: Instant = Instant(0.0)
    rest_until: Instant = Instant(0.0)
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    ours_instant: Instant | None = None
    has_waited: bool = False
    was_restored: bool = False
    is_over: bool = False
    failure: str | None = None
    waiting_since: WallTime | None = None
    has_broken: bool = False
    has_starved: bool = False
    needs_own_process: bool = False
    trouble: str = ""

    def step(self, step: Transition) -> None:
        """Move on. Raises: InvariantViolation if the table does not name the step here."""
        following = TRANSITIONS[self.state].get(step)
        if following is None:
            raise InvariantViolation(f"lease {self.key} cannot be {step.value}: {self.state.value}")
        self.state = following

    def note(self, event: str, level: str | None = None, **fields: str | int | None) -> Note:
        """A line for the log about this lease."""
        return Note(event, level, self.key, dict(fields))

    @property
    def standing(self) -> str:
        """Why the lease stands still by decision, in words; empty if it does not."""
        if self.row is not None and self.row.halt is not None:
            return self.row.halt.reason
        paused = self.row.pause if self.row is not None and self.state is State.PAUSED else None
        return paused.in_words() if paused is not None else ""

    @property
    def known_to_wait_since(self) -> WallTime | None:
        """Since when its oldest record is known to wait while no process reads it. A row of a
        former version has only the time of the halt: the record had arrived by then. The records
        of a paused lease wait since the pause at most, unless its process was behind before."""
        halt = self.row.halt if self.row is not None else None
        if halt is not None:
            return halt.waiting_since or halt.halted_at or None
        paused = self.row.pause if self.row is not None and self.state is State.PAUSED else None
        return self.waiting_since or (paused.paused_at if paused is not None else None)

    # What becomes of its writes.

    def begin_write(
        self, change: writes.Change, now: Instant, not_before: Instant | None
    ) -> WriteRow:
        """The first send of a change. Raises: InvariantViolation if the row has a writer."""
        if self.requests.awaits_answer or self.state in WITH_PROCESS:
            raise InvariantViolation(f"lease {self.key}: a second writer, {self.state.value}")
        return self.requests.begin(change, now, not_before)

    def on_not_applied(self, row: Lease) -> None:
        """The change never applied, but the row is ours: decide again from this row."""
        self.requests.misses += 1
        if row.is_ended:
            self.step(Transition.NOT_OURS)
        else:
            self.row = row

    def may_be_restored(self, now: Instant, failover_s: float) -> bool:
        """Whether to restore a vanished row: once, and only before an owner can see it expired."""
        is_fresh = now < self.confirmed_instant + failover_s
        return self.row is not None and is_fresh and not self.was_restored

    def restore(self) -> writes.CreateLease:
        """The creation that writes our vanished row again as it was, because its position is known.
        Otherwise the shard would be found without a lease and be read again from the start
        position."""
        row = self._required_row()
        self.was_restored = True
        counter = row.counter + WRITTEN_AGAIN_AHEAD
        return writes.CreateLease(msgspec.structs.replace(row, counter=counter, handoff=None))

    def abandon(self) -> None:
        """In a drain, leave a broken row to its repair."""
        self.requests.abandon()
        self.step(Transition.NOT_OURS)

    # Without a process: from the row, step by step, to the next start.

    def on_examined(self, row: Lease, decision: RestartDecision, slot: str, now: Instant) -> None:
        """The row was read and is ours: go on from it. `decision` is the conclusion from the
        failures here, on our host `slot`."""
        self.row = row
        if self.state is State.QUARANTINED:  # its former owner has stopped [P18]
            self.has_waited = True
            is_halted = row.halt is not None
            self.step(Transition.FOUND_HALTED if is_halted else Transition.QUARANTINE_OVER)
            return
        if self.ours_instant is None:
            self.ours_instant = now
        self.rest_until = Instant(now + self.restarts.pause_s)
        if row.halt is not None:
            self.step(Transition.FOUND_HALTED)
            return
        if self.failure is None and decision is RestartDecision.HALT:
            before = row.failed_slot
            elsewhere = f", and on host {before} before" if before not in {None, slot} else ""
            self.failure = (
                f"the lease process died {self.restarts.deaths} times in a row without moving"
                f" the checkpoint{elsewhere}; the last time: {self.trouble}"
            )
        self.step(Transition.STILL_OURS if self.failure is None else Transition.TO_BE_HALTED)

    def _start(self, now: Instant, failover_s: float) -> StartProcess:
        """Start a process for the row. The command is void once our last write may have expired."""
        row = self._required_row()
        self.restarts.started_instant = now
        self.failure = None
        return StartProcess(
            self.key,
            row.counter,
            Instant(self.confirmed_instant + failover_s),
            has_waited=self.has_waited and row.taken_from is not None,
            is_alone=self.needs_own_process or row.died_on is not None,
            past_pause=row.pause,
        )

    def due_instant(self, failover_s: float, wall_offset_s: float) -> Instant:
        """When a lease without a process has something to do; `wall_offset_s` makes wall times of
        instants."""
        pause = self.row.pause if self.row is not None else None
        due = [self.renew_instant]
        if self.state is State.BACKING_OFF:
            due.append(self.rest_until)
        elif self.state is State.QUARANTINED and self.ours_instant is not None:
            due.append(Instant(self.ours_instant + failover_s))
        elif self.state is State.PAUSED and pause is not None and pause.until:
            due.append(Instant(pause.until - wall_offset_s))
        return min(due)

    # With a process: its reports, and its end.

    def on_late_report(self, report: reports.CoreReport) -> None:
        """A report that its ended process left in its ring: only the reason of a halt counts."""
        if self.state is not State.EXAMINING or not isinstance(report, reports.ProcessorFailed):
            return
        if not report.is_host_fault:
            self.failure = reports.reason_of(report)

    def on_report(
        self, event: events.ProcessEvent, now: Instant, failover_s: float
    ) -> list[Command]:
        """Take in a report of its live process, or of the end of that process.

        A process that reported its end stopped in good order; one that ended without a report
        crashed. `Restarts` decides about several crashes, and about a process that broke.
        """
        match event:
            case events.ProcessExited():
                return self._died(event, now)
            case events.StartFailed():
                self.restarts.failed(now)
                self.trouble = event.reason
                self.rest_until = Instant(now + self.restarts.pause_s)
                self.step(Transition.NOT_STARTED)
                return [self.note("start_failed", "error", reason=event.reason)]
            case events.ProcessReported(_, report):
                return self._on_reported(report, now, failover_s)
            case events.ProcessStarted():
                return []  # only the shell needs its pid
            case _:
                assert_never(event)

    def _on_reported(
        self, report: reports.CoreReport, now: Instant, failover_s: float
    ) -> list[Command]:
        notes: list[Command] = []
        match report:
            case reports.LeaseClaimed():
                if self.state is State.STARTING:
                    self.step(Transition.CLAIMED)
                return []
            case reports.Checkpointed():
                self.restarts.progressed()
                self.waiting_since = None
                return []
            case reports.ShardEnded() | reports.LeaseReleased():
                self.is_over = True
            case reports.LeaseKept(is_paused):
                self.needs_own_process |= not is_paused
            case reports.ProcessorFailed(is_host_fault=True):
                self.has_broken, self.has_starved = True, True
                self.trouble = reports.reason_of(report)
            case reports.ProcessorFailed():
                self.failure = reports.reason_of(report)
            case reports.LeaseLost() | reports.ProcessReplaced():
                is_lost = isinstance(report, reports.LeaseLost)
                event = "process_lost_lease" if is_lost else "process_replaced"
                notes.append(self.note(event, "warning", reason=report.reason))
            case reports.ProcessBroke():
                self.has_broken, self.has_starved = True, False
                self.trouble = report.reason
            case reports.StartUnclaimed():
                notes.append(self._unclaimed(report.reason, now, failover_s))
            case _:
                assert_never(report)
        if self.state is not State.EXITING:
            self.step(Transition.REPORTED_END)
        return notes

    def _unclaimed(self, reason: str, now: Instant, failover_s: float) -> Note:
        # A start command is valid for a failover, and before it a write of ours came through: if
        # the process claimed nothing in that time, its host is too slow [P4].
        if now >= self.confirmed_instant + failover_s:
            self.has_broken, self.has_starved = True, False
            self.trouble = reason
        return self.note("start_unclaimed", "warning", reason=reason)

    def _died(self, event: events.ProcessExited, now: Instant) -> list[Command]:
        """The process is proven to have ended. If it had not reported its end, it crashed."""
        self.waiting_since = event.waiting_since or self.waiting_since
        if self.is_over:
            self.step(Transition.GIVEN_UP)
            return []
        is_death = False
        notes: list[Command] = []
        if self.has_broken:
            self.has_broken, is_death = False, self.has_starved
            self.needs_own_process = True
            self.restarts.broke(now, at_records=self.has_starved)
            if not is_death:
                notes.append(self.note("start_failed", "error", reason=self.trouble))
        elif self.state is State.EXITING:
            self.restarts.stopped(now)
        elif event.is_shared:
            # Which of its leases ended it shows once each has a process of its own.
            self.restarts.stopped(now)
            self.needs_own_process = True
            self.trouble = event.reason
            notes.append(self.note("shared_process_died", "warning", reason=event.reason))
        else:
            self.restarts.crashed(now)
            self.needs_own_process = True
            self.trouble, is_death = event.reason, True
        if is_death:
            deaths = self.restarts.deaths
            died = self.note("process_died", "warning", reason=self.trouble, deaths=deaths)
            notes.append(died)
        self.is_proven = False
        self.step(Transition.DIED)
        return notes

    def on_applied(
        self,
        change: writes.Change,
        row: Lease,
        now: Instant,
        renew_every_s: float,
        *,
        by_reply: bool,
    ) -> list[Command]:
        """A write of ours applied. A reply (or a take) proves that a zombie did not write it."""
        requests, sent_instant = self.requests, self.requests.sent_instant
        requests.in_flight.end()
        requests.misses = 0 if by_reply else requests.misses + 1
        if row.is_ended:
            self.step(Transition.NOT_OURS)  # the last write of an ended process ended it [H1]
            return []
        self.row = row
        self.renew_instant = Instant(sent_instant + renew_every_s)
        if by_reply or isinstance(change, writes.Take):
            self.is_proven = True
            self.confirmed_instant = sent_instant
        match change:
            case writes.Take():
                self.ours_instant = now
                return self._taken(change, row)
            case writes.CreateLease():
                return [self.note("row_restored", "warning", position=str(row.checkpoint))]
            case writes.HaltLease(halt=halt):
                self.step(Transition.HALTED)
                return [self.note("lease_halted", "error", reason=halt.reason)]
            case writes.Release() | writes.Offer():
                self.step(Transition.RELEASED)
                return self._given(change, row)
            case writes.Renew() if self.state is State.HALTED and row.halt is None:
                self.failure = None
                self.restarts.progressed()
                self.step(Transition.RESUMED)
                return [self.note("lease_resumed")]
            case (
                writes.Claim()
                | writes.Renew()
                | writes.Checkpoint()
                | writes.NameChildren()
                | writes.End()
                | writes.HandOver()
                | writes.CreateChildren()
            ):
                return []  # all but the renewal are writes of processes
            case _:
                assert_never(change)

    def _given(self, change: writes.Release | writes.Offer, row: Lease) -> list[Command]:
        if not is_unowned(row.owner):  # taken before the outcome arrived: its new owner logs that
            return []
        at = str(change.position)
        if isinstance(change, writes.Release):
            return [self.note("lease_released", position=at)]
        return [self.note("lease_offered", position=at, target=change.offered_to)]

    def _taken(self, change: writes.Take, row: Lease) -> list[Command]:
        taken = self.note("lease_taken", position=str(row.checkpoint), former=change.seen_owner)
        if row.halt is None:
            self.step(Transition.TAKEN)
            return [taken]
        self.step(Transition.FOUND_HALTED)
        return [taken, self.note("lease_still_halted", "warning", reason=row.halt.reason)]

    def on_step(self, step: Transition, now: Instant, failover_s: float) -> list[Command]:
        """Move on; return the start of the process, or a line for the log where a pause begins or
        ends."""
        was, pause = self.state, self.row.pause if self.row is not None else None
        self.step(step)
        if step is Transition.PARENTS_OVER:
            self.parents.are_over = True
        if step is Transition.STARTED:
            return [self._start(now, failover_s)]
        if pause is not None and self.state is State.PAUSED:
            return [self.note("lease_paused", "warning", reason=pause.in_words())]
        if was is State.PAUSED and step is Transition.RESUMED:
            return [self.note("lease_resumed", reason="its pause is over")]
        return []

    def lose(self, row: Lease | None) -> list[Command]:
        """The row is not ours any more. Losing a race for a take or an adoption is not logged."""
        was_ours = self.row is not None
        self.step(Transition.NOT_OURS)
        if row is None:
            return [self.note("row_vanished", "error")] if was_ours else []
        if was_ours and not row.is_ended:
            return [self.note("lease_lost", "warning", owner=row.owner)]
        return []

    def _required_row(self) -> Lease:
        if self.row is None:
            raise InvariantViolation(f"lease {self.key}, {self.state.value}, has no row yet")
        return self.row

    def check(self) -> None:
        """The invariants of one held lease. Raises: InvariantViolation."""
        if self.state in WITH_PROCESS:
            if self.requests.in_flight.change is not None:
                raise self._broken("has a write of ours under way")
            if self.requests.is_reading:
                raise self._broken("has a read of ours under way")
            if self.row is None:
                raise self._broken("was started without a row")
            if not self.is_proven:
                raise self._broken("was started without a confirmed write")
            if not self.parents.are_over:
                raise self._broken("was started before its parents ended")
        elif (change := self.requests.in_flight.change) is not None:
            written = change.lease if isinstance(change, writes.CreateLease) else change
            if getattr(written, "key", None) != self.key:
                raise self._broken("has another lease's write")

    def _broken(self, complaint: str) -> InvariantViolation:
        return InvariantViolation(f"lease {self.key}, {self.state.value}, {complaint}")
