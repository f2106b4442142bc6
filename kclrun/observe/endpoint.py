"""A small HTTP server: GET /health, /metrics and /lease of a manager, or the pages of a fleet and
the forms on them.

It does not know the content of the answers.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import types
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.stream import is_loopback_host
from kclrun.observe.connections import Begun, Connections

# A burst of clients waits here until their connections are accepted.
_BACKLOG: Final = 1024
# A service manager ends a process whose probe gets no answer.
_PROBE: Final = "/health"
# A form of the pages has 600 bytes: a lease key, an owner, a token.
_BODY_BYTES_MAX: Final = 4096


class Answer(msgspec.Struct, frozen=True):
    """The response of a path."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# A path's query: each name with its first value.
Query = Mapping[str, str]
Route = Callable[[Query], Answer]
# The pages' longest form has eight fields.
_FIELDS_MAX: Final = 8
_FORM: Final = "application/x-www-form-urlencoded"


class _RequestRefused(Exception):
    """A request whose response is only `answer`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.answer = Answer(f"{text}\n".encode(), status=status)


# A person has some tabs open; a few look at once. Each costs a socket, and no thread.
_LISTENERS_MAX: Final = 32
# How often the feed looks whether there is something new, and how often it writes if there is not:
# a proxy closes a connection that is silent for a minute.
_LOOK_EVERY_S: Final = 1.0
_SILENT_LOOKS_MAX: Final = 15
_FEED_HEAD: Final = Answer(b"", "text/event-stream; charset=utf-8")
_BEGIN: Final = b"retry: 5000\n\n"
_SILENCE: Final = b": still here\n\n"


class Feed:
    """Notifies listeners (Server-Sent Events) that there is something new: an event `changed`
    without content, so it needs no secret, and a missed event loses nothing.

    One thread serves all listeners. A listener that takes no more bytes is dropped; its browser
    connects again.
    """

    def __init__(self, version: Callable[[], object]) -> None:
        """`version` returns another value when there is something new. It is called once a second
        while there are listeners."""
        self._version = version
        self._lock = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self, connection: socket.socket, head: bytes) -> bool:
        """Serve this connection from now on; False, and it stays the caller's, if there are too
        many, or if this host has no thread left."""
        with self._lock:
            if (
                self._is_closed
                or len(self._listeners) >= _LISTENERS_MAX
                or not self._start_thread()
            ):
                return False
            taken = socket.socket(fileno=connection.detach())
            taken.settimeout(0.0)
            self._listeners.append(taken)
            self._send(head + _BEGIN, (taken,))
            self._lock.notify()
        return True

    def _start_thread(self) -> bool:
        """Start the thread at the first listener; False if this host has none left."""
        if self._thread is None:
            thread = threading.Thread(target=self._notify_all, name="kclrun-feed", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # as many threads or processes as this host allows
                return False
            self._thread = thread
        return True

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            self._drop(tuple(self._listeners))
            self._lock.notify()

    def _notify_all(self) -> None:
        known, silent = self._version(), 0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closed or bool(self._listeners))
                self._lock.wait_for(lambda: self._is_closed, timeout=_LOOK_EVERY_S)
                if self._is_closed:
                    return
            version = self._version()
            silent += 1
            if version == known and silent < _SILENT_LOOKS_MAX:
                continue
            event = _SILENCE if version == known else b"event: changed\ndata:\n\n"
            known, silent = version, 0
            with self._lock:
                self._send(event, tuple(self._listeners))

    def _send(self, event: bytes, listeners: tuple[socket.socket, ...]) -> None:
        gone = []
        for listener in listeners:
            try:
                sent = listener.send(event)
            except OSError:
                sent = 0
            if sent < len(event):
                gone.append(listener)
        self._drop(tuple(gone))

    def _drop(self, gone: tuple[socket.socket, ...]) -> None:
        for listener in gone:
            self._listeners.remove(listener)
            listener.close()


class HttpEndpoint:
    """Serves `routes` (a path and the function that answers it) until `close`.

    It never disturbs the manager: it has threads of its own, and they serve a value that is already
    made. Threads, connections, bytes and time of a request are bounded, and a slow client delays no
    other: a probe of /health is answered while any number of clients send half a request.

    It asks for no password, and so listens for this host only, unless the operator configures
    another address. A web page in a browser on this host gets nothing by pointing its own host name
    at this address, and a script of another site (its request has an `Origin`) gets nothing at all.
    A form is accepted only with the `Origin` of our own pages, which a browser sends and no other
    site can forge.

    A route is called in a thread of the server. If it raises any error, the response is a 500.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        forms: Mapping[str, Route] = types.MappingProxyType({}),
        feeds: Mapping[str, Feed] = types.MappingProxyType({}),
        fields: Mapping[str, str] = types.MappingProxyType({}),
        is_our_name: Callable[[str], bool] | None = None,
        setting: str = "observe.listen",
    ) -> None:
        """Listen. Port 0 takes a free one.

        `forms` are the paths that take a POST, each with the function that answers its fields.
        `feeds` are the paths of events; they end with this server.
        `fields` are further fields of every answer. `is_our_name` judges the host that a request
        names; without it, on loopback a name of this host is required, elsewhere none.
        `setting` chose the address, and is named in the error.

        Raises: SettingsError if the address is not usable.
        """
        self._routes = routes
        self._forms = forms
        self._feeds = feeds
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        on_loopback = is_loopback_host if is_loopback_host(host) else None
        self._is_our_name = is_our_name or on_loopback
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise SettingsError(
                f"{setting}: cannot listen on {_address(host, port)}:"
                f" {error.strerror or error}\n"
                "Another program on this host may have it: give each its own port; 0 takes a free"
                " one, which is printed at the start"
            ) from None
        self._connections = Connections(self._listener, self._begin, self._refused)

    @property
    def url(self) -> str:
        """The address it listens on: `http://127.0.0.1:9464`."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{_address(host, port)}"

    @property
    def published(self) -> str | None:
        """`ADDRESS:PORT` for other machines: where it listens on every address, that of the default
        route; None if there is none."""
        host, port = self._listener.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            found = _address_of_route(self._listener.family)
            if found is None:
                return None
            host = found
        return _address(host, port)

    def close(self) -> None:
        """Stop listening. Does not wait for answers under way."""
        for feed in self._feeds.values():
            feed.close()
        self._connections.close()

    def _begin(self, head: bytes) -> Begun | bytes:
        """A request up to its empty line: what follows, or the answer that refuses it."""
        method = "GET"
        try:
            request = _parsed(head)
            method = request.method
            body_bytes = 0
            if method == "POST":
                self._require_own_form(request)
                body_bytes = _form_bytes(request)
        except _RequestRefused as refused:
            return self._rendered(refused.answer, method)
        return Begun(body_bytes, partial(self._answered, request), is_probe=request.path == _PROBE)

    def _answered(
        self, request: _HttpRequest, body: bytes, connection: socket.socket
    ) -> bytes | None:
        """The answer; None if a feed has taken the connection."""
        try:
            if request.method == "GET" and request.path in self._feeds:
                self._require_ours(request)
                head = _head_of(_FEED_HEAD, self._fields, length="")
                if self._feeds[request.path].take(connection, head):
                    return None
                raise _RequestRefused(
                    503, f"{_LISTENERS_MAX} pages listen already, or no thread is left"
                )
            if request.method == "POST":
                request = msgspec.structs.replace(request, query=_form(request, body))
            answer = self._answer(request)
        except _RequestRefused as refused:
            answer = refused.answer
        return self._rendered(answer, request.method)

    def _refused(self, status: int, text: str) -> bytes:
        return self._rendered(_RequestRefused(status, text).answer, "GET")

    def _rendered(self, answer: Answer, method: str) -> bytes:
        head = _head_of(answer, self._fields, length=f"Content-Length: {len(answer.body)}\r\n")
        return head if method == "HEAD" else head + answer.body

    def _require_own_form(self, request: _HttpRequest) -> None:
        """Before a byte of the body is read: it is a form of our own pages, on a path that takes
        one."""
        self._require_ours(request)
        if request.path not in self._forms:
            raise _RequestRefused(405, "only GET")
        if request.origin is None:
            raise _RequestRefused(403, "this address takes only forms of its own pages")
        if request.content_type.partition(";")[0].strip().lower() != _FORM:
            raise _RequestRefused(415, "not a form")

    def _require_ours(self, request: _HttpRequest) -> None:
        if self._is_our_name is not None and not self._is_our_name(request.host):
            raise _RequestRefused(403, "this address serves only this host, by a loopback name")
        if request.origin is not None and request.origin not in _own_origins(request.authority):
            raise _RequestRefused(403, "this address serves no page of another site")

    def _answer(self, request: _HttpRequest) -> Answer:
        self._require_ours(request)
        if request.method not in {"GET", "HEAD", "POST"}:
            raise _RequestRefused(405, "only GET")
        route = (self._forms if request.method == "POST" else self._routes).get(request.path)
        if route is None:
            raise _RequestRefused(404, "the paths are: " + ", ".join(sorted(self._routes)))
        try:
            return route(request.query)
        except Exception as error:  # noqa: BLE001 - a route that fails must not end the server
            raise _RequestRefused(
                500, f"the answer could not be made: {type(error).__name__}"
            ) from None


def _form_bytes(request: _HttpRequest) -> int:
    """The length of the form in the body. Raises: _RequestRefused."""
    length = request.content_length
    if not (length.isascii() and length.isdecimal() and len(length) <= 5):
        raise _RequestRefused(411, "a form needs its Content-Length")
    if int(length) > _BODY_BYTES_MAX:
        raise _RequestRefused(413, f"a form of more than {_BODY_BYTES_MAX} bytes")
    return int(length)


def _form(request: _HttpRequest, body: bytes) -> Query:
    """The fields of the form in the body. Raises: _RequestRefused."""
    try:
        text = body[: _form_bytes(request)].decode("ascii")
        return dict(reversed(parse_qsl(text, max_num_fields=_FIELDS_MAX)))
    except ValueError:
        raise _RequestRefused(400, "not a form") from None


class _HttpRequest(msgspec.Struct, frozen=True):
    """A parsed request. `host` is the requested host without its port, `authority` with it;
    `origin` is None unless a script or a form of a page made the request."""

    method: str
    path: str
    query: Query
    authority: str
    host: str
    origin: str | None
    content_type: str = ""
    content_length: str = ""


def _parsed(head: bytes) -> _HttpRequest:
    first, *fields = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _RequestRefused(400, "not an HTTP/1 request")
    named: dict[str, str] = {}
    for field in fields:
        name, _, value = field.partition(":")
        named.setdefault(name.lower(), value.strip())
    authority = named.get("host", "")
    try:
        target = urlsplit(parts[1])
        # Of a repeated name the first value counts.
        pairs = parse_qsl(target.query, max_num_fields=_FIELDS_MAX)
        host = urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        raise _RequestRefused(400, "invalid Host header or query") from None
    query = dict(reversed(pairs))
    return _HttpRequest(
        parts[0],
        target.path,
        query,
        authority,
        host,
        named.get("origin"),
        named.get("content-type", ""),
        named.get("content-length", ""),
    )


def _own_origins(authority: str) -> tuple[str, str]:
    """The origins of our own pages: with TLS, a proxy on this host ends it."""
    return f"http://{authority}", f"https://{authority}"


def _head_of(answer: Answer, fields: str, *, length: str) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n{length}"
        "Cache-Control: no-store\r\n"
        f"X-Content-Type-Options: nosniff\r\n{fields}"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1")


def _address_of_route(family: int) -> str | None:
    """The own address that packets to other networks have. Connecting a datagram socket sends
    nothing; the far address is one of those kept for documentation."""
    far = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((far, 9))
        except OSError:
            return None
        return str(route.getsockname()[0])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
