"""One HTTP/1.1 exchange on a connected stream: send a POST, read its answer.

It must not know who connects, or the meaning of a body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.aws.connecting import Stream
from kclrun.aws.http.heads import HEADERS_MAX, BrokenAnswer, Head, parse_head

# This code replaces `http.client`, because an idle lease does little besides polling. `http.client`
# parses a head like an e-mail: with it, an empty poll takes 0.28 ms of CPU, with this code 0.09 ms
# (`bin/bench fetch`).

# Most servers accept a head of this size in all; the services' heads are below 1 kB.
HEAD_BYTES_MAX: Final = 64 * 1024
# 100 Continue, 102, 103: we request none of them, but a proxy may send one or two.
INTERIM_MAX: Final = 8
# A chunk's size has at most 16 hexadecimal digits. The rest is for extensions, which are not used
# in practice.
_CHUNK_LINE_BYTES_MAX: Final = 256
# The answer of an idle poll has 1 kB. One call receives what the kernel's buffer holds of a page.
_RECEIVE_BYTES: Final = 64 * 1024
# Above this size a copy of the body costs more than a second send.
_JOINED_BYTES_MAX: Final = 64 * 1024

_HEAD_END: Final = b"\r\n\r\n"
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\0]*)?")
# Interim answers, and a switch of protocols, which we never request.
_INTERIM: Final = range(100, 200)
_SWITCHING: Final = 101


class Answer(msgspec.Struct, frozen=True):
    """Status, headers by lower-case name, and the whole body of one reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes)"


def exchange(stream: Stream, head: bytes, body: bytes, body_max: int) -> tuple[Answer, bool]:
    """Send a request and read its answer. Also returns whether the stream can be used again.

    Raises: BrokenAnswer for an answer that is malformed, cut short or above `body_max` bytes of
    body; OSError as the stream does (TimeoutError where the peer is silent).
    """
    is_sent = _send(stream, head, body)
    incoming = _Incoming(stream)
    parsed = _final_head(incoming)
    received = _body(incoming, parsed, body_max)
    is_reusable = is_sent and parsed.keeps_alive and incoming.is_spent
    return Answer(parsed.status, parsed.headers, received), is_reusable


def exchange_for_chunks(
    stream: Stream, head: bytes, body: bytes, body_max: int
) -> tuple[Head, ChunkedBody] | Answer:
    """Send a request. The body of an answer of status 200 is left to be read piece by piece.

    Another answer is read whole. Raises: as `exchange`; BrokenAnswer for a 200 without chunks.
    """
    _send(stream, head, body)
    incoming = _Incoming(stream)
    parsed = _final_head(incoming)
    if parsed.status != 200:
        return Answer(parsed.status, parsed.headers, _body(incoming, parsed, body_max))
    if not parsed.is_chunked:
        raise BrokenAnswer("the answer should come in chunks")
    return parsed, ChunkedBody(incoming)


def _final_head(incoming: _Incoming) -> Head:
    for _ in range(INTERIM_MAX):
        parsed = parse_head(incoming.until(_HEAD_END, HEAD_BYTES_MAX))
        if parsed.status == _SWITCHING:
            raise BrokenAnswer("the answer switches to another protocol")
        if parsed.status not in _INTERIM:
            return parsed
    raise BrokenAnswer(f"more than {INTERIM_MAX} interim answers")


def _send(stream: Stream, head: bytes, body: bytes) -> bool:
    """Returns whether the whole request was sent: a server may answer and close before it has read
    the rest."""
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
    body, chunks = bytearray(), ChunkedBody(incoming)
    while piece := chunks.piece():
        body += piece
        if len(body) + chunks.left > body_max:
            raise _too_long(body_max)
    return body


class ChunkedBody:
    """A chunked body, piece by piece. `left` is the rest of the present chunk, in bytes."""

    def __init__(self, incoming: _Incoming) -> None:
        self._incoming = incoming
        self._has_chunk = False
        self._has_ended = False
        self.left = 0

    def piece(self) -> bytes:
        """The next bytes; none at the end. A TimeoutError changes nothing: call it again."""
        while not self.left:
            if not self._has_ended:
                self._next_chunk()
            if self._has_ended:
                self._skip_trailers()
                return b""
        piece = self._incoming.some(self.left)
        self.left -= len(piece)
        return piece

    def _next_chunk(self) -> None:
        if self._has_chunk:
            if self._incoming.until(b"\r\n", _CHUNK_LINE_BYTES_MAX):
                raise BrokenAnswer("a chunk of the answer is longer than its size")
            self._has_chunk = False
        line = _CHUNK_LINE.fullmatch(self._incoming.until(b"\r\n", _CHUNK_LINE_BYTES_MAX))
        if line is None:
            raise BrokenAnswer("a chunk of the answer has no size")
        self.left = int(line[1], 16)
        self._has_chunk = self.left > 0
        self._has_ended = not self._has_chunk

    def _skip_trailers(self) -> None:
        """Read the trailers to their end; they are not used."""
        for _ in range(HEADERS_MAX):
            if not self._incoming.until(b"\r\n", HEAD_BYTES_MAX):
                return
        raise BrokenAnswer(f"the answer ends with more than {HEADERS_MAX} trailers")


class _Incoming:
    """Reads an answer in parts: `_ahead` was received, its first `_used` bytes are consumed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ahead = b""
        self._used = 0
        self._has_ended = False

    @property
    def is_spent(self) -> bool:
        """Whether the peer has sent nothing behind the bytes that were read, and has not closed."""
        return self._used == len(self._ahead) and not self._has_ended

    def until(self, mark: bytes, most: int) -> bytes:
        """The bytes before `mark`; `mark` is consumed too. Raises: BrokenAnswer beyond `most`."""
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
        """Exactly `count` bytes. Bytes not received yet are received directly into the result."""
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

    def some(self, most: int) -> bytes:
        """At least one byte, at most `most`. Raises: BrokenAnswer at the end of the stream."""
        if self._used == len(self._ahead):
            self._receive_more()
        found = self._ahead[self._used : self._used + most]
        self._used += len(found)
        return found

    def to_the_end(self, most: int) -> bytearray:
        """All bytes until the peer closes."""
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
