"""An S3 and a Kinesis that take everything and keep nothing: `python -m bench.canned_sinks`.

A process of its own, for rows that measure their client: bodies are read and dropped, answers are
made beforehand. Rule: it never looks at more of a request than its answer needs.
"""

import contextlib
import os
import socket
import sys
import threading
from typing import Any, Final

_MIB: Final = 2**20
_HEAD_END: Final = b"\r\n\r\n"
_SHARD: Final = "shardId-000000000000"
_SHARDS: Final = (
    '{"Shards":[{"ShardId":"' + _SHARD + '","HashKeyRange":{"StartingHashKey":"0",'
    f'"EndingHashKey":"{2**128 - 1}"' + '},"SequenceNumberRange":{"StartingSequenceNumber":"1"}}]}'
).encode()
_RESULT: Final = b'{"SequenceNumber":"4957' + b"0" * 50 + b'","ShardId":"' + _SHARD.encode() + b'"}'
_UPLOAD: Final = (
    b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
)
_COMPLETED: Final = b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"


def _answer(line: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    target = headers.get("x-amz-target", "")
    if target.endswith("PutRecords"):
        results = b",".join([_RESULT] * body.count(b'"PartitionKey"'))
        return 200, b'{"FailedRecordCount":0,"Records":[' + results + b"]}"
    if target.endswith("ListShards"):
        return 200, _SHARDS
    if line.startswith("HEAD"):
        return 404, b""
    if line.startswith("POST"):
        return 200, _UPLOAD if "?uploads" in line else _COMPLETED
    return 200, b""


def _serve(sock: socket.socket) -> None:
    received = bytearray(_MIB)
    with contextlib.suppress(ConnectionError), sock, sock.makefile("rb", _MIB) as stream:
        while line := stream.readline().decode("latin-1"):
            headers = _headers(stream)
            if headers.get("expect") == "100-continue":
                sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = int(headers.get("content-length", 0))
            kept = bytearray()
            while left:
                count = stream.readinto(memoryview(received)[: min(left, _MIB)])
                left -= count
                if "x-amz-target" in headers:
                    kept += received[:count]
            status, body = _answer(line, headers, bytes(kept))
            head = f"HTTP/1.1 {status} .\r\nETag: e\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)


def _headers(stream: Any) -> dict[str, str]:
    headers = {}
    while (line := stream.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


def main(listener_fd: int) -> None:
    """Serve until standard input ends: the bench has gone."""
    listener = socket.socket(fileno=listener_fd)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
