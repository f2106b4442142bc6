"""The EC2 instance: its metadata, and the answers to its group's lifecycle hooks.

The metadata (IMDSv2, by session) hold the instance's identity and pending notices. They are
requested by HTTP on a link-local address, never through a proxy. Every wait is short, because
outside EC2 the address does not answer. An answer that cannot be parsed is not a notice.
Implements `ports.InstanceMetadata` and `ports.LifecycleActions`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from typing import Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import botocore.session
import msgspec
from botocore import xform_name

from kclrun.aws import operations
from kclrun.aws.control import BOTO_FAILURES, NO_CREDENTIALS, Client, ControlPlane, from_botocore
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.errors import AccessDenied, NotFound, SettingsError, Unavailable
from kclrun.model.instance import (
    InstanceIdentity,
    InstanceLook,
    Interruption,
    LifecycleAction,
    TargetState,
)
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials

Body = TypeVar("Body", bound=msgspec.Struct)

_ENDPOINT: Final = "http://169.254.169.254"
_ENDPOINT_IPV6: Final = "http://[fd00:ec2::254]"
# The service answers within a few milliseconds. botocore waits a second, too.
_TIMEOUT_S: Final = 1.0
# The longest lifetime that the service grants. A new token is fetched after half of it.
_TOKEN_TTL_S: Final = 21_600
_TOKEN: Final = re.compile(r"[ -~]{1,1000}")
# The items that are read here have a few dozen bytes.
_BODY_BYTES_MAX: Final = 16_384

_META_DATA: Final = "/latest/meta-data/"
_INSTANCE_ID: Final = re.compile(r"i-[0-9a-f]{8,32}")
_PLACE: Final = re.compile(r"[a-z0-9-]{1,64}")
_GROUP_CHARACTERS_MAX: Final = 255
_TARGET_STATES: Final = {
    "InService": TargetState.IN_SERVICE,
    "Terminated": TargetState.TERMINATED,
    "Warmed:Terminated": TargetState.TERMINATED,
}


class _SpotAction(msgspec.Struct):
    action: str
    time: str | None = None


class _Recommendation(msgspec.Struct):
    # Only the presence of the value matters.
    notice_time: str | None = msgspec.field(default=None, name="noticeTime")


class _TokenRefused(Exception):
    """The session has expired, or the service has restarted."""


class Imds:
    """The metadata service at `endpoint_url`. Keeps a session; opens a connection for each call.

    `clock` counts seconds, for the age of the session. The host counts as an EC2 instance only if
    the service returns a well-formed instance id.

    Paths and their meaning: EC2 User Guide, "Instance metadata categories", "Spot Instance
    interruption notices", "EC2 instance rebalance recommendations"; Auto Scaling User Guide,
    "Retrieve the target lifecycle state through instance metadata". An item is usually absent
    (404): no notice is pending.
    """

    def __init__(
        self,
        endpoint_url: str = _ENDPOINT,
        *,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(endpoint_url)
        if parts.scheme != "http" or not parts.hostname:
            raise SettingsError(
                f"AWS_EC2_METADATA_SERVICE_ENDPOINT: {endpoint_url!r} is not an http:// address"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._token: str  # set with the first request
        self._token_until = float("-inf")

    def identify(self) -> InstanceIdentity:
        """Which instance this is. Raises: Unavailable."""
        with _Exchange(self._host, self._port, self._timeout_s) as exchange:
            instance_id = self._required(exchange, "instance-id", _INSTANCE_ID)
            zone = self._required(exchange, "placement/availability-zone", _PLACE)
            region = self._required(exchange, "placement/region", _PLACE)
            group = self._read(exchange, "tags/instance/aws:autoscaling:groupName")
        is_name = group is not None and 0 < len(group) <= _GROUP_CHARACTERS_MAX
        return InstanceIdentity(instance_id, region, zone, group if is_name else None)

    def look(self) -> InstanceLook:
        """The notices that are pending for the instance. Raises: Unavailable."""
        with _Exchange(self._host, self._port, self._timeout_s) as exchange:
            spot = self._read(exchange, "spot/instance-action")
            rebalance = self._read(exchange, "events/recommendations/rebalance")
            target = self._read(exchange, "autoscaling/target-lifecycle-state")
        if rebalance is not None:
            _decoded(rebalance, _Recommendation)
        return InstanceLook(
            interruption=_interruption(spot) if spot is not None else None,
            is_rebalance_recommended=rebalance is not None,
            target_state=_TARGET_STATES.get(target, TargetState.OTHER)
            if target is not None
            else None,
        )

    def _required(self, exchange: _Exchange, item: str, shape: re.Pattern[str]) -> str:
        value = self._read(exchange, item)
        if value is None or not shape.fullmatch(value):
            _unavailable(f"no {item} of an EC2 instance")
        return value

    def _read(self, exchange: _Exchange, item: str) -> str | None:
        """One item, or None if it is absent. A refused session is replaced by a new one, once."""
        path = f"{self._prefix}{_META_DATA}{item}"
        try:
            return exchange.get(path, self._session(exchange))
        except _TokenRefused:
            self._token_until = float("-inf")
        try:
            return exchange.get(path, self._session(exchange))
        except _TokenRefused:
            _unavailable("the session is refused")

    def _session(self, exchange: _Exchange) -> str:
        now = self._clock()
        if now >= self._token_until:
            self._token = exchange.put_token(f"{self._prefix}/latest/api/token")
            self._token_until = now + _TOKEN_TTL_S / 2
        return self._token


class _Exchange:
    """A connection for a few requests, one after the other. Every failure is Unavailable, except a
    refused session."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._connection = HTTPConnection(host, port, timeout=timeout_s)

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def put_token(self, path: str) -> str:
        status, body = self._ask(
            "PUT", path, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        )
        # The token becomes a header, so it must not contain a line break.
        if status != 200 or not _TOKEN.fullmatch(body):
            _unavailable(f"no session (HTTP {status})")
        return body

    def get(self, path: str, token: str) -> str | None:
        status, body = self._ask("GET", path, {"X-aws-ec2-metadata-token": token})
        if status == 401:
            raise _TokenRefused
        if status == 404:
            return None
        if status != 200:
            _unavailable(f"HTTP {status}")
        return body.strip()

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        try:
            self._connection.request(method, path, headers=dict(headers))
            answer = self._connection.getresponse()
            body = answer.read(_BODY_BYTES_MAX + 1)
        except (OSError, HTTPException) as error:
            _unavailable(type(error).__name__)
        if len(body) > _BODY_BYTES_MAX:
            _unavailable(f"an answer of more than {_BODY_BYTES_MAX} bytes")
        return answer.status, body.decode("utf-8", "replace")


def open_imds(session: botocore.session.Session, environment: Mapping[str, str]) -> Imds | None:
    """The metadata service where botocore looks for it; None where it is switched off.

    Sends nothing. Raises: SettingsError for a malformed address.
    """
    if environment.get("AWS_EC2_METADATA_DISABLED", "false").lower() == "true":
        return None
    own = session.get_config_variable("ec2_metadata_service_endpoint")
    if own:
        return Imds(str(own))
    mode = str(session.get_config_variable("ec2_metadata_service_endpoint_mode")).lower()
    is_ipv6 = mode == "ipv6" or bool(session.get_config_variable("imds_use_ipv6"))
    return Imds(_ENDPOINT_IPV6 if is_ipv6 else _ENDPOINT)


def _interruption(body: str) -> Interruption:
    spot = _decoded(body, _SpotAction)
    return Interruption(spot.action[:20], _wall_time(spot.time))


def _wall_time(text: str | None) -> WallTime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return WallTime((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())


def _decoded(body: str, struct: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=struct)
    except (msgspec.DecodeError, UnicodeEncodeError):
        _unavailable("an answer that is not a notice")


def _unavailable(what: str) -> NoReturn:
    raise Unavailable(f"instance metadata: {what}", operation="instance metadata")


# The service has one code for a missing group, a missing hook and a missing pending action.
_NOTHING_WAITS: Final = "ValidationError"


class BotoLifecycleActions:
    """Answers hooks over botocore's own client, which is made for each call; each is sent once.

    The calls go to the group's region, which need not be the stream's, with the machine's own role;
    `settings.region` is not used.
    """

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._credentials: CredentialSource | None = None
        # One call at a time: botocore's sessions are not thread-safe.
        self._lock = threading.Lock()

    def heartbeat(self, action: LifecycleAction) -> None:
        """RecordLifecycleActionHeartbeat. Raises: as `ports.LifecycleActions` says."""
        self._call(operations.RECORD_LIFECYCLE_ACTION_HEARTBEAT, action)

    def complete(self, action: LifecycleAction) -> None:
        """CompleteLifecycleAction with CONTINUE. Raises: as `ports.LifecycleActions` says."""
        self._call(operations.COMPLETE_LIFECYCLE_ACTION, action, LifecycleActionResult="CONTINUE")

    def _call(self, operation: operations.Operation, action: LifecycleAction, **more: str) -> None:
        arguments = {
            "AutoScalingGroupName": action.group,
            "LifecycleHookName": action.hook,
            "InstanceId": action.instance_id,
            **more,
        }
        with self._lock:
            client = self._client(action.region)
            try:
                getattr(client, xform_name(operation.name))(**arguments)
            except BOTO_FAILURES as error:
                failure = from_botocore(operation, error)
                if failure.code == _NOTHING_WAITS:
                    raise failure.reworded(str(failure), NotFound) from None
                raise failure from None
            finally:
                client.close()

    def _client(self, region: str) -> Client:
        """A client with the present keys: minutes or months pass between two calls."""
        settings = msgspec.structs.replace(self._settings, region=region)
        session = open_session(settings)
        if self._credentials is None:
            self._credentials = CredentialSource(session, endpoint_url=settings.endpoint_url)
        return ControlPlane(session, settings, self._keys(self._credentials)).autoscaling()

    def _keys(self, source: CredentialSource) -> WireCredentials:
        try:
            return source.current()
        except AccessDenied as error:
            if error.code != NO_CREDENTIALS:
                raise
            # The role's keys come from the instance metadata service. It has answered before, so
            # this failure is temporary.
            raise error.reworded(str(error), Unavailable) from None
