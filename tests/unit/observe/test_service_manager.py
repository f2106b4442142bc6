"""Datagrams to a service manager, over real sockets."""

import os
import socket

import pytest

from kclrun.errors import SettingsError
from kclrun.manager.metering import notify_socket, watchdog_s


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
    told = notify_socket({"NOTIFY_SOCKET": listener.address})
    assert told is not None

    told.tell({"READY": "1", "STATUS": "ok, 3 leases"})

    assert listener.socket.recv(4096) == b"READY=1\nSTATUS=ok, 3 leases"
    told.close()


def test_who_does_not_read_holds_nobody_up(listener):
    told = notify_socket({"NOTIFY_SOCKET": listener.address})

    def tell_without_end():
        while True:
            told.tell({"WATCHDOG": "1"})

    with pytest.raises(BlockingIOError):
        tell_without_end()
    listener.socket.recv(4096)
    told.tell({"WATCHDOG": "1"})

    told.close()


def test_a_listener_that_is_gone_is_an_error_and_its_successor_is_heard(tmp_path):
    path = str(tmp_path / "notify")
    told = notify_socket({"NOTIFY_SOCKET": path})

    with pytest.raises(FileNotFoundError):
        told.tell({"READY": "1"})
    listener = Listener(path)
    told.tell({"READY": "1"})

    assert listener.socket.recv(4096) == b"READY=1"
    listener.socket.close()
    told.close()


def test_a_line_break_in_a_value_is_never_sent(listener):
    """It would begin a word of its own, such as MAINPID=."""
    told = notify_socket({"NOTIFY_SOCKET": listener.address})

    with pytest.raises(AssertionError, match="line break"):
        told.tell({"STATUS": "failing\nMAINPID=1"})

    told.close()


def test_the_socket_is_no_other_programs(listener):
    told = notify_socket({"NOTIFY_SOCKET": listener.address})

    assert not os.get_inheritable(told._socket.fileno())

    told.close()


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


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1.5", "²"])
def test_a_period_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match="WATCHDOG_USEC"):
        watchdog_s({"WATCHDOG_USEC": text})
