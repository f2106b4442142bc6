"""Drives real lease processes, as a manager would: launcher, segment, channels, a lease table.

The table is the embedded AWS's (moto in a process of its own), Kinesis is the canned server.
Rule: every process started here is ended by its pidfd before `LeaseRig` is left.
"""

import contextlib
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil

from bench.figures import Sample
from bench.servers import CREDENTIALS, REGION, CannedServer, endpoint_at
from bench.tls_front import OwnCa, TlsFront
from kclrun.aws.control import ControlPlane
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.table_setup import ensure_table
from kclrun.aws.wire import WireClient
from kclrun.ipc.board import Segment, StartSpec, StatusSlot
from kclrun.ipc.channel import Channel, Doorbell
from kclrun.ipc.messages import Admit, Begin, Left, ToWorker, channel_to_worker
from kclrun.local.server import Embedded, start_embedded
from kclrun.manager.forks import Launcher, ProcessForked
from kclrun.model.lease import Lease, LeaseKey, Owner
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import Instant
from kclrun.model.wire import WireEndpoint
from kclrun.protocol.status import LeaseStatus
from kclrun.protocol.writes import Applied, CreateLease

LEASE_ENTRY: Final = "kclrun.worker.main:run"
_TABLE: Final = "bench"
_ME: Final = Owner("", "bench", "1").id
_FAILOVER_S: Final = 10.0
# Each process gets a place of its own, so that none has to be cleared.
_PLACES: Final = 256
_PATIENCE_S: Final = 30.0
# CPUCLOCK_SCHED of the kernel: a clock of the whole process, in nanoseconds.
_CPU_CLOCK: Final = 2


def cpu_s_of(pid: int) -> float:
    """User and system time of a process that has not been reaped: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> None:
    """Poll every 5 ms. Raises: TimeoutError, saying what did not happen."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:g} s")
        time.sleep(0.005)


class LeaseProcess:
    """One lease process, seen from its parent."""

    def __init__(
        self, pid: int, pidfd: int, slot: StatusSlot, channel: Channel[ToWorker, Left]
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._slot = slot
        self._channel = channel
        self._process = psutil.Process(pid)

    def records(self) -> int:
        """User records handed to the processor so far."""
        status = self._slot.read()
        return status.records_total if isinstance(status, LeaseStatus) else 0

    def counter(self) -> int:
        """The lease's counter, which each heartbeat moves; 0 before the claim."""
        status = self._slot.read()
        return status.counter if isinstance(status, LeaseStatus) else 0

    def cpu_s(self) -> float:
        """User and system time of the process, all threads."""
        return cpu_s_of(self.pid)

    def memory(self) -> Any:
        """`uss` is what only this process holds, `pss` its share of the rest on top."""
        return self._process.memory_full_info()

    def sample(self, window_s: float) -> Sample:
        """What it does in the next `window_s` seconds."""
        records, cpu_s, instant = self.records(), self.cpu_s(), time.monotonic()
        time.sleep(window_s)
        return Sample(self.records() - records, self.cpu_s() - cpu_s, time.monotonic() - instant)

    def end(self) -> None:
        """SIGKILL, and proof that it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        assert poller.poll(int(_PATIENCE_S * 1000)), "a killed process does not end"
        self._channel.close()


class LeaseRig:
    """A context manager: servers and table up, launchers made as entries ask for them.

    With a `ca` the lease processes reach both servers over TLS, through fronts of their own.
    """

    def __init__(
        self,
        canned: CannedServer,
        settings: dict[str, Any] | None = None,
        ca: OwnCa | None = None,
    ) -> None:
        self._canned = canned
        self._ca = ca
        self._settings = settings or {}
        self._launchers: dict[str, Launcher] = {}
        self._processes: list[LeaseProcess] = []

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undone:
            self._folder = Path(undone.enter_context(tempfile.TemporaryDirectory()))
            (self._folder / "lock").touch()
            self._embedded: Embedded = undone.enter_context(start_embedded())
            self._segment = Segment.create(_PLACES)
            undone.callback(self._segment.close)
            self._doorbell = Doorbell.create()
            undone.callback(self._doorbell.close)
            self._table = self._make_table(undone)
            self._endpoints = [
                self._reached(url, undone)
                for url in (self._canned.url, self._embedded.dynamodb_endpoint)
            ]
            self._stack = undone.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()
        for launcher in self._launchers.values():
            launcher.stop()
        self._stack.close()

    def _make_table(self, stack: contextlib.ExitStack) -> DynamoLeaseTable:
        url = self._embedded.dynamodb_endpoint
        settings = EndpointSettings(region=REGION, endpoint_url=url)
        ensure_table(
            ControlPlane(open_session(settings), settings, CREDENTIALS),
            _TABLE,
            application=_TABLE,
            create=True,
            tags={},
            clock=lambda: Instant(time.monotonic()),
            wait=time.sleep,
            timeout_s=_PATIENCE_S,
        )
        client = WireClient(endpoint_at(url), lambda: CREDENTIALS, service="dynamodb")
        stack.callback(client.close)
        return DynamoLeaseTable(client, _TABLE)

    def _reached(self, url: str, stack: contextlib.ExitStack) -> WireEndpoint:
        if self._ca is None:
            return endpoint_at(url)
        return endpoint_at(stack.enter_context(TlsFront(url, self._ca)), self._ca.bundle)

    def prepare(self, entry: str) -> None:
        """Have a launcher for `entry` loaded, so that the next start shows forks only."""
        shard_id = f"empty-warm-up-{len(self._processes)}"
        with self.running(entry, shard_id):
            wait_until(lambda: shard_id in self._canned.first_reads(), "the first GetRecords")

    @contextlib.contextmanager
    def running(self, entry: str, shard_id: str) -> Iterator[LeaseProcess]:
        """A lease process for a new lease of `shard_id`, killed at the end."""
        process = self.start(entry, shard_id)
        try:
            yield process
        finally:
            self.end(process)

    def start(self, entry: str, shard_id: str) -> LeaseProcess:
        """Make the lease's row, ours already, and a process to claim it."""
        self.create_row(shard_id)
        return self.start_on_row(entry, shard_id)[0]

    def create_row(self, shard_id: str) -> None:
        row = Lease(key=LeaseKey(shard_id), checkpoint=TRIM_HORIZON, counter=1, owner=_ME)
        outcome = self._table.write(CreateLease(row))
        assert isinstance(outcome, Applied), outcome

    def start_on_row(self, entry: str, shard_id: str) -> tuple[LeaseProcess, float]:
        """The process, and the instant (CLOCK_MONOTONIC) at which it was asked for."""
        asked = time.monotonic()
        forked, channel = self._fork(entry)
        return self._begin(shard_id, forked, channel), asked

    def start_shared(self, entry: str, shard_ids: Sequence[str]) -> list[LeaseProcess]:
        """Leases in one process, as with `leases.per_process`: each is shown as a process."""
        forked, admitting = self._fork(entry)
        self._stack.callback(admitting.close)
        shown = []
        for shard_id in shard_ids:
            self.create_row(shard_id)
            ours, theirs = Channel.pair()
            with theirs:
                admitting.send(Admit(), (theirs.fileno(),))
            shown.append(self._begin(shard_id, forked, channel_to_worker(ours)))
        return shown

    def _fork(self, entry: str) -> tuple[ProcessForked, Channel[ToWorker, Left]]:
        ours, theirs = Channel.pair()
        launcher = self._launcher(entry)
        with theirs:
            fds = (self._segment.fd, self._doorbell.write_fd, theirs.fileno())
            assert launcher.fork(len(self._processes), fds), "the launcher does not answer"
        return self._forked(launcher), channel_to_worker(ours)

    def _begin(
        self, shard_id: str, forked: ProcessForked, channel: Channel[ToWorker, Left]
    ) -> LeaseProcess:
        number = len(self._processes)
        channel.send(Begin(self._spec(shard_id, number)))
        process = LeaseProcess(forked.pid, forked.pidfd, self._segment.slot(number), channel)
        self._processes.append(process)
        return process

    def end(self, process: LeaseProcess) -> None:
        process.end()

    @contextlib.contextmanager
    def new_launcher(self, entry: str) -> Iterator[Launcher]:
        """A launcher that the leases of this block start from. It loads when the first one does."""
        if entry in self._launchers:
            self._launchers.pop(entry).stop()
        try:
            yield self._launcher(entry)
        finally:
            self._launchers.pop(entry).stop()

    def _launcher(self, entry: str) -> Launcher:
        if entry not in self._launchers:
            self._launchers[entry] = Launcher(entry)
            self._launchers[entry].start()
            self._launchers[entry].trust(self._endpoints)
        return self._launchers[entry]

    @staticmethod
    def _forked(launcher: Launcher) -> ProcessForked:
        """The answer to the only request under way; deaths reported meanwhile are old news."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            select.select([launcher.fileno()], [], [], 1.0)
            for report in launcher.receive():
                if isinstance(report, ProcessForked):
                    return report
        raise TimeoutError("the launcher has not forked")

    def _spec(self, shard_id: str, place: int) -> StartSpec:
        """The defaults of `config.schema`, but for what a row of the bench sets otherwise."""
        boottime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        spec = StartSpec(
            application="bench",
            stream_name="bench",
            lease_key=shard_id,
            shard_id=shard_id,
            owner=_ME,
            seen_counter=1,
            place=place,
            incarnation=1,
            expires_instant=Instant(boottime_s + _FAILOVER_S),
            failover_s=_FAILOVER_S,
            processor="bench.processors:NoOp",
            import_paths=(str(Path(__file__).parents[1]),),
            fetch=FetchPolicy(
                idle_s=1.0,
                buffer_bytes=16 * 2**20,
                batch_max=10_000,
                kpl_range="keep",
            ),
            checkpoint=CheckpointPolicy(mode="auto", every_s=10.0, uncheckpointed_max=100_000),
            on_error=ErrorPolicy(retries=5, backoff_s=1.0),
            table_name=_TABLE,
            kinesis=self._endpoints[0],
            dynamodb=self._endpoints[1],
            credentials=CREDENTIALS,
            lock_path=str(self._folder / "lock"),
            log=LogPolicy(level="info", json=True),
        )
        return msgspec.structs.replace(spec, **self._settings)
