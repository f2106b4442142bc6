"""One row of the lease table, as an operator names its shard, and the failure of a write of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.leases.views import scan_table
from kclrun.cli.messages import echo, naming_table
from kclrun.errors import NotFound
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream import called, shard_id_of, spelled_out
from kclrun.protocol import writes

if TYPE_CHECKING:
    from kclrun.cli.services import Aws


def aws_of(config: ConfigChoice) -> Aws:
    """As `fleet_aws`, whose module is imported when it is needed."""
    from kclrun.cli.services import fleet_aws

    return fleet_aws(config)


def lease_of(aws: Aws, shard: str) -> Lease:
    """The row of a shard, read consistently. It is found by its lease key or its number (`2`). With
    several streams it is also found by `stream:shard`, or by a shard that only one stream has.

    Raises: NotFound; click.UsageError for a shard of several streams; a ServiceError leaf.
    """
    named = spelled_out(shard)
    with naming_table(aws.settings.table):
        lease = aws.table.read(LeaseKey(named))
    if lease is None and aws.settings.streams:
        lease = _meant(named, scan_table(aws).leases)
    if lease is None:
        raise NotFound(
            f"table {aws.settings.table} has no lease for {named}\nThose it has:  kclrun leases"
        )
    return lease


def _meant(shard: str, leases: Iterable[Lease]) -> Lease | None:
    """The only lease with this part of a key."""
    found = [lease for lease in leases if shard in (called(lease.key), shard_id_of(lease.key))]
    if len(found) > 1:
        # The same name twice: the stream was deleted and created again, and its old rows remain.
        names = {called(lease.key) for lease in found}
        exact = sorted(names if len(names) == len(found) else (lease.key for lease in found))
        raise click.UsageError(f"Several streams have a shard {shard}: name {' or '.join(exact)}.")
    return found[0] if found else None


Failure = writes.OutcomeUnknown | writes.Throttled | writes.Unavailable | writes.Refused


def print_failure(key: LeaseKey, outcome: Failure) -> int:
    """Print why a write did not apply, for every reason except its condition; the exit code."""
    match outcome:
        case writes.OutcomeUnknown(message=message):
            echo(f"{key}: no answer; look again before repeating ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case writes.Throttled(message=message) | writes.Unavailable(message=message):
            echo(f"{key}: nothing happened, try again ({message})", err=True)
            return exit_codes.UNAVAILABLE
        case writes.Refused(message=message):
            echo(f"{key}: refused: {message}", err=True)
            return exit_codes.PERMISSION
