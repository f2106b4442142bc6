"""The streams of `spark_stream.py` over HTTP, as a process: `python -m bench.spark_server FD`.

A thread a connection, because a Spark source has one for each shard that it reads at once, and a
page that waits for its client must not hold up the others. Signatures are not looked at.
"""

import json
import socket
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from typing import Any, BinaryIO, Final, NamedTuple

from bench.canned_kinesis import READ_COUNT
from bench.spark_stream import KINDS, Block, CborBlock, Stream
from kclrun.codec.cbor import decode_cbor, encode_cbor

_PREFIX: Final = "Kinesis_20131202."
_BACKLOG: Final = 512


class Request(NamedTuple):
    """An operation, and its body in one of the two forms of the service."""

    target: str
    content_type: str
    body: bytes

    @property
    def is_cbor(self) -> bool:
        return "cbor" in self.content_type


class Service:
    """What all connections share: the streams by name, and how often each operation was asked."""

    def __init__(self) -> None:
        self._began_ms = _now_ms()
        for kind in KINDS.values():
            Block(kind)  # made before anybody waits for it
        self._streams: dict[str, Stream] = {}
        self._calls: Counter[str] = Counter()

    def answer(self, asked: Request, blocks: dict[str, Block]) -> bytes:
        """The body of a success; every request is one. `blocks` are the connection's own."""
        if asked.target == READ_COUNT:
            return str(self._calls["GetRecords"]).encode()
        operation = asked.target.removeprefix(_PREFIX)
        self._calls[operation] += 1
        request: dict[str, Any] = (
            decode_cbor(asked.body) if asked.is_cbor else json.loads(asked.body)
        )
        if operation == "GetRecords":
            iterator: str = request["ShardIterator"]
            stream = self._stream(iterator.partition("|")[0])
            if stream.kind.name not in blocks:
                made = CborBlock if asked.is_cbor else Block
                blocks[stream.kind.name] = made(stream.kind)
            limit = request.get("Limit", stream.kind.page_records)
            return blocks[stream.kind.name].page(stream, iterator, limit, _now_ms())
        stream = self._stream(request["StreamName"])
        if operation == "GetShardIterator":
            answer: dict[str, Any] = {"ShardIterator": stream.iterator(request, _now_ms())}
        else:
            answer = stream.listing() if operation == "ListShards" else stream.summary()
        return encode_cbor(answer) if asked.is_cbor else json.dumps(answer).encode()

    def _stream(self, name: str) -> Stream:
        # Streams are there when they are first named; all of them began together.
        return self._streams.setdefault(name, Stream(name, self._began_ms))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _serve(sock: socket.socket, service: Service) -> None:
    """A connection's life: one request after the other, until the peer leaves."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    blocks: dict[str, Block] = {}
    try:
        with sock, sock.makefile("rb") as received:
            while (request := _request(received)) is not None:
                sock.sendall(_response(request.content_type, service.answer(request, blocks)))
    except ConnectionError:
        return


def _request(received: BinaryIO) -> Request | None:
    """The next request; None when the peer has closed."""
    if not received.readline():
        return None
    headers: dict[bytes, bytes] = {}
    while (line := received.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    body = received.read(int(headers[b"content-length"]))
    content_type = headers.get(b"content-type", b"").decode()
    return Request(headers[b"x-amz-target"].decode(), content_type, body)


def _response(content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n"
        f"x-amzn-RequestId: 00000000\r\nDate: {formatdate(usegmt=True)}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main(listener_fd: int) -> None:
    """Serve until standard input ends: the bench has gone."""
    listener = socket.socket(fileno=listener_fd)
    listener.listen(_BACKLOG)
    service = Service()

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_serve, args=(sock, service), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
