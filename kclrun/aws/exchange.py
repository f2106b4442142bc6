"""One HTTP/1.1 exchange on a connected socket: a POST out, its whole answer back.

Holds the bytes of it, as pure functions over bytes, and the reading of an answer from anything
that receives. May not know: how connections are made, kept or proxied (`transport.py`), nor what a
body means. The one rule: an answer is whole and unambiguous, or a `BrokenAnswer`; where framing can
be read in two ways nothing is guessed. Source: RFC 9112.

An own one, because a lease that idles does little else: through `http.client`, which reads a head
as an e-mail, a poll took 280 us, of which the request itself is a quarter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

__all__ = ["Answer", "BrokenAnswer", "Head", "Stream", "encode_request", "exchange", "parse_head"]

# The services send ten headers, some proxies twenty more. http.client's own limits are 100 headers
# of 64 KiB each; a head of 64 KiB in all is what most servers accept.
HEAD_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 100
# 100 Continue, 102, 103: none was asked for; a proxy may send one or two.
INTERIM_MAX: Final = 8
# A chunk's size has at most 16 hexadecimal digits, the rest is room for extensions nobody uses.
_CHUNK_LINE_BYTES_MAX: Final = 256
# An idle poll's answer is 1 kB; a page's first piece is what the kernel has by then.
_RECEIVE_BYTES: Final = 64 * 1024
# Above this a copy costs more than a second send.
_JOINED_BYTES_MAX: Final = 64 * 1024

_HEAD_END: Final = b"\r\n\r\n"
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# Strict where http.client is not: no folded lines, no bare line feeds, no blank before a colon.
_FIELD: Final = re.compile(rb"\r\n(" + _TOKEN + rb"):[ \t]*([^\r\n\0]*)")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n\0]*)?(?=\r\n|\Z)")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\0]*)?")
# Interim answers, and a switch of protocols that nobody asked for.
_INTERIM: Final = range(100, 200)
_SWITCHING: Final = 101
_BODILESS: Final = (204, 304)


class Stream(Protocol):
    """A connected socket, TLS or not, with a time-out on each call."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, most: int, /) -> bytes: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...


class Answer(msgspec.Struct, frozen=True):
    """Status, headers by lower-case name, and the whole body of one reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes)"


class BrokenAnswer(Exception):
    """The peer's bytes are no whole answer; the text quotes none of them."""


class Head(msgspec.Struct, frozen=True):
    """A status line and the headers after it, names in lower case, repeated ones joined."""

    status: int
    headers: Mapping[str, str]
    is_http_1_0: bool = False

    @property
    def length(self) -> int | None:
        """Bytes of the body; None where chunks or the connection's end bound it.

        Raises: BrokenAnswer for a Content-Length that is none.
        """
        if self.status in _BODILESS:
            return 0
        declared = self.headers.get("content-length")
        if declared is None or self.is_chunked:
            return None
        if _LENGTH.fullmatch(declared) is None:
            raise BrokenAnswer("the answer's Content-Length is no number")
        return int(declared)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks. Raises: BrokenAnswer for any other encoding."""
        encoding = self.headers.get("transfer-encoding")
        if encoding is None:
            return False
        if encoding.lower() != "chunked":
            raise BrokenAnswer("the answer has a Transfer-Encoding that was not asked for")
        return True

    @property
    def keeps_alive(self) -> bool:
        """Whether the peer will read another request.

        Two lengths in one head are how answers are smuggled: believed once, and never again.
        """
        if self.is_http_1_0 or {"transfer-encoding", "content-length"} <= self.headers.keys():
            return False
        return "close" not in self.headers.get("connection", "").lower()


def encode_request(target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The head of a POST of `body`, headers as given, with the blank line after them.

    Raises: ValueError, which shows none of it, for a header that would end before its end.
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
    """Read a head, without the blank line that ends it. Raises: BrokenAnswer, and nothing else."""
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


def exchange(stream: Stream, head: bytes, body: bytes, body_max: int) -> tuple[Answer, bool]:
    """Send a request and read its answer; and whether the stream is good for another.

    Raises: BrokenAnswer for an answer that is malformed, cut short or above `body_max` bytes of
    body; OSError as the stream does (TimeoutError where the peer is silent).
    """
    is_sent = _send(stream, head, body)
    incoming = _Incoming(stream)
    for _ in range(INTERIM_MAX):
        parsed = parse_head(incoming.until(_HEAD_END, HEAD_BYTES_MAX))
        if parsed.status == _SWITCHING:
            raise BrokenAnswer("the answer switches to another protocol")
        if parsed.status not in _INTERIM:
            break
    else:
        raise BrokenAnswer(f"more than {INTERIM_MAX} interim answers")
    received = _body(incoming, parsed, body_max)
    is_reusable = is_sent and parsed.keeps_alive and incoming.is_spent
    return Answer(parsed.status, parsed.headers, received), is_reusable


def _send(stream: Stream, head: bytes, body: bytes) -> bool:
    """Whether all of it left: a server may answer, and close, before it has read everything."""
    try:
        if len(body) <= _JOINED_BYTES_MAX:
            stream.sendall(head + body)
        else:
            stream.sendall(head)
            stream.sendall(body)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _body(incoming: _Incoming, head: Head, body_max: int) -> bytes | bytearray:
    if head.is_chunked:
        return _chunks(incoming, body_max)
    length = head.length
    if length is None:
        return incoming.to_the_end(body_max)
    if length > body_max:
        raise _too_long(body_max)
    return incoming.exactly(length)


def _chunks(incoming: _Incoming, body_max: int) -> bytearray:
    body = bytearray()
    while True:
        line = _CHUNK_LINE.fullmatch(incoming.until(b"\r\n", _CHUNK_LINE_BYTES_MAX))
        if line is None:
            raise BrokenAnswer("a chunk of the answer has no size")
        size = int(line[1], 16)
        if size == 0:
            break
        if len(body) + size > body_max:
            raise _too_long(body_max)
        body += incoming.exactly(size)
        if incoming.exactly(2) != b"\r\n":
            raise BrokenAnswer("a chunk of the answer is longer than its size")
    for _ in range(HEADERS_MAX):  # trailers: nothing in them concerns us
        if not incoming.until(b"\r\n", HEAD_BYTES_MAX):
            return body
    raise BrokenAnswer(f"the answer ends with more than {HEADERS_MAX} trailers")


class _Incoming:
    """Reads an answer piece by piece: `_ahead` was received, its first `_used` bytes are done."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ahead = b""
        self._used = 0
        self._has_ended = False

    @property
    def is_spent(self) -> bool:
        """Nothing has come after what was read, neither bytes nor the end."""
        return self._used == len(self._ahead) and not self._has_ended

    def until(self, mark: bytes, most: int) -> bytes:
        """The bytes before `mark`, which is used up too. Raises: BrokenAnswer beyond `most`."""
        at = self._ahead.find(mark, self._used)
        while at < 0 and len(self._ahead) - self._used <= most:
            self._receive_more()
            at = self._ahead.find(mark)
        found = self._ahead[self._used : at]
        if at < 0 or len(found) > most:
            raise BrokenAnswer(f"a part of the answer's head is longer than {most} bytes")
        self._used = at + len(mark)
        return found

    def exactly(self, count: int) -> bytes | bytearray:
        """So many bytes, received straight into their place where they are not here yet."""
        ahead = self._ahead[self._used : self._used + count]
        self._used += len(ahead)
        if len(ahead) == count:
            return ahead
        whole = bytearray(count)
        filled = len(ahead)
        whole[:filled] = ahead
        with memoryview(whole) as place:
            while filled < count:
                received = self._stream.recv_into(place[filled:])
                if received == 0:
                    raise BrokenAnswer(f"the answer was cut short ({filled} of {count} bytes)")
                filled += received
        return whole

    def to_the_end(self, most: int) -> bytearray:
        """Everything until the peer closes."""
        body = bytearray(self._ahead[self._used :])
        while len(body) <= most:
            received = self._stream.recv(_RECEIVE_BYTES)
            if not received:
                self._has_ended = True
                return body
            body += received
        raise _too_long(most)

    def _receive_more(self) -> None:
        received = self._stream.recv(_RECEIVE_BYTES)
        if not received:
            begun = len(self._ahead) > 0
            raise BrokenAnswer("the answer was cut short" if begun else "closed unanswered")
        self._ahead = self._ahead[self._used :] + received
        self._used = 0


def _too_long(body_max: int) -> BrokenAnswer:
    return BrokenAnswer(f"the answer is longer than {body_max} bytes")
