"""One lease process in virtual time: the real `LeaseLife`, its commands performed.

As in the worker's lease thread, a request to the table blocks: what happens meanwhile waits for
its answer. May not know: the manager's core. Look next: `desk.py`, `host.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.life import LeaseLife
from kclrun.consuming.policy import LifePolicy
from kclrun.leases import commands as manager_commands
from kclrun.leases import events as heard
from kclrun.model.changes import LateCheckpoint, LeaseChange
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Outcome
from kclrun.model.time import Instant
from kclrun.simulation.clocks import Alarm
from kclrun.simulation.desk import SimulatedDesk
from kclrun.simulation.world import World

__all__ = ["HostOfProcess", "LeaseProcess"]

Timed = do.SendWrite | do.SendLateCheckpoint | do.ReadOwnRow


class HostOfProcess(Protocol):
    """What a lease process needs of its host. `act` runs an action as the host stands: now, after
    a freeze, or never."""

    world: World
    name: str
    others_in_sight: bool

    def instant(self) -> Instant: ...

    def time_of(self, instant: Instant) -> float: ...

    def act(self, action: Callable[[], None]) -> None: ...

    def after(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def alarm(self, deadline: Callable[[Instant], Instant], ring: Callable[[], None]) -> Alarm: ...

    def feed(self, event: heard.Event) -> None: ...

    def process_over(self, process: LeaseProcess, reason: str) -> None: ...


class LeaseProcess:
    """From its start command to its exit. `incarnation` tells it from others of its lease."""

    desk_kind: type[SimulatedDesk] = SimulatedDesk

    def __init__(
        self,
        host: HostOfProcess,
        start: manager_commands.StartProcess,
        *,
        incarnation: int,
    ) -> None:
        world, settings = host.world, host.world.settings
        self.key: LeaseKey = start.key
        self.who = f"{host.name}/{incarnation}"
        self.incarnation = incarnation
        self.is_over = False
        self._host = host
        self._table = world.table
        self._oracles = world.oracles
        self._stream = world.stream
        policy = LifePolicy(
            key=start.key,
            me=settings.owner_id(host.name),
            seen_counter=start.counter,
            expires_instant=start.expires_instant,
            failover_s=settings.failover_s,
            checkpoint_every_s=settings.checkpoint_every_s,
            has_waited=start.has_waited,
            others_in_sight=host.others_in_sight,
        )
        self.life = LeaseLife(policy, world.scheduler.chance(self.who).random)
        self.desk = self.desk_kind(
            self,
            world.stream,
            world.oracles,
            world_now=lambda: world.scheduler.now,
            now=host.instant,
            after=self._after,
            post=self.post,
            poll_s=settings.poll_s,
            batch_s=settings.batch_s,
        )
        self._events: deque[on.Event] = deque()
        self._commands: deque[do.Command] = deque()
        self._is_asking = self._is_turning = False
        self._alarm = host.alarm(self.life.next_deadline, lambda: self.post(on.Ticked()))

    def post(self, event: on.Event) -> None:
        """Something happened; it is taken in after what happened before."""
        self._events.append(event)
        self._turn()

    def ends(self) -> None:
        """Killed, or exited: nothing more is done or said."""
        self.is_over = True
        self._oracles.gate_shut(self)

    def _turn(self) -> None:
        if self._is_turning:
            return
        self._is_turning = True
        try:
            self._take_turns()
        finally:
            self._is_turning = False
        if not self.is_over and not self._is_asking:
            self._alarm.set()

    def _take_turns(self) -> None:
        while not self._is_asking and not self.is_over:
            if self._commands:
                self._perform(self._commands.popleft())
            elif self._events:
                event = self._events.popleft()
                self._commands.extend(self.life.handle(event, self._host.instant()))
            else:
                return

    def _perform(self, command: do.Command) -> None:
        match command:
            case do.SendWrite() | do.SendLateCheckpoint() | do.ReadOwnRow():
                self._perform_in_time(command)
            case do.ReadRows(keys):
                self._is_asking = True
                self._read_rows(keys, ())
            case do.ListShards():
                self._ask_kinesis()
            case do.OpenGate(fence):
                self._oracles.gate_opened(self, self._host.time_of(fence))
                self.desk.open_gate(command)
            case do.ShutGate():
                self._oracles.gate_shut(self)
                self.desk.shut_gate()
            case do.CallInitialize(row):
                self.desk.initialize(row)
            case do.CallShardEnded() | do.CallShutdownRequested() | do.CallLeaseLost():
                self.desk.call()
            case do.AnswerCheckpoint():
                pass  # this user code asks for none
            case do.Report():
                self._report(command)
            case do.Exit(cause):
                self._exit(cause)

    def _exit(self, cause: do.ExitCause) -> None:
        self._oracles.process_noted(self, "exits:", cause.value)
        if cause is do.ExitCause.LOST:
            self._oracles.ended_uncleanly(self)
        self.ends()
        self._host.process_over(self, cause.value)

    # Requests.

    def _perform_in_time(self, command: Timed) -> None:
        if command.not_before is None or command.not_before <= self._host.instant():
            self._perform_now(command)
            return
        due = self._host.time_of(command.not_before)
        self._after(due - self._host.world.scheduler.now, lambda: self._perform_late(command))

    def _perform_late(self, command: Timed) -> None:
        """Its time has come; but one thing after the other."""
        if self._is_asking or self._is_turning:
            self._after(0.001, lambda: self._perform_late(command))
            return
        self._perform_now(command)
        self._turn()

    def _perform_now(self, command: Timed) -> None:
        if isinstance(command, do.ReadOwnRow):
            self._is_asking = True
            self._table.read(
                self.key,
                lambda row: self._answered(on.OwnRowRead(row)),
                lambda words: self._answered(on.ReadFailed(words)),
            )
        elif isinstance(command, do.SendLateCheckpoint) or self.life.own.pending == command.change:
            self._send(command.change)

    def _send(self, change: LeaseChange) -> None:
        sent = self._host.instant()

        def resolved(outcome: Outcome) -> None:
            self._answered(on.WriteResolved(change, outcome, sent))

        if isinstance(change, LateCheckpoint):
            self._oracles.process_noted(self, "checkpoints late", change)
        self._is_asking = True
        self._table.write(self.who, change, resolved)

    def _read_rows(
        self, keys: tuple[LeaseKey, ...], found: tuple[tuple[LeaseKey, Lease | None], ...]
    ) -> None:
        if not keys:
            self._answered(on.RowsRead(found))
            return
        self._table.read(
            keys[0],
            lambda row: self._host.act(lambda: self._read_rows(keys[1:], (*found, (keys[0], row)))),
            lambda words: self._answered(on.LookUpFailed(words)),
        )

    def _ask_kinesis(self) -> None:
        self._is_asking = True
        now = self._host.world.scheduler.now
        self._table.ask_kinesis(
            lambda: self._stream.listing(now),
            lambda shards: self._answered(on.ShardsListed(shards)),
            lambda words: self._answered(on.LookUpFailed(words)),
        )

    def _answered(self, event: on.Event) -> None:
        def take_in() -> None:
            if self.is_over:
                return
            self._is_asking = False
            self._events.appendleft(event)
            self._turn()

        self._host.act(take_in)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._host.after(delay_s, lambda: None if self.is_over else action())

    # Reports.

    def _report(self, report: do.Report) -> None:
        event = self._as_heard(report)
        if event is not None:
            self._host.feed(event)
        if report.kind is not do.ReportKind.CHECKPOINTED:
            self._oracles.process_noted(self, f"reports {report.kind.value}", report.text)

    def _as_heard(self, report: do.Report) -> heard.Event | None:
        key, position = self.key, report.position
        match report.kind:
            case do.ReportKind.CLAIMED if position is not None:
                return heard.LeaseClaimed(key, report.counter, position)
            case do.ReportKind.CHECKPOINTED if position is not None:
                return heard.PositionMoved(key, position)
            case do.ReportKind.RELEASED if position is not None:
                return heard.LeaseReleased(key, position)
            case do.ReportKind.SHARD_ENDED:
                return heard.ShardEnded(key, report.children)
            case do.ReportKind.LOST:
                return heard.LeaseLost(key, report.text)
            case do.ReportKind.FAILED:
                return heard.ProcessorFailed(key, report.text)
            case do.ReportKind.UNCLAIMED:
                return heard.StartUnclaimed(key, report.text)
            case _:
                return None
