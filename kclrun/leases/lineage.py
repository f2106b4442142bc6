"""Parents first: which leases may be started, as far as rows can say [P11].

Rule: rows of a scan are hints for whom to take; a child is *started* only on the word of
consistent reads (`ReadParents`), which `have_ended` judges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kclrun.model.lease import Lease, LeaseKey

__all__ = ["have_ended", "parent_keys", "seem_over"]


def parent_keys(lease: Lease) -> tuple[LeaseKey, ...]:
    """The keys of the parents' rows, in their order."""
    return tuple(LeaseKey(parent) for parent in sorted(lease.parents))


def have_ended(parents: Iterable[Lease | None]) -> bool:
    """Judge consistent reads: every parent's row is SHARD_END, or absent.

    An absent parent was never ours to read, or was cleaned up: rows come only from the first
    sync, or together with their parents' [P12].
    """
    return all(parent is None or parent.is_ended for parent in parents)


def seem_over(
    lease: Lease, rows: Mapping[LeaseKey, Lease], broken: Collection[str] = frozenset()
) -> bool:
    """Judge the rows of a scan. A parent whose row cannot be read is not over."""
    for shard_id in lease.parents:
        parent = rows.get(LeaseKey(shard_id))
        if parent is not None:
            if not parent.is_ended:
                return False
        elif shard_id in broken:
            return False
    return True
