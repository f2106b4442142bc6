"""Which leases to take, and no more than a fair share of them [P15, DESIGN 5 "Assignment"].

Knows: the view of one scan, how many leases we hold. May not know: how they are started.
Rule: target = ceil(work / owners), capped by `leases_max`; all that is missing to it is taken at
once. A lease that somebody renews is never taken here, whoever has too many: see P16.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kclrun.leases.observation import Observation, is_nobody
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import TableView
from kclrun.model.changes import Take
from kclrun.model.lease import Lease, LeaseKey, OwnerId

__all__ = ["left_unread", "plan_takes", "target_of"]

# Who comes first among the takeable: what a former self of ours left, children of shards that
# ended here, then all others in random order, so that managers seldom reach for the same row.
_FORMER, _CHILD, _OTHER = range(3)


def target_of(view: TableView, leases_max: int) -> int:
    """How many leases each owner should hold, so that the owners together hold all the work."""
    share = -(-len(view.work) // len(view.owners))
    return min(share, leases_max)


def plan_takes(
    view: TableView,
    observation: Observation,
    policy: ManagerPolicy,
    *,
    mine: int,
    held: int,
    gone: Set[OwnerId],
    children: Set[LeaseKey],
    is_busy: Callable[[LeaseKey], bool],
    chance: Callable[[], float],
) -> tuple[Take, ...]:
    """The takes to send now. `mine` are the leases in our hands that are work, takes included;
    `held` all that fill a place: a child that waits for its parents here fills one without being
    work, and must not keep us from taking the very parent it waits for.

    `gone` are owners proven dead; `children` of shards we just ended; `is_busy` rows have a write
    of ours under way or are held. Beyond the target, up to `leases_max`, only what stood takeable
    for three failovers: then its fair owner is full or blind, and a shard must not wait.
    """
    ranked = []
    for lease in view.work:
        rank = _rank(lease, view, observation, gone=gone, children=children)
        if rank is not None and lease.owner != policy.me and not is_busy(lease.key):
            ranked.append((rank, chance(), lease.key, lease))
    ranked.sort()
    missing = max(0, target_of(view, policy.leases_max) - mine)
    room = max(0, policy.leases_max - held)
    missing = min(missing, room)
    chosen = [lease for *_, lease in ranked[:missing]]
    now = view.seen_instant
    overdue = (
        lease
        for *_, lease in ranked[missing:]
        if observation.unchanged_s(lease, now) >= policy.overdue_after_s
    )
    chosen += [lease for lease, _ in zip(overdue, range(room - missing), strict=False)]
    return tuple(_take(lease, policy) for lease in chosen)


def left_unread(
    view: TableView,
    observation: Observation,
    policy: ManagerPolicy,
    is_busy: Callable[[LeaseKey], bool],
) -> tuple[LeaseKey, ...]:
    """The work that stood free for three failovers and that we do not take either: nobody reads
    it, because every owner is full or cannot see it. No shard may stand still unnoticed."""
    return tuple(
        lease.key
        for lease in view.work
        if (is_nobody(lease.owner) or lease.key in view.expired)
        and observation.unchanged_s(lease, view.seen_instant) >= policy.overdue_after_s
        and not is_busy(lease.key)
    )


def _rank(
    lease: Lease,
    view: TableView,
    observation: Observation,
    *,
    gone: Set[OwnerId],
    children: Set[LeaseKey],
) -> int | None:
    """The place of a lease among the takeable, or None if it is not one of them."""
    if lease.owner in gone:
        return _FORMER
    if is_nobody(lease.owner):
        # A KCL 3 worker in the middle of a hand-off still owns what `checkpointOwner` says [P8].
        if lease.checkpoint_owner and not observation.has_expired(lease, view.seen_instant):
            return None
    elif lease.key not in view.expired:
        return None
    return _CHILD if lease.key in children else _OTHER


def _take(lease: Lease, policy: ManagerPolicy) -> Take:
    return Take(
        key=lease.key,
        owner=policy.me,
        seen_owner=lease.owner,
        seen_counter=lease.counter,
        failover_s=policy.failover_s,
        start=policy.start_text,
    )
