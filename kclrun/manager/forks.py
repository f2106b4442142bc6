"""Queues fork requests to the launcher, restarts it if it exits, and makes start commands.

A request is a number and three descriptors.
"""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, assert_never

import msgspec

from kclrun.config.outputs import output_places
from kclrun.config.policies import (
    checkpoint_policy,
    concurrency_of,
    error_policy,
    fetch_policy,
    log_policy,
    trace_policy,
)
from kclrun.config.schema import Settings
from kclrun.config.state import state_place
from kclrun.errors import MalformedFrame
from kclrun.ipc import board as ipc
from kclrun.ipc import messages
from kclrun.ipc.channel import Channel, NoMessage, PeerGone, Sent
from kclrun.leases.commands import StartProcess
from kclrun.leases.policy import StreamStart
from kclrun.manager.launcher import lease_environment
from kclrun.manager.locks import Identity
from kclrun.manager.loop import Loop, LoopTimer
from kclrun.manager.world import FleetServices
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.reading import Replay
from kclrun.model.stream import StreamKey, shard_id_of, stream_of
from kclrun.model.time import Instant
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.observe.logs import EventLog


class StartHost(Protocol):
    """The manager for which a process is started, as it is at that moment."""

    def credentials(self) -> WireCredentials: ...

    def row_of(self, key: LeaseKey) -> Lease | None:
        """The row as last confirmed; None if this manager does not hold the lease."""
        ...

    def failover_s(self) -> float:
        """The smallest failover of the fleet."""
        ...

    def has_others_in_sight(self) -> bool:
        """Whether another kclrun owner could take the leases that we offer [P17]."""
        ...


class StartCommands:
    """Makes the start commands of lease processes for one manager: from settings, world and row.

    A start command contains everything that a lease process needs: it reads no file and no setting
    of its own.
    """

    def __init__(
        self,
        settings: Settings,
        world: FleetServices,
        starts: Mapping[StreamKey, StreamStart],
        identity: Identity,
        host: StartHost,
        *,
        import_paths: tuple[str, ...],
        log_as_json: bool,
        replay: Replay | None = None,
    ) -> None:
        self._settings = settings
        self._world = world
        self._starts = starts
        self._identity = identity
        self._host = host
        self._import_paths = import_paths
        self._log_as_json = log_as_json
        self._replay = replay

    def __call__(self, start: StartProcess, place: int, incarnation: int) -> ipc.StartSpec:
        settings = self._settings
        stream = stream_of(start.key)
        source = self._world.streams[stream]
        row = self._host.row_of(start.key)
        hash_range = row.hash_range if row is not None else None
        pinned_at = row.latest_pinned_at if row is not None else None
        return ipc.StartSpec(
            application=settings.application,
            stream_name=source.summary.name,
            stream_arn=source.summary.arn or None,
            consumer_arn=source.consumer_arn,
            lease_key=start.key,
            shard_id=shard_id_of(start.key),
            owner=self._identity.id,
            seen_counter=start.counter,
            place=place,
            incarnation=incarnation,
            expires_instant=start.expires_instant,
            failover_s=self._host.failover_s(),
            has_waited=start.has_waited,
            past_pause=start.past_pause,
            others_in_sight=self._host.has_others_in_sight(),
            start_timestamp=pinned_at if pinned_at is not None else self._starts[stream].at,
            hash_range_start=str(hash_range.start) if hash_range is not None else None,
            hash_range_end=str(hash_range.end) if hash_range is not None else None,
            processor=source.settings.processor or "",
            import_paths=self._import_paths,
            options=source.settings.options,
            fetch=fetch_policy(settings, source.settings.name),
            checkpoint=checkpoint_policy(settings),
            on_error=error_policy(settings.on_error_of(source.settings)),
            letters=settings.letter_place,
            concurrency=concurrency_of(source.settings.concurrency, settings),
            outputs=output_places(settings, stream),
            state=state_place(settings),
            decode=source.settings.decode,
            glue_url=settings.aws.url_of("glue"),
            table_name=settings.table,
            kinesis=self._world.kinesis,
            dynamodb=self._world.dynamodb,
            source=self._world.source,
            credentials=self._host.credentials(),
            lock_path=str(self._identity.lock.path),
            log=log_policy(settings, as_json=self._log_as_json),
            traces=trace_policy(settings),
            nice=source.settings.priority,
            ends_at_tip=settings.until is not None,
            replay=self._replay and self._replay.of_shard(shard_id_of(start.key)),
        )


# The modules that a lease process imports before the first record, beside its entry. The launcher
# loads them once and all lease processes share them. The user's module is not among them: each
# lease process loads it itself.
_PRELOADED: Final = (
    "encodings.idna",  # every lookup of a host name needs it
    "msgspec",
    "urllib3",
    "kclrun.ipc.messages",
    "kclrun.ipc.board",
    "kclrun.processor",
)


def modules_of(settings: Settings) -> tuple[str, ...]:
    """The modules that only lease processes of these settings import. OpenTelemetry takes 0.2 s,
    which a lease would wait for at each of its starts."""
    return ("kclrun.observe.traces",) if trace_policy(settings) is not None else ()


def ca_bundles_of(endpoints: Iterable[WireEndpoint]) -> tuple[str | None, ...]:
    """The CA bundles that clients of these endpoints load: none for plain HTTP."""
    return tuple(
        dict.fromkeys(
            endpoint.ca_bundle
            for endpoint in endpoints
            if endpoint.verify and endpoint.url.startswith("https:")
        )
    )


# One message for each fork and each exit of up to 1024 lease processes; more wait for the next
# turn.
_MESSAGES_MAX: Final = 256
_QUIT_PATIENCE_S: Final = 2.0
# A killed process ends within a millisecond, unless the kernel holds it (a disk, a network file
# system). The manager's one thread does not wait for that.
_KILLED_PATIENCE_S: Final = 0.2


class ProcessForked(msgspec.Struct, frozen=True):
    """A fork succeeded. The receiver has to close `pidfd`."""

    request_id: int
    pid: int
    pidfd: int


class ForkRefused(msgspec.Struct, frozen=True):
    """The request led to no process. `errno` is the kernel's; 0 if the kernel was not asked."""

    request_id: int
    reason: str
    errno: int = 0


class LauncherGone(msgspec.Struct, frozen=True):
    """The launcher exited; its lease processes live on, and we get their exit statuses."""

    exit_status: int | None


LauncherReport = ProcessForked | ForkRefused | LauncherGone | messages.Exited


class Launcher:
    """At most one launcher process at a time; `start` makes another one after its exit.

    A fork whose answer never came is a process whose exit cannot be proven. It is harmless: it gets
    its start command only after its pidfd arrived here. Without one it sees the end of its channel
    and exits without a claim.
    """

    def __init__(
        self,
        entry: str,
        preload: Sequence[str] = (),
        *,
        output_fds: tuple[int | None, int | None] = (None, None),
        only: Sequence[str] | None = None,
    ) -> None:
        """`only` narrows the environment of lease processes, as `environment.only` does."""
        self._only = only
        self._arguments = (entry, *_PRELOADED, *preload)
        self._output_fds = output_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[messages.ToLauncher, messages.FromLauncher] | None = None
        self._requested: set[int] = set()
        self._ca_bundles: tuple[str | None, ...] = ()
        self._unreaped: list[subprocess.Popen[bytes]] = []  # killed, and held by the kernel
        # Whether it has reported that it waits for requests; until then it loads modules.
        self.is_ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def in_flight(self) -> int:
        """Forks requested and not answered."""
        return len(self._requested)

    def fileno(self) -> int:
        """For a selector; -1 while no launcher runs."""
        return self._channel.fileno() if self._channel is not None else -1

    def start(self) -> None:
        """Exec a launcher. Requests may be sent at once; it answers when it has loaded (~0.3 s).

        Raises: OSError if no process can be made.
        """
        ours, theirs = Channel.pair()
        try:
            # In a session of its own: Ctrl-C is for the manager. -P: nothing is imported from the
            # working folder.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kclrun.manager.launcher",
                    str(theirs.fileno()),
                    *self._arguments,
                ],
                pass_fds=(theirs.fileno(),),
                env=lease_environment(os.environ, self._only),
                stdin=subprocess.DEVNULL,
                stdout=self._output_fds[0],
                stderr=self._output_fds[1],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = messages.channel_to_launcher(ours)
        self.is_ready = False
        self._send_trust()

    def trust(self, endpoints: Iterable[WireEndpoint]) -> None:
        """The endpoints of the lease processes to come: their CA bundles are loaded once, before
        the forks, and not by each of them."""
        self._ca_bundles = ca_bundles_of(endpoints)
        self._send_trust()

    def _send_trust(self) -> None:
        """One that is not sent costs memory and time, and nothing else."""
        for ca_bundle in self._ca_bundles:
            if self._channel is not None:
                self._channel.send(messages.Trust(ca_bundle))

    def fork(self, request_id: int, fds: Sequence[int]) -> bool:
        """Request a lease process that gets copies of `fds`; whether the request was sent."""
        if self._channel is None:
            return False
        is_sent = isinstance(self._channel.send(messages.Fork(request_id), fds), Sent)
        if is_sent:
            self._requested.add(request_id)
        return is_sent

    def receive(self) -> list[LauncherReport]:
        """The reports since the last call. After LauncherGone there are none: `start` again."""
        reports: list[LauncherReport] = []
        while self._channel is not None and len(reports) < _MESSAGES_MAX:
            try:
                got = self._channel.receive_with_fds()
            except MalformedFrame:
                # It runs only our code, so this is a damaged process: end it.
                got = PeerGone()
            if isinstance(got, NoMessage):
                break
            if isinstance(got, PeerGone):
                reports += self._gone()
                break
            reports += self._reported(*got)
        return reports

    def kill(self) -> None:
        """It does not answer: end it. `receive` reports LauncherGone; lease processes live on."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Let it exit; kill it if it does not. Lease processes are not affected."""
        if self._channel is not None:
            self._channel.send(messages.Quit())
            self._channel.close()
            self._channel = None
        self._reap(kill_after_s=_QUIT_PATIENCE_S)

    def _reported(
        self, message: messages.FromLauncher, fds: tuple[int, ...]
    ) -> list[LauncherReport]:
        match message:
            case messages.Forked(request_id, pid) if len(fds) == 1:
                self._requested.discard(request_id)
                return [ProcessForked(request_id, pid, fds[0])]
            case messages.ForkFailed(request_id, error, number):
                self._requested.discard(request_id)
                return [ForkRefused(request_id, error, number)]
            case messages.Exited():
                return [message]
            case messages.Ready():
                self.is_ready = True
                return []
            case messages.Forked():  # without its descriptor: its exit could not be proven
                return []
            case _:
                assert_never(message)

    def _gone(self) -> list[LauncherReport]:
        assert self._channel is not None, "only a launcher that was there can be gone"
        self._channel.close()
        self._channel = None
        self.is_ready = False
        status = self._reap(kill_after_s=0.0)
        refused = [ForkRefused(request, "the launcher died") for request in sorted(self._requested)]
        self._requested.clear()
        return [LauncherGone(status), *refused]

    def _reap(self, *, kill_after_s: float) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        self._unreaped = [process for process in self._unreaped if process.poll() is None]
        try:
            return process.wait(timeout=kill_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            return process.wait(timeout=_KILLED_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._unreaped.append(process)  # reaped with the next one
            return None


# Linux queues 11 messages on a channel by default; a fork takes 3 ms, so four keep it busy.
_FORKS_IN_FLIGHT_MAX: Final = 4
# A launcher that cannot run (its modules do not load, say) is tried twice a minute in the end.
_PAUSE_S_MAX: Final = 30.0
_PAUSE_FIRST_S: Final = 0.5
# A fork takes 3 ms. With a shorter wait, a host that is busy for a moment would lose its launcher.
_ANSWER_WAIT_MIN_S: Final = 5.0
# It loads in 0.3 s; a cold disk under load took 10 s.
_LOAD_WAIT_S: Final = 60.0


class Forks:
    """Sends requests in their order. The callbacks run in the loop's thread, also from `request`.

    Every request is answered once, by `forked` or `refused`, also if the launcher exits. A launcher
    that lives and does not answer (stopped, or stuck in the kernel) is killed.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        loop: Loop,
        log: EventLog,
        forked: Callable[[ProcessForked], None],
        refused: Callable[[ForkRefused], None],
        exited: Callable[[messages.Exited], None],
        answer_wait_s: float,
    ) -> None:
        self._launcher = launcher
        self._loop = loop
        self._log = log
        self._forked = forked
        self._refused = refused
        self._exited = exited
        self._answer_wait_s = max(answer_wait_s, _ANSWER_WAIT_MIN_S)
        # Since when an answer is awaited; each answer that comes restarts the wait.
        self._awaited_since: Instant | None = None
        self._look_timer: LoopTimer | None = None
        self._is_silent = False
        self._unasked: collections.deque[tuple[int, tuple[int, ...], socket.socket]] = (
            collections.deque()
        )
        self._pause_s = 0.0
        self._is_closing = False

    @property
    def launcher_pid(self) -> int | None:
        return self._launcher.pid

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher runs that answers; one that replaced a silent launcher counts once it
        is ready."""
        return self._launcher.fileno() != -1 and not self._is_silent

    def open(self) -> None:
        """Start the launcher, if none runs. A failure is logged and tried again later."""
        try:
            if self._launcher.fileno() == -1:
                self._launcher.start()
        except OSError as error:
            self._log.note("launcher_not_started", error=error.strerror)
            self._open_later()
            return
        self._loop.watch(self._launcher.fileno(), self._receive)
        self._log.note("launcher_started", launcher_pid=self._launcher.pid)

    def request(self, request_id: int, shared_fds: tuple[int, ...], theirs: socket.socket) -> None:
        """Request a lease process that gets `shared_fds` and, last, `theirs`, which we close."""
        self._unasked.append((request_id, shared_fds, theirs))
        self._ask()

    def close(self) -> None:
        """Fork no more; the launcher ends, lease processes live on."""
        self._is_closing = True
        self._loop.unwatch(self._launcher.fileno())
        self._launcher.stop()
        for _, _, theirs in self._unasked:
            theirs.close()
        self._unasked.clear()

    def _ask(self) -> None:
        """Send a few at a time: a burst would overrun the channel's queue."""
        while self._unasked and self._launcher.in_flight < _FORKS_IN_FLIGHT_MAX:
            request_id, shared_fds, theirs = self._unasked.popleft()
            is_asked = self._launcher.fork(request_id, (*shared_fds, theirs.fileno()))
            # Kept open here, it would hide the child's end of the channel from us and from it.
            theirs.close()
            if not is_asked:
                reason = "the launcher is not there or does not answer"
                self._refused(ForkRefused(request_id, reason))
            elif self._awaited_since is None:
                self._await()

    def _wait_s(self) -> float:
        return self._answer_wait_s if self._launcher.is_ready else _LOAD_WAIT_S

    def _await(self) -> None:
        """Begin to wait for an answer."""
        self._awaited_since = self._loop.now()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._look_timer = self._loop.after(self._wait_s(), self._look)

    def _look(self) -> None:
        """Check whether the launcher answers: it is killed after too long a silence."""
        since = self._awaited_since
        if since is None or self._is_closing:
            return
        self._log.note(
            "launcher_silent",
            launcher_pid=self._launcher.pid,
            waited_s=round(self._loop.now() - since, 1),
        )
        self._is_silent = True
        self._launcher.kill()
        self._await()

    def _receive(self) -> None:
        fd = self._launcher.fileno()
        reports = self._launcher.receive()
        if self._launcher.fileno() == -1:
            # Closed by now, but the selector still knows its number.
            self._loop.unwatch(fd)
        self._is_silent = self._is_silent and not self._launcher.is_ready
        self._awaited_since = None
        if self._launcher.in_flight:
            self._await()
        for report in reports:
            self._take(report)
        self._ask()

    def _take(self, report: LauncherReport) -> None:
        match report:
            case ProcessForked():
                self._pause_s = 0.0
                self._forked(report)
            case ForkRefused():
                self._refused(report)
            case messages.Exited():
                self._exited(report)
            case LauncherGone(exit_status):
                self._log.note("launcher_died", status=exit_status)
                self._open_later()
            case _:
                assert_never(report)

    def _open_later(self) -> None:
        """Restart at once the first time; after repeated exits without a fork, ever later."""
        if not self._is_closing:
            self._loop.after(self._pause_s, self.open)
        self._pause_s = min(_PAUSE_S_MAX, max(_PAUSE_FIRST_S, self._pause_s * 2))
