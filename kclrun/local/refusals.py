"""The refusals of the embedded Kinesis: our error classes with AWS's error names.

A message names streams, shards, limits and numbers; never a payload, a partition key, an iterator
or a token. Source: the error sections of the Kinesis API reference. `operations.py` converts the
errors to HTTP answers.
"""

from __future__ import annotations

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound, Throttled, Unavailable


def resource_not_found(message: str) -> NotFound:
    return NotFound(message, code="ResourceNotFoundException")


def resource_in_use(message: str) -> Unavailable:
    """Unavailable, as `ports.classify` does for the code: the same request may succeed later."""
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
