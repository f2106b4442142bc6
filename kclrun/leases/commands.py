"""What to do next, as the lease manager's core says it: imperative, a shell function each."""

from __future__ import annotations

import msgspec

from kclrun.model.changes import LeaseChange
from kclrun.model.lease import LeaseKey
from kclrun.model.stream_key import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant

__all__ = [
    "Command",
    "DrainProcess",
    "FindOffers",
    "Finish",
    "ListShards",
    "Note",
    "ReadParents",
    "ReadRow",
    "ScanTable",
    "StartProcess",
    "TellOthersInSight",
    "WriteRow",
]


class ScanTable(msgspec.Struct, frozen=True):
    """Scan the whole lease table; comes back as LeasesScanned."""


class ListShards(msgspec.Struct, frozen=True):
    """List all shards of a stream; comes back as ShardsListed. `with_start` also lists by the start
    filter."""

    with_start: bool = False
    stream: StreamKey = ONLY_STREAM


class ReadRow(msgspec.Struct, frozen=True):
    """Read one row consistently, for as long as it takes; comes back as RowRead."""

    key: LeaseKey


class ReadParents(msgspec.Struct, frozen=True):
    """Read the parents' rows consistently; comes back as ParentsRead [P11]."""

    key: LeaseKey
    parents: tuple[LeaseKey, ...]


class FindOffers(msgspec.Struct, frozen=True):
    """Look for offered rows by the index, once; comes back as OffersFound [P17]."""

    rows_max: int


class WriteRow(msgspec.Struct, frozen=True):
    """Send one change once; comes back as WriteResolved. Not before `not_before` (back-off)."""

    change: LeaseChange
    not_before: Instant | None = None


class StartProcess(msgspec.Struct, frozen=True):
    """Start a lease process for a row that is ours. The counter travels in its start command [P4].

    Comes back as ProcessStarted or StartFailed, then as what the process reports. `has_waited`: a
    failover has passed since a take by force, so its claim removes `takenFrom` [P18].
    """

    key: LeaseKey
    counter: int
    expires_instant: Instant
    has_waited: bool = False


class DrainProcess(msgspec.Struct, frozen=True):
    """Tell a lease process to finish its batch, checkpoint, release and exit."""

    key: LeaseKey
    reason: str


class TellOthersInSight(msgspec.Struct, frozen=True):
    """Tell all lease processes whether another kclrun owner is in sight: what is given away is
    offered to it then, else released [P17]. New ones are told in their start command."""

    others: bool


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
    | FindOffers
    | WriteRow
    | StartProcess
    | DrainProcess
    | TellOthersInSight
    | Note
    | Finish
)
