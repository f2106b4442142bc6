"""One POST over a kept connection: HTTP/1.1. `connecting.py` opens the connections.

It must not know the meaning of the bytes. A failure says whether the request may have been sent.
No request is repeated here, because only the caller knows whether a second send is harmless.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
import zlib
from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.aws.connecting import Connection, Connector, NotConnected, Stream, describe
from kclrun.model.wire import WireEndpoint

# Encoding a request's head and parsing an answer's head (HTTP/1.1, RFC 9112). Pure.

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


# One HTTP/1.1 exchange on a connected socket: send a POST, read its whole answer.
#
# It replaces `http.client`, because an idle lease does little besides polling. `http.client` parses
# a head like an e-mail: with it, an empty poll takes 0.28 ms of CPU, with this code 0.09 ms
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
    body, chunks = bytearray(), _Chunks(incoming)
    while piece := chunks.piece():
        body += piece
        if len(body) + chunks.left > body_max:
            raise _too_long(body_max)
    return body


class _Chunks:
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


# Kept connections. `WireClient` (wire.py) is the only user.

# GetRecords returns at most 10 MiB of data, 14 MiB in base64; 10,000 records add at most about
# 2 kB each (a partition key of 256 characters, escaped). 64 MiB leaves room and bounds memory.
BODY_BYTES_MAX: Final = 64 * 2**20
# The default number of connections: so many threads of one process read or write at once.
CONNECTIONS_MAX: Final = 8


class TransportFailure(Exception):
    """No complete answer came.

    `was_sent`: the service may have the request. `on_reused_connection`: an idle connection was
    used, which the service may have closed in the same moment. `timed_out`: the service was silent.
    `was_refused`: no program listens there.
    """

    def __init__(
        self,
        text: str,
        *,
        was_sent: bool,
        on_reused_connection: bool = False,
        timed_out: bool = False,
        was_refused: bool = False,
    ) -> None:
        super().__init__(text)
        self.was_refused = was_refused
        self.was_sent = was_sent
        self.on_reused_connection = on_reused_connection
        self.timed_out = timed_out


class StreamedAnswer:
    """An answer of status 200 whose body comes over minutes, on a connection of its own. Used by
    one thread."""

    def __init__(self, connection: Connection, incoming: _Incoming, head: Head) -> None:
        self.headers = head.headers
        self._connection = connection
        if not head.is_chunked:
            raise BrokenAnswer("the answer should come in chunks")
        self._chunks = _Chunks(incoming)

    def piece(self, timeout_s: float) -> bytes | None:
        """The next bytes; none at the end; None if nothing came in that time.

        Raises: TransportFailure where the connection broke.
        """
        self._connection.set_timeout(timeout_s)
        try:
            return self._chunks.piece()
        except TimeoutError:
            return None
        except (BrokenAnswer, OSError) as error:
            raise TransportFailure(_described(error), was_sent=True) from None

    def close(self) -> None:
        """Close the connection; the peer then stops sending."""
        self._connection.close()


class Transport:
    """At most `connections_max` connections to one endpoint, kept open between requests.

    A further thread waits for a connection, at most for the connect and the read time-out.
    """

    def __init__(self, endpoint: WireEndpoint, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connector = Connector(endpoint)
        # The address of the proxy that requests go through, for messages.
        self.proxy = self._connector.proxy
        self._read_timeout_s = endpoint.read_timeout_s
        self._patience_s = endpoint.connect_timeout_s + endpoint.read_timeout_s
        self._connections_max = connections_max
        self._permits = threading.BoundedSemaphore(connections_max)
        # The connection returned last is used first. Appending and popping are atomic.
        self._idle: list[Connection] = []
        weakref.finalize(self, _close_all, self._idle)

    def post(self, headers: dict[str, str], body: bytes) -> Answer:
        """Send once, read the whole reply. Raises: TransportFailure."""
        head = encode_request(self._connector.target, headers | self._connector.proxy_headers, body)
        if not self._permits.acquire(timeout=self._patience_s):
            raise TransportFailure(
                f"none of {self._connections_max} connections became free",
                was_sent=False,
                timed_out=True,
            )
        try:
            kept = self._kept()
            return self._exchange(kept or self._opened(), head, body, is_reused=kept is not None)
        finally:
            self._permits.release()

    def post_for_stream(self, headers: dict[str, str], body: bytes) -> Answer | StreamedAnswer:
        """Send once, on a new connection; an answer other than 200 is read whole.

        Such a connection does not count among `connections_max`. Raises: TransportFailure.
        """
        head = encode_request(self._connector.target, headers | self._connector.proxy_headers, body)
        connection = self._opened()
        streamed = None
        try:
            _send(connection.stream, head, body)
            incoming = _Incoming(connection.stream)
            parsed = _final_head(incoming)
            if parsed.status == 200:
                streamed = StreamedAnswer(connection, incoming, parsed)
                return streamed
            return Answer(parsed.status, parsed.headers, _body(incoming, parsed, BODY_BYTES_MAX))
        except (BrokenAnswer, OSError) as error:
            raise self._failure(error) from None
        finally:
            if streamed is None:
                connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        _close_all(self._idle)

    def _kept(self) -> Connection | None:
        """An idle connection that the service has not closed, as far as this host knows."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_silent():
                return connection
            connection.close()

    def _opened(self) -> Connection:
        try:
            return self._connector.open()
        except NotConnected as error:
            raise TransportFailure(
                str(error),
                was_sent=False,
                timed_out=error.timed_out,
                was_refused=error.was_refused,
            ) from None

    def _exchange(
        self, connection: Connection, head: bytes, body: bytes, *, is_reused: bool
    ) -> Answer:
        is_reusable = False
        try:
            answer, is_reusable = exchange(connection.stream, head, body, BODY_BYTES_MAX)
            _compare_checksum(answer)
        except (BrokenAnswer, OSError) as error:
            raise self._failure(error, is_reused=is_reused) from None
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return answer

    def _failure(
        self, error: BrokenAnswer | OSError, *, is_reused: bool = False
    ) -> TransportFailure:
        timed_out = isinstance(error, TimeoutError)
        text = f"silent for {self._read_timeout_s:g} s" if timed_out else _described(error)
        return TransportFailure(
            text, was_sent=True, on_reused_connection=is_reused, timed_out=timed_out
        )


def _described(error: BrokenAnswer | OSError) -> str:
    return describe(error) if isinstance(error, OSError) else str(error)


def _close_all(idle: list[Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


def _compare_checksum(answer: Answer) -> None:
    """DynamoDB sends a CRC32 of the body."""
    checksum = answer.headers.get("x-amz-crc32")
    if checksum is not None and checksum != str(zlib.crc32(answer.body)):
        raise BrokenAnswer("the answer does not match its checksum")
