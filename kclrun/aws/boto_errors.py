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
from botocore.parsers import ResponseParserError

from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import Operation
from kclrun.errors import AccessDenied, ServiceError

__all__ = ["BOTO_FAILURES", "NO_CREDENTIALS", "from_botocore"]

NO_CREDENTIALS: Final = "NoCredentials"

# What a call of a client raises, with the first look at its answer. One that was cut off inside its
# head passes for a whole one in http.client, and botocore stumbles over it: a checksum is none, or
# a body lacks what every answer has.
BOTO_FAILURES: Final = (ClientError, BotoCoreError, ResponseParserError, ValueError, KeyError)

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def from_botocore(operation: Operation, error: Exception) -> ServiceError:
    """The leaf for one of `BOTO_FAILURES`: same rules as the wire client's."""
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
