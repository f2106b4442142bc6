"""One whole manager in virtual time: a real core, loop, performer, identity and log. Not a test.

Only lease processes are stood in for, and the threads of the pool: a request is answered in the
next turn. Time jumps to what is due next, so that a test of a minute takes some milliseconds.
"""

import contextlib
import json
import os
import signal
from types import SimpleNamespace

from kclrun.config.schema import StreamSettings
from kclrun.leases import events
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.lifecycle.stopping import STOP_SIGNALS
from kclrun.local.lease_rows import LeaseRows
from kclrun.manager.locks import establish
from kclrun.manager.loop import Loop
from kclrun.manager.manager import Manager
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.sampling import Sampler
from kclrun.manager.service_calls import ServiceCalls
from kclrun.manager.world import FleetServices, RunNames, SourceStream
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.wire import WireEndpoint
from kclrun.observe.logs import EventLog, LineSink
from kclrun.ports import ShardFilter, StreamSummary
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.protocol.writes import Applied, Claim, Release

ENDPOINT = WireEndpoint(url="http://127.0.0.1:9", region="x", signing_region="x")
# The clock of a host that has been up for a while.
BEGAN = 1_000.0
# Far more turns than any of these runs takes: more of them mean that it does not end.
_TURNS_MAX = 20_000


class QuickLoop(Loop):
    """Never waits: where nothing is ready, its clock goes on to what is due next."""

    def __init__(self):
        self.time = BEGAN
        self.turns = 0
        super().__init__()

    def now(self):
        return self.time

    def turn(self, deadline=None):
        self.turns += 1
        assert self.turns < _TURNS_MAX, "the run does not end"
        super().turn(deadline)

    def _wait_s(self, deadline):
        if not self._selector.select(0):
            self.time += super()._wait_s(deadline)
        return 0.0

    def run_to(self, instant):
        while self.time < instant:
            self.turn(instant)


class Pool:
    """Does a job when it is asked for it; the answer comes in the loop's next turn."""

    def __init__(self, loop):
        self._loop = loop

    def run(self, job, then, otherwise):
        try:
            result = job()
        except Exception as error:  # as the real pool
            failure = error
            self._loop.post(lambda: otherwise(failure))
        else:
            self._loop.post(lambda: then(result))


class Stream:
    """So many shards side by side; `created_at` is what the service tells."""

    def __init__(self, shards=2):
        self.shards = shards
        self.created_at = 5.0

    def summary(self):
        return StreamSummary("orders", "arn", "ACTIVE", 24, self.shards, self.created_at)

    def list_shards(self, shard_filter=None):
        width = (HASH_KEY_MAX + 1) // self.shards
        return tuple(
            Shard(f"s{at}", HashRange(at * width, (at + 1) * width - 1), str(at + 1))
            for at in range(self.shards)
        )


class FailingRows(LeaseRows):
    """`errors` are what the next calls raise: `FailingRows(scan=[error] * 2)`."""

    def __init__(self, **errors):
        super().__init__()
        self.errors = {"read": [], "scan": []} | errors

    def read(self, key):
        if self.errors["read"]:
            raise self.errors["read"].pop()
        return super().read(key)

    def scan(self, *, consistent=True):
        if self.errors["scan"]:
            raise self.errors["scan"].pop()
        return super().scan(consistent=consistent)


class LivingProcess:
    """A lease process as a look sees it. What it says of itself is in `processes.statuses`."""

    incarnation = 1
    force_instant = None

    def __init__(self, key, processes):
        self.key = key
        self.heat = processes.heats.get(key)
        self.pid = os.getpid()
        self.trouble, self.awaited = processes.troubles.get(key, ""), ""
        self._fields = processes.statuses.get(key)

    def look(self):
        if self._fields is None:
            return None
        base = {"pid": self.pid, "incarnation": 1, "state": WorkerState.PROCESSING}
        return LeaseStatus(**{**base, **self._fields})


class Processes:
    """Lease processes that claim at once and release when they are asked to drain.

    `refusals` are what the next trials end with. With `is_stuck` they obey nothing but a kill, and
    with `is_unkillable` not even that. `said` is what the manager told them, in order.
    """

    def __init__(self, manager, loop, table, owner):
        self._manager, self._loop, self._table, self._owner = manager, loop, table, owner
        self._counters = {}
        self.refusals = []
        self.trials = 0
        self.is_stuck = self.is_unkillable = False
        self.has_forced = False
        self.has_launcher = False
        self.said = []
        self.started = []
        self.statuses = {}
        self.heats = {}
        self.troubles = {}
        self.pids = frozenset()

    def open(self):
        self.has_launcher = True

    def try_start(self, tried):
        self.trials += 1
        refusal = self.refusals.pop(0) if self.refusals else None
        if isinstance(refusal, OSError):
            raise refusal
        self._loop.after(0.01, lambda: tried(refusal))

    def start(self, command):
        self.started.append(command.key)
        self._counters[command.key] = command.counter
        self._loop.after(0.01, lambda: self._claim(command))

    def _claim(self, command):
        key = command.key
        claim = Claim(key, self._owner, command.counter)
        assert isinstance(self._table.write(claim), Applied)
        self._counters[key] += 1
        self._manager.deliver(events.ProcessStarted(key, 7))
        self._manager.deliver(
            events.ProcessReported(key, reports.LeaseClaimed(self._counters[key], TRIM_HORIZON))
        )

    def drain(self, key, reason, force_instant):
        self.said.append(("drain", key, reason, force_instant))
        if not self.is_stuck:
            self._loop.after(0.1, lambda: self._release(key))

    def _release(self, key):
        counter = self._counters.get(key)
        if counter is None:
            return
        self._table.write(Release(key, self._owner, counter, TRIM_HORIZON, TRIM_HORIZON))
        self._manager.deliver(events.ProcessReported(key, reports.LeaseReleased(TRIM_HORIZON)))
        self._die(key, "exit code 0 (done)")

    def _die(self, key, reason):
        if self._counters.pop(key, None) is not None:
            self._manager.deliver(events.ProcessExited(key, 7, reason))

    def kill_all(self):
        self.said.append(("kill", self._loop.now()))
        for key in () if self.is_unkillable else tuple(self._counters):
            self._loop.after(0.01, lambda key=key: self._die(key, "killed by SIGKILL"))

    def hurry(self, force_instant):
        self.said.append(("hurry", force_instant))

    def broadcast(self, message):
        self.said.append(message)

    def living(self):
        return iter([LivingProcess(key, self) for key in self._counters])

    def __len__(self):
        return len(self._counters)

    def reported(self, kind):
        return [each for each in self.said if isinstance(each, tuple) and each[0] == kind]


class ManagerRig:
    """`run` is a manager's run; `at` acts after so many seconds of it."""

    def __init__(
        self, tmp_path, *, shards=2, grace_s=60.0, table=None, stop_signals=STOP_SIGNALS, **policy
    ):
        self.tmp_path = tmp_path
        self.loop = QuickLoop()
        self.table = LeaseRows() if table is None else table
        self.stream = Stream(shards)
        self.identity = establish("app", "g", {"KCLRUN_STATE_DIR": str(tmp_path)})
        self._fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._sink = LineSink(self._fd)
        self.log = EventLog(self._sink, app="orders", owner=self.identity.id)
        self.report = ReportWriter()
        self.core = LeaseManager(ManagerPolicy(me=self.identity.id, **policy), lambda: 0.5)
        self.manager = Manager(
            self.core,
            identity=self.identity,
            loop=self.loop,
            log=self.log,
            report=self.report,
            grace_s=grace_s,
            leases_command="kclrun leases",
            stop_signals=stop_signals,
        )
        source = SourceStream(self.stream, self.stream.summary(), StreamSettings(name="orders"))
        self.world = FleetServices(
            self.table, {ONLY_STREAM: source}, None, ENDPOINT, ENDPOINT, lambda: 5_000.0
        )
        self.manager.service_calls = ServiceCalls(
            self.world,
            lambda _: ShardFilter("AT_TRIM_HORIZON"),
            self.manager,
            loop=self.loop,
            pool=Pool(self.loop),
            log=self.log,
        )
        self.processes = Processes(self.manager, self.loop, self.table, self.identity.id)
        self.manager.processes = self.processes

    def at(self, seconds, action):
        self.loop.at(BEGAN + seconds, action)

    def signal_at(self, seconds, number):
        self.at(seconds, lambda: signal.raise_signal(number))

    def run(self, introduce=lambda: None):
        return self.manager.run(5_000.0, introduce)

    @property
    def seconds(self):
        """How long it has run."""
        return self.loop.now() - BEGAN

    def lines(self, event=None):
        lines = [json.loads(line) for line in (self.tmp_path / "log").read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def close(self):
        self.identity.retire()
        self.loop.close()
        self._sink.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)


def sampler_of_core(core, living=list, *, began=1.0, leases_command="kclrun leases", **how):
    """A sampler of a core without a manager; `living` gives its lease processes."""
    manager = SimpleNamespace(
        core=core,
        processes=SimpleNamespace(living=living, has_launcher=True),
        service_calls=SimpleNamespace(outages={}),
        leases_command=leases_command,
    )
    return Sampler(
        manager,
        ReportWriter(),
        RunNames("a", "s", "kclrun::h:n"),
        leases_max=64,
        began_instant=began,
        **how,
    )
