"""A DynamoDB for lease tables that two cores can give a whole fleet: 20 times as quick as moto.

It exists so that kclrun is what is measured, and what the tests spend their time on. The contract
of the lease table holds over it as over moto (`test_fleet_rig_tables.py`); of DynamoDB it knows
what lease tables ask, and nothing else.
"""

import json
import zlib

from tests.processes.ledger_rig.expressions import condition, update


class _Refused(Exception):
    def __init__(self, code, message="", **more):
        self.answer = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}
        self.answer |= more


def _named(asked, expression):
    """An expression with its attributes' names in place of their aliases; None if there is none."""
    text = asked.get(expression)
    for alias, name in asked.get("ExpressionAttributeNames", {}).items():
        text = text and text.replace(alias, name)
    return text


def _key_of(item):
    return item["leaseKey"]["S"]


# Who has a lease or is offered it, how often it moved, and how far it is.
_STANDING = (
    *("leaseOwner", "offeredTo", "leaseCounter"),
    *("checkpoint", "checkpointSubSequenceNumber"),
)


class QuickTables:
    """`answer(operation, body) -> (status, bytes)`; one request after the other."""

    def __init__(self):
        self._items = {}
        self._descriptions = {}

    def row(self, asked):
        """The key of the row that a write named, and how it stands now (None: it is gone)."""
        key = _key_of(asked.get("Key") or asked["Item"])
        item = self._items[asked["TableName"]].get(key)
        if item is None:
            return key, None
        return key, {name: next(iter(item[name].values())) for name in _STANDING if name in item}

    def answer(self, operation, body):
        handler = getattr(self, f"_{operation}", None)
        try:
            if handler is None:
                raise _Refused("UnknownOperationException", operation)
            return 200, json.dumps(handler(json.loads(body))).encode()
        except _Refused as refused:
            return 400, json.dumps(refused.answer).encode()

    # Tables.

    def _CreateTable(self, asked):
        name = asked["TableName"]
        if name in self._items:
            raise _Refused("ResourceInUseException", f"Table already exists: {name}")
        indexes = [
            {**index, "IndexStatus": "ACTIVE"} for index in asked.get("GlobalSecondaryIndexes", [])
        ]
        self._items[name] = {}
        self._descriptions[name] = {
            "TableName": name,
            "TableStatus": "ACTIVE",
            "KeySchema": asked["KeySchema"],
            "AttributeDefinitions": asked["AttributeDefinitions"],
            "GlobalSecondaryIndexes": indexes,
        }
        return {"TableDescription": self._descriptions[name]}

    def _ListTables(self, _):
        return {"TableNames": sorted(self._items)}

    def _DescribeTable(self, asked):
        self._table(asked)
        return {"Table": self._descriptions[asked["TableName"]]}

    def _DeleteTable(self, asked):
        self._table(asked)
        del self._items[asked["TableName"]]
        return {"TableDescription": self._descriptions.pop(asked["TableName"])}

    def _table(self, asked):
        if asked["TableName"] not in self._items:
            raise _Refused("ResourceNotFoundException", "Requested resource not found")
        return self._items[asked["TableName"]]

    # Reads.

    def _GetItem(self, asked):
        item = self._table(asked).get(_key_of(asked["Key"]))
        return {} if item is None else {"Item": item}

    def _BatchGetItem(self, asked):
        responses = {}
        for name, wanted in asked["RequestItems"].items():
            table = self._table({"TableName": name})
            rows = (table.get(_key_of(key)) for key in wanted["Keys"])
            responses[name] = [row for row in rows if row is not None]
        return {"Responses": responses, "UnprocessedKeys": {}}

    def _Scan(self, asked):
        # In no order that means anything, as the service's, and the same each time.
        table = self._table(asked)
        keys = sorted(table, key=lambda key: zlib.crc32(key.encode()))
        if "ExclusiveStartKey" in asked:
            keys = keys[keys.index(_key_of(asked["ExclusiveStartKey"])) + 1 :]
        page = keys[: asked.get("Limit", len(keys))]
        found = {"Items": [table[key] for key in page], "Count": len(page)}
        if len(page) < len(keys):
            found["LastEvaluatedKey"] = {"leaseKey": {"S": page[-1]}}
        return found

    def _Query(self, asked):
        table = self._table(asked)
        indexes = self._descriptions[asked["TableName"]]["GlobalSecondaryIndexes"]
        if asked["IndexName"] not in {index["IndexName"] for index in indexes}:
            raise _Refused(
                "ValidationException",
                f"The table does not have the specified index: {asked['IndexName']}",
            )
        wanted = condition(asked["KeyConditionExpression"])
        rows = [row for row in table.values() if wanted(row, asked["ExpressionAttributeValues"])]
        keys = [
            {name: row[name] for name in ("leaseOwner", "leaseKey")}
            for row in rows[: asked.get("Limit")]
        ]
        return {"Items": keys, "Count": len(keys)}

    # Writes.

    def _PutItem(self, asked):
        table = self._table(asked)
        self._require(asked, table.get(_key_of(asked["Item"])))
        table[_key_of(asked["Item"])] = asked["Item"]
        return {}

    def _UpdateItem(self, asked):
        table, key = self._table(asked), _key_of(asked["Key"])
        self._require(asked, table.get(key))
        item = dict(table.get(key, asked["Key"]))
        update(_named(asked, "UpdateExpression"))(item, asked.get("ExpressionAttributeValues", {}))
        table[key] = item
        return {"Attributes": item} if asked.get("ReturnValues") == "ALL_NEW" else {}

    def _DeleteItem(self, asked):
        table, key = self._table(asked), _key_of(asked["Key"])
        self._require(asked, table.get(key))
        table.pop(key, None)
        return {}

    def _TransactWriteItems(self, asked):
        parts = [next(iter(part.items())) for part in asked["TransactItems"]]
        held = []
        for _, part in parts:
            item = self._table(part).get(_key_of(part.get("Key") or part["Item"]))
            held.append(self._holds(part, item))
        if not all(held):
            codes = ["None" if each else "ConditionalCheckFailed" for each in held]
            raise _Refused(
                "TransactionCanceledException",
                f"Transaction cancelled, please refer cancellation reasons [{', '.join(codes)}]",
                CancellationReasons=[{"Code": code} for code in codes],
            )
        for kind, part in parts:
            assert kind in ("ConditionCheck", "Put"), f"a {kind} in a transaction"
            if kind == "Put":
                self._table(part)[_key_of(part["Item"])] = part["Item"]
        return {}

    def _holds(self, asked, item):
        text = _named(asked, "ConditionExpression")
        return text is None or condition(text)(item or {}, asked.get("ExpressionAttributeValues"))

    def _require(self, asked, item):
        if not self._holds(asked, item):
            wants_item = asked.get("ReturnValuesOnConditionCheckFailure") == "ALL_OLD"
            more = {"Item": item} if wants_item and item is not None else {}
            raise _Refused(
                "ConditionalCheckFailedException", "The conditional request failed", **more
            )
