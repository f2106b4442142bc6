"""Forwards a request to another server on loopback, and its answer back, in parts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any, Final

import httptools

from kclrun.local.asgi import ClientGone, Receive, Scope, Send, respond

_PIECE_BYTES: Final = 64 * 1024
# A busy demo has a few boto3 clients with a pool of 10 connections each. So many idle connections
# are kept. Further ones are closed after their request.
_IDLE_MAX: Final = 64
# The upstream server keeps idle connections far longer, so it never closes one that is reused here.
_IDLE_AGE_MAX_S: Final = 30.0
_HOP_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"expect", b"proxy-connection"})
_ANSWER_HOP_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_UNAVAILABLE: Final = (
    b'{"__type":"ServiceUnavailableException","message":"The process behind the embedded endpoint'
    b' does not answer."}'
)


class _Parsing:
    """Collects the parsed parts of one answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: deque[bytes] = deque()
        self.has_headers = False
        self.is_complete = False
        self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_headers = True
        # Read here: after the end of the answer the parser always returns False.
        self.is_reusable = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Connection:
    """One connection to the upstream server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    def is_fresh(self) -> bool:
        is_young = time.monotonic() - self.idle_since < _IDLE_AGE_MAX_S
        return is_young and not self.reader.at_eof() and not self.writer.is_closing()


class Forwarder:
    """An ASGI application that forwards requests to `port` on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_answered = False

        async def send_noting(message: Any) -> None:
            nonlocal has_answered
            has_answered = True
            await send(message)

        connection = None
        try:
            connection = await self._connection()
            await self._send_request(connection, scope, receive)
            is_reusable = await self._relay_answer(connection, scope["method"], send_noting)
        except ClientGone:
            self._drop(connection)
        except (OSError, httptools.HttpParserError, asyncio.IncompleteReadError):
            self._drop(connection)
            if has_answered:
                raise  # A part of the answer was sent: the server must close the connection.
            await respond(
                send, 503, [(b"content-type", b"application/x-amz-json-1.1")], _UNAVAILABLE
            )
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        else:
            self._keep(connection, is_reusable=is_reusable)

    async def close(self) -> None:
        """Close the idle connections, and each other one after its answer."""
        self._is_closed = True
        while self._idle:
            writer = self._idle.pop().writer
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            self._drop(connection)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_PIECE_BYTES)
        return _Connection(reader, writer)

    def _keep(self, connection: _Connection, *, is_reusable: bool) -> None:
        # Its client may have had the whole answer, and ended this server, before we are here.
        if not is_reusable or self._is_closed or len(self._idle) >= _IDLE_MAX:
            self._drop(connection)
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _drop(self, connection: _Connection | None) -> None:
        if connection is not None:
            connection.writer.close()

    async def _send_request(self, connection: _Connection, scope: Scope, receive: Receive) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        names = {name for name, _ in headers}
        if scope["http_version"] == "2" and b"content-length" not in names:
            # HTTP/2 needs no length. In HTTP/1.1 chunks mark the end of the body.
            headers.append((b"transfer-encoding", b"chunked"))
        is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        lines = [b"%s %s%s HTTP/1.1" % (scope["method"].encode(), scope["raw_path"], query)]
        lines += [b"%s: %s" % header for header in headers]
        writer = connection.writer
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
                await writer.drain()
        if is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _relay_answer(self, connection: _Connection, method: str, send: Send) -> bool:
        """Send the answer back. Returns whether the connection may be used again."""
        answer = _Parsing()
        is_started = False
        while not answer.is_complete:
            piece = await connection.reader.read(_PIECE_BYTES)
            if not piece:
                raise asyncio.IncompleteReadError(b"", None)
            answer.parser.feed_data(piece)
            if answer.has_headers and not is_started:
                is_started = True
                await send(_start(answer.parser.get_status_code(), answer.headers))
                if method == "HEAD":
                    break  # Its Content-Length is not followed by a body.
            while answer.pieces:
                body = answer.pieces.popleft()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return answer.is_reusable


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    kept = [header for header in headers if header[0] not in _ANSWER_HOP_HEADERS]
    return {"type": "http.response.start", "status": status, "headers": kept}
