"""One HTTP/1.1 exchange on a connected socket: a POST out, its whole answer back.

Reads from anything that receives. May not know: how connections are made, kept or proxied
(`connecting.py`, `transport.py`), what a head says (`http_head.py`) or a body means. The one rule:
an answer is whole and within its limits, or a `BrokenAnswer`.

An own one, because an idle lease does little else than poll: through `http.client`, which reads a
head as an e-mail, an empty poll took 0.28 ms of CPU; with this it takes 0.09 (`bin/bench fetch`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from kclrun.aws.http_head import HEADERS_MAX, BrokenAnswer, Head, parse_head

__all__ = ["Answer", "Stream", "exchange"]

# What most servers accept in all; the services' heads are below 1 kB.
HEAD_BYTES_MAX: Final = 64 * 1024
# 100 Continue, 102, 103: none was asked for; a proxy may send one or two.
INTERIM_MAX: Final = 8
# A chunk's size has at most 16 hexadecimal digits, the rest is room for extensions nobody uses.
_CHUNK_LINE_BYTES_MAX: Final = 256
# An idle poll's answer is 1 kB; a page's first piece is what the kernel has by then.
_RECEIVE_BYTES: Final = 64 * 1024
# Above this a copy costs more than a second send.
_JOINED_BYTES_MAX: Final = 64 * 1024

_HEAD_END: Final = b"\r\n\r\n"
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\0]*)?")
# Interim answers, and a switch of protocols that nobody asked for.
_INTERIM: Final = range(100, 200)
_SWITCHING: Final = 101


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
    length = head.length
    if length is None:
        if head.is_chunked:
            return _chunks(incoming, body_max)
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
