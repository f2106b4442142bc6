"""One POST over a kept connection: an answer, or a failure that says whether anything was sent.

urllib3 makes the connections: names, time-outs, TLS, proxies and their tunnels. What is said on
them is `exchange.py`'s. May not know what the bytes mean. The one rule: nothing is retried here,
because only the caller knows whether sending twice is harmless. `WireClient` (wire.py) is the
only user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import ssl
import threading
import weakref
import zlib
from http.client import HTTPException
from typing import Final
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as UrllibTimeout
from urllib3.util import parse_url

from kclrun.aws.exchange import Answer, BrokenAnswer, Stream, encode_request, exchange
from kclrun.errors import SettingsError
from kclrun.model.wire import WireEndpoint

__all__ = ["Answer", "Transport", "TransportFailure", "is_loopback"]

# GetRecords returns at most 10 MiB of data, 14 MiB in base64; 10,000 records add at most about
# 2 kB each (a partition key of 256 characters, escaped). 64 MiB leaves room and bounds memory.
BODY_BYTES_MAX: Final = 64 * 2**20
# A client is used by at most this many threads at once; one more waits for a connection.
CONNECTIONS_MAX: Final = 8
_CAUSES_MAX: Final = 8
# A request is small and waits for its answer: it leaves at once. urllib3 does so by itself, but
# not on the way through a proxy.
_SOCKET_OPTIONS: Final = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]


class TransportFailure(Exception):
    """No whole answer came.

    `was_sent`: the service may have the request. `on_reused_connection`: an idle connection was
    used, which the service may have closed in the same moment. `timed_out`: it was silent.
    """

    def __init__(
        self, text: str, *, was_sent: bool, on_reused_connection: bool, timed_out: bool
    ) -> None:
        super().__init__(text)
        self.was_sent = was_sent
        self.on_reused_connection = on_reused_connection
        self.timed_out = timed_out


class _Connection:
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


class Transport:
    """At most `CONNECTIONS_MAX` connections to one endpoint, kept, through its proxy if any."""

    def __init__(self, endpoint: WireEndpoint) -> None:
        parts = urlsplit(endpoint.url)
        url = parse_url(f"{parts.scheme}://{parts.netloc}{parts.path or '/'}")
        self._pool = _manager(endpoint).connection_from_url(url.url)
        is_proxied = parts.scheme in endpoint.proxies
        self._is_tunneled = is_proxied and parts.scheme == "https"
        # A proxy that is no tunnel reads the request, so it is told where to and who asks.
        is_forwarded = is_proxied and not self._is_tunneled
        self._target = url.url if is_forwarded else url.request_uri
        self._proxy_headers = dict(self._pool.proxy_headers) if is_forwarded else {}
        self._connect_timeout_s = endpoint.connect_timeout_s
        self._read_timeout_s = endpoint.read_timeout_s
        self._permits = threading.BoundedSemaphore(CONNECTIONS_MAX)
        # The last one back is the first one out; appending and popping are atomic.
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close_all, self._idle)

    def post(self, headers: dict[str, str], body: bytes) -> Answer:
        """Send once, read the whole reply. Raises: TransportFailure."""
        head = encode_request(self._target, headers | self._proxy_headers, body)
        if not self._permits.acquire(timeout=self._connect_timeout_s + self._read_timeout_s):
            raise TransportFailure(
                f"none of {CONNECTIONS_MAX} connections became free",
                was_sent=False,
                on_reused_connection=False,
                timed_out=True,
            )
        try:
            kept = self._kept()
            return self._exchange(kept or self._opened(), head, body, is_reused=kept is not None)
        finally:
            self._permits.release()

    def close(self) -> None:
        """Close every idle connection."""
        _close_all(self._idle)

    def _kept(self) -> _Connection | None:
        """An idle connection that nobody has closed meanwhile, as far as one can see."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_silent():
                return connection
            connection.close()

    def _opened(self) -> _Connection:
        try:
            opened = _open(self._pool, self._connect_timeout_s, is_tunneled=self._is_tunneled)
        except (HTTPError, HTTPException, OSError) as error:
            raise TransportFailure(
                _describe(error),
                was_sent=False,
                on_reused_connection=False,
                timed_out=isinstance(error, UrllibTimeout | TimeoutError),
            ) from None
        return _Connection(opened, self._read_timeout_s)

    def _exchange(
        self, connection: _Connection, head: bytes, body: bytes, *, is_reused: bool
    ) -> Answer:
        is_reusable = False
        try:
            answer, is_reusable = exchange(connection.stream, head, body, BODY_BYTES_MAX)
            _compare_checksum(answer)
        except (BrokenAnswer, OSError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise TransportFailure(
                f"silent for {self._read_timeout_s:g} s" if timed_out else _describe(error),
                was_sent=True,
                on_reused_connection=is_reused,
                timed_out=timed_out,
            ) from None
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return answer


def _open(
    pool: urllib3.HTTPConnectionPool, timeout_s: float, *, is_tunneled: bool
) -> HTTPConnection:
    """A new connection: tunnel open, handshake done, certificate accepted.

    urllib3 has no public call that stops here; these two are the same from 1.26 to 2.8.
    """
    made = pool._new_conn()  # noqa: SLF001 - see above
    assert isinstance(made, HTTPConnection), "the class that urllib3's pools make"
    made.timeout = timeout_s
    try:
        if is_tunneled:
            pool._prepare_proxy(made)  # noqa: SLF001 - see above
        else:
            made.connect()
    except BaseException:
        made.close()
        raise
    return made


def _close_all(idle: list[_Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


def _compare_checksum(answer: Answer) -> None:
    """DynamoDB sends one."""
    checksum = answer.headers.get("x-amz-crc32")
    if checksum is not None and checksum != str(zlib.crc32(answer.body)):
        raise BrokenAnswer("the answer does not match its checksum")


def _describe(error: BaseException) -> str:
    """What happened, from the innermost cause that the system or OpenSSL named.

    The text of urllib3's own errors is left out: it may quote a proxy URL with its password.
    """
    if isinstance(error, BrokenAnswer):
        return str(error)
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
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
