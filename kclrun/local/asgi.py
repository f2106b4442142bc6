"""Types of the ASGI messages that the HTTP endpoints here use, and reading a bounded body.

No body is read without a bound.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from email.utils import formatdate
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTooLarge(Exception):
    """The request's body is larger than the given bound."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, bytes_max: int) -> bytes:
    """The whole body. Raises: BodyTooLarge, ClientGone."""
    chunks: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size_bytes += len(chunk)
        if size_bytes > bytes_max:
            raise BodyTooLarge
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def respond(
    send: Send,
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    clock: Callable[[], float] = time.time,
) -> None:
    """A complete answer with its length and the date."""
    length = (b"content-length", str(len(body)).encode())
    all_headers = [*headers, length, date_header(clock)]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


def date_header(clock: Callable[[], float] = time.time) -> tuple[bytes, bytes]:
    """The present second. The server's own Date header may be more than a second old."""
    return b"date", formatdate(clock(), usegmt=True).encode()
