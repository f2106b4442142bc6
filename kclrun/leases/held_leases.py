"""The leases that this manager holds, from the take until they are not ours any more.

Knows: each lease's `HeldLease`. Must not know: other owners, shards, the scan. Rule: a row has one
writer at a time. While a process lives, it is the process. Before its first start, between two
starts, while halted, paused or waiting for parents, it is this manager, which renews the row and
answers asks [P5, P15, P16].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kclrun.errors import InvariantViolation
from kclrun.leases import events
from kclrun.leases.capacity import HostCapacity
from kclrun.leases.commands import (
    Command,
    DrainProcess,
    Note,
    ReadRow,
    WriteRow,
)
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.policy import TAKE_ATTEMPTS_MAX, UNREADABLE_PAUSE_S, ManagerPolicy
from kclrun.leases.restarts import RestartDecision
from kclrun.leases.table_view import Observation, TableView, seem_over
from kclrun.leases.transitions import WITH_PROCESS, State, Transition
from kclrun.model.lease import ANYBODY, DiedOn, Halt, Lease, LeaseKey, Owner
from kclrun.model.time import Instant, backoff_s
from kclrun.protocol import reports, writes
from kclrun.protocol.in_flight import Fate

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
    """All leases that this manager holds: which step each makes now, and what it asks for.

    `are_others_in_sight`: another kclrun owner can take the leases that we give away [P17].
    `endpoint` is published with each take, for the page of the fleet.
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
        self._writes = RowWrites(policy, chance)
        self._observation = observation
        self._slot = Owner.slot_of(policy.me)
        self._renew_every_s = policy.renew_every_s

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
        return [self._writes.begin(held_lease, change, now)]

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
            if held_lease.state not in WITH_PROCESS and not held_lease.requests.awaits_answer:
                commands += self._settle(held_lease, now)
        return commands

    def hint_parents(self, view: TableView, now: Instant) -> list[Command]:
        """Take in a scan: where all parents seem to have ended, request the consistent reads."""
        commands: list[Command] = []
        for held_lease in self._waiting():
            row = view.rows.get(held_lease.key)
            if row is not None and seem_over(row, view.rows, view.broken):
                held_lease.parents.should_ask = True
                commands += self._settle(held_lease, now)
        return commands

    def hint_ended(self, parent: LeaseKey, now: Instant) -> list[Command]:
        """A shard ended here: its children that we hold need not wait for a scan."""
        commands: list[Command] = []
        for held_lease in self._waiting():
            if held_lease.row is not None and parent in held_lease.row.parents:
                held_lease.parents.should_ask = True
                commands += self._settle(held_lease, now)
        return commands

    def give_way(
        self, count: int, is_work: Callable[[LeaseKey], bool], now: Instant
    ) -> list[Command]:
        """Release up to `count` leases that wait for their parents: work needs their places."""
        waiting = [
            c for c in self._waiting() if not is_work(c.key) and c.requests.in_flight.change is None
        ]
        commands: list[Command] = []
        for held_lease in sorted(waiting, key=lambda lease: lease.key)[:count]:
            held_lease.step(Transition.TO_BE_RELEASED)
            commands += self._settle(held_lease, now)
        return commands

    # What became of reads, writes and processes.

    def on_write(
        self, event: events.WriteResolved, held_lease: HeldLease, now: Instant
    ) -> list[Command]:
        is_draining = self.is_draining
        commands = self._writes.on_outcome(held_lease, event, now, is_draining=is_draining)
        return commands + self._settle(held_lease, now)

    def on_row(self, event: events.RowRead, now: Instant) -> list[Command]:
        held_lease, row = self._reading(event.key), event.row
        held_lease.requests.is_reading = False
        if held_lease.requests.in_flight.change is not None:
            is_draining = self.is_draining
            commands = self._writes.on_read_back(held_lease, row, now, is_draining=is_draining)
        elif row is None or row.owner != self._policy.me or row.is_ended:
            commands = held_lease.lose(row)
        else:
            held_lease.on_examined(row, self._decision(held_lease, row), self._slot, now)
            commands = []
        return commands + self._settle(held_lease, now)

    def on_unreadable(self, event: events.RowUnreadable, now: Instant) -> list[Command]:
        """A broken row [P8]: its owner cannot be determined, so we only read it again. A drain does
        not wait for a person: a row that cannot be read is not given up."""
        held_lease = self._reading(event.key)
        if not self.is_draining:
            return [ReadRow(event.key, Instant(now + UNREADABLE_PAUSE_S))]
        held_lease.abandon()
        note = held_lease.note("broken_row_left", "warning", reason=event.reason)
        return [note, *self._settle(held_lease, now)]

    def on_parents(self, event: events.ParentsRead, now: Instant) -> list[Command]:
        """Take in consistent reads. An answer that comes too late for its lease changes nothing."""
        held_lease = self.held_leases.get(event.key)
        if held_lease is None or not held_lease.parents.is_asking:
            return []
        held_lease.parents.on_read(event.parents)
        return self._settle(held_lease, now)

    def on_report(self, event: events.ProcessEvent, now: Instant) -> list[Command]:
        held_lease = self.held_leases.get(event.key)
        report = event.report if isinstance(event, events.ProcessReported) else None
        if held_lease is None or held_lease.state not in WITH_PROCESS:
            if report is None:
                name = type(event).__name__
                raise InvariantViolation(f"lease {event.key}: {name}, and no process")
            if held_lease is not None:
                held_lease.on_late_report(report)
            return []
        commands: list[Command] = []
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
        failover_s, offset_s = self._policy.failover_s, self._observation.wall_offset_s
        due = [
            held_lease.due_instant(failover_s, offset_s)
            for held_lease in self.held_leases.values()
            if held_lease.state in _IDLE and not held_lease.requests.awaits_answer
        ]
        return Instant(max(now, min(due))) if due else None

    def _reading(self, key: LeaseKey) -> HeldLease:
        held_lease = self.held_leases.get(key)
        if held_lease is None or not held_lease.requests.is_reading:
            raise InvariantViolation(f"lease {key}: a row that was not asked for")
        return held_lease

    def _running(self) -> int:
        return sum(1 for c in self.held_leases.values() if c.state is State.RUNNING)

    def _waiting(self) -> tuple[HeldLease, ...]:
        return tuple(c for c in self.held_leases.values() if c.state is State.WAITING)

    # From the row, step by step, to the next start.

    def _settle(self, held_lease: HeldLease, now: Instant) -> list[Command]:
        """Make every step that this lease can make now, then what its state asks for; drop it once
        it is gone."""
        commands: list[Command] = []
        # As `awaits_answer`, without a call: each event comes here.
        if held_lease.requests.in_flight.change is None and not held_lease.requests.is_reading:
            while (step := self._next_step(held_lease, now)) is not None:
                commands += held_lease.on_step(step, now, self._policy.failover_s)
                if step is Transition.TO_LEAVE_HOST:
                    running = self._running()
                    commands += self.host_capacity.failed(running, held_lease.trouble, now)
            commands += self._idle(held_lease, now)
        if held_lease.state is State.GONE:
            self.held_leases.pop(held_lease.key, None)
        held_lease.check()
        return commands

    def _next_step(self, held_lease: HeldLease, now: Instant) -> Transition | None:
        """The step that a lease of ours without a process makes now; None if it waits."""
        row, state, me = held_lease.row, held_lease.state, self._policy.me
        if row is None or state not in _IDLE:
            return None
        is_asked_for = row.handoff is not None and self._observation.is_asked_for(row, me, now)
        if self.is_draining or is_asked_for:
            return Transition.TO_BE_RELEASED
        if state is State.BACKING_OFF:
            if self._decision(held_lease, row) is RestartDecision.GIVE_AWAY:
                return Transition.TO_LEAVE_HOST
            return Transition.REST_OVER if now >= held_lease.rest_until else None
        if state is State.WAITING:
            are_over = held_lease.parents.are_over or not row.parents
            return Transition.PARENTS_OVER if are_over else None
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
            return [held_lease.requests.read(held_lease.key)]
        if row is None or state in WITH_PROCESS or state is State.GONE:
            return []
        me = self._policy.me
        if state is State.HALTING:
            at = self._observation.wall_time(now)
            # If no older record is known, the record that halts it has arrived by now.
            halt = Halt(held_lease.failure or "", at, held_lease.waiting_since or at)
            noted = writes.HaltLease(row.key, me, row.counter, halt)
            return [self._writes.begin(held_lease, noted, now)]
        if state is State.RELEASING:
            return [self._writes.begin(held_lease, self._gift(held_lease, row, now), now)]
        commands: list[Command] = []
        asks_parents = held_lease.parents.should_ask and not held_lease.parents.is_asking
        if state is State.WAITING and asks_parents:
            commands.append(held_lease.parents.ask(row))
        since = held_lease.ours_instant if state is State.QUARANTINED else None
        if since is not None and now >= since + self._policy.failover_s:
            return [held_lease.requests.read(held_lease.key)]
        renews_before_start = state is State.RENEWING_BEFORE_START
        if renews_before_start or not held_lease.is_proven or now >= held_lease.renew_instant:
            renew = writes.Renew(row.key, me, row.counter, drops_ask=row.handoff is not None)
            commands.append(self._writes.begin(held_lease, renew, now))
        return commands

    def _decision(self, held_lease: HeldLease, row: Lease) -> RestartDecision:
        """Whether our host runs it again, another owner tries, or it halts."""
        return held_lease.restarts.decision(
            slot=self._slot,
            failed_slot=row.failed_slot,
            are_others=self.are_others_in_sight and not self.is_draining,
        )

    def _gift(
        self, held_lease: HeldLease, row: Lease, now: Instant
    ) -> writes.Offer | writes.Release:
        """The write that gives the row away as it stands: offered to the asker, offered to any
        owner, or released. A halt stays on the row and travels with it [P17]."""
        me, at = self._policy.me, row.checkpoint
        must_leave = self._decision(held_lease, row) is RestartDecision.GIVE_AWAY
        if held_lease.restarts.has_tripped and must_leave:
            died_on = DiedOn(self._slot, at)
            return writes.Offer(row.key, me, row.counter, at, at, died_on=died_on)
        if row.handoff is not None and self._observation.is_asked_for(row, me, now):
            to = None if row.handoff.to == ANYBODY else row.handoff.to
            return writes.Offer(row.key, me, row.counter, at, at, offered_to=to)
        # Before its parents end, a lease is not work and is not taken. It goes back to the state
        # in which it was created.
        gives_way = not held_lease.parents.are_over and not self.is_draining
        if self.are_others_in_sight and not gives_way:
            return writes.Offer(row.key, me, row.counter, at, at)
        return writes.Release(row.key, me, row.counter, at, at)


class RowWrites:
    """The writes of the rows of held leases: sends changes, again until they are settled, and
    decides what became of them. Must not know: why a row is written.

    Rule: only three things settle a write: a success reply, a row whose counter has moved, or a
    refusal that came before anything was sent [P6].
    """

    def __init__(self, policy: ManagerPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._renew_every_s = policy.renew_every_s
        self._refusals: set[str] = set()

    def begin(self, held_lease: HeldLease, change: writes.Change, now: Instant) -> WriteRow:
        """Send a first attempt; after failed ones slower and slower."""
        not_before = None
        if held_lease.requests.misses > 1:
            not_before = Instant(now + backoff_s(held_lease.requests.misses - 2, self._chance()))
        return held_lease.begin_write(change, now, not_before)

    def on_outcome(
        self,
        held_lease: HeldLease,
        event: events.WriteResolved,
        now: Instant,
        *,
        is_draining: bool,
    ) -> list[Command]:
        """Take in the outcome of a send. Raises: InvariantViolation if none was under way."""
        change, outcome = held_lease.requests.in_flight.change, event.outcome
        if change is None or change != event.change:
            raise InvariantViolation(f"lease {held_lease.key}: an outcome of no write under way")
        match outcome:
            case writes.Applied(row):
                if isinstance(change, writes.CreateLease):
                    row = change.lease
                if row is None:
                    raise InvariantViolation(f"lease {held_lease.key}: a success without the row")
                self._refusals.clear()
                every_s = self._renew_every_s
                return held_lease.on_applied(change, row, now, every_s, by_reply=True)
            case writes.ConditionFailed(row):
                return self._judge(held_lease, row, now)
            case writes.OutcomeUnknown():
                return [held_lease.requests.read_back(held_lease.key)]
            case writes.Throttled() | writes.Unavailable():
                pause_s = self._pause_s(held_lease)
                return self._again(held_lease, now, pause_s, is_draining=is_draining)
            case writes.Refused(code) if code == writes.BROKEN_ROW:
                notes = self._note_refusal(outcome)
                if is_draining:  # a drain does not wait until the row is repaired
                    held_lease.abandon()
                    return notes
                return notes + self._again(held_lease, now, UNREADABLE_PAUSE_S, is_draining=False)
            case writes.Refused():
                notes, pause_s = self._note_refusal(outcome), self._policy.refused_pause_s
                return notes + self._again(held_lease, now, pause_s, is_draining=is_draining)
            case _:
                assert_never(outcome)

    def on_read_back(
        self, held_lease: HeldLease, row: Lease | None, now: Instant, *, is_draining: bool
    ) -> list[Command]:
        """Take in the row, which was read because the outcome of the change was unknown."""
        if self._fate(held_lease, row) is Fate.UNMOVED:
            pause_s = self._pause_s(held_lease)
            return self._again(held_lease, now, pause_s, is_draining=is_draining)
        return self._judge(held_lease, row, now)

    def _pause_s(self, held_lease: HeldLease) -> float:
        return backoff_s(held_lease.requests.attempts - 1, self._chance())

    def _again(
        self, held_lease: HeldLease, now: Instant, pause_s: float, *, is_draining: bool
    ) -> list[Command]:
        """Send the same change with the same expected counter, or give up a take unsent."""
        change = held_lease.requests.in_flight.required()
        is_late = is_draining or held_lease.requests.attempts >= TAKE_ATTEMPTS_MAX
        if isinstance(change, writes.Take) and is_late and held_lease.requests.in_flight.withdraw():
            held_lease.step(Transition.NOT_OURS)
            return []
        return [held_lease.requests.send_again(Instant(now + pause_s))]

    def _note_refusal(self, refused: writes.Refused) -> list[Command]:
        """Log once for each code until a write succeeds: a missing permission fails all writes."""
        if refused.code in self._refusals:
            return []
        self._refusals.add(refused.code)
        fields = {"code": refused.code, "message": refused.message}
        return [Note("write_refused", "error", fields={**fields})]

    def _fate(self, held_lease: HeldLease, row: Lease | None) -> Fate:
        """What the row says about the change in flight."""
        flight = held_lease.requests.in_flight
        if row is None:
            is_creation = isinstance(flight.required(), writes.CreateLease)
            return Fate.UNMOVED if is_creation else Fate.LOST
        seen_counter = held_lease.row.counter if held_lease.row is not None else 0
        return flight.judge(row, self._policy.me, seen_counter)

    def _judge(self, held_lease: HeldLease, row: Lease | None, now: Instant) -> list[Command]:
        """Decide from the row what became of the change. A failed condition returned the row, so
        the last send did not apply; or the row was read back, and shows whether one applied."""
        change, fate = held_lease.requests.in_flight.required(), self._fate(held_lease, row)
        # A late write of our ended process renewed the row as well [P5].
        is_renewed = fate is Fate.OTHER_WRITER and isinstance(change, writes.Renew)
        if row is not None and (fate is Fate.APPLIED or is_renewed):
            return held_lease.on_applied(change, row, now, self._renew_every_s, by_reply=False)
        held_lease.requests.in_flight.end()
        if row is None and held_lease.may_be_restored(now, self._policy.failover_s):
            vanished = held_lease.note("row_vanished", "error")
            return [vanished, self.begin(held_lease, held_lease.restore(), now)]
        if row is None or fate is Fate.LOST or isinstance(change, writes.Take):
            return held_lease.lose(row)
        held_lease.on_not_applied(row)
        return []
