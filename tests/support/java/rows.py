"""The writes of KCL 2.x to a lease row, operation by operation (`DynamoDBLeaseSerializer`).

Every write but the children's names and the deletion is conditional on the counter alone, and
raises it by one; the owner is in no condition. The module does not know when a write is sent.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey, OwnerId, PendingCheckpoint
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.protocol.writes import Applied, ConditionFailed, Outcome
from kclrun.simulation.table import ItemWrite

# DynamoDB's older conditions and updates (`Expected`, `AttributeUpdates`), which KCL 2.x sends.
#
# Each write is a value: the network carries it, the table applies it to the raw item, and the story
# contains it. The same parameters have the same effect in a DynamoDB; a test sends both.
Value = Mapping[str, Any]
Item = Mapping[str, Value]

_KEY = "leaseKey"


def text(value: str) -> Value:
    return {"S": value}


def number(value: int) -> Value:
    return {"N": str(value)}


class UpdateItem(ItemWrite, frozen=True, kw_only=True):
    """`expected` attributes have that value; then `puts` are set, `adds` added, `deletes` removed.

    Every update of the KCL has an expected value, so none of them creates a missing item.
    """

    expected: Mapping[str, Value]
    puts: Mapping[str, Value] = {}
    adds: Mapping[str, int] = {}
    deletes: tuple[str, ...] = ()

    def apply_to(self, rows: LeaseRows) -> Outcome:
        item = rows.raw(self.key)
        if item is None or any(item.get(name) != value for name, value in self.expected.items()):
            return ConditionFailed()
        for name, amount in self.adds.items():
            item[name] = number(int(item.get(name, {"N": "0"})["N"]) + amount)
        kept = {name: value for name, value in item.items() if name not in self.deletes}
        rows.plant({**kept, **self.puts})
        return Applied()

    def parameters(self) -> dict[str, Any]:
        """As the SDK sends it, except for the table's name."""
        put = {name: {"Action": "PUT", "Value": value} for name, value in self.puts.items()}
        add = {name: {"Action": "ADD", "Value": number(by)} for name, by in self.adds.items()}
        delete = {name: {"Action": "DELETE"} for name in self.deletes}
        return {
            "Key": {_KEY: text(self.key)},
            "Expected": {name: {"Value": value} for name, value in self.expected.items()},
            "AttributeUpdates": put | add | delete,
        }


class PutNewItem(ItemWrite, frozen=True, kw_only=True):
    """A whole item, if the table has none with its key."""

    item: Item

    def apply_to(self, rows: LeaseRows) -> Outcome:
        if rows.raw(self.key) is not None:
            return ConditionFailed()
        rows.plant(self.item)
        return Applied()

    def parameters(self) -> dict[str, Any]:
        """As the SDK sends it, except for the table's name."""
        return {"Item": self.item, "Expected": {_KEY: {"Exists": False}}}


class DeleteItem(ItemWrite, frozen=True):
    """Deletes an item, whatever its content."""

    def apply_to(self, rows: LeaseRows) -> Outcome:
        rows.uproot(self.key)
        return Applied()

    def parameters(self) -> dict[str, Any]:
        """As the SDK sends it, except for the table's name."""
        return {"Key": {_KEY: text(self.key)}}


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
    """`takeLease`. Version 2 does not know `checkpointOwner` and leaves it as it is."""
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
    """`updateLeaseWithMetaInfo`, for an existing item of any owner."""
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
