"""The head of a request as bytes, and the head of an answer from bytes: HTTP/1.1, RFC 9112. Pure.

It must not know sockets or bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

# The services send ten headers, some proxies twenty more. http.client has the same limit.
HEADERS_MAX: Final = 100
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# Strict where http.client is not: no folded lines, no bare line feeds, no blank before a colon.
_FIELD: Final = re.compile(rb"\r\n(" + _TOKEN + rb"):[ \t]*([^\r\n\0]*)")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n\0]*)?(?=\r\n|\Z)")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_BODILESS: Final = (204, 304)


class BrokenAnswer(Exception):
    """The peer's bytes are not a complete answer. The error's text quotes none of them."""


class Head(msgspec.Struct, frozen=True):
    """A status line and the headers after it, names in lower case, repeated ones joined."""

    status: int
    headers: Mapping[str, str]
    is_http_1_0: bool = False

    @property
    def length(self) -> int | None:
        """Bytes of the body; None where chunks or the connection's end bound it.

        Raises: BrokenAnswer for a Content-Length that is not a number.
        """
        if self.status in _BODILESS:
            return 0
        declared = self.headers.get("content-length")
        if declared is None or self.is_chunked:
            return None
        if _LENGTH.fullmatch(declared) is None:
            raise BrokenAnswer("the answer's Content-Length is not a number")
        return int(declared)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks. Raises: BrokenAnswer for another Transfer-Encoding."""
        encoding = self.headers.get("transfer-encoding")
        if encoding is None:
            return False
        if encoding.lower() != "chunked":
            raise BrokenAnswer("the answer has a Transfer-Encoding that was not asked for")
        return True

    @property
    def keeps_alive(self) -> bool:
        """Whether the peer will read another request.

        An attacker can smuggle an answer with two lengths in one head. Such an answer is read,
        but its connection is not used again.
        """
        if self.is_http_1_0 or {"transfer-encoding", "content-length"} <= self.headers.keys():
            return False
        return "close" not in self.headers.get("connection", "").lower()


def encode_request(target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The head of a POST of `body`, headers as given, with the blank line after them.

    Raises: ValueError for a header that holds a line break or is not ASCII. It quotes nothing.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = (
        f"POST {target} HTTP/1.1\r\nAccept-Encoding: identity\r\n"
        f"Content-Length: {len(body)}\r\n{lines}\r\n"
    )
    line_count = len(headers) + 4
    if not head.isascii() or not head.count("\r") == head.count("\n") == line_count:
        raise ValueError("a header of the request holds a line break or is not ASCII")
    return head.encode("ascii")


def parse_head(head: bytes) -> Head:
    """Parse a head without the blank line that ends it. Raises only BrokenAnswer."""
    status_line = _STATUS_LINE.match(head)
    if status_line is None:
        raise BrokenAnswer("the answer is not HTTP/1.1")
    headers: dict[str, str] = {}
    at, count = status_line.end(), 0
    for field in _FIELD.finditer(head, at):
        if field.start() != at or count >= HEADERS_MAX:
            break
        at, count = field.end(), count + 1
        name = field[1].decode("ascii").lower()
        value = field[2].decode("latin-1").rstrip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if at != len(head):
        raise BrokenAnswer(f"the answer's headers are malformed or more than {HEADERS_MAX}")
    return Head(int(status_line[2]), headers, is_http_1_0=status_line[1] == b"0")
