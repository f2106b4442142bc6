"""The parent process, put together: `run_fleet`.

One loop in one thread: events come from the pool, the lease processes, the locks, the clock and
the signals; the core answers each with commands; each command is one call. Rule: no decision about
a lease is made here. Look next: `manager.py` (the pump), `leases/manager.py` (the core).
"""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from kclrun.config.schema import Settings
from kclrun.config.start_position import parse_start
from kclrun.ipc.messages import RenewCredentials
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy, StreamStart
from kclrun.manager.announcing import open_announcer
from kclrun.manager.child import Child
from kclrun.manager.children import LeaseProcesses
from kclrun.manager.credentials_handing import CredentialHanding
from kclrun.manager.identity import Identity, establish
from kclrun.manager.instance_watch import InstanceWatch
from kclrun.manager.io_pool import IoPool
from kclrun.manager.launching import Launcher
from kclrun.manager.loop import Loop
from kclrun.manager.manager import Manager
from kclrun.manager.metering import Metering, open_metering
from kclrun.manager.performing import Performer
from kclrun.manager.process_rights import adopt_orphans
from kclrun.manager.report import ReportWriter
from kclrun.manager.sampling import Sampler
from kclrun.manager.snapshots import Snapshots
from kclrun.manager.start_commands import StartCommands
from kclrun.manager.watchdog import Watchdog
from kclrun.manager.watching import Watch
from kclrun.manager.world import ExitReason, Until, World
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.model.stream_key import StreamKey
from kclrun.model.time import WallTime
from kclrun.observe.line_sink import LineSink
from kclrun.observe.logs import EventLog
from kclrun.observe.snapshot import Snapshot
from kclrun.ports import ShardFilter
from kclrun.sinks.report_file import write_report

__all__ = ["SPARE_PLACES", "WORKER_ENTRY", "run_fleet"]

# By name: the manager imports nothing that runs beside user code.
WORKER_ENTRY: Final = "kclrun.worker.main:run"
_STDERR: Final = 2
# Beyond `leases.max`: for processes on their way out while the next lease is taken.
SPARE_PLACES: Final = 16
_FILTER_KINDS: Final = {
    TRIM_HORIZON.sequence_number: "AT_TRIM_HORIZON",
    LATEST.sequence_number: "AT_LATEST",
}


def run_fleet(
    settings: Settings,
    world: World,
    *,
    import_paths: Sequence[str] = (),
    until: Until | None = None,
    report_path: Path | None = None,
    on_snapshot: Callable[[Snapshot], None] | None = None,
    source_is_done: Callable[[], bool] = lambda: True,
    launcher: Launcher | None = None,
) -> ExitReason:
    """Run the lease manager of this machine until it is told to stop. From the main thread only.

    `import_paths` are where lease processes import the processor from. `on_snapshot` is called
    about once a second, in this thread. `source_is_done` says, for `until`, that no more records
    are to be expected. `launcher` may have been started before the world was opened, to load
    meanwhile; it decides where the output of lease processes goes.

    Raises: SettingsError if there is no place for lock files; AccessDenied or Unavailable if there
    are no credentials; InvariantViolation for a bug of ours (the lease processes then drain by
    themselves); SettingsError if the report cannot be written.
    """
    starts = _starts(world, WallTime(time.time()))
    identity = establish(settings.application, settings.leases.group, os.environ)
    sink = LineSink(_STDERR)
    loop = Loop()
    pool = IoPool(loop.post)
    run: _Run | None = None
    try:
        log = _log(settings, identity, sink)
        run = _Run(settings, world, starts, identity=identity, log=log, loop=loop, pool=pool)
        run.assemble(launcher or Launcher(WORKER_ENTRY), tuple(import_paths))
        run.watch(on_snapshot, until, source_is_done)
        reason = run.run()
        if report_path is not None:
            run.write_report(report_path, reason)
        return reason
    finally:
        pool.close()
        loop.close()
        identity.retire(is_named=run is not None and run.holds_leases)
        sink.close()


class _Run:
    """The parts of one run, and who is told about whom."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        starts: Mapping[StreamKey, StreamStart],
        *,
        identity: Identity,
        log: EventLog,
        loop: Loop,
        pool: IoPool,
    ) -> None:
        self._settings = settings
        self._world = world
        self._identity = identity
        self._starts = starts
        self._log = log
        self._loop = loop
        self._pool = pool
        self._began_instant = loop.now()
        self._report = ReportWriter()
        self._policy = _policy(settings, starts, identity)
        self._core = LeaseManager(self._policy, random.random)
        self._watch: Watch | None = None
        self._metering: Metering | None = None
        self._manager = Manager(
            self._core,
            identity=identity,
            loop=loop,
            log=log,
            report=self._report,
            grace_s=float(settings.shutdown.grace),
        )
        self._credentials = CredentialHanding(
            world.credentials,
            loop=loop,
            pool=pool,
            log=log,
            hand_over=lambda keys: self._manager.processes.broadcast(RenewCredentials(keys)),
        )

    def assemble(self, launcher: Launcher, import_paths: tuple[str, ...]) -> None:
        """Give the manager its hands."""
        self._manager.performer = Performer(
            self._world,
            lambda stream: _start_filter(self._starts[stream]),
            loop=self._loop,
            pool=self._pool,
            log=self._log,
            deliver=self._manager.deliver,
            broke=self._manager.broke,
            table_gone=self._manager.table_gone,
        )
        self._manager.processes = LeaseProcesses(
            launcher,
            places=self._settings.leases.max + SPARE_PLACES,
            specify=self._start_commands(import_paths),
            loop=self._loop,
            log=self._log,
            deliver=self._manager.deliver,
            departed=self._departed,
            farewell_patience_s=float(self._settings.shutdown.grace),
            failover_s=self._policy.failover_s,
        )
        self._watchdog = Watchdog(
            self._manager.processes,
            log=self._log,
            stall_s=float(self._settings.stall),
            failover_s=self._fleet_failover_s,
        )

    def _departed(self, child: Child) -> None:
        self._report.departed(child.key, child.last_status)
        self._watchdog.buried(child)

    def watch(
        self,
        on_snapshot: Callable[[Snapshot], None] | None,
        until: Until | None,
        source_is_done: Callable[[], bool],
    ) -> None:
        """Have it looked at."""
        snapshots = Snapshots(
            application=self._settings.application,
            stream=self._world.stream_names,
            owner=self._identity.id,
            began_instant=self._began_instant,
            core=self._core,
            living=self._manager.processes.living,
            report=self._report,
        )
        self._watch = Watch(
            self._manager,
            snapshots,
            loop=self._loop,
            log=self._log,
            watchdog=self._watchdog,
            failover_s=self._policy.failover_s,
            on_snapshot=on_snapshot,
            is_until_caught_up=until is not None,
            source_is_done=source_is_done,
        )

    def run(self) -> ExitReason:
        """From the first line of the log to the last."""
        assert self._watch is not None, "assembled and watched before it runs"
        adopt_orphans()
        self._credentials.open()
        self._loop.after(0.0, self._watch.look)
        self._watch_instance()
        try:
            self._metering = self._open_metering()
            reason = self._manager.run(WallTime(time.time()), self._first_line)
        finally:
            if self._metering is not None:
                self._metering.close()
            self._manager.processes.close()
        self._log.note("manager_stopped", reason=reason.value, records=self._records())
        return reason

    def _watch_instance(self) -> None:
        """What becomes of this machine, where somebody can tell."""
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

    def _open_metering(self) -> Metering | None:
        """Before the first lease is taken: an address that cannot be had ends the start."""
        sampler = Sampler(
            self._manager,
            self._report,
            application=self._settings.application,
            stream=self._world.stream_names,
            owner=self._identity.id,
            leases_max=self._settings.leases.max,
            began_instant=self._began_instant,
        )
        metering = open_metering(
            self._settings,
            sampler,
            failover_s=self._policy.failover_s,
            outlet=self._world.metrics,
            announcer=open_announcer(os.environ, self._log),
            loop=self._loop,
            log=self._log,
        )
        if metering is not None:
            self._manager.stop_begins = metering.stop_begins
            self._loop.after(0.0, metering.look)
        return metering

    @property
    def holds_leases(self) -> bool:
        """Whether rows may name us; after the end, only those of a stop that was cut short."""
        return bool(self._core.held())

    def write_report(self, path: Path, reason: ExitReason) -> None:
        report = self._report.report(
            application=self._settings.application,
            stream=self._world.stream_names,
            owner=self._identity.id,
            exit_reason=reason.value,
            seconds=self._loop.now() - self._began_instant,
        )
        write_report(path, report)

    def _records(self) -> int:
        return self._report.records_total

    def _start_commands(self, import_paths: tuple[str, ...]) -> StartCommands:
        return StartCommands(
            self._settings,
            self._world,
            owner=self._identity.id,
            lock_path=self._identity.lock.path,
            import_paths=import_paths,
            start_at_of=lambda stream: self._starts[stream].at,
            log_as_json=self._log.as_json,
            credentials=lambda: self._credentials.held,
            row_of=self._row_of,
            failover_s=self._fleet_failover_s,
            others_in_sight=lambda: self._manager.others_in_sight,
        )

    def _row_of(self, key: LeaseKey) -> Lease | None:
        custody = self._core.custody(key)
        return custody.row if custody is not None else None

    def _fleet_failover_s(self) -> float:
        return self._watch.failover_s if self._watch is not None else self._policy.failover_s

    def _processors(self) -> Iterable[str]:
        sources = (stream.settings for stream in self._world.streams.values())
        return dict.fromkeys(source.processor for source in sources if source.processor is not None)

    def _first_line(self) -> None:
        settings, policy = self._settings, self._policy
        self._log.note(
            "manager_started",
            version=metadata.version("kclrun"),
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
        if self._metering is not None:
            self._metering.introduce()


def _starts(world: World, now: WallTime) -> dict[StreamKey, StreamStart]:
    starts = {}
    for key, stream in world.streams.items():
        text = stream.settings.start or TRIM_HORIZON.sequence_number
        parsed = parse_start(text, now)
        starts[key] = StreamStart(text, parsed.sentinel, parsed.at)
    return starts


def _start_filter(start: StreamStart) -> ShardFilter:
    kind = _FILTER_KINDS.get(start.sentinel.sequence_number, "AT_TIMESTAMP")
    return ShardFilter(kind, start.at)


def _policy(
    settings: Settings, starts: Mapping[StreamKey, StreamStart], identity: Identity
) -> ManagerPolicy:
    return ManagerPolicy(
        me=identity.id,
        failover_s=float(settings.leases.failover),
        leases_max=settings.leases.max,
        moves_per_cycle=settings.leases.moves_per_cycle,
        cleanup=settings.leases.cleanup,
        streams=tuple(starts),
        starts=starts,
    )


def _log(settings: Settings, identity: Identity, sink: LineSink) -> EventLog:
    """JSON for machines, words for a terminal, unless the settings say which."""
    wanted = settings.log.format
    as_json = wanted == "json" or (wanted == "auto" and not sys.stderr.isatty())
    return EventLog(
        sink,
        app=settings.application,
        owner=identity.id,
        level=settings.log.level,
        as_json=as_json,
    )
