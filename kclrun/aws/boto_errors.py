"""botocore's errors to our leaves, for the control plane. The only place that looks inside them."""

from __future__ import annotations

from typing import Any, Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ProxyConnectionError,
)

from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import Operation
from kclrun.errors import AccessDenied, ServiceError

__all__ = ["NO_CREDENTIALS", "from_botocore"]

NO_CREDENTIALS: Final = "NoCredentials"

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def from_botocore(operation: Operation, error: ClientError | BotoCoreError) -> ServiceError:
    """The leaf for an error of a botocore client: same rules as the wire client's."""
    if isinstance(error, ClientError):
        response: dict[str, Any] = dict(error.response)
        named = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        reply = ErrorReply(code=named.get("Code", ""), message=named.get("Message", ""))
        return service_error(operation, reply, status)
    if isinstance(error, NoCredentialsError):
        return AccessDenied(
            f"{operation.name}: no AWS credentials", operation=operation.name, code=NO_CREDENTIALS
        )
    return service_error(
        operation,
        ErrorReply(message=type(error).__name__),
        None,
        was_sent=not isinstance(error, _NOT_SENT),
    )
