"""DynamoDB's older conditions and updates (`Expected`, `AttributeUpdates`), which KCL 2.x sends.

Each write is a value: the network carries it, the table applies it to the raw item, and the story
tells it. May not know: what a lease is. Rule: the same parameters sent to a DynamoDB have the same
effect; a test sends both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import LeaseKey
from kclrun.model.outcomes import Applied, ConditionFailed, Outcome

__all__ = ["DeleteItem", "Item", "ItemWrite", "PutNewItem", "UpdateItem", "Value", "number", "text"]

Value = Mapping[str, Any]
Item = Mapping[str, Value]

_KEY = "leaseKey"


def text(value: str) -> Value:
    return {"S": value}


def number(value: int) -> Value:
    return {"N": str(value)}


class ItemWrite(msgspec.Struct, frozen=True):
    """One write of one item."""

    key: LeaseKey

    def apply_to(self, rows: LeaseRows) -> Outcome:
        """What DynamoDB does with it."""
        raise NotImplementedError


class UpdateItem(ItemWrite, frozen=True, kw_only=True):
    """`expected` attributes have that value; then `puts` are set, `adds` added to, `deletes` gone.

    Every update of the KCL expects something, so none of them makes an item that was not there.
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
        """As the SDK sends it, but for the table's name."""
        put = {name: {"Action": "PUT", "Value": value} for name, value in self.puts.items()}
        add = {name: {"Action": "ADD", "Value": number(by)} for name, by in self.adds.items()}
        delete = {name: {"Action": "DELETE"} for name in self.deletes}
        return {
            "Key": {_KEY: text(self.key)},
            "Expected": {name: {"Value": value} for name, value in self.expected.items()},
            "AttributeUpdates": put | add | delete,
        }


class PutNewItem(ItemWrite, frozen=True, kw_only=True):
    """A whole item, if there is none of its key."""

    item: Item

    def apply_to(self, rows: LeaseRows) -> Outcome:
        if rows.raw(self.key) is not None:
            return ConditionFailed()
        rows.plant(self.item)
        return Applied()

    def parameters(self) -> dict[str, Any]:
        """As the SDK sends it, but for the table's name."""
        return {"Item": self.item, "Expected": {_KEY: {"Exists": False}}}


class DeleteItem(ItemWrite, frozen=True):
    """Whatever stands there."""

    def apply_to(self, rows: LeaseRows) -> Outcome:
        rows.uproot(self.key)
        return Applied()

    def parameters(self) -> dict[str, Any]:
        """As the SDK sends it, but for the table's name."""
        return {"Key": {_KEY: text(self.key)}}
