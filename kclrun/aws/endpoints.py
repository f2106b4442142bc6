"""Resolves the services' endpoints in the parent, as plain values. No request leaves this host.

botocore knows the endpoint rules (partitions, FIPS, dual-stack), the configuration files and the
environment (AWS_ENDPOINT_URL*, AWS_CA_BUNDLE, proxies, NO_PROXY). So a probe request is built by
botocore and signed with made-up keys. It is caught before it is sent. Its address and its
credential scope are the endpoint's.
"""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import urlsplit

import botocore.session
import msgspec
from botocore import xform_name
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import BotoCoreError, NoRegionError, ProfileNotFound

from kclrun.aws import operations
from kclrun.aws.proxies import proxies_for
from kclrun.aws.sessions import OwnSession, ca_bundle
from kclrun.errors import SettingsError
from kclrun.model.stream import LOOPBACK_REGION, is_aws_region, is_loopback
from kclrun.model.text import without_secrets
from kclrun.model.wire import WireEndpoint

_PROBES: Final[dict[str, tuple[operations.Operation, dict[str, str]]]] = {
    "kinesis": (operations.DESCRIBE_STREAM_SUMMARY, {"StreamName": "probe"}),
    "dynamodb": (operations.DESCRIBE_TABLE, {"TableName": "probe"}),
    "dynamodbstreams": (
        operations.DESCRIBE_STREAM,
        {"StreamArn": "arn:aws:dynamodb:us-east-1:000000000000:table/probe/stream/probe"},
    ),
}


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The connection settings of the configuration; None leaves one to botocore's own sources.

    The time-outs leave room for several attempts within a `failover` of 10 s: a connection within
    a region takes milliseconds, an answer to a conditional write tens of milliseconds.
    """

    region: str | None = None
    profile: str | None = None
    endpoint_url: str | None = None
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 5.0


def open_session(settings: EndpointSettings) -> OwnSession:
    """A botocore session for a profile and region; with an endpoint on this host and no region
    anywhere, for `LOOPBACK_REGION`. Raises: SettingsError for an unknown profile, or configuration
    files of AWS that cannot be read."""
    session = OwnSession(profile=settings.profile)
    if settings.region is not None:
        session.set_config_variable("region", settings.region)
    try:
        if session.get_config_variable("region") is None and "AWS_REGION" in os.environ:
            # The other SDKs read this variable, and containers get it; botocore ignores it.
            session.set_config_variable("region", os.environ["AWS_REGION"])
        session.get_scoped_config()
        if is_loopback(settings.endpoint_url) and session.get_config_variable("region") is None:
            session.set_config_variable("region", LOOPBACK_REGION)
    except ProfileNotFound as error:
        setting = "aws.profile" if settings.profile is not None else "AWS_PROFILE"
        name = error.kwargs["profile"]
        raise SettingsError(f"{setting}: {name!r} is not in the AWS configuration files") from None
    except BotoCoreError as error:
        raise SettingsError(f"the AWS configuration files cannot be used: {error}") from None
    return session


def resolve_endpoint(
    session: botocore.session.Session, service: str, settings: EndpointSettings
) -> WireEndpoint:
    """The endpoint of `kinesis`, `dynamodb` or `dynamodbstreams` as botocore would use it. Sends
    nothing.

    Raises: SettingsError where botocore finds no region or rejects the settings.
    """
    try:
        probed = _probe_anywhere(session, service, settings)
    except (BotoCoreError, ValueError) as error:
        words = without_secrets(str(error))
        raise SettingsError(f"the {service} endpoint cannot be resolved: {words}") from None
    parts = urlsplit(probed["url"])
    if "@" in parts.netloc or parts.query:
        raise SettingsError(
            f"the {service} endpoint has a user, a password or a query: none has a place there\n"
            f"Correct AWS_ENDPOINT_URL or AWS_ENDPOINT_URL_{service.upper()}, or the profile"
        )
    region = probed["region"]
    # botocore makes a host name of any word. DNS does not know the name of a wrong one.
    if f".{region}.amazonaws.com" in str(parts.hostname) and not is_aws_region(region):
        raise SettingsError(
            f"{region} is not a region of AWS: expected one such as eu-west-1 in aws.region, in"
            " AWS_REGION or in the profile"
        )
    return WireEndpoint(
        url=f"{parts.scheme}://{parts.netloc}{parts.path}",
        region=region,
        signing_region=probed["signing_region"],
        ca_bundle=ca_bundle(session) if parts.scheme == "https" else None,
        proxies=proxies_for(probed["url"]),
        connect_timeout_s=settings.connect_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )


def _probe_anywhere(
    session: botocore.session.Session, service: str, settings: EndpointSettings
) -> dict[str, str]:
    """The probe. An endpoint on this host needs no region; AWS_ENDPOINT_URL may name one too."""
    try:
        return _probe(session, service, settings, region=None)
    except NoRegionError:
        probed = _probe(session, service, settings, region=LOOPBACK_REGION)
        if is_loopback(probed["url"]):
            return probed
    raise SettingsError("no AWS region: set aws.region, AWS_REGION, or a region in the profile")


def _probe(
    session: botocore.session.Session,
    service: str,
    settings: EndpointSettings,
    *,
    region: str | None,
) -> dict[str, str]:
    operation, arguments = _PROBES[service]
    client = session.create_client(
        service,
        region_name=region,
        endpoint_url=settings.endpoint_url,
        aws_access_key_id="probe",
        aws_secret_access_key="probe",  # noqa: S106 - made up, and never sent
    )
    caught: dict[str, str] = {"region": client.meta.region_name}

    def catch(request: Any, **_: Any) -> AWSResponse:
        caught["url"] = request.url
        scope = _text(request.headers["Authorization"]).partition("Credential=")[2].split("/")
        caught["signing_region"] = scope[2]
        return AWSResponse(request.url, 200, HTTPHeaders(), _NoBody())

    # The type stubs say that handlers return nothing. But if a before-send handler returns an
    # answer, botocore does not send the request.
    events: Any = client.meta.events
    events.register(
        f"before-send.{client.meta.service_model.service_id.hyphenize()}.{operation.name}", catch
    )
    getattr(client, xform_name(operation.name))(**arguments)
    return caught


class _NoBody:
    """The empty raw body of the answer to a caught probe."""

    def stream(self, **_: Any) -> list[bytes]:
        return [b"{}"]


def _text(header: str | bytes) -> str:
    return header.decode("ascii") if isinstance(header, bytes) else header
