"""What the verbs that change a lease share: reading its row, and telling why a write failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.errors import NotFound
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import (
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["lease_of", "tell_failure"]


def lease_of(aws: Aws, shard: str) -> Lease:
    """The row of a shard, read consistently. Raises: NotFound; a ServiceError leaf."""
    lease = aws.table.read(LeaseKey(shard))
    if lease is None:
        raise NotFound(f"table {aws.settings.table} has no lease for {shard}")
    return lease


Failure = OutcomeUnknown | Throttled | Unavailable | Refused


def tell_failure(key: LeaseKey, outcome: Failure) -> int:
    """Say why a write did not apply, for every reason but its condition; the exit code."""
    match outcome:
        case OutcomeUnknown(message=message):
            click.echo(f"{key}: no answer; look again before repeating ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case Throttled(message=message) | Unavailable(message=message):
            click.echo(f"{key}: nothing happened, try again ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case Refused(message=message):
            click.echo(f"{key}: refused: {message}", err=True)
            return exit_codes.PERMISSION
