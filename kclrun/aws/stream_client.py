"""The client of one stream for a program of its own: a producer, or a reading without leases."""

from __future__ import annotations

from typing import NamedTuple

from kclrun.aws.changes.stream import endpoint_service, signing_service
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.wire import WireClient
from kclrun.errors import SettingsError
from kclrun.model.wire import WireEndpoint


class StreamClient(NamedTuple):
    """The client, and the address that it uses. Nothing has been sent."""

    client: WireClient
    endpoint: WireEndpoint


def open_stream_client(
    stream: str, settings: EndpointSettings, *, role_arn: str | None = None
) -> StreamClient:
    """A client for a stream, by name or ARN.

    Raises: SettingsError (no region, unknown profile, a role or an endpoint that cannot be used).
    """
    if role_arn is not None and not role_arn.startswith("arn:"):
        raise SettingsError("role_arn: expected arn:aws:iam::<account>:role/<name>")
    session = open_session(settings)
    endpoint = resolve_endpoint(session, endpoint_service(stream), settings)
    credentials = CredentialSource(session, endpoint_url=endpoint.url, role_arn=role_arn)
    client = WireClient(
        endpoint,
        credentials.current,
        service=signing_service(stream),
        reread=credentials.reread,
    )
    return StreamClient(client, endpoint)
