"""The state with which a lease begins, by its row and the rows of its parents [K13, K16]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import HashRange, hash_key_of
from kclrun.model.state import OF_PARENTS
from kclrun.state.chain import Entries
from kclrun.state.timers import WATERMARK, merged_watermark

BOTH_HAVE: Final = "both parents have state for one key"


class Empty(msgspec.Struct, frozen=True):
    """Nothing was processed before: the state is empty."""


class OwnVersion(msgspec.Struct, frozen=True):
    """The version that the row names."""

    name: str


class ParentVersions(msgspec.Struct, frozen=True):
    """What the parents' rows name, each by its lease key."""

    versions: tuple[tuple[LeaseKey, str], ...]


Beginning = Empty | OwnVersion | ParentVersions


def parents_to_read(row: Lease) -> tuple[LeaseKey, ...]:
    """The parents whose rows decide where this lease begins; none if its own row does."""
    if row.state_version not in {None, OF_PARENTS}:
        return ()
    return tuple(LeaseKey(each) for each in sorted(row.parents))


def beginning(
    row: Lease, parents: Mapping[LeaseKey, Lease | None], *, may_begin_empty: bool = False
) -> Beginning:
    """Where the claimed lease takes its state from; `parents` has the rows of `parents_to_read`.

    `may_begin_empty`: an operator said that the application ran without state so far. Then a row
    that names no version begins empty, and so do those of its parents. A row that names one never
    does. Raises: SettingsError, in words, where only an empty state would be left for records that
    were processed. [V8]
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
    """False for a shard that was read to its end without state."""
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
    """The entries of a child: those of its parents whose keys belong to its hash range, with their
    timers; and their watermark, of two the smaller.

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
            "the row has no hash range, so the keys of its parents' state cannot be told apart:"
            " `kclrun doctor --yes` writes it"
        )
    return hash_range
