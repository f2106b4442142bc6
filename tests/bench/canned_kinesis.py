"""A Kinesis that answers from memory, as a process of its own: `python -m bench.canned_kinesis`.

Serves what a lease process asks for (GetShardIterator, GetRecords) for shards named after a shape
(`small-1`), at memory speed, without looking at signatures, and remembers when each shard was
first read. It is there to be faster than any client: one thread, kept connections, bodies made
before they are asked for. Rule: it never parses more of a request than it needs.
"""

import json
import selectors
import socket
import sys
import time
from typing import Any, Final

from bench.canned_pages import SHAPES, Page, iterator_of, shape_of_shard

# Operations of our own, for the bench to ask what was seen.
FIRST_READS: Final = "Bench.FirstReads"
READ_COUNT: Final = "Bench.ReadCount"
_GET_RECORDS: Final = "Kinesis_20131202.GetRecords"
_GET_SHARD_ITERATOR: Final = "Kinesis_20131202.GetShardIterator"
# A lease process asks for the retention when its first page is old: these records never expire.
_SUMMARY: Final = "Kinesis_20131202.DescribeStreamSummary"
_SUMMARY_BODY: Final = json.dumps(
    {
        "StreamDescriptionSummary": {
            "StreamName": "bench",
            "StreamARN": "arn:aws:kinesis:us-east-1:123456789012:stream/bench",
            "StreamStatus": "ACTIVE",
            "RetentionPeriodHours": 100 * 8760,
            "OpenShardCount": 1,
            "StreamCreationTimestamp": 1.0,
        }
    }
).encode()
_RECEIVE_BYTES: Final = 64 * 1024
_HEAD_END: Final = b"\r\n\r\n"


class CannedKinesis:
    """All state of the server: a body for each shape, and what was read when."""

    def __init__(self) -> None:
        self._pages = {name: Page(shape) for name, shape in SHAPES.items()}
        self._first_reads: dict[str, float] = {}
        self._reads = 0

    def answer(self, target: str, body: bytes) -> bytes | bytearray:
        """The body of a success; every request is one."""
        if target == _GET_RECORDS:
            return self._get_records(json.loads(body)["ShardIterator"])
        if target == _GET_SHARD_ITERATOR:
            return self._get_shard_iterator(json.loads(body))
        if target == _SUMMARY:
            return _SUMMARY_BODY
        if target == FIRST_READS:
            return json.dumps(self._first_reads).encode()
        assert target == READ_COUNT, f"nobody has asked for {target} before"
        return str(self._reads).encode()

    def _get_records(self, iterator: str) -> bytearray:
        shard_id, _, rest = iterator.partition("|")
        self._reads += 1
        if shard_id not in self._first_reads:
            self._first_reads[shard_id] = time.monotonic()
        page = self._pages[shape_of_shard(shard_id).name]
        return page.numbered(shard_id, int(rest.rstrip(".")))

    def _get_shard_iterator(self, request: dict[str, Any]) -> bytes:
        number = request.get("StartingSequenceNumber")
        # The page number stands in digits 40 to 48; what was read ends at the end of a page.
        page = 0 if number is None else int(number[40:48]) + 1
        iterator = iterator_of(request["ShardId"], page)
        return json.dumps({"ShardIterator": iterator}).encode()


class _Connection:
    """Bytes of a request that has not arrived whole yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = b""

    def serve(self, kinesis: CannedKinesis) -> bool:
        """Read once and answer what is complete; False when the peer has closed."""
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
            if not data:
                return False
            self._received += data
            while (request := self._next_request()) is not None:
                self._send(kinesis.answer(*request))
        except ConnectionError:
            return False
        return True

    def _next_request(self) -> tuple[str, bytes] | None:
        head_end = self._received.find(_HEAD_END)
        if head_end < 0:
            return None
        headers = _headers(self._received[:head_end])
        body_at = head_end + len(_HEAD_END)
        end = body_at + int(headers["content-length"])
        if len(self._received) < end:
            return None
        body, self._received = self._received[body_at:end], self._received[end:]
        return headers["x-amz-target"], body

    def _send(self, body: bytes | bytearray) -> None:
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        head = (
            "HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\n"
            f"x-amzn-RequestId: 00000000\r\nDate: {date}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        if len(body) < _RECEIVE_BYTES:
            self.sock.sendall(head + body)
            return
        self.sock.sendall(head)
        self.sock.sendall(body)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs}


def main(listener_fd: int) -> None:
    """Serve until standard input ends: the bench has gone."""
    listener = socket.socket(fileno=listener_fd)
    kinesis = CannedKinesis()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(sock, selectors.EVENT_READ, _Connection(sock))
                continue
            connection: _Connection = key.data
            if not connection.serve(kinesis):
                selector.unregister(connection.sock)
                connection.sock.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
