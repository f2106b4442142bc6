"""How the embedded Kinesis says no: AWS's error names on the leaves of our own error tree.

Rule: a message names streams, shards, limits and numbers; never a payload, a partition key, an
iterator or a token. Source: the error sections of the Kinesis API reference. Look next:
`operations.py`, which turns them into HTTP answers.
"""

from __future__ import annotations

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound, Throttled, Unavailable

__all__ = [
    "expired_iterator",
    "expired_token",
    "invalid_argument",
    "limit_exceeded",
    "resource_in_use",
    "resource_not_found",
    "throughput_exceeded",
    "unknown_operation",
    "validation",
]


def resource_not_found(message: str) -> NotFound:
    return NotFound(message, code="ResourceNotFoundException")


def resource_in_use(message: str) -> Unavailable:
    """Unavailable, as `ports.classify` reads the code: the same request may succeed later."""
    return Unavailable(message, code="ResourceInUseException")


def invalid_argument(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="InvalidArgumentException")


def validation(message: str) -> InvalidRequest:
    """A single field is outside what the API's schema allows."""
    return InvalidRequest(f"1 validation error detected: {message}", code="ValidationException")


def unknown_operation(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="UnknownOperationException")


def limit_exceeded(message: str) -> Throttled:
    return Throttled(message, code="LimitExceededException")


def throughput_exceeded(message: str) -> Throttled:
    return Throttled(message, code="ProvisionedThroughputExceededException")


def expired_iterator(message: str) -> ExpiredIterator:
    return ExpiredIterator(message, code="ExpiredIteratorException")


def expired_token(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="ExpiredNextTokenException")
