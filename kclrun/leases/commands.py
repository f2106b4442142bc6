"""What to do next, as the lease manager's core says it: imperative, a shell function each."""

from __future__ import annotations

import msgspec

from kclrun.model.changes import LeaseChange
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant

__all__ = [
    "Command",
    "DrainProcess",
    "Finish",
    "ListShards",
    "Note",
    "ReadParents",
    "ReadRow",
    "ScanTable",
    "StartProcess",
    "WriteRow",
]


class ScanTable(msgspec.Struct, frozen=True):
    """Scan the whole lease table; comes back as LeasesScanned."""


class ListShards(msgspec.Struct, frozen=True):
    """List all shards; comes back as ShardsListed. `with_start` also lists by the start filter."""

    with_start: bool = False


class ReadRow(msgspec.Struct, frozen=True):
    """Read one row consistently, for as long as it takes; comes back as RowRead."""

    key: LeaseKey


class ReadParents(msgspec.Struct, frozen=True):
    """Read the parents' rows consistently; comes back as ParentsRead [P11]."""

    key: LeaseKey
    parents: tuple[LeaseKey, ...]


class WriteRow(msgspec.Struct, frozen=True):
    """Send one change once; comes back as WriteResolved. Not before `not_before` (back-off)."""

    change: LeaseChange
    not_before: Instant | None = None


class StartProcess(msgspec.Struct, frozen=True):
    """Start a lease process for a row that is ours. The counter travels in its start command [P4].

    Comes back as ProcessStarted or StartFailed, then as what the process reports.
    """

    key: LeaseKey
    counter: int
    expires_instant: Instant


class DrainProcess(msgspec.Struct, frozen=True):
    """Tell a lease process to finish its batch, checkpoint, release and exit."""

    key: LeaseKey
    reason: str


class Note(msgspec.Struct, frozen=True):
    """One line for the log: an event of the catalogue, its level and its fields."""

    event: str
    level: str = "info"
    key: LeaseKey | None = None
    fields: dict[str, str | int | float | bool | None] = {}


class Finish(msgspec.Struct, frozen=True):
    """Nothing is ours any more and nothing is under way: the manager may exit."""


Command = (
    ScanTable
    | ListShards
    | ReadRow
    | ReadParents
    | WriteRow
    | StartProcess
    | DrainProcess
    | Note
    | Finish
)
