"""The start of a query at the checkpoints of a lease table: the table read, and what it says told.

Reads only: not a row is changed. That somebody still has leases is warned of and no more: a query
beside a running fleet, from where that stands now, is a use of its own. Look next:
`scout/lease_beginnings.py`, which decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kclrun.errors import NotFound, SettingsError
from kclrun.model.lease import Lease
from kclrun.ports import LeaseTable, StreamSummary
from kclrun.spark.scout.lease_beginnings import lease_owners

__all__ = ["leases_of", "tell_unleased"]

_log = logging.getLogger(__name__)


def leases_of(table: LeaseTable, name: str, stream: StreamSummary) -> Mapping[str, Lease]:
    """The rows of this stream by shard id, of one complete consistent scan.

    Raises: NotFound without a table; SettingsError for one without leases, or with rows that
    cannot be read; a ServiceError leaf.
    """
    rows: dict[str, Lease] = {}
    broken: list[str] = []
    try:
        for page in table.scan():
            for lease in page.leases:
                if (shard_id := _shard_of(lease.key, stream)) is not None:
                    rows[shard_id] = lease
            broken += page.broken
    except NotFound as error:
        raise NotFound(
            f"startingLeases: there is no lease table {name} in this region: name the application"
            " as its configuration does, or its table where leases.table names one",
            operation=error.operation,
            code=error.code,
        ) from None
    if broken:
        raise SettingsError(
            f"startingLeases: of table {name}, {len(broken)} rows cannot be read as leases, such as"
            f" {broken[0][:60]!r}: their shards would be read from elsewhere\nTo go on: mend them,"
            " or give positions in startingOffsets"
        )
    if not rows:
        raise SettingsError(
            f"startingLeases: table {name} holds no lease of {stream.name}: that application has"
            " read nothing of it yet\nTo go on: say where to begin with startingOffsets"
        )
    if owners := lease_owners(rows.values()):
        _log.warning(
            "leases of %s still have owners (%s): what those process after their checkpoints of"
            " this moment, this query reads as well. To move an application, stop them first",
            *(name, ", ".join(owners[:5]) + (", …" if len(owners) > 5 else "")),
        )
    return rows


def _shard_of(key: str, stream: StreamSummary) -> str | None:
    """A key is a shard id, or in a table of several streams `account:stream:created:shard`, as the
    Java KCL's `StreamIdentifier` writes it; None for another stream."""
    *of_stream, shard_id = key.split(":")
    account = stream.arn.split(":")[4]
    ours = [account, stream.name, str(int(stream.created_at))]
    return shard_id if of_stream in ([], ours) else None


def tell_unleased(name: str, shard_ids: tuple[str, ...]) -> None:
    """Say which shards begin at the oldest record, for want of any row about them."""
    if shard_ids:
        _log.warning(
            "table %s says nothing of %s: read from the oldest record", name, ", ".join(shard_ids)
        )
