"""Descriptors and memory run out in one process: what happens stays there, and it heals.

Limits are set from outside, on a process that runs; no right is needed for that.
"""

import contextlib
import os
import resource
import signal

import pytest

from tests.patience import until
from tests.processes.ledger_rig.deliveries import judge
from tests.processes.ledger_rig.gate import Gate

pytestmark = pytest.mark.slow

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

FAILOVER_S = 4.0
CAP = 1000
SHARDS = 3
# Standard input, output and errors: whatever else is open stays so, and nothing new can be opened.
NO_DESCRIPTORS = 3
MIB = 1 << 20


@contextlib.contextmanager
def limited(pid, what, soft):
    """Of a process that may end meanwhile."""
    former, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, (former, hard))


class Rig:
    """A running application of three shards, behind gates that can cut its connections."""

    def __init__(self, aws, application, producer, **settings):
        self.gates = [
            Gate(url) for url in (aws.embedded.dynamodb_endpoint, aws.embedded.kinesis_endpoint)
        ]
        dynamodb, kinesis = self.gates
        stream = aws.stream(SHARDS)
        self.app = application(
            stream,
            aws={"endpoints": {"dynamodb": dynamodb.url, "kinesis": kinesis.url}},
            leases={"failover": f"{FAILOVER_S:g}s"},
            checkpoint={"every": "500ms", "uncheckpointed_max": CAP},
            on_error={"retries": 30, "backoff": "100ms"},
            **settings,
        ).start()
        self.source = producer(stream, 10**6, seed=8, rate=300).start()
        self.until_all_read()
        self.app.until_delivered(1_000)

    def until_all_read(self, without=()):
        def are_read():
            pids = set(self.app.lease_pids())
            return len(pids) == SHARDS and not pids & set(without)

        self.app.until(are_read)

    def until_reported(self, event):
        """The manager has written this event, and lives."""

        def is_reported():
            assert self.app.process.poll() is None, self.app.last_words()
            return self.app.of(event)

        self.app.until(is_reported)

    def until_others_read(self, victim, batches=10):
        """Each of the others goes on, by so many batches."""
        seen = len(self.app.ledger.batches)
        # While a launcher ends, its processes are for a moment no descendants of the manager.
        others = until(lambda: set(self.app.lease_pids()) - {victim}, why=self.app.last_words)

        def have_read():
            pids = [batch.pid for batch in self.app.ledger.batches[seen:]]
            return all(pids.count(pid) >= batches for pid in others)

        self.app.until(have_read)

    def cut(self):
        for gate in self.gates:
            gate.cut()

    def verdict(self, *struck):
        """Everything is delivered, everybody leaves in good order."""
        self.source.stop()
        self.app.until_all_delivered(self.source)
        assert self.app.stop() == 0
        return judge(self.source.put, self.app.ledger.read(), killed=set(struck), cap=CAP)


@pytest.fixture
def rig(embedded_aws, application, producer):
    made = []

    def make(**settings):
        made.append(Rig(embedded_aws, application, producer, **settings))
        return made[-1]

    yield make
    for one in made:
        one.source.stop()
        one.app.close()
        for gate in one.gates:
            gate.shut()


def test_a_lease_process_without_descriptors_loses_its_lease_to_a_new_one(rig):
    fleet = rig()
    victim = fleet.app.lease_pids()[0]

    with limited(victim, resource.RLIMIT_NOFILE, NO_DESCRIPTORS):
        fleet.cut()
        fleet.until_others_read(victim)
        # It cannot renew, so its fence passes, and its manager starts another one.
        fleet.until_all_read(without=[victim])
        assert "Too many open files" in fleet.app.log_path.read_text()

    verdict = fleet.verdict(victim)
    assert verdict.faults == []
    assert fleet.app.starts == 1


def test_a_manager_without_descriptors_keeps_what_it_has_and_starts_the_rest_later(rig):
    fleet = rig()
    victim = fleet.app.lease_pids()[0]

    with limited(fleet.app.process.pid, resource.RLIMIT_NOFILE, NO_DESCRIPTORS):
        os.kill(victim, signal.SIGKILL)
        until(lambda: fleet.app.of("start_failed"), why=fleet.app.last_words)
        fleet.cut()
        fleet.until_others_read(victim, batches=20)
        assert len(fleet.app.lease_pids()) == SHARDS - 1
    assert "Too many open files" in fleet.app.of("start_failed")[0]["reason"]

    fleet.until_all_read()
    verdict = fleet.verdict(victim)
    assert verdict.faults == []
    assert fleet.app.process.returncode == 0


def test_a_manager_without_descriptors_outlives_its_launcher_and_those_that_it_inherits(rig):
    fleet = rig()
    (launcher,) = fleet.app.launcher_pids()
    victim = fleet.app.lease_pids()[0]

    with limited(fleet.app.process.pid, resource.RLIMIT_NOFILE, NO_DESCRIPTORS):
        os.kill(launcher, signal.SIGKILL)
        fleet.until_reported("launcher_not_started")
        os.kill(victim, signal.SIGKILL)
        fleet.until_reported("start_failed")
        fleet.until_others_read(victim, batches=20)

    fleet.until_all_read()
    assert fleet.verdict(victim).faults == []
    assert fleet.app.starts == 1


def test_a_launcher_without_descriptors_is_replaced(rig):
    fleet = rig()
    victim = fleet.app.lease_pids()[0]
    (launcher,) = fleet.app.launcher_pids()

    with limited(launcher, resource.RLIMIT_NOFILE, NO_DESCRIPTORS):
        os.kill(victim, signal.SIGKILL)
        fleet.until_others_read(victim)
        fleet.until_all_read(without=[victim])
    assert launcher not in fleet.app.launcher_pids()

    assert fleet.verdict(victim).faults == []


def test_user_code_without_memory_is_asked_again_until_there_is_some(rig):
    fleet = rig(options={"hoard_mb": 512})
    victim = fleet.app.lease_pids()[0]

    with limited(victim, resource.RLIMIT_AS, 400 * MIB):
        until(lambda: failures(fleet.app), why=fleet.app.last_words)
        fleet.until_others_read(victim)
        assert victim in fleet.app.lease_pids(), "it is alive, and renews"

    seen = len(fleet.app.ledger.batches)
    fleet.app.until(lambda: any(b.pid == victim for b in fleet.app.ledger.batches[seen:]))
    verdict = fleet.verdict()
    assert (verdict.faults, verdict.duplicates) == ([], 0)
    shards = {batch.shard for batch in fleet.app.ledger.batches if batch.pid == victim}
    assert {line["shard"] for line in failures(fleet.app)} == shards


def failures(app):
    return [each for each in app.of("processor_raised") if "MemoryError" in each["error"]]
