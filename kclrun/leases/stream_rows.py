"""Which rows of a lease table are of a stream, among several streams. Pure.

A lease key begins with `<account>:<stream>:<creation>`. The KCL takes that from its settings and
never compares the creation with the stream's. So its rows may have any number there. Rule: rows of
the same account and name whose positions fit the stream are this stream's, and are used under the
key that they have: a Java worker and kclrun then agree on each row. A stream that was deleted and
made again has other positions, and another creation time on the rows that kclrun wrote [P13].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from kclrun.errors import TableRefused
from kclrun.model.lease import Lease
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream import ONLY_STREAM, StreamKey, shard_id_of, stream_name_of, stream_of
from kclrun.model.time import WallTime

_KEYS_SHOWN_MAX: Final = 5


def key_in_table(
    own: StreamKey,
    created_at: WallTime,
    rows: Iterable[Lease],
    shards: Callable[[], Collection[Shard]] | None,
    *,
    table: str,
) -> StreamKey:
    """The key under which the rows of `table` have this stream; `own` if they have it, or do not
    know the stream. `shards` lists the stream; it is asked only if rows have another creation.
    None: the positions are not compared.

    Raises: TableRefused if nothing shows which rows are the stream's.
    """
    by_key: dict[StreamKey, list[Lease]] = {}
    for row in rows:
        stream = stream_of(row.key)
        if stream == own:
            return own
        if _is_same_name(stream, own):
            by_key.setdefault(stream, []).append(row)
    near = {key: found for key, found in by_key.items() if not _is_of_former(found, created_at)}
    if not near:
        return own
    listed = {shard.shard_id: shard for shard in (shards() if shards is not None else ())}
    fits = {key: shards is None or _fit(found, listed) for key, found in near.items()}
    chosen = [key for key, fit in fits.items() if fit]
    unknown = [key for key, fit in fits.items() if fit is None]
    if len(chosen) == 1 and not unknown:
        return chosen[0]
    if not chosen and not unknown:
        return own
    raise TableRefused(_undecided(own, [*chosen, *unknown], table))


def _is_same_name(one: StreamKey, other: StreamKey) -> bool:
    """Whether account and name are the same."""
    return one != ONLY_STREAM and one.rpartition(":")[0] == other.rpartition(":")[0]


def _is_of_former(rows: Iterable[Lease], created_at: WallTime) -> bool:
    """Whether kclrun wrote on a row that the stream was another one."""
    times = (row.stream_created_at for row in rows)
    return any(at is not None and round(at * 1000) != round(created_at * 1000) for at in times)


def _fit(rows: Iterable[Lease], listed: Mapping[str, Shard]) -> bool | None:
    """Whether the positions of the rows are in the shards of the stream. None: no shard of a row
    with a position is listed, so nothing shows it. Rows that have not begun fit any stream."""
    is_known = False
    has_begun = False
    for row in rows:
        shard = listed.get(shard_id_of(row.key))
        has_begun = has_begun or row.has_begun
        if shard is None or not row.has_begun:
            continue
        is_known = True
        if not _is_within(row, shard):
            return False
    return True if is_known or not has_begun else None


def _is_within(row: Lease, shard: Shard) -> bool:
    if row.is_ended:
        return not shard.is_open
    at, last = row.checkpoint, shard.ending_sequence_number
    if at < ExtendedSequenceNumber(shard.starting_sequence_number):
        return False
    return last is None or at.of_record <= ExtendedSequenceNumber(last)


def _undecided(own: StreamKey, keys: Collection[StreamKey], table: str) -> str:
    named = ", ".join(sorted(keys)[:_KEYS_SHOWN_MAX])
    return (
        f"lease table {table} has leases of stream {stream_name_of(own)} under {named}, and the"
        f" stream's own key is {own}: nothing shows which of them are of this stream (the KCL takes"
        " the number from its settings). With the wrong ones records would be read again, or left"
        " out\n"
        "To go on: leave the rows of one key in the table, or name another table (leases.table)"
    )


def near_misses(ours: Iterable[StreamKey], others: Iterable[StreamKey]) -> Mapping[StreamKey, str]:
    """The keys among `others` that resemble a stream of ours, each with the difference in words."""
    ours = tuple(ours)
    found = ((other, _difference(own, other)) for other in set(others) for own in ours)
    return {other: words for other, words in found if words}


def _difference(own: StreamKey, other: StreamKey) -> str:
    if ONLY_STREAM in {own, other} or own == other:
        return ""
    account, name, _ = own.split(":")
    its_account, its_name, its_creation = other.split(":")
    if name.casefold() != its_name.casefold():
        return ""
    if name != its_name:
        return f"{its_name} is written otherwise than {name}, which is read"
    if account != its_account:
        return f"{name} of account {its_account}; the one of account {account} is read"
    return (
        f"{name} with the creation {its_creation} instead of {own.rpartition(':')[2]}: a stream of"
        " that name which was deleted, or one that another program calls so"
    )
