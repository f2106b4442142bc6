"""What a row that stands there says about a change: whether it holds, and the same wish over it.

Knows: P2 (never a lower position), P6 (an unknown outcome is judged by the row). May not know:
what is under way. Look next: `own_row.py`.
"""

from __future__ import annotations

import msgspec

from kclrun.model.changes import (
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    End,
    HandOver,
    NameChildren,
    Offer,
    Release,
    Renew,
)
from kclrun.model.lease import Lease

__all__ = ["GivingAway", "OwnChange", "holds", "holds_after_giving_up", "rebased"]

# The last writes that leave the lease to others.
GivingAway = Release | Offer | HandOver
OwnChange = (
    Claim | Renew | Checkpoint | NameChildren | End | GivingAway | CreateChildren | CreateLease
)


def holds(change: OwnChange, row: Lease) -> bool:
    """Whether the row, ours still, already says what the change wanted to say."""
    match change:
        case Renew():
            return True
        case Checkpoint(position=position):
            return row.checkpoint >= position
        case NameChildren(children=children):
            return children <= row.children
        case End():
            return row.is_ended
        case _:
            return False


def holds_after_giving_up(change: OwnChange, row: Lease, seen_counter: int) -> bool:
    """Whether a change that ends our ownership has applied, by what stands on the row.

    Offered, unowned, or with the next owner already: then the counter is further on, and the
    position, which only the applied write can have moved to ours, tells.
    """
    if row.counter <= seen_counter:
        return False
    match change:
        case End():
            return row.is_ended
        case Release(position=position, owner=me) | Offer(position=position, owner=me):
            return row.owner != me and row.checkpoint >= position
        case HandOver(position=position, owner=me):
            return me not in {row.owner, row.checkpoint_owner} and row.checkpoint >= position
        case _:
            return False


def rebased(change: OwnChange, row: Lease) -> OwnChange:
    """The same wish over the row as it stands: its counter, never a lower position [P2, N1]."""
    match change:
        case Checkpoint(position=position) | Release(position=position) | Offer(position=position):
            return msgspec.structs.replace(
                change,
                seen_counter=row.counter,
                last=row.checkpoint,
                position=max(position, row.checkpoint),
            )
        case HandOver(position=position):
            return msgspec.structs.replace(
                change,
                seen_counter=row.counter,
                last=row.checkpoint,
                position=max(position, row.checkpoint),
                next_owner=row.owner or change.next_owner,
            )
        case End():
            return msgspec.structs.replace(change, seen_counter=row.counter, last=row.checkpoint)
        case Renew() | NameChildren() | Claim():
            return msgspec.structs.replace(change, seen_counter=row.counter)
        case CreateChildren() | CreateLease():
            return change
