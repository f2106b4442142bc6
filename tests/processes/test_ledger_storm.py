"""Everything at random: kills, stops, restarts, freezes, while shards split and merge.

On one machine, whose emitted rows are counted. Several machines and worse: `tests/chaos`.
"""

import os
import random
import re
import signal
import time

import pytest

from tests.patience import HUNG_S
from tests.processes.ledger_rig.deliveries import judge
from tests.processes.ledger_rig.gate import Gate
from tests.seeds import seed_of

# Failovers are short: a machine that is busy with another test loses leases that no blow struck,
# and the records that come again for it have no excuse.
pytestmark = pytest.mark.alone

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 1000
FAILOVER_S = 4.0
RESHARDS = [
    (3_000, "split", 0),
    (9_000, "merge", 2),
    (15_000, "split", 1),
    (21_000, "merge", 0),
    (27_000, "split", 2),
    (33_000, "merge", 1),
]


class Storm:
    """What may happen to an application; `struck` are the lease processes that it hit."""

    def __init__(self, app, table_gate, stream_gate, rng):
        self.app = app
        self.table_gate = table_gate
        self.stream_gate = stream_gate
        self.rng = rng
        self.struck = set()
        self.reported = []

    def blow(self):
        blows = {
            self.kill_lease: 10,
            self.kill_launcher: 2,
            self.kill_manager: 2,
            self.stop_manager: 2,
            self.kill_all: 1,
            self.freeze_lease: 2,
            self.cut_connections: 8,
            self.shut_table: 2,
            self.shut_stream: 2,
        }
        blow = self.rng.choices(list(blows), weights=list(blows.values()))[0]
        self.reported.append(blow.__name__)
        blow()

    def kill_lease(self):
        for pid in self._some(self.app.lease_pids()):
            self.struck.add(pid)
            self._signal(pid, signal.SIGKILL)

    def kill_launcher(self):
        for pid in self._some(self.app.launcher_pids()):
            self._signal(pid, signal.SIGKILL)

    def kill_manager(self):
        self.app.process.kill()
        self.app.process.wait()
        self.app.start()

    def stop_manager(self):
        self.app.process.send_signal(signal.SIGTERM)
        self.app.process.wait(HUNG_S)
        self.app.start()

    def kill_all(self):
        self.struck |= set(self.app.lease_pids(with_orphans=True))
        self.app.lose_power()
        self.app.start()

    def freeze_lease(self):
        for pid in self._some(self.app.lease_pids()):
            self.struck.add(pid)
            self._signal(pid, signal.SIGSTOP)
            self._last()
            self._signal(pid, signal.SIGCONT)

    def cut_connections(self):
        for _ in range(10):
            self.table_gate.cut()
            self.stream_gate.cut()
            self._last(0.05)

    def shut_table(self):
        """Those who lose their lease meanwhile leave records uncheckpointed."""
        self.struck |= set(self.app.lease_pids(with_orphans=True))
        with self.table_gate.outage():
            self._last()

    def shut_stream(self):
        with self.stream_gate.outage():
            self._last()

    def _last(self, longest_s=1.5 * FAILOVER_S):
        """For a while; by default beyond the fence as often as not."""
        ends = time.monotonic() + self.rng.uniform(0, longest_s)
        self.app.until(lambda: time.monotonic() > ends)

    def _some(self, pids):
        return [self.rng.choice(pids)] if pids else []

    def _signal(self, pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.reported.append(f"{pid} was gone")


@pytest.fixture
def gates(embedded_aws):
    embedded = embedded_aws.embedded
    gates = [Gate(url) for url in (embedded.dynamodb_endpoint, embedded.kinesis_endpoint)]
    yield gates
    for gate in gates:
        gate.shut()


def weather(source, rng, storm):
    """Blow after blow until everything is put; the processes that were struck."""
    while not source.is_done:
        calm_until = time.monotonic() + rng.uniform(0.1, 2.0)
        storm.app.until(lambda calm_until=calm_until: time.monotonic() > calm_until)
        storm.blow()
    print(storm.reported)
    return storm.struck


@pytest.mark.slow
def test_a_storm_of_every_kind_loses_nothing(embedded_aws, application, producer, gates):
    seed = seed_of()
    rng = random.Random(seed)
    stream = embedded_aws.stream(shards=4)
    table_gate, stream_gate = gates
    app = application(
        stream,
        aws={"endpoints": {"kinesis": stream_gate.url, "dynamodb": table_gate.url}},
        leases={"failover": f"{FAILOVER_S:g}s"},
        checkpoint={"every": "1s", "uncheckpointed_max": CAP},
        output={"path": "rows"},
        options={"emits": True},
    )
    source = producer(stream, 40_000, seed=seed, rate=800, reshards=RESHARDS)
    storm = Storm(app.start(), table_gate, stream_gate, rng)
    source.start()

    struck = weather(source, rng, storm)

    app.until_all_delivered(source, 90.0)
    app.stop()
    # What the last blow left uncheckpointed is read once more, to the very end.
    assert app.start("--until", "caught-up").process.wait(HUNG_S) == 0
    verdict = judge(source.put, app.ledger.read(), killed=struck, cap=CAP)
    print(f"{len(storm.reported)} blows, {len(struck)} processes struck; {verdict}; cap {CAP}")
    assert verdict.faults == []
    rows = sum(len(path.read_text().splitlines()) for path in app.folder.glob("rows/*.jsonl"))
    assert rows == 40_000
    errors = [line for line in app.lines() if line["level"] == "error"]
    # A start fails, and is made again, if the launcher is killed meanwhile, or if a busy machine
    # takes so long over it that another owner might have taken the lease.
    excused = re.compile("launcher|its start command expired")
    assert [x for x in errors if not excused.search(x.get("reason", ""))] == []
