"""The leases that this manager holds, from the take until they are not ours any more.

Knows: each lease's `HeldLease`. Must not know: other owners, shards, the scan. Rule: a row has one
writer at a time. While a process lives, it is the process. Before its first start, between two
starts, while halted, paused or waiting for parents, it is this manager, which renews the row and
answers asks [P5, P15, P16].
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases import events
from kclrun.leases.capacity import HostCapacity
from kclrun.leases.commands import (
    Command,
    DrainProcess,
    Note,
    ReadParents,
    ReadRow,
    StartProcess,
    WriteRow,
)
from kclrun.leases.held_lease import WITH_PROCESS, HeldLease, RestartDecision, State, Transition
from kclrun.leases.policy import TAKE_ATTEMPTS_MAX, UNREADABLE_PAUSE_S, ManagerPolicy
from kclrun.leases.table_view import Observation, TableView, have_ended, parent_keys, seem_over
from kclrun.model.lease import ANYBODY, WRITTEN_AGAIN_AHEAD, DiedOn, Halt, Lease, LeaseKey, Owner
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import reports, writes

# States without a process and without a task of their own: a drain gives these leases up at once.
_IDLE = frozenset(
    {
        State.BACKING_OFF,
        State.WAITING,
        State.RENEWING_BEFORE_START,
        State.QUARANTINED,
        State.HALTED,
        State.PAUSED,
    }
)


class HeldLeases:
    """All leases that this manager holds, and the writes of their rows.

    `are_others_in_sight`: another kclrun owner can take the leases that we give away [P17].
    `endpoint` is published with each take, for the page of the fleet.

    Rule: only three things settle a write: a success reply, a row whose counter has moved, or a
    refusal that came before anything was sent [P6].
    """

    def __init__(
        self, policy: ManagerPolicy, chance: Callable[[], float], observation: Observation
    ) -> None:
        self.held_leases: dict[LeaseKey, HeldLease] = {}
        self.is_draining = False
        self.are_others_in_sight = False
        self.endpoint: str | None = None
        self.host_capacity = HostCapacity(policy.leases_max)
        self._policy = policy
        self._chance = chance
        self._observation = observation
        self._slot = Owner.slot_of(policy.me)
        self._renew_every_s = policy.renew_every_s
        self._refusals: set[str] = set()

    @property
    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return tuple(c.key for c in self.held_leases.values() if not c.is_over)

    @property
    def places(self) -> int:
        """How many leases we may hold: fewer than `leases.max` where our host proves able to run
        fewer, but only while another owner can take the rest."""
        return self.host_capacity.count if self.are_others_in_sight else self._policy.leases_max

    @property
    def is_full(self) -> bool:
        """Whether every place is filled. Called at each event, so it counts only close to full."""
        places = self.places
        return len(self.held_leases) >= places and len(self.held) >= places

    # What the manager decides.

    def take(self, change: writes.Take, now: Instant) -> list[Command]:
        held_lease = HeldLease(key=change.key, state=State.TAKING)
        self.held_leases[change.key] = held_lease
        return [self._write(held_lease, change, now)]

    def adopt(self, key: LeaseKey, now: Instant) -> list[Command]:
        """A scan shows a row as ours that we do not hold: read its current state."""
        self.held_leases[key] = HeldLease(key=key, state=State.EXAMINING)
        return self._settle(self.held_leases[key], now)

    def drain(self, reason: str, now: Instant) -> list[Command]:
        """Give everything up in good order: processes are asked to drain, idle rows given away."""
        self.is_draining = True
        commands: list[Command] = []
        for held_lease in tuple(self.held_leases.values()):
            if held_lease.state in (State.STARTING, State.RUNNING):
                held_lease.step(Transition.DRAIN_SENT)
                commands.append(DrainProcess(held_lease.key, reason))
            commands += self._settle(held_lease, now)
        return commands

    def tick(self, now: Instant) -> list[Command]:
        """Time passed. A lease with a process waits for that process, not for time; so does a
        lease with a write or a read under way for its outcome."""
        commands: list[Command] = []
        for held_lease in tuple(self.held_leases.values()):
            waits = held_lease.in_flight.change is not None or held_lease.is_reading
            if held_lease.state not in WITH_PROCESS and not waits:
                commands += self._settle(held_lease, now)
        return commands

    def hint_parents(self, view: TableView, now: Instant) -> list[Command]:
        """Take in a scan: where all parents seem to have ended, request the consistent reads."""
        commands: list[Command] = []
        for held_lease in self._waiting():
            row = view.rows.get(held_lease.key)
            if row is not None and seem_over(row, view.rows, view.broken):
                held_lease.should_ask_parents = True
                commands += self._settle(held_lease, now)
        return commands

    def hint_ended(self, parent: LeaseKey, now: Instant) -> list[Command]:
        """A shard ended here: its children that we hold need not wait for a scan."""
        commands: list[Command] = []
        for held_lease in self._waiting():
            if held_lease.row is not None and parent in held_lease.row.parents:
                held_lease.should_ask_parents = True
                commands += self._settle(held_lease, now)
        return commands

    def give_way(
        self, count: int, is_work: Callable[[LeaseKey], bool], now: Instant
    ) -> list[Command]:
        """Release up to `count` leases that wait for their parents: work needs their places."""
        waiting = [c for c in self._waiting() if not is_work(c.key) and c.in_flight.change is None]
        commands: list[Command] = []
        for held_lease in sorted(waiting, key=lambda each: each.key)[:count]:
            held_lease.step(Transition.TO_BE_RELEASED)
            commands += self._settle(held_lease, now)
        return commands

    # What became of reads, writes and processes.

    def on_write(
        self, event: events.WriteResolved, held_lease: HeldLease, now: Instant
    ) -> list[Command]:
        change = held_lease.in_flight.change
        if change is None or change != event.change:
            raise InvariantViolation(f"lease {held_lease.key}: an outcome of no write under way")
        commands = self._resolve(held_lease, change, event.outcome, now)
        return commands + self._settle(held_lease, now)

    def on_row(self, event: events.RowRead, now: Instant) -> list[Command]:
        held_lease = self._reading(event.key)
        held_lease.is_reading = False
        if held_lease.in_flight.change is not None:
            commands = self._judged(held_lease, event.row, now, answered=False)
        else:
            commands = self._examined(held_lease, event.row, now)
        return commands + self._settle(held_lease, now)

    def on_unreadable(self, event: events.RowUnreadable, now: Instant) -> list[Command]:
        """A broken row [P8]: its owner cannot be determined, so we only read it again. A drain does
        not wait for a person: a row that cannot be read is not given up."""
        held_lease = self._reading(event.key)
        if not self.is_draining:
            return [ReadRow(event.key, Instant(now + UNREADABLE_PAUSE_S))]
        held_lease.is_reading = False
        self._abandon(held_lease)
        note = held_lease.note("broken_row_left", "warning", reason=event.reason)
        return [note, *self._settle(held_lease, now)]

    def on_parents(self, event: events.ParentsRead, now: Instant) -> list[Command]:
        """Take in consistent reads. An answer that comes too late for its lease changes nothing."""
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.is_asking_parents:
            return []
        held_lease.is_asking_parents = False
        held_lease.are_parents_over = have_ended(event.parents)
        return self._settle(held_lease, now)

    def on_report(self, event: events.ProcessEvent, now: Instant) -> list[Command]:
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or held_lease.state not in WITH_PROCESS:
            self._take_in_late(event, held_lease)
            return []
        commands: list[Command] = []
        report = event.report if isinstance(event, events.ProcessReported) else None
        if isinstance(report, reports.Checkpointed):
            commands += self.host_capacity.moved(held_lease.restarts.started_instant, now)
        elif isinstance(report, reports.LeaseClaimed):
            self.host_capacity.claimed()
        commands += held_lease.on_report(event, now, self._policy.failover_s)
        has_expired = isinstance(report, reports.StartUnclaimed) and held_lease.has_broken
        if has_expired and self.are_others_in_sight:
            commands += self.host_capacity.start_expired(self._running(), held_lease.trouble, now)
        return commands + self._settle(held_lease, now)

    def deadline(self, now: Instant) -> Instant | None:
        """When the next renewal or restart is due; None if nothing waits for the clock."""
        due = []
        for held_lease in self.held_leases.values():
            if held_lease.state not in _IDLE:
                continue
            if held_lease.in_flight.change is None and not held_lease.is_reading:
                due.append(held_lease.renew_instant)
                if held_lease.state is State.BACKING_OFF:
                    due.append(held_lease.rest_until)
                elif held_lease.state is State.QUARANTINED and held_lease.ours_instant is not None:
                    due.append(self._quarantined_until(held_lease.ours_instant))
                elif held_lease.state is State.PAUSED and (until := self._paused_until(held_lease)):
                    due.append(until)
        return Instant(max(now, min(due))) if due else None

    def _take_in_late(self, event: events.ProcessEvent, held_lease: HeldLease | None) -> None:
        """Ignore reports that an ended process left in its ring, except the reason of a halt."""
        if not isinstance(event, events.ProcessReported):
            raise InvariantViolation(f"lease {event.key}: {type(event).__name__}, and no process")
        is_examining = held_lease is not None and held_lease.state is State.EXAMINING
        report = event.report
        if held_lease is not None and is_examining and isinstance(report, reports.ProcessorFailed):
            held_lease.failure = (
                held_lease.failure if report.is_host_fault else reports.reason_of(report)
            )

    def _reading(self, key: LeaseKey) -> HeldLease:
        held_lease = self.held_leases.get(key)
        if held_lease is None or not held_lease.is_reading:
            raise InvariantViolation(f"lease {key}: a row that was not asked for")
        return held_lease

    def _running(self) -> int:
        return sum(1 for c in self.held_leases.values() if c.state is State.RUNNING)

    def _waiting(self) -> tuple[HeldLease, ...]:
        return tuple(c for c in self.held_leases.values() if c.state is State.WAITING)

    # One write at a time, and its outcome.

    def _write(self, held_lease: HeldLease, change: writes.Change, now: Instant) -> WriteRow:
        """Send a first attempt; after failed ones slower and slower."""
        flight, has_process = held_lease.in_flight, held_lease.state in WITH_PROCESS
        if flight.change is not None or held_lease.is_reading or has_process:
            raise InvariantViolation(
                f"lease {held_lease.key}: a second writer, {held_lease.state.value}"
            )
        not_before = None
        if held_lease.misses > 1:
            not_before = Instant(now + backoff_s(held_lease.misses - 2, self._chance()))
        flight.begin(change)
        held_lease.attempts, held_lease.sent_instant = 1, not_before or now
        return WriteRow(change, not_before)

    def _resolve(
        self, held_lease: HeldLease, change: writes.Change, outcome: writes.Outcome, now: Instant
    ) -> list[Command]:
        match outcome:
            case writes.Applied(row):
                if isinstance(change, writes.CreateLease):
                    row = change.lease
                if row is None:
                    raise InvariantViolation(f"lease {held_lease.key}: a success without the row")
                self._refusals.clear()
                return held_lease.on_applied(change, row, now, self._renew_every_s, by_reply=True)
            case writes.ConditionFailed(row):
                return self._judged(held_lease, row, now, answered=True)
            case writes.OutcomeUnknown():
                if not held_lease.in_flight.unresolved:  # only the earliest counts
                    held_lease.in_flight.unresolved.append(held_lease.sent_instant)
                held_lease.is_reading = True
                return [ReadRow(held_lease.key)]
            case writes.Throttled() | writes.Unavailable():
                return self._again(held_lease, now)
            case writes.Refused(code) if code == writes.BROKEN_ROW:
                notes = self._note_refusal(outcome)
                if self.is_draining:  # a drain does not wait until the row is repaired
                    self._abandon(held_lease)
                    return notes
                return notes + self._again(held_lease, now, UNREADABLE_PAUSE_S)
            case writes.Refused():
                notes = self._note_refusal(outcome)
                return notes + self._again(held_lease, now, self._policy.refused_pause_s)

    def _again(
        self, held_lease: HeldLease, now: Instant, pause_s: float | None = None
    ) -> list[Command]:
        """Send the same change with the same expected counter, or give up a take unsent."""
        if pause_s is None:
            pause_s = backoff_s(held_lease.attempts - 1, self._chance())
        change = held_lease.in_flight.required()
        is_late = self.is_draining or held_lease.attempts >= TAKE_ATTEMPTS_MAX
        if isinstance(change, writes.Take) and is_late and held_lease.in_flight.withdraw():
            held_lease.step(Transition.NOT_OURS)
            return []
        not_before = Instant(now + pause_s)
        if not held_lease.in_flight.unresolved:
            held_lease.sent_instant = not_before
        held_lease.attempts += 1
        return [WriteRow(change, not_before)]

    def _abandon(self, held_lease: HeldLease) -> None:
        """In a drain, leave a broken row to its repair."""
        held_lease.in_flight.end()
        held_lease.step(Transition.NOT_OURS)

    def _note_refusal(self, refused: writes.Refused) -> list[Command]:
        """Log once for each code until a write succeeds: a missing permission fails all writes."""
        if refused.code in self._refusals:
            return []
        self._refusals.add(refused.code)
        fields = {"code": refused.code, "message": refused.message}
        return [Note("write_refused", "error", fields={**fields})]

    def _judged(
        self, held_lease: HeldLease, row: Lease | None, now: Instant, *, answered: bool
    ) -> list[Command]:
        """Decide from the row what became of the write. `answered`: a failed condition returned it,
        so this send did not apply; else it was read because the outcome was unknown."""
        flight, change = held_lease.in_flight, held_lease.in_flight.required()
        if row is None:
            fate = (
                writes.Fate.UNMOVED if isinstance(change, writes.CreateLease) else writes.Fate.LOST
            )
        else:
            seen_counter = held_lease.row.counter if held_lease.row is not None else 0
            fate = flight.judge(row, self._policy.me, seen_counter)
        if fate is writes.Fate.UNMOVED and not answered:
            return self._again(held_lease, now)
        # A late write of our ended process renewed the row as well [P5].
        is_renewed = fate is writes.Fate.OTHER_WRITER and isinstance(change, writes.Renew)
        if row is not None and (fate is writes.Fate.APPLIED or is_renewed):
            return held_lease.on_applied(change, row, now, self._renew_every_s, by_reply=False)
        flight.end()
        if row is None and held_lease.row is not None and self._may_restore(held_lease, now):
            return self._restore(held_lease, held_lease.row, now)
        if row is None or fate is writes.Fate.LOST or isinstance(change, writes.Take):
            return held_lease.lose(row)
        # The write never applied, but the row is ours: decide again from this row.
        held_lease.misses += 1
        if row.is_ended:
            held_lease.step(Transition.NOT_OURS)
        else:
            held_lease.row = row
        return []

    def _may_restore(self, held_lease: HeldLease, now: Instant) -> bool:
        """Whether to restore a vanished row: once, and only before an owner can see it expired."""
        fresh_until = held_lease.confirmed_instant + self._policy.failover_s
        return not held_lease.was_restored and now < fresh_until

    def _restore(self, held_lease: HeldLease, row: Lease, now: Instant) -> list[Command]:
        """Our row vanished while we held it. Write it again as it was, because its position is
        known. Otherwise the shard would be found without a lease and be read again from the start
        position."""
        held_lease.was_restored = True
        counter = row.counter + WRITTEN_AGAIN_AHEAD
        again = msgspec.structs.replace(row, counter=counter, handoff=None)
        vanished = held_lease.note("row_vanished", "error")
        return [vanished, self._write(held_lease, writes.CreateLease(again), now)]

    # Without a process: from the row, step by step, to the next start.

    def _examined(self, held_lease: HeldLease, row: Lease | None, now: Instant) -> list[Command]:
        """The lease has no process and the row was read: go on from the row, if it is ours."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            return held_lease.lose(row)
        held_lease.row = row
        if held_lease.state is State.QUARANTINED:  # its former owner has stopped [P18]
            held_lease.has_waited = True
            held_lease.step(
                Transition.FOUND_HALTED if row.halt is not None else Transition.QUARANTINE_OVER
            )
            return []
        if held_lease.ours_instant is None:
            held_lease.ours_instant = now
        held_lease.rest_until = Instant(now + held_lease.restarts.pause_s)
        if row.halt is not None:
            held_lease.step(Transition.FOUND_HALTED)
            return []
        if held_lease.failure is None and self._verdict(held_lease, row) is RestartDecision.HALT:
            before = row.failed_slot
            elsewhere = f", and on host {before} before" if before not in {None, self._slot} else ""
            held_lease.failure = (
                f"the lease process died {held_lease.restarts.deaths} times in a row without moving"
                f" the checkpoint{elsewhere}; the last time: {held_lease.trouble}"
            )
        held_lease.step(
            Transition.STILL_OURS if held_lease.failure is None else Transition.TO_BE_HALTED
        )
        return []

    def _settle(self, held_lease: HeldLease, now: Instant) -> list[Command]:
        """Make every step that this lease can make now, then what its state asks for; drop it once
        it is gone."""
        commands: list[Command] = []
        if held_lease.in_flight.change is None and not held_lease.is_reading:
            while (step := self._next_step(held_lease, now)) is not None:
                commands += held_lease.on_step(step)
                if step is Transition.TO_LEAVE_HOST:
                    running = self._running()
                    commands += self.host_capacity.failed(running, held_lease.trouble, now)
                elif step is Transition.STARTED:
                    commands.append(self._start(held_lease, now))
            commands += self._idle(held_lease, now)
        if held_lease.state is State.GONE:
            self.held_leases.pop(held_lease.key, None)
        held_lease.check()
        return commands

    def _next_step(self, held_lease: HeldLease, now: Instant) -> Transition | None:
        """The step that a lease of ours without a process makes now; None if it waits."""
        row, state = held_lease.row, held_lease.state
        if row is None or state not in _IDLE:
            return None
        if self.is_draining or self._is_asked_for(row, now):
            return Transition.TO_BE_RELEASED
        if state is State.BACKING_OFF:
            if self._verdict(held_lease, row) is RestartDecision.GIVE_AWAY:
                return Transition.TO_LEAVE_HOST
            return Transition.REST_OVER if now >= held_lease.rest_until else None
        if state is State.WAITING:
            held_lease.are_parents_over = held_lease.are_parents_over or not row.parents
            return Transition.PARENTS_OVER if held_lease.are_parents_over else None
        is_paused = row.pause is not None and row.pause.stands_at(self._observation.wall_time(now))
        if state is State.PAUSED:
            return None if is_paused else Transition.RESUMED
        if state is not State.RENEWING_BEFORE_START:
            return None
        if is_paused:
            return Transition.TO_BE_PAUSED
        # After a take by force, by us or by a previous owner: the former owner may work on until
        # its own renewals have failed for a failover [P18].
        if row.taken_from is not None and not held_lease.has_waited:
            return Transition.TO_QUARANTINE
        is_fresh = now < held_lease.confirmed_instant + self._renew_every_s
        return Transition.STARTED if held_lease.is_proven and is_fresh else None

    def _idle(self, held_lease: HeldLease, now: Instant) -> list[Command]:
        """The reads and writes that the state of a lease without a process asks for."""
        state, row = held_lease.state, held_lease.row
        if state is State.EXAMINING:
            held_lease.is_reading = True
            return [ReadRow(held_lease.key)]
        if row is None or state in WITH_PROCESS or state is State.GONE:
            return []
        me = self._policy.me
        if state is State.HALTING:
            at = self._observation.wall_time(now)
            # If no older record is known, the record that halts it has arrived by now.
            halt = Halt(held_lease.failure or "", at, held_lease.waiting_since or at)
            return [self._write(held_lease, writes.HaltLease(row.key, me, row.counter, halt), now)]
        if state is State.RELEASING:
            return [self._write(held_lease, self._gift(held_lease, row, now), now)]
        commands: list[Command] = []
        asks_parents = held_lease.should_ask_parents and not held_lease.is_asking_parents
        if state is State.WAITING and asks_parents:
            held_lease.should_ask_parents = False
            held_lease.is_asking_parents = True
            commands.append(ReadParents(held_lease.key, parent_keys(row)))
        since = held_lease.ours_instant if state is State.QUARANTINED else None
        if since is not None and now >= self._quarantined_until(since):
            held_lease.is_reading = True
            return [ReadRow(held_lease.key)]
        renews_before_start = state is State.RENEWING_BEFORE_START
        if renews_before_start or not held_lease.is_proven or now >= held_lease.renew_instant:
            renew = writes.Renew(row.key, me, row.counter, drops_ask=row.handoff is not None)
            commands.append(self._write(held_lease, renew, now))
        return commands

    def _quarantined_until(self, ours_instant: Instant) -> Instant:
        return Instant(ours_instant + self._policy.failover_s)

    def _paused_until(self, held_lease: HeldLease) -> Instant | None:
        pause = held_lease.row.pause if held_lease.row is not None else None
        if pause is None or not pause.until:
            return None
        return Instant(pause.until - self._observation.wall_offset_s)

    def _verdict(self, held_lease: HeldLease, row: Lease) -> RestartDecision:
        """Whether our host runs it again, another owner tries, or it halts."""
        return held_lease.restarts.verdict(
            slot=self._slot,
            failed_slot=row.failed_slot,
            are_others=self.are_others_in_sight and not self.is_draining,
        )

    def _is_asked_for(self, row: Lease, now: Instant) -> bool:
        """Whether another owner, or an operator, waits for this row [P16]."""
        if row.handoff is None or row.handoff.to == self._policy.me:
            return False
        return not self._observation.is_ask_stale(row, now)

    def _gift(
        self, held_lease: HeldLease, row: Lease, now: Instant
    ) -> writes.Offer | writes.Release:
        """The write that gives the row away as it stands: offered to the asker, offered to any
        owner, or released. A halt stays on the row and travels with it [P17]."""
        me, at = self._policy.me, row.checkpoint
        must_leave = self._verdict(held_lease, row) is RestartDecision.GIVE_AWAY
        if held_lease.restarts.has_tripped and must_leave:
            died_on = DiedOn(self._slot, at)
            return writes.Offer(row.key, me, row.counter, at, at, died_on=died_on)
        if row.handoff is not None and self._is_asked_for(row, now):
            to = None if row.handoff.to == ANYBODY else row.handoff.to
            return writes.Offer(row.key, me, row.counter, at, at, offered_to=to)
        # Before its parents end, a lease is not work and is not taken. It goes back to the state
        # in which it was created.
        gives_way = not held_lease.are_parents_over and not self.is_draining
        if self.are_others_in_sight and not gives_way:
            return writes.Offer(row.key, me, row.counter, at, at)
        return writes.Release(row.key, me, row.counter, at, at)

    def _start(self, held_lease: HeldLease, now: Instant) -> StartProcess:
        """Start a process for the row. The command is void once our last write may have expired."""
        row = held_lease.row
        if row is None:
            raise InvariantViolation(f"lease {held_lease.key}: a start without a row")
        held_lease.restarts.started_instant = now
        held_lease.failure = None
        expires_instant = Instant(held_lease.confirmed_instant + self._policy.failover_s)
        return StartProcess(
            held_lease.key,
            row.counter,
            expires_instant,
            has_waited=held_lease.has_waited and row.taken_from is not None,
            is_alone=held_lease.needs_own_process or row.died_on is not None,
            past_pause=row.pause,
        )
