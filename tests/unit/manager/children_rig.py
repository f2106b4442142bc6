"""Lease processes over real processes, in virtual time. Not a test.

A launcher of the test's own answers as it is told; what it "forks" is a program that sleeps, with a
pidfd, a session and a death as real as any. The test speaks for it: in its ring, its slot.
"""

import contextlib
import json
import os
import select
import signal
import socket
from types import SimpleNamespace

from kclrun.ipc.board import Segment
from kclrun.ipc.channel import Doorbell, PeerGone
from kclrun.ipc.messages import Exited, channel_of_worker, encode_report
from kclrun.leases.commands import StartProcess
from kclrun.manager.children import LeaseProcesses, ProcessLimits
from kclrun.manager.forks import ForkRefused, LauncherGone, ProcessForked
from kclrun.observe.logs import EventLog, LineSink
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.patience import HUNG_S
from tests.support.start_specs import specified
from tests.unit.manager.manager_rig import QuickLoop


class Process:
    """A program in a session of its own, in a lease process's place."""

    def __init__(self, fds, program):
        segment_fd, doorbell_fd, self._theirs = (os.dup(fd) for fd in fds)
        self.pid = os.posix_spawnp(program[0], program, os.environ, setsid=True)
        self._segment = Segment.attach(segment_fd)
        os.close(segment_fd)
        self._doorbell = Doorbell.for_writer(doorbell_fd)
        self.channel = channel_of_worker(self._theirs)
        self._pidfd = os.pidfd_open(self.pid)

    def heard(self):
        """The next message of the manager."""
        return self.channel.receive()

    def sees_its_channel_end(self):
        """Waited for: a program holds copies of descriptors for a moment after its start, which the
        kernel closes only once it has let the starter go on."""
        return isinstance(self.channel.receive(HUNG_S), PeerGone)

    def begin(self):
        """The start command, and the descriptors that came with it."""
        message, fds = self.channel.receive_with_fds()
        self.spec = message.spec
        return self.spec, fds

    def say(self, *said):
        ring = self._segment.ring(self.spec.place)
        for one in said:
            ring.put(one if isinstance(one, bytes) else encode_report(one))
        self._doorbell.press()

    def publish(self, **fields):
        base = {
            "pid": self.pid,
            "incarnation": self.spec.incarnation,
            "state": WorkerState.PROCESSING,
        }
        self.slot.publish(LeaseStatus(**{**base, **fields}))

    @property
    def slot(self):
        return self._segment.slot(self.spec.place)

    def die(self, number=signal.SIGTERM):
        """Be dead, and not reaped."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        self.await_death()

    def await_death(self):
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        assert poller.poll(HUNG_S * 1000), "it does not die"

    def close(self):
        # With what it started: its session is its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.await_death()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._doorbell.close()
        self.channel.close()


class StandIn:
    """A launcher in this process. `refuses` the next so many requests, `ignores` all of them."""

    def __init__(self):
        self.program = ["sleep", "600"]
        self.pid = None
        self.is_ready = True
        self.in_flight = 0
        self.starts = []
        self.kills = 0
        self.is_stopped = False
        self.refuses = 0
        self.unsent = 0
        self.fails_to_start = 0
        self.ignores = False
        self.processes = []
        self.asked = []
        self._reports = []
        self._ours, self._theirs = socket.socketpair()
        self._is_there = False

    def fileno(self):
        return self._ours.fileno() if self._is_there else -1

    def trust(self, endpoints):
        self.trusted = list(endpoints)

    def start(self):
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise OSError(11, "Resource temporarily unavailable")
        self.starts.append(True)
        self.pid = 4_000_000 + len(self.starts)
        self._is_there = True

    def fork(self, request_id, fds):
        if not self._is_there or self.unsent:
            self.unsent = max(0, self.unsent - 1)
            return False
        self.in_flight += 1
        self.asked.append(request_id)
        if self.ignores:
            return True
        if self.refuses:
            self.refuses -= 1
            self.report(ForkRefused(request_id, "fork: no memory", 12))
            return True
        process = Process(fds, self.program)
        self.processes.append(process)
        self.report(ProcessForked(request_id, process.pid, os.pidfd_open(process.pid)))
        return True

    def report(self, report):
        self._reports.append(report)
        self._theirs.send(b"!")

    def reap(self, process):
        """Say how it ended, unless the manager was quicker and reaped it itself."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(process.pid, 0)
            self.report(Exited(pid, status))

    def receive(self):
        self._ours.recv(1024)
        reports, self._reports = self._reports, []
        for one in reports:
            self.in_flight -= isinstance(one, ProcessForked | ForkRefused)
            if isinstance(one, LauncherGone):
                self._is_there = False
        return reports

    def kill(self):
        self.kills += 1

    def stop(self):
        self.is_stopped = True

    def close(self):
        for process in self.processes:
            process.close()
        self._ours.close()
        self._theirs.close()


class ChildrenRig:
    """Lease processes and what they report; `turn` as often as something is ready."""

    def __init__(self, tmp_path, *, places=8, lock_fd=None, per_process=1):
        self._log_path = tmp_path / "log"
        self._fd = os.open(self._log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._sink = LineSink(self._fd)
        log = EventLog(self._sink, app="a", owner="o", level="debug")
        self.loop = QuickLoop()
        self.launcher = StandIn()
        self.events = []
        self.departed = []
        self.processes = LeaseProcesses(
            self.launcher,
            SimpleNamespace(deliver=self.events.append, departed=self.departed.append),
            ProcessLimits(places, exit_patience_s=20.0, failover_s=10.0, per_process=per_process),
            specify=specified,
            loop=self.loop,
            log=log,
            lock_fd=lock_fd,
        )
        self._is_closed = False

    def turn(self):
        """What is ready now, and nothing that is due later."""
        for _ in range(5):
            self.loop.turn(self.loop.now())

    def start(self, key="s0", *, expires_s=10.0):
        """A process that runs and has its start command."""
        self.processes.start(StartProcess(key, 7, self.loop.now() + expires_s))
        self.turn()
        process = self.launcher.processes[-1]
        process.begin()
        return process

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def kinds(self):
        """Of the events, and of the reports that they bring."""
        return [type(getattr(event, "report", event)) for event in self.events]

    def child(self, key="s0"):
        return next(child for child in self.processes.living() if child.key == key)

    def lines(self, event=None):
        lines = [json.loads(line) for line in self._log_path.read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def close_processes(self):
        self._is_closed = True
        self.processes.close()

    def close(self):
        if not self._is_closed:
            self.close_processes()
        self.launcher.close()
        self.loop.close()
        self._sink.close()
        os.close(self._fd)
