"""One lease process in virtual time: the real `LeaseStateMachine`, and its commands performed.

As in the worker's lease thread, a request to the table blocks: events in the meantime wait for its
answer. The module does not know the manager's core.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kclrun.errors import InvariantViolation
from kclrun.lease import commands, events
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import WORKER_STATES
from kclrun.leases import commands as manager_commands
from kclrun.leases.events import ProcessReported
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.shard import Shard
from kclrun.model.time import Instant
from kclrun.ports import Pump
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus
from kclrun.protocol.writes import LateCheckpoint, LeaseChange, Outcome
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.fetching import QueueTimes, SimulatedFetching
from kclrun.simulation.machine import Machine, OsProcess
from kclrun.simulation.shards import FetchFate
from kclrun.simulation.uplink import Uplink
from kclrun.simulation.user_code import BatchUserCode
from kclrun.simulation.world import SimulatedWorld

# From the fork to the lock: the start command is read; the modules are loaded already.
_LOCKED_AFTER_S: Final = 0.002

_LONG_BATCH_S: Final = 10.0

Timed = commands.SendWrite | commands.SendLateCheckpoint | commands.ReadOwnRow


class HostOfProcess(Protocol):
    """The part of its manager that a lease process needs: the manager's identity and machine."""

    world: SimulatedWorld
    machine: Machine
    name: str
    owner: OwnerId
    others_in_sight: bool


class LookUps:
    """The requests of a lease process that its other threads send: the lease is renewed
    meanwhile. `post` takes their results."""

    def __init__(
        self,
        process: OsProcess,
        uplink: Uplink,
        world: SimulatedWorld,
        post: Callable[[events.Event], None],
    ) -> None:
        self._process = process
        self._uplink = uplink
        self._stream = world.stream
        self._now = world.scheduler.clock
        self._post = post

    def read_rows(self, keys: tuple[LeaseKey, ...]) -> None:
        self._read_on(keys, ())

    def list_shards(self) -> None:
        now = self._now()
        self._uplink.ask_kinesis(
            lambda: self._stream.listing(now),
            lambda shards: self._came(events.ShardsListed(shards)),
            lambda words: self._came(events.LookUpFailed(words)),
        )

    def fetch_fate(self) -> FetchFate | None:
        """The error of a fetch; None for a page."""
        return "unreachable" if self._uplink.is_cut else self._stream.fetch_fate()

    def list_for_fetching(self, reply: Callable[[tuple[Shard, ...] | None], None]) -> None:
        """Sent by the fetch thread, which waits alone."""
        now = self._now()
        self._uplink.ask_kinesis(
            lambda: self._stream.listing(now),
            lambda shards: self._process.act(lambda: reply(shards)),
            lambda _: self._process.act(lambda: reply(None)),
        )

    def _read_on(
        self, keys: tuple[LeaseKey, ...], found: tuple[tuple[LeaseKey, Lease | None], ...]
    ) -> None:
        if not keys:
            self._came(events.RowsRead(found))
            return
        key, *others = keys

        def read(row: Lease | None) -> None:
            self._process.act(lambda: self._read_on(tuple(others), (*found, (key, row))))

        self._uplink.read(key, read, lambda words: self._came(events.LookUpFailed(words)))

    def _came(self, event: events.Event) -> None:
        self._process.act(lambda: self._post(event))


class LeaseProcess:
    """From its start command to its exit. `incarnation` separates it from others of its lease."""

    queue_kind: type[SimulatedDeliveryQueue] = SimulatedDeliveryQueue

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
        # Messages that the manager has not taken yet; how it forces the process to end.
        self.ring: deque[ProcessReported] = deque()
        self.force_instant: Instant | None = None
        self.forced: list[signal.Signals] = []
        self.machine = host.machine
        self.os = host.machine.run(on_still=self._stands_still, on_death=self._died)
        self._owner = host.owner
        self._uplink = host.machine.uplink
        self._scheduler = world.scheduler
        self._observer = world.observer
        self._stream = world.stream
        policy = self.policy(host, start)
        chance = world.scheduler.chance(self.who).random
        self.life = LeaseStateMachine(policy, chance, lambda: self.queue.cpu_s)
        self.user_code = BatchUserCode(world.user_code, chance)
        times = QueueTimes(world.scheduler.clock, self.machine.instant, self.os.after)
        self._look_ups = LookUps(self.os, self._uplink, world, self.post)
        self.fetching = SimulatedFetching(
            self,
            world.stream,
            world.observer,
            times,
            settings,
            chance=chance,
            fetch_fault=self._look_ups.fetch_fate,
            list_shards=self._look_ups.list_for_fetching,
        )
        self.queue = self.queue_kind(
            self,
            world.stream,
            world.observer,
            times,
            fetching=self.fetching,
            post=self.post,
            user_code=self.user_code,
            uncheckpointed_max=settings.uncheckpointed_max,
        )
        self._channel: deque[events.Event] = deque()
        self._pump: Pump[events.Event, commands.Command] = Pump(
            lambda event: self.life.handle(event, self.machine.instant()), self._perform
        )
        self._still_since = Instant(0.0)
        self._has_begun = self._is_orphan = False
        self._alarm = self.os.alarm(self.life.next_deadline, lambda: self.post(events.Ticked()))

    def policy(self, host: HostOfProcess, start: manager_commands.StartProcess) -> LeasePolicy:
        """The settings of its core."""
        settings = host.world.settings
        return LeasePolicy(
            key=start.key,
            me=host.owner,
            seen_counter=start.counter,
            expires_instant=start.expires_instant,
            failover_s=settings.failover_s,
            checkpoint=CheckpointPolicy(
                mode="manual" if host.world.user_code.is_manual else "auto",
                every_s=settings.checkpoint_every_s,
                uncheckpointed_max=settings.uncheckpointed_max,
            ),
            has_waited=start.has_waited,
            past_pause=start.past_pause,
            others_in_sight=host.others_in_sight,
        )

    # Start and end.

    def begin(
        self,
        *,
        rung: Callable[[LeaseProcess], None],
        gone: Callable[[LeaseProcess, str], None],
    ) -> None:
        """It was forked. `rung` is called when its ring has messages for the manager, `gone` when
        it has died."""
        self._rung, self._gone = rung, gone
        self._observer.process_noted(self, "starts")
        self._observer.coverage.started(self._owner, self.key)
        self.os.after(_LOCKED_AFTER_S, self._lock)

    def _lock(self) -> None:
        """Nothing starts before the lock of its owner's nonce [P3]."""
        if not self.machine.locks.share(self._owner, self.os):
            self._send_report(reports.StartUnclaimed("another manager of this host holds its lock"))
            self._exit(commands.ExitCause.UNCLAIMED)
            return
        self._has_begun = True
        self.post(events.Started())
        self._listen()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal from any sender ends it."""
        self.os.die()
        self._gone(self, number.name)

    def _died(self) -> None:
        """No action and no message follows. If it did not exit by itself, it was killed."""
        if not self.is_over:
            self.is_over = True
            self._observer.process_noted(self, "is killed")
            self._observer.coverage.killed(
                self._owner,
                self.key,
                has_claimed=self.life.own.row is not None,
                is_writing=self._pump.is_held and self.life.own.pending is not None,
                in_user_code=self.queue.is_inside_user_code,
            )
            self._observer.ended_uncleanly(self)
            self._pump.is_held = True

    def _stands_still(self) -> None:
        self._still_since = self.machine.instant()
        self._observer.process_noted(self, "stands still")
        if self.queue.is_inside_user_code:
            self._observer.coverage.seen("frozen_inside_user_code")
        self._observer.frozen(self)

    @property
    def may_stand_still(self) -> bool:
        """Whether a look at its status could find a stall; most batches end quickly."""
        busy_since = self.queue.busy_since
        is_busy_long = busy_since > 0.0 and self.machine.instant() - busy_since > _LONG_BATCH_S
        return self.os.is_stopped or is_busy_long or not self._has_begun

    def status(self) -> LeaseStatus:
        """Its status slot: written every two seconds, unless it stands still."""
        is_still = self.os.is_stopped or self.machine.is_frozen
        return LeaseStatus(
            pid=self.incarnation,
            incarnation=self.incarnation,
            state=WORKER_STATES[self.life.state],
            processing_since_instant=self.queue.busy_since,
            published_instant=self._still_since if is_still else self.machine.instant(),
        )

    # Messages from its manager.

    def send(self, message: events.Event) -> None:
        """Its manager sends a message; it is taken in order, when the process is awake."""
        self._is_orphan |= isinstance(message, events.ManagerGone)
        self._channel.append(message)
        self.os.act(self._listen)

    def _listen(self) -> None:
        while self._channel and self._has_begun:
            self.post(self._channel.popleft())

    def post(self, event: events.Event) -> None:
        """An event happened; it is taken in after earlier events."""
        if not self.is_over:
            self._pump.post(event)
            self._turn()

    def _turn(self) -> None:
        if self._pump.run() and not self._pump.is_held:
            self._alarm.set()

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.SendWrite() | commands.SendLateCheckpoint() | commands.ReadOwnRow():
                self._perform_in_time(command)
            case commands.ReadRows(keys):
                self._look_ups.read_rows(keys)
            case commands.ListShards():
                self._look_ups.list_shards()
            case commands.AllowDelivery(fence):
                self._observer.delivery_allowed(self, self.machine.clock.time_of(fence))
                self.queue.allow_delivery(command)
            case commands.StopDelivery():
                self._observer.delivery_stopped(self)
                self.queue.stop_delivery()
            case commands.AnswerCheckpoint():
                self.queue.answer(command)
            case reports.Report():
                self._report(command)
            case commands.Exit(cause):
                self._exit(cause)
            case commands.CommitOutputs():
                raise InvariantViolation("a process without outputs is asked to commit them")
            case call:
                self.queue.call(call)

    def _exit(self, cause: commands.ExitCause) -> None:
        self._observer.process_noted(self, "exits:", cause.value)
        self.is_over = self._pump.is_held = True
        self._observer.coverage.exited(cause, is_orphan=self._is_orphan)
        if cause in {commands.ExitCause.LOST, commands.ExitCause.REPLACED}:
            self._observer.ended_uncleanly(self, "losing it")
        else:
            self._observer.ended_in_order(self)
        self.os.die()
        self._gone(self, cause.value)

    # Requests.

    def _perform_in_time(self, command: Timed) -> None:
        if command.not_before is None or command.not_before <= self.machine.instant():
            self._perform_now(command)
            return
        due_s = self.machine.clock.time_of(command.not_before)
        self.os.after(due_s - self._scheduler.now, lambda: self._perform_late(command))

    def _perform_late(self, command: Timed) -> None:
        """Its time has come; but a current request is finished first."""
        if self._pump.is_held:
            self.os.after(0.001, lambda: self._perform_late(command))
            return
        self._perform_now(command)
        self._turn()

    def _perform_now(self, command: Timed) -> None:
        if isinstance(command, commands.ReadOwnRow):
            self._pump.is_held = True
            self._uplink.read(
                self.key,
                lambda row: self._answered(events.OwnRowRead(row)),
                lambda words: self._answered(events.ReadFailed(words)),
            )
        elif self.life.own.sends(command.change):
            self._send(command.change)

    def _send(self, change: LeaseChange) -> None:
        sent = self.machine.instant()

        def resolved(outcome: Outcome) -> None:
            self._answered(events.WriteResolved(change, outcome, sent))

        if isinstance(change, LateCheckpoint):
            self._observer.process_noted(self, "checkpoints late", change)
        self._pump.is_held = True
        self._uplink.write(self.who, change, resolved)

    def _answered(self, event: events.Event) -> None:
        def take_in() -> None:
            if self.is_over:
                return
            self._pump.answer(event)
            self._turn()

        self.os.act(take_in)

    # Reports.

    def _report(self, report: reports.Report) -> None:
        if isinstance(report, reports.Checkpointed):
            self.queue.note_durable(report.position)
        if isinstance(report, reports.CoreReport):
            self._send_report(report)
        self._observer.coverage.reported(report)
        if isinstance(report, reports.RecordsExpired):
            self._observer.shard_expired(self)
        if not isinstance(report, reports.Checkpointed):
            self._observer.process_noted(self, "reports", report)

    def _send_report(self, report: reports.CoreReport) -> None:
        self.ring.append(ProcessReported(self.key, report))
        self._rung(self)
