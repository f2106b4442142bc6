"""The client of one stream for a program of its own: a producer, or a reading without leases."""

from __future__ import annotations

from typing import NamedTuple

from kclrun.aws.changes.stream import endpoint_service, signing_service
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.wire import WireClient


class StreamClient(NamedTuple):
    """The client, and the address that it uses. Nothing has been sent."""

    client: WireClient
    url: str


def open_stream_client(
    stream: str, settings: EndpointSettings, *, role_arn: str | None = None
) -> StreamClient:
    """A client for a stream, by name or ARN.

    Raises: SettingsError (no region, unknown profile, an endpoint that cannot be used).
    """
    session = open_session(settings)
    endpoint = resolve_endpoint(session, endpoint_service(stream), settings)
    credentials = CredentialSource(session, endpoint_url=endpoint.url, role_arn=role_arn)
    client = WireClient(
        endpoint,
        credentials.current,
        service=signing_service(stream),
        reread=credentials.reread,
    )
    return StreamClient(client, endpoint.url)
