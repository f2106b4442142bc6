"""A scripted HTTP server on loopback: real sockets, each request answered as the test says."""

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from werkzeug.serving import make_server

from kclrun.aws.http.pool import CONNECTIONS_MAX
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.local.moto_process import dispatcher
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S


@dataclass
class Reply:
    """Answer, then keep the connection open unless `then_close`; `cut_at` sends only so much."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    then_close: bool = False
    declare_length: bool = True


@dataclass
class HangUp:
    """Read the request, then close without a word."""


@dataclass
class Silence:
    """Read the request, then say nothing until the test ends."""


Action = Reply | HangUp | Silence


@dataclass
class Request:
    connection: int
    line: str
    headers: dict[str, str]
    body: bytes


class ScriptedServer:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.script: list[Action] = []
        self.connections = 0
        self.default: Action = Reply()
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def reply(self, status: int = 200, body: bytes = b"{}", **options: object) -> None:
        """Queue an answer; see `Reply` for the options."""
        self.script.append(Reply(status, body, **options))

    def refuse(self, status: int, code: str, message: str = "") -> None:
        """Queue an error body as the JSON services write it."""
        body = msgspec.json.encode({"__type": f"com.amazonaws#{code}", "message": message})
        self.reply(status, body)

    def hang_up(self) -> None:
        self.script.append(HangUp())

    def be_silent(self) -> None:
        self.script.append(Silence())

    def close(self) -> None:
        self._ended.set()
        # Wakes the accepting thread; closing alone would leave it in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(timeout=HUNG_S)
        self._listener.close()
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(timeout=HUNG_S)
        for connection in self._sockets:
            connection.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, self.connections))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._sockets.append(connection)
            with connection.makefile("rb") as stream:
                while self._answer(connection, stream, number):
                    pass
        except OSError:
            pass
        finally:
            connection.close()

    def _answer(self, connection: socket.socket, stream: object, number: int) -> bool:
        line = stream.readline().decode("latin-1").strip()
        if not line:
            return False
        headers: dict[str, str] = {}
        while header := stream.readline().decode("latin-1").strip():
            name, _, value = header.partition(":")
            assert name.lower() not in headers, f"{name} was sent twice"
            headers[name.lower()] = value.strip()
        body = stream.read(int(headers.get("content-length", 0)))
        self.requests.append(Request(number, line, headers, body))
        action = self.script.pop(0) if self.script else self.default
        match action:
            case HangUp():
                return False
            case Silence():
                self._ended.wait(30)
                return False
            case Reply():
                connection.sendall(_encoded(action))
                return not action.then_close and action.cut_at is None
        return False


def _encoded(reply: Reply) -> bytes:
    headers = dict(reply.headers)
    if reply.declare_length:
        headers["Content-Length"] = str(len(reply.body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    body = reply.body if reply.cut_at is None else reply.body[: reply.cut_at]
    return f"HTTP/1.1 {reply.status} Scripted\r\n{lines}\r\n".encode() + body


@pytest.fixture
def serve():
    started: list[ScriptedServer] = []

    def start(tls: ssl.SSLContext | None = None) -> ScriptedServer:
        started.append(ScriptedServer(tls))
        return started[-1]

    yield start
    for scripted in started:
        scripted.close()


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def make_client():
    made: list[WireClient] = []

    def make(
        url: str,
        *,
        service: str = "kinesis",
        credentials: WireCredentials | None = None,
        clock: Callable[[], float] | None = None,
        connections_max: int = CONNECTIONS_MAX,
        **endpoint: object,
    ) -> WireClient:
        settings = {"connect_timeout_s": HUNG_S, "read_timeout_s": HUNG_S} | endpoint
        client = WireClient(
            WireEndpoint(url, "eu-west-1", "eu-west-1", **settings),
            HeldCredentials(credentials or WireCredentials("AKID", "secret")),
            service=service,
            connections_max=connections_max,
            **({"clock": clock} if clock is not None else {}),
        )
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture(scope="module")
def moto_url():
    """Moto's services behind one endpoint, for one module's tests."""
    server = make_server("127.0.0.1", 0, dispatcher(), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=HUNG_S)
    server.server_close()
