"""What a service manager is told, verdict by verdict, over a real socket."""

import faulthandler
import json
import os
import socket

import pytest

from kclrun.errors import SettingsError
from kclrun.manager.metering import notify_socket, open_announcer, watchdog_s
from kclrun.observe.health import HealthReason, HealthVerdict
from kclrun.observe.logs import EventLog, LineSink
from tests.support.tables import over_rows

OK = HealthVerdict("ok")
STARTING = HealthVerdict("starting", (HealthReason(text="the manager is starting"),))
HALTED = HealthVerdict("degraded", (HealthReason(text="halted: KeyError", shard="a"),))
FAILING = HealthVerdict(
    "failing", (HealthReason(text="no lease\nMAINPID=1 gets on", is_failing=True),)
)


class SystemD:
    """A listener, an announcer that tells it, and the log of the announcer."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "notify"
        self._log_path = tmp_path / "log"
        self._fd = os.open(self._log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.sink = LineSink(self._fd)
        self.log = EventLog(self.sink, app="orders", owner="me")
        self.listen()
        self.announcer = open_announcer({"NOTIFY_SOCKET": str(self.path)}, self.log)

    def listen(self):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)

    def go_deaf(self):
        self._socket.close()
        self.path.unlink()

    def heard(self):
        """Everything that was told since the last call."""
        words = []
        while True:
            try:
                words += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return words

    def events(self):
        self.sink.close()
        return [json.loads(line)["event"] for line in self._log_path.read_text().splitlines()]

    def close(self):
        self.announcer.close()
        self._socket.close()
        self.sink.close()
        os.close(self._fd)


@pytest.fixture
def systemd(tmp_path):
    made = SystemD(tmp_path)
    yield made
    made.close()


def test_ready_is_reported_once_when_the_table_has_been_read(systemd):
    systemd.announcer.look(STARTING, 0)
    before = systemd.heard()
    systemd.announcer.look(OK, 3)
    at = systemd.heard()
    systemd.announcer.look(OK, 3)

    assert "READY=1" not in before
    assert set(at) == {"WATCHDOG=1", "READY=1", "STATUS=ok, 3 leases"}
    assert systemd.heard() == ["WATCHDOG=1"]


def test_a_halted_lease_neither_delays_the_start_nor_wakes_the_watchdog(systemd):
    systemd.announcer.look(HALTED, 1)

    assert systemd.heard() == [
        "WATCHDOG=1",
        "READY=1",
        "STATUS=degraded, 1 lease: halted: KeyError",
    ]


def test_without_progress_the_watchdog_is_told_nothing_until_there_is_some_again(systemd):
    systemd.announcer.look(OK, 2)
    systemd.heard()

    systemd.announcer.look(FAILING, 2)
    first = systemd.heard()
    systemd.announcer.look(FAILING, 2)
    second = systemd.heard()
    systemd.announcer.look(OK, 2)

    assert first == ["STATUS=failing, 2 leases: no lease\\nMAINPID=1 gets on"]
    assert second == []
    assert "WATCHDOG=1" in systemd.heard()
    assert systemd.events().count("watchdog_withheld") == 1


def test_a_start_that_fails_is_never_called_ready(systemd):
    systemd.announcer.look(FAILING, 0)
    systemd.announcer.look(HealthVerdict("draining"), 0)

    assert "READY=1" not in systemd.heard()


def test_a_stop_is_reported_once(systemd):
    systemd.announcer.stop_begins()
    systemd.announcer.stop_begins()

    assert systemd.heard() == ["STOPPING=1"]


def test_a_stop_that_goes_well_is_given_more_time_and_one_that_does_not_is_not(systemd):
    """An instance that is drained may wait for its group, longer than TimeoutStopSec."""
    systemd.announcer.look(OK, 1)
    before = systemd.heard()
    systemd.announcer.stop_begins()
    systemd.announcer.look(HealthVerdict("draining"), 1)
    well = systemd.heard()
    systemd.announcer.look(FAILING, 1)

    assert not any(word.startswith("EXTEND") for word in before)
    assert "EXTEND_TIMEOUT_USEC=30000000" in well
    assert not any(word.startswith("EXTEND") for word in systemd.heard())


def test_what_was_not_heard_is_reported_again(systemd):
    systemd.go_deaf()
    systemd.announcer.look(OK, 1)
    systemd.announcer.look(OK, 1)
    systemd.listen()
    systemd.announcer.look(OK, 1)

    assert set(systemd.heard()) == {"WATCHDOG=1", "READY=1", "STATUS=ok, 1 lease"}
    assert systemd.events() == ["service_manager_unreachable"]


def test_a_watchdog_that_is_too_quick_for_us_is_refused_at_the_start(systemd):
    environment = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "5000000"}

    with pytest.raises(SettingsError, match="WatchdogSec: 5 s"):
        open_announcer(environment, systemd.log)


def test_a_watched_process_leaves_its_stacks_when_it_is_ended(systemd, monkeypatch):
    enabled = []
    monkeypatch.setattr(faulthandler, "enable", lambda *args, **more: enabled.append((args, more)))

    announcer = open_announcer(
        {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "30000000"}, systemd.log
    )

    assert enabled == [((2,), {"all_threads": True})]
    announcer.close()


def test_nobody_is_reported_where_nobody_asked(systemd):
    assert open_announcer({"WATCHDOG_USEC": "30000000"}, systemd.log) is None


class Listener:
    """The service manager's end; `address` is as it stands in the environment."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.settimeout(10)


@pytest.fixture(params=["a path", "an abstract name"])
def listener(request, tmp_path):
    path = str(tmp_path / "notify")
    made = Listener(path if request.param == "a path" else f"@kclrun-test-{os.getpid()}")
    yield made
    made.socket.close()


def test_words_arrive_together_as_one_datagram(listener):
    reported = notify_socket({"NOTIFY_SOCKET": listener.address})
    assert reported is not None

    reported.send({"READY": "1", "STATUS": "ok, 3 leases"})

    assert listener.socket.recv(4096) == b"READY=1\nSTATUS=ok, 3 leases"
    reported.close()


def test_who_does_not_read_holds_nobody_up(listener):
    reported = notify_socket({"NOTIFY_SOCKET": listener.address})

    def send_without_end():
        while True:
            reported.send({"WATCHDOG": "1"})

    with pytest.raises(BlockingIOError):
        send_without_end()
    listener.socket.recv(4096)
    reported.send({"WATCHDOG": "1"})

    reported.close()


def test_a_listener_that_is_gone_is_an_error_and_its_successor_is_heard(tmp_path):
    path = str(tmp_path / "notify")
    reported = notify_socket({"NOTIFY_SOCKET": path})

    with pytest.raises(FileNotFoundError):
        reported.send({"READY": "1"})
    listener = Listener(path)
    reported.send({"READY": "1"})

    assert listener.socket.recv(4096) == b"READY=1"
    listener.socket.close()
    reported.close()


def test_a_line_break_in_a_value_is_never_sent(listener):
    """It would begin a word of its own, such as MAINPID=."""
    reported = notify_socket({"NOTIFY_SOCKET": listener.address})

    with pytest.raises(AssertionError, match="line break"):
        reported.send({"STATUS": "failing\nMAINPID=1"})

    reported.close()


def test_the_socket_is_no_other_programs(listener):
    reported = notify_socket({"NOTIFY_SOCKET": listener.address})

    assert not os.get_inheritable(reported._socket.fileno())

    reported.close()


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_who_was_started_by_nobody_in_particular_tells_nobody(environment):
    assert notify_socket(environment) is None


@pytest.mark.parametrize("address", ["relative", "vsock:2:1234", "@", "/"])
def test_an_address_of_another_kind_is_refused(address):
    with pytest.raises(SettingsError, match="NOTIFY_SOCKET"):
        notify_socket({"NOTIFY_SOCKET": address})


def test_the_watchdogs_period_is_in_seconds():
    assert watchdog_s({"WATCHDOG_USEC": "30000000"}) == 30.0
    assert watchdog_s({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}) == 1.5


@pytest.mark.parametrize("environment", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}])
def test_a_watchdog_of_nobody_or_of_another_process_is_none(environment):
    assert watchdog_s(environment) is None


@over_rows("text", ["0", "-1", "soon", "1.5", "²"])
def test_a_period_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match="WATCHDOG_USEC"):
        watchdog_s({"WATCHDOG_USEC": text})
