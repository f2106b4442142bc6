"""Reads a lease table for a query that starts at its checkpoints.

It only reads: no row is changed. If owners still have leases, it only logs a warning: a query
beside a running fleet, from the fleet's current checkpoints, is a legitimate use.
`planning/lease_beginnings.py` decides the positions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from kclrun.errors import NotFound, SettingsError
from kclrun.model.lease import Lease
from kclrun.ports import LeaseTable
from kclrun.spark.planning.lease_beginnings import lease_owners
from kclrun.spark.stream_set import Streams, first_keys, moved, parted, shard_name

_log = logging.getLogger(__name__)


def leases_of(table: LeaseTable, name: str, streams: Streams) -> Mapping[str, Lease]:
    """The rows of these streams by the source's shard names, of one complete consistent scan.

    Raises: NotFound without a table; SettingsError for one without leases, or with rows that
    cannot be read; a ServiceError leaf.
    """
    rows: dict[str, Lease] = {}
    first = first_keys(streams)
    broken: list[str] = []
    try:
        for page in table.scan():
            for lease in page.leases:
                if (shard := _shard_of(lease.key, streams)) is not None:
                    rows[shard] = _placed(lease, shard, first)
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
    leased = {parted(shard)[0] for shard in rows}
    if without := [each.name for of, each in sorted(streams.items()) if of not in leased]:
        raise SettingsError(
            f"startingLeases: table {name} holds no lease of {', '.join(without)}: that"
            " application has read nothing of it yet\nTo go on: say where to begin with"
            " startingOffsets"
        )
    if owners := lease_owners(rows.values()):
        _log.warning(
            "leases of %s still have owners (%s): what those process after their checkpoints of"
            " this moment, this query reads as well. To move an application, stop them first",
            *(name, ", ".join(owners[:5]) + (", …" if len(owners) > 5 else "")),
        )
    return rows


def _shard_of(key: str, streams: Streams) -> str | None:
    """A key is a shard id, or in a table of several streams `account:stream:created:shard`, as the
    Java KCL's `StreamIdentifier` writes it; None for another stream. With several streams, a bare
    shard id does not name one of them, so it is None, too."""
    *of_stream, shard_id = key.split(":")
    for stream, summary in streams.items():
        account = summary.arn.split(":")[4]
        ours = [account, summary.name, str(int(summary.created_at))]
        if of_stream == ours or not (of_stream or stream):
            return shard_name(stream, shard_id)
    return None


def _placed(lease: Lease, shard: str, first: Mapping[str, int]) -> Lease:
    """The row with its keys and parents as the source names them among several streams."""
    stream, _ = parted(shard)
    if not stream:
        return lease
    keys = lease.hash_range
    return msgspec.structs.replace(
        lease,
        hash_range=None if keys is None else moved(keys, first[stream]),
        parents=frozenset(shard_name(stream, parted(each)[1]) for each in lease.parents),
    )


def tell_unleased(name: str, shard_ids: tuple[str, ...]) -> None:
    """Log which shards begin at the oldest record because the table has no row about them."""
    if shard_ids:
        _log.warning(
            "table %s says nothing of %s: read from the oldest record", name, ", ".join(shard_ids)
        )
