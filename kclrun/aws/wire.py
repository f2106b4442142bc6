"""The signed wire client: one JSON service over kept connections, from plain values.

It signs, sends (`http.py`), classifies failures (`errors.py`), and corrects this host's clock by
the service's. A lease process needs no botocore for it: endpoint and credentials are
`model/wire.py` values.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from kclrun.aws.clocks import CLOCK_SKEW_CODES, SKEW_BELIEVED_S, Dates, is_perhaps_of_clock
from kclrun.aws.errors import (
    REFUSED_KEYS,
    ErrorReply,
    nothing_listens,
    parse_error_reply,
    service_error,
)
from kclrun.aws.http.exchange import Answer
from kclrun.aws.http.pool import CONNECTIONS_MAX, StreamedAnswer, Transport, TransportFailure
from kclrun.aws.operations import Operation
from kclrun.errors import InvariantViolation, SettingsError, Unavailable
from kclrun.model.stream import is_loopback
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint

AnswerT = TypeVar("AnswerT", bound=Answer | StreamedAnswer)
T = TypeVar("T")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# What decoding a body may raise. A RecursionError: it is nested too deeply.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encode: Final = msgspec.json.Encoder().encode
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class HeldCredentials:
    """The credentials that the parent sent last to its lease process.

    A call returns them. The call and `replace` may come from different threads.
    """

    def __init__(self, credentials: WireCredentials) -> None:
        self._credentials = credentials

    def __call__(self) -> WireCredentials:
        return self._credentials

    def replace(self, credentials: WireCredentials) -> None:
        self._credentials = credentials

    def __repr__(self) -> str:
        return "HeldCredentials(…)"


class Signer:
    """Signature Version 4 for one host, path, service and region.

    It signs one kind of request: POST, JSON body, no query string. botocore's general signer takes
    54 us a request and needs botocore to be imported; this one takes 4 us. An idle lease polls each
    second, and signing is a quarter of the cost of its request. A property test compares each
    header with botocore's. Source: AWS "Signature Version 4 signing process".
    """

    def __init__(self, *, host: str, path: str, service: str, region: str) -> None:
        self._host = host
        self._path = quote(path or "/", safe="/~")
        self._service = service
        self._region = region
        self._key: tuple[str, str, bytes] = ("", "", b"")

    def headers(
        self,
        body: bytes,
        *,
        target: str,
        content_type: str,
        credentials: WireCredentials,
        at: float,
    ) -> dict[str, str]:
        """All headers of the request except the transport's, signed as of `at` (epoch)."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
        headers = {
            "content-type": content_type,
            "host": self._host,
            "x-amz-date": stamp,
        }
        if credentials.token:
            headers["x-amz-security-token"] = credentials.token
        headers["x-amz-target"] = target
        # Inserted in alphabetical order, as the canonical form requires.
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        digest = hashlib.sha256(body).hexdigest()
        canonical = f"POST\n{self._path}\n\n{lines}\n{names}\n{digest}"
        day = stamp[:8]
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        canonical_digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{canonical_digest}"
        key = self._signing_key(credentials.secret_key, day)
        signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope},"
            f" SignedHeaders={names}, Signature={signature}"
        )
        return headers

    def _signing_key(self, secret: str, day: str) -> bytes:
        """Derived once for each day and secret. The tuple is replaced as a whole, so threads may
        share it."""
        known_secret, known_day, key = self._key
        if known_secret == secret and known_day == day:
            return key
        key = f"AWS4{secret}".encode()
        for part in (day, self._region, self._service, "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        self._key = (secret, day, key)
        return key

    def __repr__(self) -> str:
        return f"Signer({self._service}, {self._region})"


class WireReply(msgspec.Struct, frozen=True):
    """A success: its body, and the service's time (None if it sent no Date)."""

    status: int
    body: bytes | bytearray
    date_at: WallTime | None = None

    def __repr__(self) -> str:
        return f"WireReply({self.status}, {len(self.body)} bytes)"


class RefusedReply(msgspec.Struct, frozen=True):
    """An answer with an error status: the status and the parsed error body."""

    status: int
    error: ErrorReply

    def __repr__(self) -> str:
        return f"RefusedReply({self.status}, {self.error.code})"


class WireClient:
    """Calls one service. Threads may share it; processes may not.

    It repeats no request, with three harmless exceptions: a read on a connection that the service
    had just closed, and a request that the service refused for its date or for its keys. No I/O
    happens before the first call. A client refuses to be used in another process than the one that
    made it, because two processes on one connection would read each other's answers.

    `credentials` is called for every request: a `HeldCredentials` in a lease process, a
    `CredentialSource.current` in the manager. `reread` says whether there are other keys than those
    that the service refused; a lease process waits for the manager's. `clock` gives seconds since
    the epoch. At most `connections_max` requests are under way at once.
    """

    def __init__(
        self,
        endpoint: WireEndpoint,
        credentials: Callable[[], WireCredentials],
        *,
        service: str,
        clock: Callable[[], float] = time.time,
        connections_max: int = CONNECTIONS_MAX,
        reread: Callable[[WireCredentials], bool] = lambda _refused: False,
    ) -> None:
        host = _host_header(endpoint.url)
        if host is None:
            raise SettingsError(f"the {service} endpoint is not a plain http:// or https:// URL")
        self._service = service
        self._host = host
        self._is_on_this_host = is_loopback(endpoint.url)
        self._credentials = credentials
        self._reread = reread
        self._clock = clock
        self._skew_s = 0.0
        self._ahead_s = 0.0
        self._signer = Signer(
            host=host,
            path=urlsplit(endpoint.url).path,
            service=service,
            region=endpoint.signing_region,
        )
        self._transport = Transport(endpoint, connections_max)
        proxy = self._transport.proxy
        setting = f"{urlsplit(endpoint.url).scheme.upper()}_PROXY"
        self._via = "" if proxy is None else f" through the proxy {proxy} ({setting})"
        self._pid = os.getpid()

    def call(self, operation: Operation, body: bytes) -> WireReply:
        """Send one request and return its answer.

        Raises a ServiceError whose class decides the next step, with `operation` and `code`:
        Throttled, Unavailable (not sent, or harmless to repeat), OutcomeUnknown (a write that may
        have happened), AccessDenied, NotFound, ExpiredIterator, InvalidRequest.
        """
        reply = self.ask(operation, body)
        if isinstance(reply, RefusedReply):
            raise service_error(operation, reply.error, reply.status)
        return reply

    def ask(self, operation: Operation, body: bytes) -> WireReply | RefusedReply:
        """Like `call`, but an error answer of the service is returned with its body.

        Raises: Unavailable or OutcomeUnknown where no complete answer came.
        """
        answer = self._answered(lambda keys: self._send(operation, body, keys))
        if isinstance(answer, RefusedReply):
            return self._of_proxy(answer)
        return WireReply(answer.status, answer.body, self._note_time(answer))

    def open_stream(self, operation: Operation, body: bytes) -> StreamedAnswer:
        """Send one request whose answer comes over minutes. The caller closes it.

        Raises: as `call`.
        """
        try:
            answer = self._answered(
                lambda keys: self._transport.post_for_stream(
                    self._headers(operation, body, keys), body
                )
            )
        except TransportFailure as failure:
            raise self._unanswered(operation, failure) from None
        if isinstance(answer, RefusedReply):
            answer = self._of_proxy(answer)
            raise service_error(operation, answer.error, answer.status)
        assert isinstance(answer, StreamedAnswer), "as the transport gives for a 200"
        self._note_time(answer)
        return answer

    def _answered(self, send: Callable[[WireCredentials], AnswerT]) -> AnswerT | RefusedReply:
        """The answer to a request; sent again if the service refused only its date or its keys."""
        self._refuse_other_process()
        keys = self._credentials()
        answer = send(keys)
        refused = _refusal(answer)
        # The service only checked the date: a second send is safe, also for a write.
        if refused is not None and self._corrects_clock(refused.error, _date_of(answer)):
            answer = send(keys)
            refused = _refusal(answer)
        # It refused the keys before it did anything: the same holds.
        if refused is not None and refused.error.code in REFUSED_KEYS and self._reread(keys):
            answer = send(self._credentials())
            refused = _refusal(answer)
        return answer if refused is None else self._dated(refused, answer)

    def _dated(self, refused: RefusedReply, answer: Answer | StreamedAnswer) -> RefusedReply:
        """The refusal with the clocks, one of which may be its cause."""
        here_at = self._clock()
        dates = Dates(_date_of(answer), here_at, here_at + self._skew_s)
        error = msgspec.structs.replace(refused.error, dates=dates)
        return msgspec.structs.replace(refused, error=error)

    def service_time(self) -> WallTime:
        """The service's clock: this host's clock plus the difference shown by the last success.

        It is late by up to a second and the time an answer takes (a Date has whole seconds, rounded
        down). It is never early, so a start position pinned to it skips nothing [P14]. Before the
        first success it is this host's clock.
        """
        return WallTime(self._clock() + self._ahead_s)

    def close(self) -> None:
        """Close the idle connections; the client can still be used."""
        self._transport.close()

    def _note_time(self, answer: Answer | StreamedAnswer) -> WallTime | None:
        """The service's time in an answer, which `service_time` counts on from."""
        date_at = _date_of(answer)
        if date_at is not None:
            self._ahead_s = date_at - self._clock()
        return date_at

    def _send(self, operation: Operation, body: bytes, keys: WireCredentials) -> Answer:
        try:
            return self._send_once(operation, body, keys)
        except TransportFailure as failure:
            stale = failure.on_reused_connection and not failure.timed_out
            if operation.is_write or not stale:
                raise self._unanswered(operation, failure) from None
        # The service had closed the idle connection: a second read is harmless.
        self._transport.close()
        try:
            return self._send_once(operation, body, keys)
        except TransportFailure as failure:
            raise self._unanswered(operation, failure) from None

    def _send_once(self, operation: Operation, body: bytes, keys: WireCredentials) -> Answer:
        return self._transport.post(self._headers(operation, body, keys), body)

    def _headers(self, operation: Operation, body: bytes, keys: WireCredentials) -> dict[str, str]:
        headers = self._signer.headers(
            body,
            target=operation.target,
            content_type=operation.content_type,
            credentials=keys,
            at=self._clock() + self._skew_s,
        )
        headers["User-Agent"] = "kclrun"
        return headers

    def _unanswered(self, operation: Operation, failure: TransportFailure) -> Exception:
        if failure.was_refused and self._is_on_this_host:
            return nothing_listens(operation, self._host)
        reached = "after it was sent" if failure.was_sent else "before anything was sent"
        text = f"{failure} {reached}, at {self._host}{self._via}"
        return service_error(operation, ErrorReply(message=text), None, was_sent=failure.was_sent)

    def _of_proxy(self, refused: RefusedReply) -> RefusedReply:
        """The reply; one without the name of an error may be the proxy's own, and says so."""
        if refused.error.code or not self._via:
            return refused
        text = f"not the name of an error of {self._service}, but an answer{self._via}"
        return msgspec.structs.replace(refused, error=ErrorReply(message=text))

    def _corrects_clock(self, error: ErrorReply, date_at: WallTime | None) -> bool:
        """Adopt the service's clock if it refused because of ours; returns whether it did."""
        if date_at is None or not is_perhaps_of_clock(error.code, error.message):
            return False
        skew_s = date_at - self._clock()
        is_certain = error.code in CLOCK_SKEW_CODES
        if not is_certain and abs(skew_s - self._skew_s) < SKEW_BELIEVED_S:
            return False
        self._skew_s = skew_s
        return True

    def _refuse_other_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvariantViolation(
                f"a {self._service} client made in process {self._pid} is used in {os.getpid()}:"
                " make one after the fork"
            )

    def __repr__(self) -> str:
        return f"WireClient({self._service} at {self._host})"


class Caller(Protocol):
    """A wire client, as far as a request and its answer need it."""

    def call(self, operation: Operation, body: bytes) -> WireReply: ...


def call_json(
    client: Caller, operation: Operation, request: dict[str, Any], decoder: msgspec.json.Decoder[T]
) -> T:
    """One request that reads, and its decoded answer. Raises: a ServiceError leaf; Unavailable for
    a malformed answer."""
    body = client.call(operation, _encode(request)).body
    try:
        return decoder.decode(body)
    except MALFORMED:
        raise garbled(operation, "the answer is not what the service promises") from None


def garbled(operation: Operation, text: str) -> Unavailable:
    """The error of a read whose 200 has a malformed body: the fault of a proxy or of a connection
    that was cut. Reads may be repeated."""
    return Unavailable(f"{operation.name}: {text}", operation=operation.name, code="MalformedBody")


def _refusal(answer: Answer | StreamedAnswer) -> RefusedReply | None:
    """None for a success."""
    if isinstance(answer, StreamedAnswer) or answer.status == 200:
        return None
    named = answer.headers.get("x-amzn-errortype")
    return RefusedReply(answer.status, parse_error_reply(answer.body, named))


def _date_of(answer: Answer | StreamedAnswer) -> WallTime | None:
    header = answer.headers.get("date")
    return None if header is None else _parsed_date(header)


# Parsing takes as long as signing, and the text changes once a second: recent values are cached.
@functools.lru_cache(maxsize=4)
def _parsed_date(header: str) -> WallTime | None:
    try:
        return WallTime(parsedate_to_datetime(header).timestamp())
    except (ValueError, OverflowError):
        return None


def _host_header(url: str) -> str | None:
    """The host, with the port if it is not the scheme's default; None for a malformed address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.username or parts.query:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host if port in {None, _DEFAULT_PORTS[parts.scheme]} else f"{host}:{port}"
