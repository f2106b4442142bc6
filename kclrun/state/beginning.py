"""The state with which a lease begins, by its row and the rows of its parents [K13, K16]; and which
records have to be read to make a lost state again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange, ShardGraph, hash_key_of
from kclrun.model.state import OF_PARENTS
from kclrun.model.stream import shard_id_of
from kclrun.model.time import WallTime
from kclrun.state.chain import Entries
from kclrun.state.timers import WATERMARK, merged_watermark

BOTH_HAVE: Final = "both parents have state for one key"


class Empty(msgspec.Struct, frozen=True):
    """Nothing was processed before: the state is empty."""


class OwnVersion(msgspec.Struct, frozen=True):
    """The version that the row names."""

    name: str


class ParentVersions(msgspec.Struct, frozen=True):
    """The versions that the rows of the parents name, with the lease key of each parent."""

    versions: tuple[tuple[LeaseKey, str], ...]


Beginning = Empty | OwnVersion | ParentVersions


def parents_to_read(row: Lease) -> tuple[LeaseKey, ...]:
    """The parents whose rows decide where this lease begins; none if its own row does."""
    if row.state_version not in {None, OF_PARENTS}:
        return ()
    return tuple(LeaseKey(parent) for parent in sorted(row.parents))


def beginning(
    row: Lease, parents: Mapping[LeaseKey, Lease | None], *, may_begin_empty: bool = False
) -> Beginning:
    """Where the claimed lease takes its state from; `parents` has the rows of `parents_to_read`.

    `may_begin_empty`: by its settings, the application ran without state so far. Then a lease
    begins empty if its row names no version, and so do parents. A row that names a version never
    begins empty. Raises: SettingsError, in words, if records were processed and only an empty state
    is left for them [V8].
    """
    own = row.state_version
    if own is not None and own != OF_PARENTS:
        return OwnVersion(own)
    if not row.checkpoint.is_sentinel:
        if may_begin_empty and own is None:
            return Empty()
        raise SettingsError(
            f"the lease is at {row.checkpoint}, and its row names no version of the state: records"
            " were processed without state. To begin with an empty state at this position, set"
            " state.begin: empty; to have the state of those records, too, begin again under a new"
            " name of the application"
        )
    known = {key: parent for key, parent in parents.items() if parent is not None}
    if own == OF_PARENTS and len(known) < len(parents):
        gone = ", ".join(sorted(set(parents) - set(known)))
        raise SettingsError(
            f"the row of {gone} is gone, and this shard's state begins with the version that it"
            " named: restore that row"
        )
    if may_begin_empty:
        with_state = {key: each for key, each in known.items() if _has_state(each)}
        known = with_state if with_state or own != OF_PARENTS else known
    if own == OF_PARENTS or known:
        return ParentVersions(tuple((key, _version_of(known[key])) for key in sorted(known)))
    return Empty()


def _has_state(parent: Lease) -> bool:
    """False for a parent that was read to its end without state."""
    return parent.state_version is not None or not parent.is_ended


def _version_of(parent: Lease) -> str:
    version = parent.state_version
    if version is None or version == OF_PARENTS or parent.is_moved_past_outputs:
        raise SettingsError(
            f"the row of its parent {parent.key} names no version of the state at"
            f" {parent.checkpoint}: that shard was read without state. If that was before the"
            " application had `state`, set state.begin: empty"
        )
    if not parent.is_ended:
        raise SettingsError(f"its parent {parent.key} has not ended, at {parent.checkpoint}")
    return version


def inherited(parts: Iterable[Entries], hash_range: HashRange | None) -> Entries:
    """The entries of a child: those of its parents whose keys are in its hash range, with their
    timers; and the watermark of its parents, of two the smaller.

    Raises: SettingsError if the range is not known, or both parents have a key.
    """
    known = known_range(hash_range)
    entries: Entries = {}
    shard, of = WATERMARK
    watermarks = []
    for part in parts:
        watermarks.append(part.get(shard, {}).get(of))
        for key, values in part.items():
            if key != shard and hash_key_of(key) in known:
                if key in entries:
                    raise SettingsError(BOTH_HAVE)
                entries[key] = dict(values)
    if (watermark := merged_watermark(watermarks, SHARD_END)) is not None:
        entries[shard] = {of: watermark}
    return entries


def known_range(hash_range: HashRange | None) -> HashRange:
    """Raises: SettingsError if it is not known."""
    if hash_range is None:
        raise SettingsError(
            "the row has no hash range, so the keys of its parents' state cannot be divided:"
            " `kclrun doctor --yes` writes it"
        )
    return hash_range


# A state follows from the records of its shard and of the ancestors, up to the checkpoint. So a
# lost state can be made again while the stream holds all of these records.

_SAY_FROM: Final = (
    "Say with --from where the replay begins: the state will lack what earlier records left"
)


class KeptSince(msgspec.Struct, frozen=True):
    """What a stream keeps: the records that arrived at `since` or later. It was created at
    `created_at`."""

    since: WallTime
    created_at: WallTime


def stops_of(
    targets: Collection[Lease], rows: Mapping[str, Lease], shards: ShardGraph
) -> dict[str, ExtendedSequenceNumber]:
    """Up to which position each shard is read, by its id: the checkpoint of a target, whose state
    is made, and the end of an ancestor. `rows` are all rows of the stream, by shard id.

    Raises: SettingsError for a shard that is not listed any more: its records have expired; and
    where an ancestor has not ended.
    """
    stops: dict[str, ExtendedSequenceNumber] = {}
    waiting: list[str] = []
    for row in targets:
        shard_id = shard_id_of(row.key)
        if shard_id not in shards:
            raise SettingsError(
                f"{shard_id} is not listed any more: its records have expired, and its state"
                " cannot be made again"
            )
        stops[shard_id] = SHARD_END if row.is_ended else row.checkpoint.of_record
        waiting.append(shard_id)
    while waiting:
        child = waiting.pop()
        for parent in shards.parents_of(child):
            known = rows.get(parent)
            if known is not None and not known.is_ended:
                raise SettingsError(f"the parent {parent} of {child} has not ended")
            if parent not in stops:
                waiting.append(parent)
            stops[parent] = SHARD_END
    return stops


def beginning_of(
    read: Iterable[str], rows: Mapping[str, Lease], shards: ShardGraph, kept: KeptSince
) -> WallTime | None:
    """The instant from which the shards `read` are replayed, so that no record is missing; None:
    from the oldest record of the stream.

    It is where the application began, by its rows. Raises: SettingsError if the stream does not
    hold all records from there on, or if the rows do not have it.
    """
    for shard_id in read:
        lost = [parent for parent in shards[shard_id].parents if parent not in shards]
        if lost:
            raise SettingsError(
                f"the stream does not hold the beginning any more: {lost[0]}, the parent of"
                f" {shard_id}, has expired\n{_SAY_FROM}"
            )
    starts = {row.start for row in rows.values() if row.start is not None}
    if len(starts) != 1:
        why = "their owners began with different settings" if starts else "no owner wrote it"
        raise SettingsError(f"the rows do not say where the application began: {why}\n{_SAY_FROM}")
    began = _instant_of(starts.pop(), rows.values())
    if (kept.created_at if began is None else began) < kept.since:
        raise SettingsError(
            "the stream does not hold the beginning any more: records of before its retention have"
            f" expired\n{_SAY_FROM}"
        )
    return began


def _instant_of(start: str, rows: Iterable[Lease]) -> WallTime | None:
    if start == TRIM_HORIZON.sequence_number:
        return None
    if start == LATEST.sequence_number:
        pins = {row.latest_pinned_at for row in rows if row.latest_pinned_at is not None}
        if len(pins) != 1:
            raise SettingsError(f"the rows do not say which instant LATEST was\n{_SAY_FROM}")
        return pins.pop()
    try:
        return WallTime(datetime.fromisoformat(start).timestamp())
    except ValueError:
        raise SettingsError(
            f"the rows say that the application began at {start[:60]!r}, which is not an instant"
            f"\n{_SAY_FROM}"
        ) from None
