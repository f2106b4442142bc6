"""Connections to one endpoint: names, time-outs, TLS, proxies and their tunnels.

urllib3 opens them; it is used for nothing else in this package. If a connection fails here, then
no part of a request was sent.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
from collections.abc import Iterator
from http.client import HTTPException
from importlib import metadata
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as UrllibTimeout
from urllib3.util import parse_url

from kclrun.aws.proxies import shown_proxy
from kclrun.aws.trust import tls_context, unverified_context
from kclrun.errors import SettingsError
from kclrun.model.stream import is_loopback
from kclrun.model.wire import WireEndpoint

_CAUSES_MAX: Final = 8
# The text of http.client's OSError; the rest of it is the proxy's own.
_TUNNEL_REFUSED: Final = re.compile(r"Tunnel connection failed: (\d{3})\b")
# What `_opened` calls of urllib3's pools.
_PRIVATE: Final = ("_new_conn", "_prepare_proxy")
# A request is small and waits for its answer, so it is sent at once. urllib3 sets this option by
# itself, but not for a connection through a proxy.
_SOCKET_OPTIONS: Final = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]


class Stream(Protocol):
    """A connected socket, TLS or not, with a time-out on each call."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, most: int, /) -> bytes: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...


class NotConnected(Exception):
    """No connection was made. `timed_out`: the peer was silent. `was_refused`: no program listens
    at the address of the endpoint."""

    def __init__(self, text: str, *, timed_out: bool, was_refused: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.was_refused = was_refused


class Connection:
    """An open connection: urllib3's object, which owns the socket, and the socket."""

    def __init__(self, opened: HTTPConnection, read_timeout_s: float) -> None:
        assert opened.sock is not None, "a connection that was opened has a socket"
        opened.sock.settimeout(read_timeout_s)
        self.stream: Stream = opened.sock
        self._opened = opened
        self._poll = select.poll()
        self._poll.register(opened.sock, select.POLLIN)

    def is_silent(self) -> bool:
        """Whether an idle connection can be used: it is open, and no byte was received on it."""
        return not self._poll.poll(0)

    def set_timeout(self, timeout_s: float) -> None:
        """How long one call of the stream waits for bytes."""
        assert self._opened.sock is not None, "it is open"
        self._opened.sock.settimeout(timeout_s)

    def close(self) -> None:
        self._opened.close()


class Connector:
    """Opens connections to one endpoint, through its proxy if it has one.

    `target` is the target of the request line. `proxy_headers` are sent besides a request's own
    headers. A proxy without a tunnel reads the request, so the request must carry the full address
    and the proxy's credentials. `proxy` is its address, for messages.
    Raises: SettingsError for a proxy or a CA bundle that cannot be used, and for a urllib3 that is
    not one of those that we know.
    """

    def __init__(self, endpoint: WireEndpoint) -> None:
        parts = urlsplit(endpoint.url)
        url = parse_url(f"{parts.scheme}://{parts.netloc}{parts.path or '/'}")
        is_proxied = parts.scheme in endpoint.proxies
        is_forwarded = is_proxied and parts.scheme == "http"
        self.proxy = shown_proxy(endpoint.proxies[parts.scheme]) if is_proxied else None
        self._is_tunneled = is_proxied and not is_forwarded
        self._pool = _manager(endpoint).connection_from_url(url.url)
        _require_private(self._pool)
        self._connect_timeout_s = endpoint.connect_timeout_s
        self._read_timeout_s = endpoint.read_timeout_s
        self.target = url.url if is_forwarded else url.request_uri
        self.proxy_headers = dict(self._pool.proxy_headers) if is_forwarded else {}

    def open(self) -> Connection:
        """A connection with its tunnel open, its TLS handshake done and its certificate accepted.

        Raises: NotConnected.
        """
        try:
            return Connection(self._opened(), self._read_timeout_s)
        except (HTTPError, HTTPException, OSError) as error:
            raise NotConnected(
                describe(error),
                timed_out=isinstance(error, UrllibTimeout | TimeoutError),
                was_refused=self.proxy is None and is_refusal(error),
            ) from None

    def _opened(self) -> HTTPConnection:
        """urllib3 has no public call for a connection without a request.

        The two private methods are the same from urllib3 1.26 to 2.8, and `_require_private` looks
        for them.
        """
        made = self._pool._new_conn()  # noqa: SLF001 - see above
        assert isinstance(made, HTTPConnection), "the class that urllib3's pools make"
        made.timeout = self._connect_timeout_s
        try:
            if self._is_tunneled:
                self._pool._prepare_proxy(made)  # noqa: SLF001 - see above
            else:
                made.connect()
        except BaseException:
            made.close()
            raise
        return made


def _require_private(pool: urllib3.HTTPConnectionPool) -> None:
    missing = [name for name in _PRIVATE if not callable(getattr(pool, name, None))]
    if missing:
        raise SettingsError(
            f"urllib3 {metadata.version('urllib3')} has no {' and no '.join(missing)}"
            " to open connections with\nInstall a release that has: pip install 'urllib3<2.9'"
        )


def describe(error: BaseException) -> str:
    """A description of the failure: the innermost cause that the system or OpenSSL named.

    The text of urllib3's own errors is left out: it may quote a proxy URL with its password.
    """
    named = type(error).__name__
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"certificate refused ({cause.verify_message})"
        if isinstance(cause, OSError) and cause.strerror:
            return f"{named} ({cause.strerror})"
        refused = _TUNNEL_REFUSED.match(str(cause))
        if refused is not None:
            return f"the proxy refused the tunnel (HTTP {refused[1]})"
    return named


def is_refusal(error: BaseException) -> bool:
    """Whether the peer's host refused the connection: no program listens there."""
    return any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, the innermost last."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__ or _wrapped(cause)


def _wrapped(error: BaseException) -> BaseException | None:
    return next((part for part in reversed(error.args) if isinstance(part, BaseException)), None)


def _manager(endpoint: WireEndpoint) -> urllib3.PoolManager:
    scheme = urlsplit(endpoint.url).scheme
    context = _tls_context(endpoint) if scheme == "https" else None
    proxy = endpoint.proxies.get(scheme)
    if proxy is None:
        return urllib3.PoolManager(ssl_context=context, socket_options=_SOCKET_OPTIONS)
    parts = urlsplit(proxy)
    if parts.scheme not in {"http", "https"}:
        raise SettingsError(
            f"the proxy {shown_proxy(proxy)} for {scheme} is neither http:// nor https://\n"
            f"Correct {scheme.upper()}_PROXY"
        )
    auth = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return urllib3.ProxyManager(
        proxy,
        ssl_context=context,
        socket_options=_SOCKET_OPTIONS,
        proxy_ssl_context=_tls_context(endpoint) if parts.scheme == "https" else None,
        proxy_headers=urllib3.make_headers(proxy_basic_auth=auth) if auth else None,
    )


def _tls_context(endpoint: WireEndpoint) -> ssl.SSLContext:
    if endpoint.verify:
        return tls_context(endpoint.ca_bundle)
    if not is_loopback(endpoint.url):
        raise SettingsError(
            f"certificate checks cannot be switched off for {endpoint.url}:"
            " only for an endpoint on this host"
        )
    return unverified_context()
