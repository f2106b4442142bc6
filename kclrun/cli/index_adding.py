"""`kclrun init --add-index`: the plan, and with `--yes` the owner index, waited for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kclrun.aws.index_setup import (
    INDEX_WAIT_S,
    IndexState,
    add_owner_index,
    inspect_owner_index,
)
from kclrun.aws.owner_index import OWNER_INDEX
from kclrun.cli import exit_codes
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["add_index"]


def add_index(aws: Aws, *, is_confirmed: bool) -> int:
    """Show what adding the index would do, or do it and wait; the exit code.

    Raises: TableRefused (no such table, other keys); Unavailable if it takes longer than
    `INDEX_WAIT_S`; AccessDenied and other ServiceError leaves.
    """
    table = aws.settings.table
    state = inspect_owner_index(aws.control.dynamodb_reads(), table)
    if state.is_active:
        click.echo(f"{table} has its index {OWNER_INDEX} already. Nothing to do.")
        return exit_codes.DRAINED
    click.echo(_plan(table, state))
    if not is_confirmed:
        click.echo("Nothing was changed. To do it, add --yes")
        return exit_codes.DRAINED
    began = time.monotonic()
    add_owner_index(
        aws.control,
        table,
        tell=click.echo,
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
    )
    click.echo(f"{OWNER_INDEX} is ACTIVE, after {time.monotonic() - began:.0f} s")
    return exit_codes.DRAINED


def _plan(table: str, state: IndexState) -> str:
    if state.status is not None:
        return f"{table}: index {OWNER_INDEX} is {state.status}; with --yes this waits for it"
    billing = "on demand, as the table is"
    if state.capacity is not None:
        read, write = state.capacity
        billing = f"provisioned as the table is: {read} read and {write} write units more to pay"
    return (
        f"{table}: add index {OWNER_INDEX} (leaseOwner, leaseKey; keys only; {billing})\n"
        "AWS needs minutes for it, 15 to 20 have been seen; the fleet runs on meanwhile.\n"
        f"This waits up to {INDEX_WAIT_S / 60:.0f} minutes; Ctrl-C stops the waiting, not the work."
    )
