"""One POST over a kept connection. `connecting.py` opens the connections, `WireClient` uses them.

It must not know the meaning of the bytes. A failure says whether the request may have been sent.
No request is repeated here, because only the caller knows whether a second send is harmless.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from typing import Final

from kclrun.aws.connecting import Connection, Connector, NotConnected, describe
from kclrun.aws.http.exchange import Answer, ChunkedBody, exchange, exchange_for_chunks
from kclrun.aws.http.heads import BrokenAnswer, Head, encode_request
from kclrun.model.wire import WireEndpoint

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

    def __init__(self, connection: Connection, head: Head, chunks: ChunkedBody) -> None:
        self.headers = head.headers
        self._connection = connection
        self._chunks = chunks

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
            answer = exchange_for_chunks(connection.stream, head, body, BODY_BYTES_MAX)
            if isinstance(answer, Answer):
                return answer
            streamed = StreamedAnswer(connection, *answer)
            return streamed
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
