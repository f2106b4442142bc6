"""Maps botocore's errors to our error classes. Only this module inspects botocore's errors."""

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

NO_CREDENTIALS: Final = "NoCredentials"

# The exceptions of a client call and of the first use of its answer. http.client accepts an answer
# that was cut off inside its head as complete. botocore then fails on it: a checksum cannot be
# parsed (ValueError), or a member is missing that every answer has (KeyError).
BOTO_FAILURES: Final = (ClientError, BotoCoreError, ResponseParserError, ValueError, KeyError)

# botocore's code for a 400 whose body names no error. The services always name one. http.client
# takes an answer that was cut off inside its head for a complete answer without a body.
_NAMELESS: Final = "400"

_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def from_botocore(operation: Operation, error: Exception) -> ServiceError:
    """Our error for one of `BOTO_FAILURES`, by the same rules as in the wire client."""
    if isinstance(error, ClientError):
        response: dict[str, Any] = dict(error.response)
        named = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(named.get("Code", ""))
        if code == _NAMELESS:
            silent = ErrorReply(message="an error without a name: the answer was cut short")
            return service_error(operation, silent, None)
        return service_error(
            operation, ErrorReply(code=code, message=named.get("Message", "")), status
        )
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
