"""The control plane over botocore's own clients: for the manager's start and the command line.

These calls are few and need not be fast, so botocore's clients are used; only reads are retried
(mode `standard`). Calls of every second go through the wire client instead. Only this module
inspects botocore's errors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from kclrun.aws.clocks import Dates
from kclrun.aws.connecting import is_refusal
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.errors import ErrorReply, code_in, nothing_listens, service_error
from kclrun.aws.operations import Operation
from kclrun.aws.sessions import VIA
from kclrun.errors import AccessDenied, ServiceError, SinkError
from kclrun.model.stream import is_loopback
from kclrun.model.wire import WireCredentials

# botocore makes the methods of its clients at run time, so a static type does not exist.
Client = Any

# Three repetitions within a few seconds. The caller handles longer outages.
READ_ATTEMPTS_MAX: Final = 4

NO_CREDENTIALS: Final = "NoCredentials"

# The exceptions of a client call and of the first use of its answer. http.client accepts an answer
# that was cut off inside its head as complete. botocore then fails on it: a checksum cannot be
# parsed (ValueError), or a member is missing that every answer has (KeyError).
BOTO_FAILURES: Final = (ClientError, BotoCoreError, ResponseParserError, ValueError, KeyError)

# botocore's code for a 400 whose body names no error. The services always name one, so such an
# answer was cut off inside its head.
_NAMELESS: Final = "400"

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def from_botocore(operation: Operation, error: Exception) -> ServiceError:
    """Our error for one of `BOTO_FAILURES`, by the same rules as in the wire client."""
    if isinstance(error, ClientError):
        response: dict[str, Any] = dict(error.response)
        named = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = code_in(str(named.get("Code", "")))
        if code == _NAMELESS:
            silent = ErrorReply(message="an error without a name: the answer was cut short")
            return service_error(operation, silent, None)
        now = time.time()
        dates = Dates(_date_of(response), now, now)
        reply = ErrorReply(code=code, message=named.get("Message") or "", dates=dates)
        return service_error(operation, reply, status)
    if isinstance(error, NoCredentialsError):
        return AccessDenied(
            f"{operation.name}: no AWS credentials", operation=operation.name, code=NO_CREDENTIALS
        )
    refused_at = _refused_at(error)
    if refused_at is not None:
        return nothing_listens(operation, refused_at)
    words = type(error).__name__
    via = getattr(error, "kwargs", {}).get(VIA)
    if via is not None:
        words += f" through the proxy {via}"
    if isinstance(error, KeyError):
        words = f"the answer has no {error.args[0]}: it was cut short, or a proxy sent it"
    return service_error(
        operation,
        ErrorReply(message=words),
        None,
        was_sent=not isinstance(error, _NOT_SENT),
    )


def _date_of(response: dict[str, Any]) -> float | None:
    """The service's time in an answer."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _refused_at(error: BaseException | None) -> str | None:
    """The address of this host that refused the connection; None for any other error."""
    if not isinstance(error, EndpointConnectionError):
        return None
    url, cause = str(error.kwargs.get("endpoint_url")), error.kwargs.get("error")
    if not is_loopback(url) or not isinstance(cause, BaseException) or not is_refusal(cause):
        return None
    return urlsplit(url).netloc


def _raise_refusal(*, caught_exception: BaseException | None = None, **_: Any) -> None:
    """A refusal on this host is an answer: botocore would repeat the request for seconds."""
    if caught_exception is not None and _refused_at(caught_exception) is not None:
        raise caught_exception


@contextlib.contextmanager
def asking(operation: Operation) -> Iterator[None]:
    """Raises: a ServiceError leaf for any failure of the service."""
    try:
        yield
    except BOTO_FAILURES as error:
        raise from_botocore(operation, error) from None


@contextlib.contextmanager
def doing(operation: Operation, what: str) -> Iterator[None]:
    """Raises: a ServiceError leaf for any failure of the service, of the credentials, or of a call
    inside; its message begins with `cannot <what>`."""
    try:
        with asking(operation):
            yield
    except ServiceError as failure:
        text = f"cannot {what}: {failure}"
        if failure.code == "NoSuchBucket" and not isinstance(failure, AccessDenied):
            text += ": create the bucket, or correct its name in the settings"
        raise failure.reworded(text) from None


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Raises: SinkError for a ServiceError: the shard waits until its rows or letters are kept."""
    try:
        yield
    except ServiceError as error:
        raise SinkError(str(error)) from None


class ControlPlane:
    """Makes botocore clients: retrying ones for reads, others for writes.

    A client keeps the credentials that it was made with: use it for a task, not for a day.
    """

    def __init__(
        self,
        session: botocore.session.Session,
        settings: EndpointSettings,
        credentials: WireCredentials,
    ) -> None:
        self._session = session
        self._settings = settings
        self._credentials = credentials

    def dynamodb_reads(self) -> Client:
        """To inspect tables."""
        return self._client("dynamodb", READ_ATTEMPTS_MAX)

    def dynamodb_writes(self) -> Client:
        """To create a table: one attempt."""
        return self._client("dynamodb", 1)

    def cloudwatch(self) -> Client:
        """To publish metrics: one attempt, because repeated values count twice."""
        return self._client("cloudwatch", 1)

    def s3(self) -> Client:
        """For objects: each call may be repeated. With a URL of its own, a bucket is a part of the
        path: no host has a name like `bucket.localhost`."""
        style = "path" if self._settings.endpoint_url is not None else "auto"
        return self._client("s3", READ_ATTEMPTS_MAX, s3={"addressing_style": style})

    def sqs(self) -> Client:
        """For messages: one attempt, because a repeated message may be in the queue twice."""
        return self._client("sqs", 1)

    def sns(self) -> Client:
        """For messages: one attempt, as for SQS."""
        return self._client("sns", 1)

    def firehose(self) -> Client:
        """For records: one attempt, because a repeated record is delivered twice."""
        return self._client("firehose", 1)

    def glue(self) -> Client:
        """To read schemas."""
        return self._client("glue", READ_ATTEMPTS_MAX)

    def autoscaling(self) -> Client:
        """To answer lifecycle hooks: one attempt, the caller repeats it."""
        return self._client("autoscaling", 1)

    def _client(self, service: str, attempts: int, **more: Any) -> Client:
        client = self._session.create_client(
            service,
            region_name=self._settings.region,
            endpoint_url=self._settings.endpoint_url,
            aws_access_key_id=self._credentials.access_key,
            aws_secret_access_key=self._credentials.secret_key,
            aws_session_token=self._credentials.token,
            config=Config(
                connect_timeout=self._settings.connect_timeout_s,
                read_timeout=self._settings.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": attempts},
                **more,
            ),
        )
        client.meta.events.register_first("needs-retry", _raise_refusal)
        return client

    def __repr__(self) -> str:
        return "ControlPlane(…)"


class RenewedClient:
    """A botocore client with the present credentials: made at the first call, and again after the
    credentials were renewed. For one thread: botocore's sessions are not thread-safe, so this has
    a session of its own.

    `credentials` may do I/O. Raises: SettingsError for an unknown profile.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        credentials: Callable[[], WireCredentials],
        make: Callable[[ControlPlane], Client],
    ) -> None:
        self._session = open_session(settings)
        self._settings = settings
        self._credentials = credentials
        self._make = make
        self._made: tuple[WireCredentials, Client] | None = None

    def __call__(self) -> Client:
        """The client. Raises: the errors of `credentials`."""
        credentials = self._credentials()
        if self._made is not None and self._made[0] == credentials:
            return self._made[1]
        self.close()
        client = self._make(ControlPlane(self._session, self._settings, credentials))
        self._made = (credentials, client)
        return client

    def close(self) -> None:
        """Close the client's connections."""
        if self._made is not None:
            self._made[1].close()
            self._made = None
