"""Puts the parent process together and runs it: `run_fleet`.

It makes no decision about a lease.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kclrun import __version__
from kclrun.config.rules import unused_settings
from kclrun.config.schema import Settings
from kclrun.config.state import state_place
from kclrun.config.units import parse_start
from kclrun.files.durable import write_report
from kclrun.ipc.messages import RenewCredentials
from kclrun.leases.events import Event
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy, StreamStart
from kclrun.lifecycle.stopping import STOP_SIGNALS
from kclrun.manager.children import LeaseProcesses, ProcessLimits
from kclrun.manager.exits import ProcessHost
from kclrun.manager.forks import Launcher, StartCommands, StartHost, modules_of
from kclrun.manager.instance_watch import InstanceWatch
from kclrun.manager.launcher import adopt_orphans
from kclrun.manager.locks import Identity, establish
from kclrun.manager.loop import IoPool, Loop
from kclrun.manager.manager import Manager
from kclrun.manager.metering import (
    SAMPLE_EVERY_S,
    Metering,
    open_announcer,
    open_metering,
    reads_apart_s,
)
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.ring_reader import Child
from kclrun.manager.sampling import Sampler
from kclrun.manager.service_calls import CredentialRenewal, Prefetching, ServiceCalls
from kclrun.manager.story import StoryKeeper
from kclrun.manager.tips import TipsElsewhere
from kclrun.manager.unread import UNREAD_S
from kclrun.manager.watch import EndWhenCaughtUp, ManagerTimer, SampleReader
from kclrun.manager.watchdog import Watchdog
from kclrun.manager.world import ExitReason, FleetServices, RunNames, Until
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.reading import Replay
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import ONLY_STREAM, StreamKey, stream_key
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials
from kclrun.observe.logs import EventLog, LineSink, log_of
from kclrun.observe.sample import LEASES_COMMAND
from kclrun.ports import ShardFilter

# For a live table, which is drawn anew with each sample.
_SHOW_EVERY_S: Final = 1.0
# By name: the manager does not import modules that run beside user code.
WORKER_ENTRY: Final = "kclrun.worker.main:run"
_STDERR: Final = 2
# Beyond `leases.max`: for processes that are still ending while the next lease is taken.
SPARE_PLACES: Final = 16
# A running lease has a pidfd and a channel here (with a limit of 64 descriptors, twenty leases
# ran). While a process is started there are three more for a moment, for four starts at a time. The
# rest of a manager has 24, and some connections to AWS.
_DESCRIPTORS_PER_LEASE: Final = 2
_DESCRIPTORS_BASE: Final = 64


def run_fleet(  # noqa: PLR0913 - what a run may be given besides its settings
    settings: Settings,
    world: FleetServices,
    *,
    import_paths: Sequence[str] = (),
    until: Until | None = None,
    report_path: Path | None = None,
    on_sample: SampleReader | None = None,
    source_is_done: Callable[[], bool] = lambda: True,
    launcher: Launcher | None = None,
    leases_command: str | None = LEASES_COMMAND,
    replay: Replay | None = None,
    stop_signals: Collection[signal.Signals] = STOP_SIGNALS,
) -> ExitReason:
    """Run the lease manager of this machine until it is asked to stop. From the main thread only.

    One loop runs in one thread. Events come from the I/O pool, the lease processes, the locks, the
    clock and the signals. The core answers each event with commands, and each command is one call.

    `import_paths` are the paths from which lease processes import the processor. `on_sample` is
    called about once a second, in this thread. `source_is_done` says, for `until`, that no more
    records are expected. `launcher` may have been started before the world was opened, so that it
    loads meanwhile; it decides where the output of lease processes goes. `leases_command` is named
    in the instructions for resuming a halted shard (`sample.how_to_resume`). With `replay` each
    shard ends where that time range does. `stop_signals` request a stop.

    Raises: SettingsError without a usable folder for lock files; AccessDenied or Unavailable
    without credentials; InvariantViolation for a bug of ours (the lease processes then drain by
    themselves); SettingsError if the report cannot be written.
    """
    starts = _starts(world, WallTime(time.time()))
    with _opened(settings, world) as resources:
        run = _ManagerRun(
            settings,
            world,
            starts,
            resources,
            leases_command=leases_command,
            replay=replay,
            stop_signals=stop_signals,
        )
        launcher = launcher or Launcher(
            WORKER_ENTRY, modules_of(settings), only=settings.environment.only
        )
        launcher.trust(world.endpoints)
        run.assemble(launcher, tuple(import_paths))
        reason = run.run(on_sample, until, source_is_done)
        if report_path is not None:
            run.write_report(report_path, reason)
        return reason


@dataclass
class _Resources:
    """What a run opens before its parts are made, and closes after their end.

    `holds_leases`: whether rows may name us as owner; after the end, only if the stop was cut
    short.
    """

    identity: Identity
    loop: Loop
    pool: IoPool
    log: EventLog
    story: StoryKeeper | None
    holds_leases: Callable[[], bool] = lambda: False


@contextlib.contextmanager
def _opened(settings: Settings, world: FleetServices) -> Iterator[_Resources]:
    identity = establish(settings.application, settings.leases.group, os.environ)
    sink = LineSink(_STDERR)
    loop = Loop()
    pool = IoPool(loop.post)
    resources: _Resources | None = None
    try:
        log = log_of(settings, identity.id, sink)
        story = None
        if settings.observe.story != "nowhere":
            story = StoryKeeper(settings, identity.folder.folder, identity.id, log, world.story)
        resources = _Resources(identity, loop, pool, log, story)
        yield resources
    finally:
        if resources is not None and resources.story is not None:
            resources.story.close()
        pool.close()
        loop.close()
        identity.retire(is_named=resources is not None and resources.holds_leases())
        sink.close()


class _ManagerRun(ProcessHost, StartHost):
    """The parts of one run, and the calls between them."""

    def __init__(
        self,
        settings: Settings,
        world: FleetServices,
        starts: Mapping[StreamKey, StreamStart],
        resources: _Resources,
        *,
        leases_command: str | None,
        replay: Replay | None,
        stop_signals: Collection[signal.Signals],
    ) -> None:
        self._replay = replay
        self._settings = settings
        self._world = world
        self._starts = starts
        self._identity = identity = resources.identity
        self._log = log = resources.log
        self._loop = loop = resources.loop
        self._pool = pool = resources.pool
        self._story = resources.story
        self._began_instant = loop.now()
        self._report = ReportWriter()
        self._names = RunNames(settings.application, world.stream_names, identity.id)
        self._policy = _policy(settings, world, starts, identity, is_bounded=replay is not None)
        self._core = LeaseManager(self._policy, random.random)
        resources.holds_leases = lambda: bool(self._core.held())
        self._watch: ManagerTimer | None = None
        self._metering: Metering | None = None
        self._manager = Manager(
            self._core,
            identity=identity,
            loop=loop,
            log=log,
            report=self._report,
            grace_s=float(settings.shutdown.grace),
            leases_command=leases_command,
            stop_signals=stop_signals,
        )
        self._credentials = CredentialRenewal(
            world.credentials,
            loop=loop,
            pool=pool,
            log=log,
            renewed=lambda keys: self._manager.processes.broadcast(RenewCredentials(keys)),
        )

    def assemble(self, launcher: Launcher, import_paths: tuple[str, ...]) -> None:
        """Make the parts that perform commands and connect them to the manager."""
        prefetching = Prefetching(
            state_place(self._settings),
            application=self._settings.application,
            owner=self._identity.id,
            world=self._world,
            credentials=self.credentials,
            loop=self._loop,
            log=self._log,
            is_stopping=lambda: self._core.is_draining,
        )

        self._manager.service_calls = ServiceCalls(
            self._world,
            lambda stream: ShardFilter.at(self._starts[stream].sentinel, self._starts[stream].at),
            self._manager,
            loop=self._loop,
            pool=self._pool,
            log=self._log,
            delays=prefetching.delays,
        )
        self._manager.processes = LeaseProcesses(
            launcher,
            self,
            ProcessLimits(
                places=self._settings.leases.max + SPARE_PLACES,
                exit_patience_s=float(self._settings.shutdown.grace),
                failover_s=self._policy.failover_s,
                per_process=self._settings.leases.per_process,
            ),
            specify=self._start_commands(import_paths),
            loop=self._loop,
            log=self._log,
            lock_fd=self._identity.lock.fileno(),
        )
        self._watchdog = Watchdog(
            self._manager.processes,
            log=self._log,
            stall_s=float(self._settings.stall),
            failover_s=self.failover_s,
        )
        if (story := self._story) is not None:
            # It records what no line of the log says, too.
            self._loop.after(0.0, lambda: story.watch(self._manager.processes, self._loop))

    # As `ProcessHost`.

    def deliver(self, event: Event) -> None:
        self._manager.deliver(event)

    def departed(self, child: Child) -> None:
        self._report.departed(child.key, child.last_status)
        self._manager.departed(child)
        self._watchdog.exited(child)

    # As `StartHost`.

    def credentials(self) -> WireCredentials:
        return self._credentials.held

    def row_of(self, key: LeaseKey) -> Lease | None:
        held_lease = self._core.held_lease(key)
        return held_lease.row if held_lease is not None else None

    def failover_s(self) -> float:
        return self._watch.failover_s if self._watch is not None else self._policy.failover_s

    def has_others_in_sight(self) -> bool:
        return self._manager.others_in_sight

    # The run.

    def run(
        self,
        on_sample: SampleReader | None,
        until: Until | None,
        source_is_done: Callable[[], bool],
    ) -> ExitReason:
        """Run from the first line of the log to the last."""
        adopt_orphans()
        self._credentials.open()
        self._watch_instance()
        sampler = Sampler(
            self._manager,
            self._report,
            self._names,
            leases_max=self._settings.leases.max,
            began_instant=self._began_instant,
            has_gauge=on_sample is not None,
            unread_max_s=UNREAD_S + reads_apart_s(self._settings),
        )
        try:
            self._metering = self._open_metering(sampler)
            readers: list[tuple[float, SampleReader]] = []
            if on_sample is not None:
                readers.append((_SHOW_EVERY_S, on_sample))
            if self._metering is not None:
                readers.append((SAMPLE_EVERY_S, self._metering.read))
            self._watch = ManagerTimer(
                self._manager,
                sampler,
                loop=self._loop,
                log=self._log,
                watchdog=self._watchdog,
                failover_s=self._policy.failover_s,
                readers=readers,
                end=None if until is None else self._end_when_caught_up(source_is_done),
            )
            self._loop.after(0.0, self._watch.look)
            reason = self._manager.run(self._world.service_time(), self._first_line)
        finally:
            if self._metering is not None:
                self._metering.close()
            self._manager.processes.close()
        self._log.note("manager_stopped", reason=reason.value, records=self._report.records_total)
        return reason

    def _end_when_caught_up(self, source_is_done: Callable[[], bool]) -> EndWhenCaughtUp:
        tips = TipsElsewhere(
            {key: stream.reader for key, stream in self._world.streams.items()},
            lambda stream: self._starts[stream].at,
            pool=self._pool,
            now=self._loop.now,
            broke=self._manager.broke,
        )
        return EndWhenCaughtUp(
            self._manager, self._log, source_is_done=source_is_done, are_read=tips.are_read
        )

    def _watch_instance(self) -> None:
        """Watch the life of this EC2 instance, where it is configured."""
        if self._world.instance is None:
            return
        watch = InstanceWatch(
            self._world.instance,
            self._settings.instance,
            manager=self._manager,
            loop=self._loop,
            pool=self._pool,
            log=self._log,
        )
        self._manager.stays = watch.stays
        watch.open()

    def _open_metering(self, sampler: Sampler) -> Metering | None:
        """Called before the first lease is taken: an address that is not free ends the start."""
        metering = open_metering(
            self._settings,
            sampler,
            failover_s=self._policy.failover_s,
            owner=self._identity.id,
            outlet=self._world.metrics,
            announcer=open_announcer(os.environ, self._log),
            loop=self._loop,
            log=self._log,
        )
        if metering is not None:
            self._manager.stop_begins = metering.stop_begins
            self._core.publish(metering.address)
        return metering

    def write_report(self, path: Path, reason: ExitReason) -> None:
        seconds = self._loop.now() - self._began_instant
        report = self._report.report(self._names, exit_reason=reason.value, seconds=seconds)
        write_report(path, report)

    def _start_commands(self, import_paths: tuple[str, ...]) -> StartCommands:
        return StartCommands(
            self._settings,
            self._world,
            self._starts,
            self._identity,
            self,
            import_paths=import_paths,
            log_as_json=self._log.as_json,
            replay=self._replay,
        )

    def _processors(self) -> Iterable[str]:
        sources = (stream.settings for stream in self._world.streams.values())
        return dict.fromkeys(source.processor for source in sources if source.processor is not None)

    def _first_line(self) -> None:
        settings, policy = self._settings, self._policy
        self._log.note(
            "manager_started",
            version=__version__,
            python=platform.python_version(),
            stream=self._world.stream_names,
            table=settings.table,
            start=", ".join(dict.fromkeys(start.text for start in self._starts.values())),
            failover_s=policy.failover_s,
            renew_every_s=policy.renew_every_s,
            scan_every_s=policy.scan_every_s,
            leases_max=settings.leases.max,
            grace_s=float(settings.shutdown.grace),
            stall_s=float(settings.stall),
            processor=", ".join(self._processors()),
        )
        for name, words in self._world.missing.items():
            self._log.note("stream_missing", stream=name, error=words)
        for key, stream in self._world.streams.items():
            own = stream.summary
            if key != ONLY_STREAM and key != stream_key(own.arn, own.created_at):
                self._log.note("leases_named_otherwise", stream=own.name, keys=str(key))
        if unused := unused_settings(settings):
            self._log.note("settings_unused", keys=", ".join(unused))
        self._warn_of_few_descriptors()
        if self._metering is not None:
            self._metering.introduce()

    def _warn_of_few_descriptors(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = _DESCRIPTORS_BASE + _DESCRIPTORS_PER_LEASE * self._settings.leases.max
        if limit != resource.RLIM_INFINITY and limit < needed:
            self._log.note(
                "descriptors_short",
                what=limit,
                expected=needed,
                leases_max=self._settings.leases.max,
            )


def _starts(world: FleetServices, now: WallTime) -> dict[StreamKey, StreamStart]:
    starts = {}
    for key, stream in world.streams.items():
        text = stream.settings.start or TRIM_HORIZON.sequence_number
        parsed = parse_start(text, now)
        starts[key] = StreamStart(text, parsed.sentinel, parsed.at)
    return starts


def _policy(
    settings: Settings,
    world: FleetServices,
    starts: Mapping[StreamKey, StreamStart],
    identity: Identity,
    *,
    is_bounded: bool = False,
) -> ManagerPolicy:
    return ManagerPolicy(
        me=identity.id,
        failover_s=float(settings.leases.failover),
        leases_max=settings.leases.max,
        moves_per_cycle=settings.leases.moves_per_cycle,
        balance=settings.leases.balance,
        cleanup=settings.leases.cleanup,
        streams=tuple(starts),
        starts=starts,
        created={key: stream.summary.created_at for key, stream in world.streams.items()},
        described_instant=world.described_instant,
        reads_kcl3_mode=world.coordinator is not None,
        is_bounded=is_bounded,
    )
