"""One POST over urllib3: an answer, or a failure that says whether anything was sent.

May not know what the bytes mean. The one rule: nothing is retried here, because only the caller
knows whether sending twice is harmless. `WireClient` (wire.py) is the only user.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import threading
import warnings
import zlib
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ClosedPoolError,
    EmptyPoolError,
    HTTPError,
    InsecureRequestWarning,
)
from urllib3.exceptions import TimeoutError as UrllibTimeout

from kclrun.errors import SettingsError
from kclrun.model.wire import WireEndpoint

__all__ = ["Answer", "Transport", "TransportFailure", "is_loopback"]

# GetRecords returns at most 10 MiB of data, 14 MiB in base64; 10,000 records add at most about
# 2 kB each (a partition key of 256 characters, escaped). 64 MiB leaves room and bounds memory.
BODY_BYTES_MAX: Final = 64 * 2**20
# A client is used by at most this many threads at once; one more waits for a connection.
CONNECTIONS_MAX: Final = 8
_CAUSES_MAX: Final = 8


class Answer(msgspec.Struct, frozen=True):
    """Status, headers and the whole body of one reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes)"


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


class _Progress(threading.local):
    """How far this thread's request has got: nothing is sent before `connected`."""

    connecting = False
    connected = False

    def reset(self) -> None:
        self.connecting = self.connected = False


_progress: Final = _Progress()


class _NotingHTTPConnection(HTTPConnection):
    def connect(self) -> None:
        _progress.connecting = True
        super().connect()
        _progress.connected = True


class _NotingHTTPSConnection(HTTPSConnection):
    """Connected here means: proxy tunnel open, handshake done, certificate accepted."""

    def connect(self) -> None:
        _progress.connecting = True
        super().connect()
        _progress.connected = True


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _NotingHTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _NotingHTTPSConnection


class Transport:
    """A pool of kept connections to one endpoint, through its proxy if it has one."""

    def __init__(self, endpoint: WireEndpoint) -> None:
        parts = urlsplit(endpoint.url)
        self._url = f"{parts.scheme}://{parts.netloc}{parts.path or '/'}"
        self._patience_s = endpoint.connect_timeout_s + endpoint.read_timeout_s
        self._timeout = urllib3.Timeout(
            connect=endpoint.connect_timeout_s, read=endpoint.read_timeout_s
        )
        self._manager = _manager(endpoint)
        self._manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    def post(self, headers: dict[str, str], body: bytes) -> Answer:
        """Send once, read the whole reply. Raises: TransportFailure."""
        _progress.reset()
        try:
            response = self._manager.urlopen(
                "POST",
                self._url,
                body=body,
                headers=headers,
                retries=False,
                redirect=False,
                timeout=self._timeout,
                pool_timeout=self._patience_s,
                preload_content=False,
                decode_content=False,
                enforce_content_length=True,
            )
            return Answer(response.status, response.headers, _read_whole(response))
        except (ClosedPoolError, EmptyPoolError):
            raise TransportFailure(
                f"none of {CONNECTIONS_MAX} connections became free",
                was_sent=False,
                on_reused_connection=False,
                timed_out=True,
            ) from None
        except (HTTPError, OSError) as error:
            raise TransportFailure(
                _describe(error),
                was_sent=_progress.connected or not _progress.connecting,
                on_reused_connection=not _progress.connecting,
                timed_out=isinstance(error, UrllibTimeout | TimeoutError),
            ) from None

    def close(self) -> None:
        """Close every idle connection."""
        self._manager.clear()


def _read_whole(response: urllib3.response.BaseHTTPResponse) -> bytes:
    """The body, bounded, and compared with DynamoDB's checksum where it sent one."""
    declared = response.headers.get("content-length")
    body: bytes
    if declared is not None and declared.isdigit() and int(declared) <= BODY_BYTES_MAX:
        body = response.read(decode_content=False)
    else:
        body = response.read(BODY_BYTES_MAX + 1, decode_content=False)
        if len(body) > BODY_BYTES_MAX:
            response.close()
            raise HTTPError(f"the answer is longer than {BODY_BYTES_MAX} bytes")
    response.release_conn()
    checksum = response.headers.get("x-amz-crc32")
    if checksum is not None and checksum != str(zlib.crc32(body)):
        raise HTTPError("the answer does not match its checksum")
    return body


def _describe(error: BaseException) -> str:
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
    if type(error) is HTTPError:
        return str(error)
    return named


def _wrapped(error: BaseException) -> BaseException | None:
    return next((part for part in reversed(error.args) if isinstance(part, BaseException)), None)


def _manager(endpoint: WireEndpoint) -> urllib3.PoolManager:
    scheme = urlsplit(endpoint.url).scheme
    context = _tls_context(endpoint) if scheme == "https" else None
    proxy = endpoint.proxies.get(scheme)
    if proxy is None:
        return urllib3.PoolManager(
            num_pools=1, maxsize=CONNECTIONS_MAX, block=True, ssl_context=context
        )
    parts = urlsplit(proxy)
    if parts.scheme not in {"http", "https"}:
        raise SettingsError(f"the proxy for {scheme} is neither http:// nor https://")
    auth = f"{parts.username}:{parts.password or ''}" if parts.username else None
    return urllib3.ProxyManager(
        proxy,
        num_pools=1,
        maxsize=CONNECTIONS_MAX,
        block=True,
        ssl_context=context,
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
        # urllib3 would warn at every request; it was asked for, and leaves this host nowhere.
        host = re.escape(urlsplit(endpoint.url).hostname or "")
        warnings.filterwarnings("ignore", f".*made to host '{host}'", InsecureRequestWarning)
    return context


def is_loopback(url: str) -> bool:
    """Whether an endpoint is on this host, by its address or the name localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
