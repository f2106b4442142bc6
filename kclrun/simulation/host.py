"""One host: the real `LeaseManager`, its commands performed in virtual time.

As the manager's shell does it: events are taken one after another, each with all its commands;
reads are repeated until they succeed, writes are sent once; an exit is reported once it is proven.
May not know: other hosts. Look next: `process.py`, `fleet.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kclrun.consuming import events as worker_events
from kclrun.leases import commands as do
from kclrun.leases import events as on
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.backoff import backoff_s
from kclrun.model.changes import LeaseChange
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.outcomes import Outcome
from kclrun.model.time import Instant, WallTime
from kclrun.simulation.clocks import WORLD_BEGAN_AT, Alarm, HostClock
from kclrun.simulation.offer_polls import OfferPolls
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.story import RuleBroken
from kclrun.simulation.table import Failed, keys_written
from kclrun.simulation.world import World

__all__ = ["Host"]

Answer = TypeVar("Answer")
Ask = Callable[[Callable[[Answer], None], Failed], None]

# The fork server forks one at a time: 8 ms (DESIGN 6), and half as much again until it runs.
_FORK_S: Final = 0.015
# From an exit, or a SIGKILL, to what the pidfd says of it.
_REAP_S: Final = 0.003

# Within which time the threads of a host that stood still are all awake.
_WAKING_S: Final = 0.01


class Host:
    """`name` is `<group>:<slot>:<nonce>`. `core_kind` and `process_kind` are for planted bugs."""

    def __init__(
        self,
        name: str,
        world: World,
        clock: HostClock | None = None,
        *,
        core_kind: type[LeaseManager] = LeaseManager,
        process_kind: type[LeaseProcess] = LeaseProcess,
    ) -> None:
        self.name = name
        self.world = world
        self.owner: OwnerId = world.settings.owner_id(name)
        self.group = name.split(":", maxsplit=1)[0]
        self.others_in_sight = False
        self.is_finished = self.is_dead = self.is_frozen = False
        self.processes: dict[LeaseKey, LeaseProcess] = {}
        self._clock = clock if clock is not None else HostClock()
        self._process_kind = process_kind
        self._chance = world.scheduler.chance(name).random
        settings = world.settings
        policy = ManagerPolicy(
            me=self.owner, failover_s=settings.failover_s, leases_max=settings.leases_max
        )
        self.core = core_kind(policy, self._chance)
        self._events: deque[on.Event] = deque()
        self._is_pumping = False
        self._held_back: list[Callable[[], None]] = []
        # The keys with a write under way, and the changes that wait for it.
        self._writes: dict[LeaseKey, deque[LeaseChange]] = {}
        self._starting: dict[LeaseKey, bool] = {}  # and whether to drain as soon as it lives
        self._launcher_free_at = 0.0
        self._incarnations = 0
        self._offer_polls = OfferPolls(
            world.table,
            now=lambda: world.scheduler.now,
            after=self.after,
            looked=lambda rows: self.act(lambda: self.feed(on.OffersFound(rows))),
        )
        self._alarm = self.alarm(self.core.next_deadline, lambda: self.feed(on.Ticked()))

    # Its life.

    def start(self) -> None:
        self.feed(on.Started(self._clock.wall(self.world.scheduler.now)))

    def drain(self) -> None:
        """SIGTERM."""
        self.act(lambda: self.feed(on.DrainRequested("SIGTERM")))

    def kill(self) -> None:
        """The host is gone, manager and lease processes with it."""
        self.is_dead = True
        self.world.table.idle_no_more(self._offer_polls)
        for process in tuple(self.processes.values()):
            self.world.oracles.process_noted(process, "is gone with its host")
            self.world.oracles.ended_uncleanly(process)
            process.ends()

    def freeze(self) -> None:
        """All of it stands still; its clocks do not."""
        if self.world.table.idle_no_more(self._offer_polls):
            self._offer_polls.wake()  # it looks when it would have, or as soon as it can
        self.is_frozen = True
        for process in self.processes.values():
            self.world.oracles.process_noted(process, "stands still")
            self.world.oracles.frozen(process)

    def thaw(self) -> None:
        """What would have happened meanwhile happens now, in any order: each is another thread's,
        or another process's, and whoever wakes first goes first."""
        self.is_frozen = False
        held, self._held_back = self._held_back, []
        for action in held:
            self.after(_WAKING_S * self._chance(), action)

    def kill_process(self, key: LeaseKey) -> None:
        """SIGKILL of one lease process."""
        process = self.processes[key]
        self.world.oracles.process_noted(process, "is killed")
        self.world.oracles.ended_uncleanly(process)
        process.ends()
        self.process_over(process, "SIGKILL")

    @property
    def is_up(self) -> bool:
        """It takes part: neither gone nor going."""
        return not (self.is_dead or self.is_finished or self.core.is_draining)

    # Time and events.

    def instant(self) -> Instant:
        return self._clock.instant(self.world.scheduler.now)

    def time_of(self, instant: Instant) -> float:
        return self._clock.time_of(instant)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.scheduler.after(delay_s, lambda: self.act(action))

    def act(self, action: Callable[[], None]) -> None:
        """Now; after the freeze; never."""
        if self.is_frozen:
            self._held_back.append(action)
        elif not self.is_dead:
            action()

    def alarm(self, deadline: Callable[[Instant], Instant], ring: Callable[[], None]) -> Alarm:
        scheduler = self.world.scheduler
        return Alarm(self._clock, lambda: scheduler.now, self.after, deadline=deadline, ring=ring)

    def feed(self, event: on.Event) -> None:
        """Give an event to the core, after those that wait already."""
        self._events.append(event)
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._events:
                for command in self.core.handle(self._events.popleft(), self.instant()):
                    self._perform(command)
                self.core.check()
        finally:
            self._is_pumping = False
        if not self.is_finished:
            self._alarm.set()

    # Commands.

    def _perform(self, command: do.Command) -> None:  # noqa: C901 - one case a command
        match command:
            case do.ScanTable():
                self._read(self.world.table.scan, on.LeasesScanned)
            case do.ListShards(with_start):
                self._list_shards(with_start=with_start)
            case do.ReadRow(key):
                self._read_row(key)
            case do.ReadParents(key, parents):
                self._read_parents(key, parents, ())
            case do.FindOffers(rows_max):
                self._offer_polls.look(rows_max)
            case do.WriteRow(change, not_before):
                self._write_in_time(change, not_before)
            case do.StartProcess():
                self._start_process(command)
            case do.DrainProcess(key, reason):
                self._drain_process(key, reason)
            case do.TellOthersInSight(others):
                self.others_in_sight = others
                for process in tuple(self.processes.values()):
                    process.post(worker_events.OthersInSight(others))
            case do.Note():
                pass
            case do.Finish():
                self.is_finished = True
                self.world.table.idle_no_more(self._offer_polls)

    def _list_shards(self, *, with_start: bool) -> None:
        world = self.world

        def ask() -> on.ShardsListed:
            now = world.scheduler.now
            at_start = world.stream.at_trim_horizon(now) if with_start else None
            return on.ShardsListed(
                world.stream.listing(now), WallTime(WORLD_BEGAN_AT + now), at_start
            )

        self._read(
            lambda reply, failed: world.table.ask_kinesis(ask, reply, failed), lambda event: event
        )

    def _read_row(self, key: LeaseKey) -> None:
        table = self.world.table

        def read(reply: Callable[[Lease | None], None], failed: Failed) -> None:
            table.read(key, reply, failed)

        self._read(read, lambda row: on.RowRead(key, row))

    def _read_parents(
        self, key: LeaseKey, parents: tuple[LeaseKey, ...], found: tuple[Lease | None, ...]
    ) -> None:
        if len(found) == len(parents):
            self.feed(on.ParentsRead(key, found))
            return
        table, parent = self.world.table, parents[len(found)]

        def read(reply: Callable[[Lease | None], None], failed: Failed) -> None:
            table.read(parent, reply, failed)

        self._read_until(read, lambda row: self._read_parents(key, parents, (*found, row)))

    def _read(self, ask: Ask[Answer], as_event: Callable[[Answer], on.Event]) -> None:
        self._read_until(ask, lambda answer: self.feed(as_event(answer)))

    def _read_until(
        self, ask: Ask[Answer], succeeded: Callable[[Answer], None], attempt: int = 1
    ) -> None:
        """Again after a pause until it succeeds."""

        def again(_: str) -> None:
            pause_s = backoff_s(attempt, self._chance())
            self.after(pause_s, lambda: self._read_until(ask, succeeded, attempt + 1))

        ask(lambda answer: self.act(lambda: succeeded(answer)), again)

    def _write_in_time(self, change: LeaseChange, not_before: Instant | None) -> None:
        if not_before is None or not_before <= self.instant():
            self._write(change)
            return
        self.after(self.time_of(not_before) - self.world.scheduler.now, lambda: self._write(change))

    def _write(self, change: LeaseChange) -> None:
        """One write of a key at a time; children are created in the name of the first."""
        key = keys_written(change)[0]
        if key in self._writes:
            self._writes[key].append(change)
            return
        self._writes[key] = deque()
        self._send(key, change)

    def _send(self, key: LeaseKey, change: LeaseChange) -> None:
        if key in self.processes:
            raise RuleBroken("P5", key, f"{self.name} writes beside its lease process")

        def resolved(outcome: Outcome) -> None:
            waiting = self._writes[key]
            if waiting:
                self._send(key, waiting.popleft())
            else:
                del self._writes[key]
            self.feed(on.WriteResolved(change, outcome))

        self.world.table.write(
            self.name, change, lambda outcome: self.act(lambda: resolved(outcome))
        )

    # Lease processes.

    def _start_process(self, start: do.StartProcess) -> None:
        if start.key in self.processes or start.key in self._starting:
            raise RuleBroken("P5", start.key, f"{self.name} starts a second process")
        self._starting[start.key] = False
        now = self.world.scheduler.now
        self._launcher_free_at = max(now, self._launcher_free_at) + _FORK_S
        self.after(self._launcher_free_at - now, lambda: self._forked(start))

    def _forked(self, start: do.StartProcess) -> None:
        self._incarnations += 1
        process = self._process_kind(self, start, incarnation=self._incarnations)
        self.processes[start.key] = process
        is_to_drain = self._starting.pop(start.key)
        self.world.oracles.process_noted(process, "starts")
        process.post(worker_events.Started())
        self.feed(on.ProcessStarted(start.key, process.incarnation))
        if is_to_drain:
            process.post(worker_events.DrainRequested("asked to before it began"))

    def _drain_process(self, key: LeaseKey, reason: str) -> None:
        if key in self._starting:
            self._starting[key] = True
        elif key in self.processes:
            self.processes[key].post(worker_events.DrainRequested(reason))

    def process_over(self, process: LeaseProcess, reason: str) -> None:
        """It exited, or was killed; its manager hears of it once that is proven."""

        def reaped() -> None:
            del self.processes[process.key]
            self.feed(on.ProcessExited(process.key, process.incarnation, reason))

        self.after(_REAP_S, reaped)
