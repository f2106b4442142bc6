"""A DynamoDB for the rig's lease tables, as the second process of the embedded AWS."""

import zlib

from kclrun.local.asgi import ClientGone, read_body, respond
from kclrun.local.serving import serve_as_child
from tests.processes.ledger_rig.quick_table import QuickTables

_BODY_BYTES_MAX = 1 << 20


class TableServer:
    """An ASGI application over `QuickTables`."""

    def __init__(self):
        self.tables = QuickTables()

    async def __call__(self, scope, receive, send):
        try:
            body = await read_body(receive, _BODY_BYTES_MAX)
        except ClientGone:
            return
        target = dict(scope["headers"]).get(b"x-amz-target", b"").decode()
        operation = target.rpartition(".")[2]
        status, answer = self.tables.answer(operation, body)
        self.answered(operation, body, status)
        # botocore checks it.
        checksum = (b"x-amz-crc32", str(zlib.crc32(answer)).encode())
        content_type = (b"content-type", b"application/x-amz-json-1.0")
        await respond(send, status, (content_type, checksum), answer)

    def answered(self, operation, body, status):
        """The answer is there, a moment before it is sent."""


if __name__ == "__main__":
    serve_as_child(lambda _: TableServer())
