"""How often one manager looks at the table and the stream, so that a fleet looks often enough.

May not know: clocks; chance is an argument. Rule: alone, a manager does everything itself; in a
crowd, the sum over all managers stays the same [P9, P10].
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

from kclrun.leases.owner_hash import owner_hash
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import OwnerId

__all__ = ["FREQUENT_SCANNERS_MAX", "Pace", "lists_shards", "scan_delay_s"]

# So many managers scan every half failover; the others rely on them to notice what expired [P9].
FREQUENT_SCANNERS_MAX: Final = 16
# ListShards calls expected per cycle, over the whole fleet [P10].
_LISTINGS_PER_CYCLE: Final = 2


class Pace(enum.Enum):
    """What a manager waits for after a scan. Only who takes or asks for something looks sooner, so
    a fleet at rest pays nothing for it."""

    GRAB = "it took free leases or left some for a next look; others reach for them too"
    MOVE = "it asked for leases, or offered some, and may do so again"
    REST = "nothing"


def scan_delay_s(
    policy: ManagerPolicy, owners: Collection[OwnerId], pace: Pace = Pace.REST
) -> float:
    """The fixed delay to the next scan, for a manager that sees these live kclrun owners."""
    if pace is Pace.GRAB:
        return policy.scan_soon_s
    if pace is Pace.MOVE or len(owners) <= FREQUENT_SCANNERS_MAX:
        return policy.scan_every_s
    mine = owner_hash(policy.me)
    smaller = sum(1 for owner in owners if owner != policy.me and owner_hash(owner) < mine)
    is_frequent = smaller < FREQUENT_SCANNERS_MAX
    return policy.scan_every_s if is_frequent else policy.seldom_scan_every_s


def lists_shards(owners: int, chance: float) -> bool:
    """Whether this manager lists in this cycle: two of `owners` do, on average; alone, always."""
    return chance * owners < _LISTINGS_PER_CYCLE
