"""A whole application and the socket of a service manager: ready, alive, stopping."""

import select
import signal
import socket
import time

import psutil
import pytest

from tests.processes.ledger_rig.application import Application, until

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)
pytestmark = pytest.mark.timeout(90)

# Twice the 2 s between two looks of a manager, and what a busy machine adds.
SILENCE_S = 8.0


class Unit(Application):
    """Started as by systemd: Type=notify, WatchdogSec=30."""

    def __init__(self, folder, where, stream, /, **settings):
        super().__init__(folder, where, stream, **settings)
        self.words = []
        self._path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)

    @property
    def environment(self):
        told = {"NOTIFY_SOCKET": self._path, "WATCHDOG_USEC": "30000000"}
        return super().environment | told

    def listen(self, for_s):
        """What is told within a time; all of it is in `words`."""
        deadline = time.monotonic() + for_s
        heard = []
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left_s)[0]:
                heard += self._socket.recv(4096).decode().split("\n")
        self.words += heard
        return heard

    def hear(self, word, timeout_s=30.0):
        """Listen until the word is told."""
        until(lambda: word in self.listen(0.1), timeout_s, why=self.last_words)

    def close(self):
        super().close()
        self._socket.close()


@pytest.fixture
def unit(tmp_path, embedded_aws):
    made = []

    def make(stream, /, **settings):
        made.append(Unit(tmp_path, embedded_aws, stream, **settings))
        return made[-1].start()

    yield make
    for one in made:
        one.close()


def test_a_unit_is_ready_once_its_table_is_read_stays_alive_and_says_that_it_stops(
    embedded_aws, unit
):
    app = unit(embedded_aws.stream(shards=2))

    app.hear("READY=1")
    ready = list(app.words)
    alive = app.listen(SILENCE_S)
    environments = [psutil.Process(pid).environ() for pid in app.lease_pids()]
    assert app.stop() == 0
    app.listen(0.1)

    assert app.of("manager_started")
    assert "STOPPING=1" not in ready
    assert alive.count("WATCHDOG=1") >= 2
    assert app.words.count("READY=1") == 1
    assert app.words.count("STOPPING=1") == 1
    assert any(word.startswith("STATUS=ok, ") for word in app.words)
    # Lease processes, and so user code, cannot speak for the service.
    assert len(environments) == 2
    assert not any("NOTIFY_SOCKET" in each for each in environments)


def test_a_manager_that_stands_still_says_nothing_and_leaves_its_stacks_to_the_watchdog(
    embedded_aws, unit
):
    app = unit(embedded_aws.stream(shards=1))
    app.hear("READY=1")

    app.process.send_signal(signal.SIGSTOP)
    app.listen(0.5)  # what was on its way
    silent = app.listen(SILENCE_S)
    app.process.send_signal(signal.SIGABRT)  # as systemd does when WatchdogSec has passed
    app.process.send_signal(signal.SIGCONT)

    assert silent == []
    assert app.process.wait(30) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in app.log_path.read_text()


@pytest.mark.slow
def test_without_progress_the_watchdog_is_told_nothing_though_the_manager_turns(embedded_aws, unit):
    app = unit(embedded_aws.stream(shards=2), leases={"failover": "2s"}, stall="4s")
    app.hear("READY=1")

    with embedded_aws.outage("dynamodb"):
        until(lambda: app.listen(0.1) or app.of("watchdog_withheld"), why=app.last_words)
        until(lambda: app.of("watchdog_withheld"), why=app.last_words)
        app.listen(0.5)
        silent = app.listen(SILENCE_S)
        turning = app.process.poll() is None
    app.hear("WATCHDOG=1")

    assert turning
    assert not any(word.startswith("WATCHDOG") for word in silent)
    assert app.stop() == 0


def test_a_watchdog_that_is_too_quick_ends_the_start_in_words(tmp_path, embedded_aws):
    class Quick(Unit):
        @property
        def environment(self):
            return super().environment | {"WATCHDOG_USEC": "1000000"}

    app = Quick(tmp_path, embedded_aws, embedded_aws.stream(shards=1)).start()
    try:
        assert app.process.wait(30) == 78
        assert "WatchdogSec: 1 s" in app.log_path.read_text()
        assert app.of("lease_taken") == []
    finally:
        app.close()
