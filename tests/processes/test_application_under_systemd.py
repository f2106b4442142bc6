"""A whole application and the socket of a service manager: ready, alive, stopping."""

import select
import signal
import socket
import time

import psutil
import pytest

from tests.patience import HUNG_S, until

pytest_plugins = (
    "tests.processes.ledger_rig.fixtures",
    "tests.processes.instance_rig.fixtures",
)

# Three looks of a manager, every 2 s.
SILENCE_S = 6.0


class Systemd:
    """The socket that a unit with Type=notify and WatchdogSec=30 is given."""

    def __init__(self, folder):
        self.words = []
        self._path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self.environment = {"NOTIFY_SOCKET": self._path, "WATCHDOG_USEC": "30000000"}

    def listen(self, for_s):
        """What is told within a time; all of it is in `words`."""
        deadline = time.monotonic() + for_s
        heard = []
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left_s)[0]:
                heard += self._socket.recv(4096).decode().split("\n")
        self.words += heard
        return heard

    def hear(self, word, why, times=1):
        """Listen until the word is told so often; what was told meanwhile."""
        heard = []

        def is_reported():
            heard.extend(self.listen(0.1))
            return heard.count(word) >= times

        until(is_reported, why=why)
        return heard

    def close(self):
        self._socket.close()


@pytest.fixture
def systemd(tmp_path):
    made = Systemd(tmp_path)
    yield made
    made.close()


@pytest.fixture
def unit(application, systemd):
    """An application, started as by systemd."""

    def make(stream, /, **settings):
        app = application(stream, **settings)
        app.more_environment = dict(systemd.environment)
        return app.start()

    return make


def test_a_unit_is_ready_once_its_table_is_read_stays_alive_and_says_that_it_stops(
    embedded_aws, unit, systemd
):
    app = unit(embedded_aws.stream(shards=2))

    systemd.hear("READY=1", app.last_words)
    ready = list(systemd.words)
    systemd.hear("WATCHDOG=1", app.last_words, times=2)
    until(lambda: len(app.lease_pids()) == 2, why=app.last_words)
    environments = [psutil.Process(pid).environ() for pid in app.lease_pids()]
    assert app.stop() == 0
    systemd.listen(0.1)

    assert app.of("manager_started")
    assert "STOPPING=1" not in ready
    assert systemd.words.count("READY=1") == 1
    assert systemd.words.count("STOPPING=1") == 1
    assert any(word.startswith("STATUS=ok, ") for word in systemd.words)
    # Lease processes, and so user code, cannot speak for the service.
    assert len(environments) == 2
    assert not any("NOTIFY_SOCKET" in each for each in environments)


@pytest.mark.slow
def test_a_manager_that_stands_still_says_nothing_and_leaves_its_stacks_to_the_watchdog(
    embedded_aws, unit, systemd
):
    app = unit(embedded_aws.stream(shards=1))
    systemd.hear("READY=1", app.last_words)

    app.process.send_signal(signal.SIGSTOP)
    systemd.listen(0.5)  # what was on its way
    silent = systemd.listen(SILENCE_S)
    app.process.send_signal(signal.SIGABRT)  # as systemd does when WatchdogSec has passed
    app.process.send_signal(signal.SIGCONT)

    assert silent == []
    # faulthandler reads the frames of threads that run meanwhile, and seldom fails over them.
    assert app.process.wait(HUNG_S) in {-signal.SIGABRT, -signal.SIGSEGV}
    assert "Fatal Python error: Aborted" in app.log_path.read_text()


@pytest.mark.slow
def test_without_progress_the_watchdog_is_told_nothing_though_the_manager_turns(
    embedded_aws, unit, systemd
):
    app = unit(embedded_aws.stream(shards=2), leases={"failover": "2s"}, stall="4s")
    systemd.hear("READY=1", app.last_words)

    with embedded_aws.outage("dynamodb"):
        until(lambda: systemd.listen(0.1) or app.of("watchdog_withheld"), why=app.last_words)
        until(lambda: app.of("watchdog_withheld"), why=app.last_words)
        systemd.listen(0.5)
        silent = systemd.listen(SILENCE_S)
        turning = app.process.poll() is None
    systemd.hear("WATCHDOG=1", app.last_words)

    assert turning
    assert not any(word.startswith("WATCHDOG") for word in silent)
    assert app.stop() == 0


def test_a_watchdog_that_is_too_quick_ends_the_start_in_words(embedded_aws, unit, systemd):
    systemd.environment["WATCHDOG_USEC"] = "1000000"
    app = unit(embedded_aws.stream(shards=1), log={"level": "debug"})

    assert app.process.wait(HUNG_S) == 78
    assert "WatchdogSec: 1 s" in app.log_path.read_text()
    assert app.of("lease_taken") == []


@pytest.mark.slow
def test_a_drained_instance_that_waits_for_its_group_asks_for_the_time(
    embedded_aws, on_instance, metadata, group, systemd
):
    """TimeoutStopSec would end it, as a failure, and it would be started anew."""
    app = on_instance(embedded_aws.stream(shards=1))
    app.more_environment |= systemd.environment
    app.start()
    systemd.hear("READY=1", app.last_words)

    metadata.notice_interruption(in_s=120.0)
    until(lambda: systemd.listen(0.1) and app.of("lifecycle_awaited"), why=app.last_words)
    waiting = systemd.hear("EXTEND_TIMEOUT_USEC=30000000", app.last_words, times=2)
    group.end()
    assert app.process.wait(HUNG_S) == 0

    assert systemd.words.count("STOPPING=1") == 1
    assert waiting.count("WATCHDOG=1") >= 2
