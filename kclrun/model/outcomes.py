"""What became of a write to the lease table. Each way it can go is a type, not a flag."""

from __future__ import annotations

import msgspec

from kclrun.model.lease import Lease

__all__ = [
    "Applied",
    "ConditionFailed",
    "Outcome",
    "OutcomeUnknown",
    "Refused",
    "Throttled",
    "Unavailable",
]


class Applied(msgspec.Struct, frozen=True):
    """A success reply. `row` is the row after the write; None after a delete or a creation."""

    row: Lease | None = None


class ConditionFailed(msgspec.Struct, frozen=True):
    """The condition did not hold. `row` is the row that stands there; None if there is none,
    or if the service did not return it (CreateChildren)."""

    row: Lease | None = None


class Throttled(msgspec.Struct, frozen=True):
    """Nothing happened; ask again after a pause."""

    message: str


class Unavailable(msgspec.Struct, frozen=True):
    """The request did not reach the service (refused connection, no address): nothing happened."""

    message: str


class OutcomeUnknown(msgspec.Struct, frozen=True):
    """It may have happened, or may still happen: time-out, broken connection, 5xx [P6]."""

    message: str


class Refused(msgspec.Struct, frozen=True):
    """The service will not do it and repeating will not help (permission, missing table, …)."""

    code: str
    message: str


Outcome = Applied | ConditionFailed | Throttled | Unavailable | OutcomeUnknown | Refused
