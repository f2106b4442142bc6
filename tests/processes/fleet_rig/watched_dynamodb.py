"""The DynamoDB of `ledger_rig`, noting each request: what, on which row, and the answer."""

import json

from kclrun.local.serving import serve_as_child
from tests.processes.fleet_rig.noting import Noter
from tests.processes.ledger_rig.quick_dynamodb import TableServer

_WRITES = ("PutItem", "UpdateItem", "DeleteItem")


class WatchedTables(TableServer):
    def __init__(self):
        super().__init__()
        self._noter = Noter()

    def answered(self, operation, body, status):
        asked = json.loads(body)
        table = asked.get("TableName") or next(iter(asked.get("RequestItems", {})), None)
        self._noter.note(
            "dynamodb",
            operation=operation,
            table=table,
            key=asked.get("Key", {}).get("leaseKey", {}).get("S"),
            update=asked.get("UpdateExpression"),
            condition=asked.get("ConditionExpression"),
            me=asked.get("ExpressionAttributeValues", {}).get(":me", {}).get("S"),
            status=status,
            rows=self._rows_after(operation, asked) if status == 200 else [],
        )

    def _rows_after(self, operation, asked):
        """What a write that was applied left of the rows it wrote; None for one that is gone."""
        if operation == "TransactWriteItems":
            writes = [part["Put"] for part in asked["TransactItems"] if "Put" in part]
        else:
            writes = [asked] if operation in _WRITES else []
        return [self.tables.row(write) for write in writes]


if __name__ == "__main__":
    serve_as_child(lambda _: WatchedTables())
