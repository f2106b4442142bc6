"""What KCL 2.x writes to a lease row, operation by operation (`DynamoDBLeaseSerializer`).

Every write but the children's names and the deletion is conditional on the counter alone, and
moves it by one; the owner is in no condition. May not know: when any of it is sent.
"""

from __future__ import annotations

from collections.abc import Collection

from kclrun.model.lease import Lease, LeaseKey, OwnerId, PendingCheckpoint
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.simulation.java.items import (
    DeleteItem,
    PutNewItem,
    UpdateItem,
    Value,
    number,
    text,
)

__all__ = ["create", "delete", "name_children", "renew", "take", "update"]

_COUNTER = "leaseCounter"
_PENDING = (
    "pendingCheckpoint",
    "pendingCheckpointSubSequenceNumber",
    "pendingCheckpointState",
)


def renew(key: LeaseKey, counter: int) -> UpdateItem:
    """`renewLease`."""
    return UpdateItem(key, expected=_counter(counter), puts=_counter(counter + 1))


def take(lease: Lease, worker: OwnerId) -> UpdateItem:
    """`takeLease`. Version 2 knows no `checkpointOwner` and leaves what stands there."""
    is_from_other = lease.owner is not None and lease.owner != worker
    return UpdateItem(
        lease.key,
        expected=_counter(lease.counter),
        puts={"leaseOwner": text(worker)} | _counter(lease.counter + 1),
        adds={"ownerSwitchesSinceCheckpoint": 1} if is_from_other else {},
    )


def update(
    key: LeaseKey,
    counter: int,
    position: ExtendedSequenceNumber,
    *,
    pending: PendingCheckpoint | None,
    owner_switches: int,
    children: Collection[str],
    hash_range: HashRange | None,
) -> UpdateItem:
    """`updateLease`: a checkpoint, or with `pending` the first half of one."""
    puts = _counter(counter + 1) | _position(position)
    puts["ownerSwitchesSinceCheckpoint"] = number(owner_switches)
    if pending is not None:
        puts["pendingCheckpoint"] = text(pending.position.sequence_number)
        puts["pendingCheckpointSubSequenceNumber"] = number(pending.position.sub_sequence_number)
    if children:
        puts["childShardIds"] = _ids(children)
    return UpdateItem(
        key,
        expected=_counter(counter),
        puts=puts | _hash_keys(hash_range),
        deletes=() if pending is not None else _PENDING,
    )


def name_children(key: LeaseKey, children: Collection[str]) -> UpdateItem:
    """`updateLeaseWithMetaInfo`, of an item that exists, whoever owns it."""
    return UpdateItem(key, expected={"leaseKey": text(key)}, puts={"childShardIds": _ids(children)})


def create(key: str, parents: Collection[str], hash_range: HashRange) -> PutNewItem:
    """`createLeaseIfNotExists`, at TRIM_HORIZON: the position of every child, and of every shard
    of an application that starts there."""
    item: dict[str, Value] = {"leaseKey": text(key), "ownerSwitchesSinceCheckpoint": number(0)}
    item |= _counter(0) | _position(TRIM_HORIZON) | _hash_keys(hash_range)
    if parents:
        item["parentShardId"] = _ids(parents)
    return PutNewItem(LeaseKey(key), item=item)


def delete(key: LeaseKey) -> DeleteItem:
    """`deleteLease`, without a condition."""
    return DeleteItem(key)


def _counter(value: int) -> dict[str, Value]:
    return {_COUNTER: number(value)}


def _position(position: ExtendedSequenceNumber) -> dict[str, Value]:
    return {
        "checkpoint": text(position.sequence_number),
        "checkpointSubSequenceNumber": number(position.sub_sequence_number),
    }


def _hash_keys(hash_range: HashRange | None) -> dict[str, Value]:
    if hash_range is None:
        return {}
    return {
        "startingHashKey": text(str(hash_range.start)),
        "endingHashKey": text(str(hash_range.end)),
    }


def _ids(shard_ids: Collection[str]) -> Value:
    return {"SS": sorted(shard_ids)}
