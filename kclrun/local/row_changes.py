"""Does a change to a row hold, and what does the row become? `aws/clauses.py` in plain Python.

Pure; for `lease_rows.py`. Rule: the same conditions and updates as DynamoDB is sent, one by one;
the contract suite of the lease tables compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.model.changes import (
    Amend,
    Ask,
    Checkpoint,
    Claim,
    DeleteEnded,
    DeleteTrimmed,
    End,
    HaltLease,
    HandOver,
    LateCheckpoint,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from kclrun.model.lease import OFFERED, OWNER_PREFIX, Handoff, Lease
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime

__all__ = ["RowChange", "RowUpdate", "change_row", "holds", "refuse_unbound"]

_OwnersWrite = Claim | Renew | Checkpoint | NameChildren | End | Release | Offer | Amend | HaltLease
RowUpdate = Take | Ask | _OwnersWrite | HandOver | LateCheckpoint | ResumeLease
RowChange = RowUpdate | DeleteEnded | DeleteTrimmed

# Not an owner's writes: the counter stays.
_WITHOUT_COUNTER: Final = (Ask, LateCheckpoint, ResumeLease)


def holds(change: RowChange, row: Lease) -> bool:
    """Whether the condition of a change holds on a row that exists [P1, P2, P13, P16, P19]."""
    match change:
        case Renew() | Claim():
            return _is_held(change, row)
        case Take() | DeleteTrimmed():
            return row.counter == change.seen_counter and row.owner == change.seen_owner
        case ResumeLease():
            return True
        case DeleteEnded():
            return row.is_ended
        case Ask(asked=asked, seen=seen):
            return row.owner == asked and not row.is_ended and _stored(row.handoff) == _stored(seen)
        case HandOver():
            return (
                row.owner == change.next_owner
                and row.checkpoint_owner == change.owner
                and row.counter == change.seen_counter
                and row.checkpoint == change.last
            )
        case LateCheckpoint():
            return _is_ours_now(change, row) and change.last <= row.checkpoint < change.position
        case Checkpoint(last=last) | End(last=last) | Release(last=last) | Offer(last=last):
            return _is_held(change, row) and row.checkpoint == last
        case _:
            return _is_held(change, row)


def change_row(change: RowUpdate, row: Lease) -> Lease:
    """The row after a change whose condition holds."""
    grows = 0 if isinstance(change, _WITHOUT_COUNTER) else 1
    after = msgspec.structs.replace(row, counter=row.counter + grows)
    return _CHANGED[type(change)](change, after)


def refuse_unbound(change: RowChange) -> None:
    """Refuse what DynamoDB would never be sent, row or no row. Raises: InvariantViolation."""
    match change:
        case Renew() | Checkpoint():
            pass
        case NameChildren(children=children) if not children:
            raise InvariantViolation("no expression for NameChildren without children")
        case Take(forced=True, seen_owner=seen):
            if seen is None or seen.startswith(OWNER_PREFIX):
                raise InvariantViolation(
                    f"{change.key}: only a Java owner is taken from by force, not {seen}"
                )
        case LateCheckpoint(position=position) if position.is_sentinel:
            raise InvariantViolation(f"{change.key}: a late checkpoint is never {position}")
        case _:
            pass


def _is_held(change: _OwnersWrite, row: Lease) -> bool:
    return row.owner == change.owner and row.counter == change.seen_counter


def _is_ours_now(change: LateCheckpoint, row: Lease) -> bool:
    if row.owner is None:
        return True
    return row.owner.startswith(OWNER_PREFIX) and row.owner != change.former


def _stored(handoff: Handoff | None) -> Handoff | None:
    """With its time in whole milliseconds, as the table keeps it."""
    if handoff is None:
        return None
    return Handoff(handoff.to, WallTime(round(handoff.asked_at * 1000) / 1000))


def _without_handoff(row: Lease) -> Lease:
    return msgspec.structs.replace(row, handoff=None, offered_to=None, offered_by=None)


def _moved(row: Lease, position: ExtendedSequenceNumber) -> Lease:
    return msgspec.structs.replace(row, checkpoint=position, owner_switches=0, pending=None)


def _moved_if_elsewhere(change: Release | Offer | HandOver, row: Lease) -> Lease:
    return row if change.position == change.last else _moved(row, change.position)


def _taken(change: Take, row: Lease) -> Lease:
    from_other = change.seen_owner not in {None, change.owner}
    return msgspec.structs.replace(
        _without_handoff(row),
        owner=change.owner,
        checkpoint_owner=None,
        failover_s=round(change.failover_s * 1000) / 1000,
        start=change.start,
        owner_switches=row.owner_switches + from_other,
        taken_from=change.seen_owner if change.forced else row.taken_from,
    )


def _asked(change: Ask, row: Lease) -> Lease:
    return msgspec.structs.replace(row, handoff=_stored(Handoff(change.owner, change.asked_at)))


def _claimed(change: Claim, row: Lease) -> Lease:
    return msgspec.structs.replace(row, taken_from=None) if change.has_waited else row


def _renewed(change: Renew, row: Lease) -> Lease:
    if change.throughput_kbps is not None:
        row = msgspec.structs.replace(row, throughput_kbps=change.throughput_kbps)
    return msgspec.structs.replace(row, handoff=None) if change.drops_ask else row


def _ended(_: End, row: Lease) -> Lease:
    return _without_handoff(_moved(row, SHARD_END))


def _released(change: Release, row: Lease) -> Lease:
    gone = _without_handoff(_moved_if_elsewhere(change, row))
    return msgspec.structs.replace(gone, owner=None)


def _offered(change: Offer, row: Lease) -> Lease:
    return msgspec.structs.replace(
        _moved_if_elsewhere(change, row),
        owner=OFFERED,
        handoff=None,
        offered_to=change.offered_to,
        offered_by=change.owner,
    )


def _handed_over(change: HandOver, row: Lease) -> Lease:
    stays = change.position == change.last
    gone = _without_handoff(_moved_if_elsewhere(change, row))
    return msgspec.structs.replace(
        gone, checkpoint_owner=None, owner_switches=gone.owner_switches + stays
    )


def _amended(change: Amend, row: Lease) -> Lease:
    right = msgspec.structs.replace(row, parents=change.parents, hash_range=change.hash_range)
    if change.latest_pinned_at is None:
        return right
    return msgspec.structs.replace(right, latest_pinned_at=change.latest_pinned_at)


_CHANGED: Final[Mapping[type[Any], Callable[[Any, Lease], Lease]]] = {
    Take: _taken,
    Ask: _asked,
    Claim: _claimed,
    Renew: _renewed,
    Checkpoint: lambda change, row: _moved(row, change.position),
    NameChildren: lambda change, row: msgspec.structs.replace(row, children=change.children),
    End: _ended,
    Release: _released,
    Offer: _offered,
    HandOver: _handed_over,
    LateCheckpoint: lambda change, row: _moved(row, change.position),
    Amend: _amended,
    HaltLease: lambda change, row: msgspec.structs.replace(row, halt=change.halt),
    ResumeLease: lambda _, row: msgspec.structs.replace(row, halt=None),
}
