"""One POST over a kept connection: an answer, or a failure that says whether anything was sent.

Keeps the connections that `connecting.py` makes; what is said on them is `exchange.py`'s. May not
know what the bytes mean. The one rule: nothing is retried here, because only the caller knows
whether sending twice is harmless. `WireClient` (wire.py) is the only user.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from typing import Final

from kclrun.aws.connecting import Connection, Connector, NotConnected, describe
from kclrun.aws.exchange import Answer, exchange
from kclrun.aws.http_head import BrokenAnswer, encode_request
from kclrun.model.wire import WireEndpoint

__all__ = ["CONNECTIONS_MAX", "Answer", "Transport", "TransportFailure"]

# GetRecords returns at most 10 MiB of data, 14 MiB in base64; 10,000 records add at most about
# 2 kB each (a partition key of 256 characters, escaped). 64 MiB leaves room and bounds memory.
BODY_BYTES_MAX: Final = 64 * 2**20
# Unless a client is told of more: so many threads of one process read or write at once.
CONNECTIONS_MAX: Final = 8


class TransportFailure(Exception):
    """No whole answer came.

    `was_sent`: the service may have the request. `on_reused_connection`: an idle connection was
    used, which the service may have closed in the same moment. `timed_out`: it was silent.
    """

    def __init__(
        self, text: str, *, was_sent: bool, on_reused_connection: bool, timed_out: bool
    ) -> None:
        super().__init__(text)
        self.was_sent = was_sent
        self.on_reused_connection = on_reused_connection
        self.timed_out = timed_out


class Transport:
    """At most `connections_max` connections to one endpoint, kept open between requests.

    One more thread waits for a connection, as long as for an answer.
    """

    def __init__(self, endpoint: WireEndpoint, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connector = Connector(endpoint)
        self._read_timeout_s = endpoint.read_timeout_s
        self._patience_s = endpoint.connect_timeout_s + endpoint.read_timeout_s
        self._connections_max = connections_max
        self._permits = threading.BoundedSemaphore(connections_max)
        # The last one back is the first one out; appending and popping are atomic.
        self._idle: list[Connection] = []
        weakref.finalize(self, _close_all, self._idle)

    def post(self, headers: dict[str, str], body: bytes) -> Answer:
        """Send once, read the whole reply. Raises: TransportFailure."""
        head = encode_request(self._connector.target, headers | self._connector.proxy_headers, body)
        if not self._permits.acquire(timeout=self._patience_s):
            raise TransportFailure(
                f"none of {self._connections_max} connections became free",
                was_sent=False,
                on_reused_connection=False,
                timed_out=True,
            )
        try:
            kept = self._kept()
            return self._exchange(kept or self._opened(), head, body, is_reused=kept is not None)
        finally:
            self._permits.release()

    def close(self) -> None:
        """Close every idle connection."""
        _close_all(self._idle)

    def _kept(self) -> Connection | None:
        """An idle connection that nobody has closed meanwhile, as far as one can see."""
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
                str(error), was_sent=False, on_reused_connection=False, timed_out=error.timed_out
            ) from None

    def _exchange(
        self, connection: Connection, head: bytes, body: bytes, *, is_reused: bool
    ) -> Answer:
        is_reusable = False
        try:
            answer, is_reusable = exchange(connection.stream, head, body, BODY_BYTES_MAX)
            _compare_checksum(answer)
        except (BrokenAnswer, OSError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise TransportFailure(
                self._described(error),
                was_sent=True,
                on_reused_connection=is_reused,
                timed_out=timed_out,
            ) from None
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return answer

    def _described(self, error: BrokenAnswer | OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"silent for {self._read_timeout_s:g} s"
        return describe(error) if isinstance(error, OSError) else str(error)


def _close_all(idle: list[Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


def _compare_checksum(answer: Answer) -> None:
    """DynamoDB sends one."""
    checksum = answer.headers.get("x-amz-crc32")
    if checksum is not None and checksum != str(zlib.crc32(answer.body)):
        raise BrokenAnswer("the answer does not match its checksum")
