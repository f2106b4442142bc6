"""What happens to the leases in our hands, from the take to the day they are not ours.

Knows: each lease's `Custody`, and one rule above all: the row has one writer at a time. While a
process lives, that is the process; before its first start, between two starts, halted or waiting
for parents, it is this manager, which keeps renewing [P5, P15].
May not know: other owners, shards, the scan. Look next: `custody.py` (the states), `writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, DrainProcess, Note, ReadParents, ReadRow, StartProcess
from kclrun.leases.custody import Custody, State, Step
from kclrun.leases.events import (
    LeaseClaimed,
    LeaseLost,
    LeaseReleased,
    ParentsRead,
    PositionMoved,
    ProcessExited,
    ProcessorFailed,
    ProcessStarted,
    RowRead,
    ShardEnded,
    StartFailed,
    StartUnclaimed,
    WriteResolved,
)
from kclrun.leases.lineage import have_ended, parent_keys, seem_over
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.restarts import DEATHS_MAX
from kclrun.leases.writing import Forgone, Landed, Lost, RowWriter, Settled, Stale
from kclrun.model.changes import HaltLease, Release, Renew, Take
from kclrun.model.lease import Halt, Lease, LeaseKey
from kclrun.model.time import Instant, WallTime

__all__ = ["Keeper", "ProcessReport"]

ProcessReport = (
    ProcessStarted
    | StartFailed
    | LeaseClaimed
    | StartUnclaimed
    | PositionMoved
    | ShardEnded
    | LeaseReleased
    | LeaseLost
    | ProcessorFailed
    | ProcessExited
)

# States without a process and without a task of their own: a drain releases them at once.
_IDLE = frozenset({State.RESTING, State.WAITING, State.READYING, State.HALTED})


class Keeper:
    """All leases in our hands. `out` collects the commands; `wall` dates a halt."""

    def __init__(
        self,
        policy: ManagerPolicy,
        chance: Callable[[], float],
        out: list[Command],
        wall: Callable[[Instant], WallTime],
    ) -> None:
        self.custodies: dict[LeaseKey, Custody] = {}
        self.is_draining = False
        self._policy = policy
        self._out = out
        self._wall = wall
        self._writer = RowWriter(policy, chance, out)

    @property
    def held(self) -> tuple[LeaseKey, ...]:
        """The leases that fill our places: ours or being taken, and not ended."""
        return tuple(c.key for c in self.custodies.values() if c.counts_as_held)

    def take(self, change: Take, now: Instant) -> None:
        custody = Custody(key=change.key, state=State.TAKING)
        self.custodies[change.key] = custody
        self._writer.send(custody, change, now)

    def adopt(self, key: LeaseKey, now: Instant) -> None:
        """A scan shows a row as ours that is not in our hands: read what it says now."""
        self.custodies[key] = Custody(key=key, state=State.EXAMINING)
        self._settle(self.custodies[key], now)

    def drain(self, reason: str, now: Instant) -> None:
        """Give everything up in good order: processes are told, idle rows released."""
        self.is_draining = self._writer.is_draining = True
        for custody in tuple(self.custodies.values()):
            if custody.state in (State.STARTING, State.RUNNING):
                custody.step(Step.TOLD_TO_DRAIN)
                self._out.append(DrainProcess(custody.key, reason))
            self._settle(custody, now)

    def tick(self, now: Instant) -> None:
        for custody in tuple(self.custodies.values()):
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
        self._take_in(custody, self._writer.resolve(custody, event.outcome, now))
        self._settle(custody, now)

    def on_row(self, event: RowRead, now: Instant) -> None:
        custody = self.custodies.get(event.key)
        if custody is None or not custody.is_reading:
            raise InvariantViolation(f"lease {event.key}: a row that was not asked for")
        custody.is_reading = False
        if custody.unresolved is not None:
            self._take_in(custody, self._writer.read_back(custody, event.row, now))
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
            self._late_report(event, custody)
            return
        match event:
            case ProcessExited():
                self._died(custody, event, now)
            case StartFailed():
                self._not_started(custody, event, now)
            case LeaseClaimed():
                if custody.state is State.STARTING:
                    custody.step(Step.CLAIMED)
            case PositionMoved():
                custody.restarts.progressed()
            case ShardEnded() | LeaseReleased():
                custody.is_over = True
                self._said_farewell(custody)
            case ProcessorFailed():
                custody.failure = event.reason
                self._said_farewell(custody)
            case LeaseLost():
                self._note("process_lost_lease", custody, "warning", reason=event.reason)
                self._said_farewell(custody)
            case StartUnclaimed():
                self._note("start_unclaimed", custody, "warning", reason=event.reason)
                self._said_farewell(custody)
            case ProcessStarted():
                pass  # its pid is the shell's affair
        self._settle(custody, now)

    def deadline(self, now: Instant) -> Instant | None:
        """When the next renewal or restart is due; None if nothing waits for the clock."""
        due = [
            min(custody.renew_instant, custody.rest_until)
            if custody.state is State.RESTING
            else custody.renew_instant
            for custody in self.custodies.values()
            if custody.state in _IDLE and custody.unresolved is None
        ]
        return Instant(max(now, min(due))) if due else None

    def _waiting(self) -> Iterable[Custody]:
        return tuple(c for c in self.custodies.values() if c.state is State.WAITING)

    def _late_report(self, event: ProcessReport, custody: Custody | None) -> None:
        """What a dead process still had in its ring is ignored, but for the reason of a halt."""
        if isinstance(event, ProcessStarted | StartFailed | ProcessExited):
            raise InvariantViolation(f"lease {event.key}: {type(event).__name__}, and no process")
        is_examining = custody is not None and custody.state is State.EXAMINING
        if custody is not None and is_examining and isinstance(event, ProcessorFailed):
            custody.failure = event.reason

    def _said_farewell(self, custody: Custody) -> None:
        if custody.state is not State.LEAVING:
            custody.step(Step.SAID_FAREWELL)

    def _died(self, custody: Custody, event: ProcessExited, now: Instant) -> None:
        """Its death is proven. Without a word before, that was a crash."""
        if custody.is_over:
            custody.step(Step.GIVEN_UP)
            return
        if custody.state is State.LEAVING:
            custody.restarts.stopped(now)
        else:
            custody.restarts.crashed(now)
            deaths = custody.restarts.deaths
            self._note("process_died", custody, "warning", reason=event.reason, deaths=deaths)
        if custody.restarts.has_tripped and custody.failure is None:
            custody.failure = (
                f"the lease process died {DEATHS_MAX} times in a row without moving the"
                f" checkpoint; the last time: {event.reason}"
            )
        custody.is_proven = False
        custody.step(Step.DIED)

    def _not_started(self, custody: Custody, event: StartFailed, now: Instant) -> None:
        custody.restarts.stopped(now)
        custody.rest_until = Instant(now + custody.restarts.pause_s)
        custody.step(Step.NOT_STARTED)
        self._note("start_failed", custody, "error", reason=event.reason)

    def _examined(self, custody: Custody, row: Lease | None, now: Instant) -> None:
        """No process lives and the row was read: go on from what it says, if it is ours."""
        if row is None or row.owner != self._policy.me or row.is_ended:
            self._lose(custody, row)
            return
        custody.row = row
        custody.rest_until = Instant(now + custody.restarts.pause_s)
        if row.halt is not None:
            custody.step(Step.FOUND_HALTED)
        elif custody.failure is not None:
            custody.step(Step.TO_BE_HALTED)
        else:
            custody.step(Step.STILL_OURS)

    def _take_in(self, custody: Custody, settled: Settled | None) -> None:
        match settled:
            case Landed(row=row) | Stale(row=row) if row.is_ended:
                custody.step(Step.NOT_OURS)  # a dead process's last write ended it [H1]
            case Landed():
                self._landed(custody, settled)
            case Stale(row):
                custody.row = row
            case Lost(row):
                self._lose(custody, row)
            case Forgone():
                custody.step(Step.NOT_OURS)
            case None:
                pass

    def _landed(self, custody: Custody, landed: Landed) -> None:
        """A write of ours applied. Only a reply (or a take) proves that no zombie wrote it."""
        custody.row = landed.row
        custody.renew_instant = Instant(landed.sent_instant + self._policy.renew_every_s)
        if landed.by_reply or isinstance(landed.change, Take):
            custody.is_proven = True
            custody.confirmed_instant = landed.sent_instant
        match landed.change:
            case Take():
                self._taken(custody, landed.change, landed.row)
            case HaltLease(halt=halt):
                custody.step(Step.HALTED)
                self._note("lease_halted", custody, "error", reason=halt.reason)
            case Release():
                custody.step(Step.RELEASED)
                self._note("lease_released", custody, position=str(landed.change.position))
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
        custody.step(Step.NOT_OURS)
        if row is None:
            self._note("row_vanished", custody, "error")
        elif was_ours and not row.is_ended:
            self._note("lease_lost", custody, "warning", owner=row.owner)

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
        elif self.is_draining and custody.state in _IDLE:
            custody.step(Step.TO_BE_RELEASED)
        elif custody.state is State.HALTING:
            halt = Halt(custody.failure or "", self._wall(now))
            self._writer.send(custody, HaltLease(custody.key, me, row.counter, halt), now)
        elif custody.state is State.RELEASING:
            release = Release(custody.key, me, row.counter, row.checkpoint, row.checkpoint)
            self._writer.send(custody, release, now)
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
        fresh_until = custody.confirmed_instant + self._policy.renew_every_s
        is_readying = custody.state is State.READYING
        if is_readying and custody.is_proven and now < fresh_until:
            self._start(custody, row, now)
        elif is_readying or not custody.is_proven or now >= custody.renew_instant:
            self._writer.send(custody, Renew(custody.key, self._policy.me, row.counter), now)
        return False

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
        self._out.append(StartProcess(custody.key, row.counter, expires_instant))

    def _note(
        self, event: str, custody: Custody, level: str = "info", **fields: str | int | None
    ) -> None:
        self._out.append(Note(event, level, custody.key, dict(fields)))
