"""Where the services are, resolved in the parent by botocore, as plain values for everybody.

botocore knows the endpoint rules (partitions, FIPS, dual-stack), the configuration files and the
environment (AWS_ENDPOINT_URL*, AWS_CA_BUNDLE, proxies, NO_PROXY). Its own answer is used: a probe
request is built and signed with made-up keys and caught before it is sent; its address and
credential scope are the endpoint's. Rule: no request leaves this host.
"""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import urlsplit

import botocore.session
import msgspec
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.config import Config
from botocore.exceptions import BotoCoreError, NoRegionError, ProfileNotFound
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from kclrun.aws.operations import DESCRIBE_STREAM_SUMMARY, DESCRIBE_TABLE, Operation
from kclrun.errors import SettingsError
from kclrun.model.wire import WireEndpoint

__all__ = ["EndpointSettings", "open_session", "resolve_endpoint"]

_PROBES: Final[dict[str, tuple[Operation, dict[str, str]]]] = {
    "kinesis": (DESCRIBE_STREAM_SUMMARY, {"StreamName": "probe"}),
    "dynamodb": (DESCRIBE_TABLE, {"TableName": "probe"}),
}
_METHODS: Final = {
    DESCRIBE_STREAM_SUMMARY.name: "describe_stream_summary",
    DESCRIBE_TABLE.name: "describe_table",
}


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about reaching AWS; None leaves it to botocore's own sources.

    The time-outs leave room for several tries within a `failover` of 10 s: a connection within a
    region takes milliseconds, an answer to a conditional write tens of them.
    """

    region: str | None = None
    profile: str | None = None
    endpoint_url: str | None = None
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 5.0


def open_session(settings: EndpointSettings) -> botocore.session.Session:
    """A botocore session for a profile and region. Raises: SettingsError for an unknown profile."""
    session = botocore.session.Session(profile=settings.profile)
    if settings.region is not None:
        session.set_config_variable("region", settings.region)
    try:
        if session.get_config_variable("region") is None and "AWS_REGION" in os.environ:
            # What the other SDKs read, and what containers are given; botocore does not.
            session.set_config_variable("region", os.environ["AWS_REGION"])
        session.get_scoped_config()
    except ProfileNotFound:
        raise SettingsError(
            f"aws.profile: {settings.profile!r} is not in the AWS configuration files"
        ) from None
    return session


def resolve_endpoint(
    session: botocore.session.Session, service: str, settings: EndpointSettings
) -> WireEndpoint:
    """The endpoint of `kinesis` or `dynamodb` as botocore would use it. Sends nothing.

    Raises: SettingsError where botocore finds no region or calls the settings impossible.
    """
    try:
        probed = _probe(session, service, settings)
    except NoRegionError:
        raise SettingsError(
            "no AWS region: set aws.region, AWS_REGION, or a region in the profile"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise SettingsError(f"the {service} endpoint cannot be resolved: {error}") from None
    parts = urlsplit(probed["url"])
    return WireEndpoint(
        url=f"{parts.scheme}://{parts.netloc}{parts.path}",
        region=probed["region"],
        signing_region=probed["signing_region"],
        ca_bundle=_ca_bundle(session) if parts.scheme == "https" else None,
        proxies=_proxies(probed["url"]),
        connect_timeout_s=settings.connect_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )


def _probe(
    session: botocore.session.Session, service: str, settings: EndpointSettings
) -> dict[str, str]:
    operation, arguments = _PROBES[service]
    client = session.create_client(
        service,
        endpoint_url=settings.endpoint_url,
        aws_access_key_id="probe",
        aws_secret_access_key="probe",  # noqa: S106 - made up, and never sent
        config=Config(retries={"total_max_attempts": 1}),
    )
    caught: dict[str, str] = {"region": client.meta.region_name}

    def catch(request: Any, **_: Any) -> AWSResponse:
        caught["url"] = request.url
        scope = _text(request.headers["Authorization"]).split("Credential=", 1)[1].split("/")
        caught["signing_region"] = scope[2]
        return AWSResponse(request.url, 200, HTTPHeaders(), _NoBody())

    # The stubs say handlers return nothing; a before-send handler's answer replaces the sending.
    events: Any = client.meta.events
    events.register(f"before-send.{service}.{operation.name}", catch)
    try:
        getattr(client, _METHODS[operation.name])(**arguments)
    finally:
        client.close()
    return caught


class _NoBody:
    """The raw side of the answer that a caught probe gets."""

    def stream(self, **_: Any) -> list[bytes]:
        return [b"{}"]


def _text(header: str | bytes) -> str:
    return header.decode("ascii") if isinstance(header, bytes) else header


def _ca_bundle(session: botocore.session.Session) -> str:
    """As botocore: the profile's or AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, else the one it carries."""
    configured = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    path = str(configured or get_cert_path(True))  # noqa: FBT003 - botocore's signature
    if not os.path.exists(path):  # noqa: PTH110 - a file or a folder, as OpenSSL takes either
        raise SettingsError(f"the CA bundle {path} does not exist")
    return path


def _proxies(url: str) -> dict[str, str]:
    scheme = urlsplit(url).scheme
    proxy = get_environ_proxies(url).get(scheme)
    if not proxy:
        return {}
    return {scheme: proxy if "://" in proxy else f"http://{proxy.lstrip('/')}"}
