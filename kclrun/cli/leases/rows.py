"""Rows of the lease table for operators: one row by the name of its shard, and the one way to write
many rows, of which some may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.leases.views import scan_table
from kclrun.cli.messages import echo, naming_table
from kclrun.cli.tables import most_on_terminal
from kclrun.errors import KclrunError, NotFound
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream import display_name, shard_id_of, spelled_out
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
    found = [
        lease for lease in leases if shard in (display_name(lease.key), shard_id_of(lease.key))
    ]
    if len(found) > 1:
        # The same name twice: the stream was deleted and created again, and its old rows remain.
        names = {display_name(lease.key) for lease in found}
        exact = sorted(names if len(names) == len(found) else (lease.key for lease in found))
        raise click.UsageError(f"Several streams have a shard {shard}: name {' or '.join(exact)}.")
    return found[0] if found else None


Failure = writes.OutcomeUnknown | writes.Throttled | writes.Unavailable | writes.Refused
RowOutcome = writes.Outcome | KclrunError
RowT = TypeVar("RowT")
CHANGED_MEANWHILE: Final = "its row has changed meanwhile: is a manager running?"

# As many as the client has connections. One write a row, at some 5 ms: 1,000 rows take a second.
_AT_ONCE: Final = 8
# In the terminal; a fleet of 1,000 rows would fill 20 screens with one reason.
_FAILURES_SHOWN_MAX: Final = 20


def write_rows(
    rows: Sequence[RowT], write: Callable[[RowT], RowOutcome], at_once: int | None = None
) -> list[tuple[RowT, RowOutcome]]:
    """Write each of these rows, several at once; the rows with their outcomes, in their order.

    A row that fails does not stop the others. An error of `write` is the outcome of its row.
    """

    def written(row: RowT) -> RowOutcome:
        try:
            return write(row)
        except KclrunError as error:
            return error

    with ThreadPoolExecutor(at_once or _AT_ONCE) as pool:
        return list(zip(rows, pool.map(written, rows), strict=True))


def print_failures(
    failed: Sequence[tuple[LeaseKey, RowOutcome]], condition_failed: str = CHANGED_MEANWHILE
) -> int:
    """Name each row whose write did not apply, with the reason; the exit code, 0 for no rows.
    `condition_failed` is the reason if the row was not as it was seen."""
    shown = failed[: most_on_terminal(_FAILURES_SHOWN_MAX)]
    for key, outcome in shown:
        echo(f"{display_name(key)}: {_reason(outcome, condition_failed)}", err=True)
    if len(shown) < len(failed):
        echo(f"… and {len(failed) - len(shown)} more rows", err=True)
    return max((_exit_code(outcome) for _, outcome in failed), default=exit_codes.DRAINED)


def print_failure(key: LeaseKey, outcome: RowOutcome) -> int:
    """Name one row whose write did not apply, with the reason; the exit code."""
    return print_failures([(key, outcome)])


def _reason(outcome: RowOutcome, condition_failed: str) -> str:
    match outcome:
        case writes.OutcomeUnknown(message):
            return f"no answer; look again before repeating ({message})"
        case writes.Throttled(message) | writes.Unavailable(message):
            return f"nothing happened, try again ({message})"
        case writes.Refused(message=message):
            return f"refused: {message}"
        case writes.ConditionFailed():
            return condition_failed
        case writes.Applied():
            return "written"
        case KclrunError():
            return str(outcome)
        case _:
            assert_never(outcome)


def _exit_code(outcome: RowOutcome) -> int:
    match outcome:
        case writes.OutcomeUnknown() | writes.Throttled() | writes.Unavailable():
            return exit_codes.UNAVAILABLE
        case writes.Refused():
            return exit_codes.PERMISSION
        case writes.ConditionFailed():
            return exit_codes.CUT_SHORT
        case writes.Applied():
            return exit_codes.DRAINED
        case KclrunError():
            return exit_codes.exit_code_of(outcome)
        case _:
            assert_never(outcome)
