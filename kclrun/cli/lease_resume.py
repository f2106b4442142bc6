"""`kclrun leases resume`: the plan, and with `--yes` the writes; what became of each is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.cli.lease_views import shortened
from kclrun.cli.lease_writes import lease_of, tell_failure
from kclrun.cli.messages import harmless
from kclrun.model.changes import ResumeLease
from kclrun.model.lease import Lease
from kclrun.model.outcomes import Applied, ConditionFailed

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["resume"]


def resume(aws: Aws, shards: Sequence[str], *, is_confirmed: bool) -> int:
    """Show what resuming these leases would do, or do it; the exit code.

    Raises: NotFound for a shard without a lease (before anything is written); a ServiceError leaf.
    """
    rows = [lease_of(aws, shard) for shard in shards]
    halted = [lease for lease in rows if lease.halt is not None]
    for lease in rows:
        click.echo(_plan(lease))
    if not halted:
        click.echo("Nothing to do.")
        return exit_codes.DRAINED
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    codes = [_write(aws, lease) for lease in halted]
    return next((code for code in codes if code), exit_codes.DRAINED)


def _plan(lease: Lease) -> str:
    if lease.halt is None:
        return f"{lease.key}: is not halted"
    reason = harmless(lease.halt.reason).split("\n", 1)[0]
    position = shortened(str(lease.checkpoint))
    return f"{lease.key}: goes on after {position}; it was halted because: {reason}"


def _write(aws: Aws, lease: Lease) -> int:
    outcome = aws.table.write(ResumeLease(lease.key))
    match outcome:
        case Applied():
            click.echo(f"{lease.key}: resumed")
            return exit_codes.DRAINED
        case ConditionFailed():
            click.echo(f"{lease.key}: was not halted any more")
            return exit_codes.DRAINED
        case _:
            return tell_failure(lease.key, outcome)
