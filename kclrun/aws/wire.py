"""The signed wire client: one JSON service over kept connections, from plain values.

Signs (`signing.py`), sends (`transport.py`), names what went wrong (`errors.py`), and corrects
this host's clock by the service's. Never retries, with two exceptions that cannot do harm: a read
on a connection that the service had just closed, and a request it refused for its date.

A lease process needs no botocore for this: endpoint and credentials come as `model/wire.py`
values. No I/O happens before the first call, and a client refuses to be used in another process
than the one it was made in: two processes on one connection read each other's answers.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kclrun.aws.errors import (
    CLOCK_SKEW_CODES,
    POSSIBLE_CLOCK_SKEW_CODES,
    ErrorReply,
    parse_error_reply,
    service_error,
)
from kclrun.aws.operations import Operation
from kclrun.aws.signing import Signer
from kclrun.aws.transport import CONNECTIONS_MAX, Answer, Transport, TransportFailure
from kclrun.errors import InvariantViolation, SettingsError
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint

__all__ = ["RefusedReply", "WireClient", "WireReply"]

# The services accept a date up to five minutes off. A code that may have other causes counts as a
# wrong clock only from four minutes on, the figure all AWS SDKs use.
SKEW_BELIEVED_S: Final = 240.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class WireReply(msgspec.Struct, frozen=True):
    """A success: its body, and the service's own time, None where it sent no Date."""

    status: int
    body: bytes | bytearray
    date_at: WallTime | None = None

    def __repr__(self) -> str:
        return f"WireReply({self.status}, {len(self.body)} bytes)"


class RefusedReply(msgspec.Struct, frozen=True):
    """An answer with an error status: the status and what its body said."""

    status: int
    error: ErrorReply

    def __repr__(self) -> str:
        return f"RefusedReply({self.status}, {self.error.code})"


class WireClient:
    """Calls one service. Threads may share it; processes may not.

    `credentials` is called for every request: a `HeldCredentials` in a lease process, a
    `CredentialSource.current` in the manager. `clock` gives seconds since the epoch. At most
    `connections_max` requests are under way at once.
    """

    def __init__(
        self,
        endpoint: WireEndpoint,
        credentials: Callable[[], WireCredentials],
        *,
        service: str,
        clock: Callable[[], float] = time.time,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        host = _host_header(endpoint.url)
        if host is None:
            raise SettingsError(f"the {service} endpoint is no plain http:// or https:// URL")
        self._service = service
        self._host = host
        self._credentials = credentials
        self._clock = clock
        self._skew_s = 0.0
        self._signer = Signer(
            host=host,
            path=urlsplit(endpoint.url).path,
            service=service,
            region=endpoint.signing_region,
        )
        self._transport = Transport(endpoint, connections_max)
        self._pid = os.getpid()

    def call(self, operation: Operation, body: bytes) -> WireReply:
        """Send one request and return its answer.

        Raises the ServiceError leaf that says what to do next, with `operation` and `code`:
        Throttled, Unavailable (not sent, or harmless to repeat), OutcomeUnknown (a write that may
        have happened), AccessDenied, NotFound, ExpiredIterator, InvalidRequest.
        """
        reply = self.ask(operation, body)
        if isinstance(reply, RefusedReply):
            raise service_error(operation, reply.error, reply.status)
        return reply

    def ask(self, operation: Operation, body: bytes) -> WireReply | RefusedReply:
        """Like `call`, but an error the service put into words is returned, body and all.

        Raises: Unavailable or OutcomeUnknown where no whole answer came.
        """
        self._refuse_other_process()
        answer = self._send(operation, body)
        if answer.status == 200:
            return WireReply(answer.status, answer.body, _date_of(answer))
        refused = _refusal(answer)
        if self._corrects_clock(refused.error.code, _date_of(answer)):
            # The service did nothing but look at the date: sending again is safe, writes too.
            answer = self._send(operation, body)
            if answer.status == 200:
                return WireReply(answer.status, answer.body, _date_of(answer))
            refused = _refusal(answer)
        return refused

    def close(self) -> None:
        """Close the idle connections; the client can still be used."""
        self._transport.close()

    def _send(self, operation: Operation, body: bytes) -> Answer:
        try:
            return self._send_once(operation, body)
        except TransportFailure as failure:
            stale = failure.on_reused_connection and not failure.timed_out
            if operation.is_write or not stale:
                raise self._unanswered(operation, failure) from None
        # The service had closed the idle connection: reading once more does no harm.
        self._transport.close()
        try:
            return self._send_once(operation, body)
        except TransportFailure as failure:
            raise self._unanswered(operation, failure) from None

    def _send_once(self, operation: Operation, body: bytes) -> Answer:
        headers = self._signer.headers(
            body,
            target=operation.target,
            content_type=operation.content_type,
            credentials=self._credentials(),
            at=self._clock() + self._skew_s,
        )
        headers["User-Agent"] = "kclrun"
        return self._transport.post(headers, body)

    def _unanswered(self, operation: Operation, failure: TransportFailure) -> Exception:
        reached = "after it was sent" if failure.was_sent else "before anything was sent"
        text = f"{failure} {reached}, at {self._host}"
        return service_error(operation, ErrorReply(message=text), None, was_sent=failure.was_sent)

    def _corrects_clock(self, code: str, date_at: WallTime | None) -> bool:
        """Adopt the service's clock if ours is why it refused; say whether that was so."""
        if date_at is None or code not in CLOCK_SKEW_CODES | POSSIBLE_CLOCK_SKEW_CODES:
            return False
        skew_s = date_at - self._clock()
        if code in POSSIBLE_CLOCK_SKEW_CODES and abs(skew_s - self._skew_s) < SKEW_BELIEVED_S:
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


def _refusal(answer: Answer) -> RefusedReply:
    named = answer.headers.get("x-amzn-errortype")
    return RefusedReply(answer.status, parse_error_reply(answer.body, named))


def _date_of(answer: Answer) -> WallTime | None:
    header = answer.headers.get("date")
    return None if header is None else _parsed_date(header)


# Parsing takes as long as signing, and the text changes once a second: the last few are kept.
@functools.lru_cache(maxsize=4)
def _parsed_date(header: str) -> WallTime | None:
    try:
        return WallTime(parsedate_to_datetime(header).timestamp())
    except (ValueError, OverflowError):
        return None


def _host_header(url: str) -> str | None:
    """Host, and port where it is not the scheme's own; None for what is no plain address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.username or parts.query:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host if port in {None, _DEFAULT_PORTS[parts.scheme]} else f"{host}:{port}"
