"""What the verbs that change a lease share: reading its row, and telling why a write failed."""

from __future__ import annotations

from collections.abc import Iterable
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
from kclrun.model.stream_key import called, shard_id_of

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["lease_of", "tell_failure"]


def lease_of(aws: Aws, shard: str) -> Lease:
    """The row of a shard, read consistently: by its lease key, or among several streams also by
    `stream:shard`, or by a shard id that one stream alone has.

    Raises: NotFound; click.UsageError for a shard of several streams; a ServiceError leaf.
    """
    lease = aws.table.read(LeaseKey(shard))
    if lease is None and aws.settings.streams:
        lease = _meant(shard, (row for page in aws.table.scan() for row in page.leases))
    if lease is None:
        raise NotFound(f"table {aws.settings.table} has no lease for {shard}")
    return lease


def _meant(shard: str, leases: Iterable[Lease]) -> Lease | None:
    """The lease that a person means by a part of its key."""
    found = [lease for lease in leases if shard in (called(lease.key), shard_id_of(lease.key))]
    if len(found) > 1:
        # The same name twice: the stream was deleted and made again, and left its rows behind.
        names = {called(lease.key) for lease in found}
        exact = sorted(names if len(names) == len(found) else (lease.key for lease in found))
        raise click.UsageError(f"Several streams have a shard {shard}: say {' or '.join(exact)}.")
    return found[0] if found else None


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
