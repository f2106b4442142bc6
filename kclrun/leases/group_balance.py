"""Ties: which owner of another group gives one lease, so that groups come closer to their share.

With 100 + 100 machines over 500 shards each owner holds 2 or 3, and that is all a target asks
for; yet one group may hold 300 and the other 200. So among owners within one lease of each other
one lease moves if that brings the groups' totals closer to their shares: of all work as much as
they have of all owners.
Rule: every manager works out the *same* list of moves from the same view, and makes only its own;
so a hundred managers that plan at once make as many moves as are needed and not a hundred. Each
move makes the sum of squared distances from the shares smaller, so the moves come to an end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from kclrun.leases.owner_hash import owner_hash
from kclrun.leases.standing import Standing, group_of, is_ours_kind
from kclrun.model.lease import OwnerId

__all__ = ["giver_across_groups"]

# The receiver that the list names may be full, and then nobody would move. So once in so many
# cycles, over all receivers of a group together, another one puts itself first.
_OUT_OF_TURN_ONCE_IN = 10


def giver_across_groups(standing: Standing, chance: Callable[[], float]) -> OwnerId | None:
    """The owner to ask for one lease, or None. It holds exactly one more than we do.

    With `surplus` = total - share, a move from one group to another pays while their surpluses
    are more than one apart; at the end no group is further than one lease from its share.
    """
    me, mine = standing.me, standing.mine
    receivers, givers = defaultdict(list), defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    members: dict[str, int] = defaultdict(int)
    for owner in standing.owners:
        group, count = group_of(owner), standing.counts[owner]
        totals[group] += count
        members[group] += 1
        if not is_ours_kind(owner):
            continue
        if count == mine:
            receivers[group].append(owner)
        elif count == mine + 1:
            givers[group].append(owner)
    if not givers or len(members) == 1:
        return None
    owners = len(standing.owners)
    surplus = {g: totals[g] * owners - standing.work * members[g] for g in members}
    first = me if chance() * _OUT_OF_TURN_ONCE_IN * len(receivers[group_of(me)]) < 1 else None
    for queue in (*receivers.values(), *givers.values()):
        queue.sort(key=lambda owner: (owner == first, owner_hash(owner)))  # the last one is next
    return _my_giver(me, surplus, receivers, givers, step=owners)


def _my_giver(
    me: OwnerId,
    surplus: dict[str, int],
    receivers: dict[str, list[OwnerId]],
    givers: dict[str, list[OwnerId]],
    *,
    step: int,
) -> OwnerId | None:
    """Go through the moves, from the fullest group to the emptiest, up to our own.

    Surpluses are multiplied by the number of owners (`step`), so that they are whole numbers.
    """
    rich = [(-surplus[group], group) for group in givers]
    poor = [(surplus[group], group) for group in receivers]
    heapq.heapify(rich)
    heapq.heapify(poor)
    while rich and poor:
        giving, taking = rich[0][1], poor[0][1]
        if surplus[giving] - surplus[taking] <= step:
            return None
        giver, receiver = givers[giving].pop(), receivers[taking].pop()
        if receiver == me:
            return giver
        surplus[giving] -= step
        surplus[taking] += step
        _renew_head(rich, -surplus[giving], giving, has_more=bool(givers[giving]))
        _renew_head(poor, surplus[taking], taking, has_more=bool(receivers[taking]))
    return None


def _renew_head(heap: list[tuple[int, str]], rank: int, group: str, *, has_more: bool) -> None:
    if has_more:
        heapq.heapreplace(heap, (rank, group))
    else:
        heapq.heappop(heap)
