"""Connections to one endpoint: names, time-outs, TLS and trust, proxies and their tunnels.

urllib3 makes them; this room's only use of it. May not know what is said on a connection. The one
rule: whatever fails here, nothing of a request was sent. Look next: `transport.py`, which keeps
them, and `exchange.py`, which speaks on them.
"""

from __future__ import annotations

import select
import socket
import ssl
from http.client import HTTPException
from typing import Final
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as UrllibTimeout
from urllib3.util import parse_url

from kclrun.aws.exchange import Stream
from kclrun.errors import SettingsError
from kclrun.model.address import is_loopback_host
from kclrun.model.wire import WireEndpoint

__all__ = ["Connection", "Connector", "NotConnected", "describe", "is_loopback"]

_CAUSES_MAX: Final = 8
# A request is small and waits for its answer: it leaves at once. urllib3 does so by itself, but
# not on the way through a proxy.
_SOCKET_OPTIONS: Final = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]


class NotConnected(Exception):
    """No connection came about. `timed_out`: the peer was silent."""

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Connection:
    """An open connection: urllib3's, which owns the socket, and the socket."""

    def __init__(self, opened: HTTPConnection, read_timeout_s: float) -> None:
        assert opened.sock is not None, "a connection that was opened has a socket"
        opened.sock.settimeout(read_timeout_s)
        self.stream: Stream = opened.sock
        self._opened = opened
        self._poll = select.poll()
        self._poll.register(opened.sock, select.POLLIN)

    def is_silent(self) -> bool:
        """Whether it is open and nothing has come: an idle one should say nothing."""
        return not self._poll.poll(0)

    def close(self) -> None:
        self._opened.close()


class Connector:
    """Opens connections to one endpoint, through its proxy if it has one.

    `target` is what a request line names there, `proxy_headers` what a request carries besides its
    own: a proxy that is no tunnel reads the request, so it is told where to and who asks.
    Raises: SettingsError for a proxy or a CA bundle that cannot be used.
    """

    def __init__(self, endpoint: WireEndpoint) -> None:
        parts = urlsplit(endpoint.url)
        url = parse_url(f"{parts.scheme}://{parts.netloc}{parts.path or '/'}")
        is_proxied = parts.scheme in endpoint.proxies
        is_forwarded = is_proxied and parts.scheme == "http"
        self._is_tunneled = is_proxied and not is_forwarded
        self._pool = _manager(endpoint).connection_from_url(url.url)
        self._connect_timeout_s = endpoint.connect_timeout_s
        self._read_timeout_s = endpoint.read_timeout_s
        self.target = url.url if is_forwarded else url.request_uri
        self.proxy_headers = dict(self._pool.proxy_headers) if is_forwarded else {}

    def open(self) -> Connection:
        """Tunnel open, handshake done, certificate accepted. Raises: NotConnected."""
        try:
            return Connection(self._opened(), self._read_timeout_s)
        except (HTTPError, HTTPException, OSError) as error:
            timed_out = isinstance(error, UrllibTimeout | TimeoutError)
            raise NotConnected(describe(error), timed_out=timed_out) from None

    def _opened(self) -> HTTPConnection:
        """urllib3 has no public call that stops here; these two are the same from 1.26 to 2.8."""
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


def describe(error: BaseException) -> str:
    """What happened, from the innermost cause that the system or OpenSSL named.

    The text of urllib3's own errors is left out: it may quote a proxy URL with its password.
    """
    innermost: BaseException | None = error
    named = type(error).__name__
    for _ in range(_CAUSES_MAX):
        if isinstance(innermost, ssl.SSLCertVerificationError):
            return f"certificate refused ({innermost.verify_message})"
        if isinstance(innermost, OSError) and innermost.strerror:
            return f"{named} ({innermost.strerror})"
        if innermost is None:
            break
        innermost = innermost.__cause__ or innermost.__context__ or _wrapped(innermost)
    return named


def _wrapped(error: BaseException) -> BaseException | None:
    return next((part for part in reversed(error.args) if isinstance(part, BaseException)), None)


def _manager(endpoint: WireEndpoint) -> urllib3.PoolManager:
    scheme = urlsplit(endpoint.url).scheme
    context = _tls_context(endpoint) if scheme == "https" else None
    proxy = endpoint.proxies.get(scheme)
    if proxy is None:
        return urllib3.PoolManager(num_pools=1, ssl_context=context, socket_options=_SOCKET_OPTIONS)
    parts = urlsplit(proxy)
    if parts.scheme not in {"http", "https"}:
        raise SettingsError(f"the proxy for {scheme} is neither http:// nor https://")
    auth = f"{parts.username}:{parts.password or ''}" if parts.username else None
    return urllib3.ProxyManager(
        proxy,
        num_pools=1,
        ssl_context=context,
        socket_options=_SOCKET_OPTIONS,
        proxy_ssl_context=_tls_context(endpoint) if parts.scheme == "https" else None,
        proxy_headers=urllib3.make_headers(proxy_basic_auth=auth) if auth else None,
    )


def _tls_context(endpoint: WireEndpoint) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"the CA bundle {endpoint.ca_bundle} cannot be used: {error.strerror or error}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not endpoint.verify:
        if not is_loopback(endpoint.url):
            raise SettingsError(
                f"certificate checks cannot be switched off for {endpoint.url}:"
                " only for an endpoint on this host"
            )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def is_loopback(url: str) -> bool:
    """Whether an endpoint is on this host, by its address or the name localhost."""
    return is_loopback_host(urlsplit(url).hostname or "")
