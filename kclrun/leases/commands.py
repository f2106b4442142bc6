"""The commands of the lease manager's core: imperative, one shell function each."""

from __future__ import annotations

import msgspec

from kclrun.model.lease import LeaseKey
from kclrun.model.stream import ONLY_STREAM, StreamKey
from kclrun.model.time import Instant
from kclrun.protocol.writes import LeaseChange


class ScanTable(msgspec.Struct, frozen=True):
    """Scan the whole lease table; comes back as LeasesScanned. `consistent`: read the current
    state; else the rows may be a moment old, for half the read units [P9]."""

    consistent: bool = True


class ListShards(msgspec.Struct, frozen=True):
    """List all shards of a stream; comes back as ShardsListed. `with_start` also lists by the start
    filter."""

    with_start: bool = False
    stream: StreamKey = ONLY_STREAM


class DescribeStream(msgspec.Struct, frozen=True):
    """Ask the service when a stream was created; comes back as StreamDescribed [P13]."""

    stream: StreamKey = ONLY_STREAM


class ReadRow(msgspec.Struct, frozen=True):
    """Read one row consistently and retry until it succeeds; comes back as RowRead, or at once as
    RowUnreadable. Not before `not_before`."""

    key: LeaseKey
    not_before: Instant | None = None


class ReadParents(msgspec.Struct, frozen=True):
    """Read the parents' rows consistently; comes back as ParentsRead [P11]."""

    key: LeaseKey
    parents: tuple[LeaseKey, ...]


class ReadKcl3Mode(msgspec.Struct, frozen=True):
    """Read the mode of a KCL 3 fleet where early KCL 3 versions keep it, outside of the lease
    table; comes back as Kcl3ModeRead, or at once as Kcl3ModeUnreadable [P8]."""


class FindOffers(msgspec.Struct, frozen=True):
    """Look for offered rows by the index, once; comes back as OffersFound [P17]."""

    rows_max: int


class WriteRow(msgspec.Struct, frozen=True):
    """Send one change once; comes back as WriteResolved. Not before `not_before` (back-off)."""

    change: LeaseChange
    not_before: Instant | None = None


class StartProcess(msgspec.Struct, frozen=True):
    """Start a lease process for a row that is ours. The counter travels in its start command [P4].

    Comes back as ProcessStarted or StartFailed, then as the reports of the process. `has_waited`: a
    failover has passed since a take by force, so its claim removes `takenFrom` [P18].
    """

    key: LeaseKey
    counter: int
    expires_instant: Instant
    has_waited: bool = False


class DrainProcess(msgspec.Struct, frozen=True):
    """Ask a lease process to finish its batch, checkpoint, release and exit."""

    key: LeaseKey
    reason: str


class TellOthersInSight(msgspec.Struct, frozen=True):
    """Send to all lease processes whether another kclrun owner is in sight. If so, they offer the
    leases that they give away; else they release them [P17]. New processes get it in their start
    command."""

    others: bool


class Note(msgspec.Struct, frozen=True):
    """One line for the log: an event of the catalogue, its level and its fields."""

    event: str
    level: str = "info"
    key: LeaseKey | None = None
    fields: dict[str, str | int | float | bool | None] = {}


class StopRefused(msgspec.Struct, frozen=True):
    """The rows belong to another stream than the one that is there [P13]: drain, and do not start
    again before a person has looked. Comes back as DrainRequested."""

    reason: str


class Finish(msgspec.Struct, frozen=True):
    """No lease is ours any more and no write is under way: the manager may exit."""


Command = (
    ScanTable
    | ListShards
    | DescribeStream
    | ReadKcl3Mode
    | ReadRow
    | ReadParents
    | FindOffers
    | WriteRow
    | StartProcess
    | DrainProcess
    | TellOthersInSight
    | Note
    | StopRefused
    | Finish
)
