"""A DynamoDB for the rig's lease tables, noting each request: what, on which row, and the answer.

The note is made when the answer is there, a moment before it is sent.
"""

import json
import zlib

from kclrun.local.asgi import ClientGone, read_body, respond
from kclrun.local.serving import serve_as_child
from tests.processes.fleet_rig.noting import Noter
from tests.processes.fleet_rig.quick_table import QuickTables

_BODY_BYTES_MAX = 1 << 20
_WRITES = ("PutItem", "UpdateItem", "DeleteItem")


class WatchedTables:
    """An ASGI application over `QuickTables`."""

    def __init__(self):
        self._tables = QuickTables()
        self._noter = Noter()

    async def __call__(self, scope, receive, send):
        try:
            body = await read_body(receive, _BODY_BYTES_MAX)
        except ClientGone:
            return
        target = dict(scope["headers"]).get(b"x-amz-target", b"").decode()
        operation = target.rpartition(".")[2]
        status, answer = self._tables.answer(operation, body)
        self._note(operation, json.loads(body), status)
        # botocore checks it.
        checksum = (b"x-amz-crc32", str(zlib.crc32(answer)).encode())
        content_type = (b"content-type", b"application/x-amz-json-1.0")
        await respond(send, status, (content_type, checksum), answer)

    def _note(self, operation, asked, status):
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
        return [self._tables.row(write) for write in writes]


if __name__ == "__main__":
    serve_as_child(lambda _: WatchedTables())
