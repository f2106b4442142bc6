"""Clients that send or read slowly delay no other client, however many they are."""

import contextlib
import errno
import http.client
import socket
import threading
from urllib.parse import urlsplit

import pytest

from kclrun.observe import connections as module
from kclrun.observe.endpoint import Answer, HttpEndpoint
from tests.patience import HUNG_S, until

LARGE = b"x" * 16 * 1024 * 1024
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
GET_LARGE = HEALTH.replace(b"health", b"large")
FORM = (
    b"POST /form HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 40\r\n\r\na=1"
)


@pytest.fixture
def endpoint(monkeypatch):
    """No request and no answer is ended by its time: what is served is served beside them."""
    for name in ("_REQUEST_S_MAX", "_ANSWER_S_MAX", "_LINGER_S_MAX"):
        monkeypatch.setattr(module, name, 10 * HUNG_S)
    routes = {
        "/health": lambda _: Answer(b"ok\n"),
        "/middle": lambda _: Answer(LARGE[: 2**21]),
        "/large": lambda _: Answer(LARGE),
    }
    made = HttpEndpoint("127.0.0.1", 0, routes, forms={"/form": lambda _: Answer(b"done\n")})
    yield made
    made.close()


def address(endpoint):
    parts = urlsplit(endpoint.url)
    return parts.hostname, parts.port


def ask(endpoint, path):
    connection = http.client.HTTPConnection(*address(endpoint), timeout=HUNG_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def clients(endpoint, count, sent=b"", *, buffer_bytes=None):
    """Connections that have sent this, and then neither send nor read."""
    with contextlib.ExitStack() as opened:
        made = []
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            if buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            connection.connect(address(endpoint))
            connection.sendall(sent)
            made.append(connection)
        yield made


SLOW = {
    "silent": b"",
    "half a head": HEALTH[:30],
    "one byte short of a head": HEALTH[:-1],
    "half a form": FORM,
    "an answer that is not read": HEALTH.replace(b"health", b"middle"),
    "an answer that is not taken off": HEALTH,
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("count", [4, 24, pytest.param(300, marks=pytest.mark.seconds)])
def test_a_probe_is_answered_beside_slow_clients(endpoint, sent, count):
    with clients(endpoint, count, sent, buffer_bytes=4096):
        for _ in range(3):
            assert ask(endpoint, "/health") == (200, b"ok\n")


def is_answered(endpoint):
    try:
        return ask(endpoint, "/health") == (200, b"ok\n")
    except OSError:
        return False


@pytest.mark.seconds
def test_a_probe_is_answered_while_slow_clients_come_and_come(endpoint):
    """They take the place of any that was ended. A probe that does not send at once, on a busy
    machine, may be ended with them: three tries are what Kubernetes takes by default."""
    stop = threading.Event()

    def attack():
        opened = []
        with contextlib.ExitStack() as kept:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    opened.append(kept.enter_context(socket.create_connection(address(endpoint))))
                    opened[-1].sendall(HEALTH[:30])
                if len(opened) > 400:
                    opened.pop(0).close()

    threads = [threading.Thread(target=attack) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert any(is_answered(endpoint) for _ in range(3))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def peer(connection):
    """None: the endpoint closed it meanwhile."""
    try:
        return connection.getpeername()
    except OSError:
        return None


@pytest.mark.parametrize("phase", ["_reading", "_writing"])
def test_one_connection_too_many_ends_the_oldest_of_its_kind(endpoint, monkeypatch, phase):
    monkeypatch.setattr(module, "_CONNECTIONS_MAX", 3)
    held = getattr(endpoint._connections, phase)
    sent = {"_reading": HEALTH[:30], "_writing": GET_LARGE}[phase]
    with contextlib.ExitStack() as opened:
        made = []
        for number in range(1, 6):
            made += opened.enter_context(clients(endpoint, 1, sent, buffer_bytes=4096))
            until(lambda n=number: len(held) == min(n, 3))
        newest = {connection.getsockname() for connection in made[2:]}
        until(lambda: {peer(one.connection) for one in tuple(held)} == newest)


@pytest.mark.parametrize(
    ("limit", "sent"),
    [("_REQUEST_S_MAX", HEALTH[:30]), ("_ANSWER_S_MAX", GET_LARGE)],
    ids=["in its request", "in its answer"],
)
def test_a_slow_client_is_ended_at_its_time(endpoint, monkeypatch, limit, sent):
    monkeypatch.setattr(module, limit, 0.05)
    phases = endpoint._connections._phases()
    with clients(endpoint, 3, sent, buffer_bytes=4096) as opened:
        for connection in opened:
            connection.settimeout(HUNG_S)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65_536):
                    pass
        until(lambda: not any(phases))


def test_the_times_are_those_of_a_request_and_of_an_answer():
    assert (module._REQUEST_S_MAX, module._ANSWER_S_MAX, module._LINGER_S_MAX) == (2.0, 5.0, 1.0)


def test_a_large_answer_arrives_whole_at_a_client_that_reads(endpoint):
    assert ask(endpoint, "/large") == (200, LARGE)


def test_a_form_in_pieces_is_put_together(endpoint):
    with clients(endpoint, 1, FORM) as (connection,):
        connection.settimeout(HUNG_S)
        for _ in range(36):
            connection.sendall(b"x")
        connection.sendall(b"x")
        assert connection.recv(65_536).endswith(b"done\n")


def test_routes_that_take_long_leave_a_bounded_number_of_requests_waiting(monkeypatch):
    begun, goes_on = [], threading.Event()
    monkeypatch.setattr(module, "_WAITING_MAX", 2)

    def slow(_):
        begun.append(1)
        goes_on.wait(HUNG_S)
        return Answer(b"late\n")

    made = HttpEndpoint("127.0.0.1", 0, {"/slow": slow})
    waiting = made._connections._waiting
    sent = HEALTH.replace(b"health", b"slow")
    try:
        with contextlib.ExitStack() as opened:
            served = []
            for number in range(1, 7):
                served += opened.enter_context(clients(made, 1, sent))
                # Four threads take the first ones; before they have, none counts as waiting.
                until(lambda n=number: (len(begun), waiting.qsize()) == (min(n, 4), max(0, n - 4)))
            (refused,) = opened.enter_context(clients(made, 1, sent))
            refused.settimeout(HUNG_S)
            assert refused.recv(65_536).startswith(b"HTTP/1.1 503 ")
            goes_on.set()
            for connection in served:
                connection.settimeout(HUNG_S)
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
    finally:
        goes_on.set()
        made.close()


def test_a_probe_does_not_wait_for_routes_that_take_long():
    goes_on = threading.Event()
    routes = {
        "/slow": lambda _: goes_on.wait(HUNG_S) and Answer(b"late\n"),
        "/health": lambda _: Answer(b"ok\n"),
    }
    made = HttpEndpoint("127.0.0.1", 0, routes)
    try:
        with clients(made, 100, HEALTH.replace(b"health", b"slow")):
            assert ask(made, "/health") == (200, b"ok\n")
            assert not goes_on.is_set()
    finally:
        goes_on.set()
        made.close()


class Starved:
    """A listening socket of a process without descriptors."""

    def __init__(self):
        self.refused = 0

    def accept(self):
        self.refused += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_a_descriptor_the_oldest_slow_client_is_ended_and_then_there_is_a_pause(endpoint):
    connections, starved, pauses = endpoint._connections, Starved(), []

    class Closing(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)

    with clients(endpoint, 2, HEALTH[:30]):
        until(lambda: len(connections._reading) == 2)
        connections._listener, real = starved, connections._listener
        connections._is_closed, closed = Closing(), connections._is_closed
        try:
            for left in (1, 0, 0):
                connections._accept()
                assert len(connections._reading) == left
        finally:
            connections._listener, connections._is_closed = real, closed

    assert (starved.refused, pauses) == (3, [0.1])


def test_the_close_ends_every_connection(endpoint):
    with clients(endpoint, 3, HEALTH[:30]) as opened:
        until(lambda: len(endpoint._connections._reading) == 3)
        endpoint.close()
        for connection in opened:
            connection.settimeout(HUNG_S)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
