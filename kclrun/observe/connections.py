"""The connections of a small HTTP server: one thread reads every request and writes every answer.

So a client that sends or reads slowly, or not at all, occupies a socket for a bounded time, and no
thread. Other threads make the answers. It knows heads, lengths and times, but neither paths nor the
rules for browsers.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

# Four answers are made at once (Prometheus, a load balancer, a person), and one of a probe.
_THREADS: Final = 4
# A request head of Prometheus has 400 bytes; that of a browser with its cookies, 2 KiB.
HEAD_BYTES_MAX: Final = 8192
_PIECE_BYTES: Final = 16_384
# For the whole request, and for its answer: a client on the same host or network needs
# milliseconds.
_REQUEST_S_MAX: Final = 2.0
_ANSWER_S_MAX: Final = 5.0
# After its answer, for a client to close its connection. If we closed it first while the client
# still sends, the system would reset it, and the client could lose the answer.
_LINGER_S_MAX: Final = 1.0
# Connections whose requests are incomplete, those whose answers are, and those that are to be
# closed by their clients. One more ends the oldest of its kind: a probe sends its request at once,
# and is never the oldest for long.
_CONNECTIONS_MAX: Final = 64
# Complete requests that wait for one of the threads. One more is refused.
_WAITING_MAX: Final = 64
# An answer to a probe is made within a millisecond: 512 wait for half of the second that Kubernetes
# gives a probe by default.
_PROBES_WAITING_MAX: Final = 512
_ACCEPTED_A_TURN_MAX: Final = 64
# The pause after a failed accept (no descriptors left).
_PAUSE_S: Final = 0.1
_END_OF_HEAD: Final = b"\r\n\r\n"


class Begun(msgspec.Struct, frozen=True):
    """A request whose head is accepted: the length of its body, and the function that answers it.

    `answer` is called in a thread of the server, with the body and the connection. None: it has
    taken the connection over. A probe waits for no other request.
    """

    body_bytes: int
    answer: Callable[[bytes, socket.socket], bytes | None]
    is_probe: bool = False


class _Exchange:
    """One connection: its request as it arrives, then its answer as it leaves."""

    __slots__ = ("begun", "connection", "deadline", "received", "unsent")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = 0.0
        self.received = b""
        self.begun: Begun | None = None
        self.unsent = memoryview(b"")


# Complete requests that wait for a thread. None ends a thread.
_Waiting = queue.SimpleQueue[_Exchange | None]
# The exchanges of one phase. The oldest, which has the earliest deadline, is the first.
_Phase = dict[_Exchange, None]


class Connections:
    """Serves the clients of a listening socket until `close`.

    `begin` is called with the head of a request, up to its empty line. It returns a `Begun`, or the
    answer if no body and no work is needed. `refused` makes an answer from a status and a text.
    """

    def __init__(
        self,
        listener: socket.socket,
        begin: Callable[[bytes], Begun | bytes],
        refused: Callable[[int, str], bytes],
    ) -> None:
        self._listener = listener
        self._begin = begin
        self._refused = refused
        self._is_closed = threading.Event()
        self._reading: _Phase = {}
        self._writing: _Phase = {}
        self._lingering: _Phase = {}
        self._waiting: _Waiting = queue.SimpleQueue()
        self._probes: _Waiting = queue.SimpleQueue()
        self._answered: deque[tuple[_Exchange, bytes | None]] = deque()
        self._waker, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waits in (listener, self._wakes):
            waits.settimeout(0.0)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._take_answers)
        served = [self._probes, *(self._waiting for _ in range(_THREADS))]
        self.threads = [
            threading.Thread(target=self._serve, name="kclrun-http", daemon=True),
            *(
                threading.Thread(
                    target=self._answer, args=(waiting,), name=f"kclrun-http-{number}", daemon=True
                )
                for number, waiting in enumerate(served)
            ),
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Stop listening and end the connections. Does not wait for answers that are being made."""
        self._is_closed.set()
        self._probes.put(None)
        for _ in range(_THREADS):
            self._waiting.put(None)
        self._wake()
        self._listener.close()

    # The thread of the connections.

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select(self._next_deadline_s()):
                key.data()
            now = time.monotonic()
            for phase in self._phases():
                while phase and next(iter(phase)).deadline <= now:
                    self._end(next(iter(phase)))
        for phase in self._phases():
            for exchange in tuple(phase):
                self._end(exchange)
        self._drop_answered()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    def _phases(self) -> tuple[_Phase, _Phase, _Phase]:
        return self._reading, self._writing, self._lingering

    def _next_deadline_s(self) -> float | None:
        """Seconds until the first deadline; None without a connection."""
        deadlines = [next(iter(phase)).deadline for phase in self._phases() if phase]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_A_TURN_MAX):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                if self._reading:
                    self._end(next(iter(self._reading)))
                else:
                    self._is_closed.wait(_PAUSE_S)
                return
            connection.settimeout(0.0)
            exchange = _Exchange(connection)
            self._enter(self._reading, exchange, _REQUEST_S_MAX)
            self._expect(exchange, selectors.EVENT_READ, self._read)
            self._read(exchange)  # it is often there already

    def _read(self, exchange: _Exchange) -> None:
        piece = self._received(exchange)
        if piece is None:
            return
        exchange.received += piece
        if exchange.begun is None:
            head, end, body = exchange.received.partition(_END_OF_HEAD)
            if len(head) + len(end) > HEAD_BYTES_MAX:
                text = f"a request of more than {HEAD_BYTES_MAX} bytes"
                self._write(exchange, self._refused(400, text))
                return
            if not end:
                return
            begun = self._begin(head)
            if isinstance(begun, bytes):
                self._write(exchange, begun)
                return
            exchange.begun, exchange.received = begun, body
        if len(exchange.received) >= exchange.begun.body_bytes:
            self._ask(exchange, exchange.begun)

    def _received(self, exchange: _Exchange) -> bytes | None:
        """The bytes that have arrived; None if there are none. At the client's end, end it."""
        try:
            piece = exchange.connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if piece:
            return piece
        self._end(exchange)
        return None

    def _ask(self, exchange: _Exchange, begun: Begun) -> None:
        """Give a complete request to the threads."""
        waiting, limit = (
            (self._probes, _PROBES_WAITING_MAX) if begun.is_probe else (self._waiting, _WAITING_MAX)
        )
        if waiting.qsize() >= limit:
            self._write(exchange, self._refused(503, f"{limit} requests wait already"))
            return
        self._leave(exchange)
        waiting.put(exchange)

    def _take_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(_PIECE_BYTES)
        while self._answered:
            exchange, answer = self._answered.popleft()
            if answer is not None:
                self._write(exchange, answer)

    def _write(self, exchange: _Exchange, answer: bytes) -> None:
        exchange.unsent = memoryview(answer)
        self._enter(self._writing, exchange, _ANSWER_S_MAX)
        self._send(exchange)

    def _send(self, exchange: _Exchange) -> None:
        try:
            sent = exchange.connection.send(exchange.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # its client has left
            self._end(exchange)
            return
        exchange.unsent = exchange.unsent[sent:]
        if exchange.unsent:
            self._expect(exchange, selectors.EVENT_WRITE, self._send)
            return
        with contextlib.suppress(OSError):
            exchange.connection.shutdown(socket.SHUT_WR)
        self._enter(self._lingering, exchange, _LINGER_S_MAX)
        self._expect(exchange, selectors.EVENT_READ, self._received)

    def _enter(self, phase: _Phase, exchange: _Exchange, for_s: float) -> None:
        """Move it to a phase. If the phase is full, end the oldest of it."""
        for other in self._phases():
            other.pop(exchange, None)
        exchange.deadline = time.monotonic() + for_s
        phase[exchange] = None
        if len(phase) > _CONNECTIONS_MAX:
            self._end(next(iter(phase)))

    def _expect(
        self, exchange: _Exchange, events: int, then: Callable[[_Exchange], object]
    ) -> None:
        def happened() -> None:
            # An event before it in the same turn may have ended it.
            if exchange.connection.fileno() >= 0:
                then(exchange)

        if exchange.connection.fileno() in self._selector.get_map():
            self._selector.modify(exchange.connection, events, happened)
        else:
            self._selector.register(exchange.connection, events, happened)

    def _leave(self, exchange: _Exchange) -> None:
        for phase in self._phases():
            phase.pop(exchange, None)
        if exchange.connection.fileno() in self._selector.get_map():
            self._selector.unregister(exchange.connection)

    def _end(self, exchange: _Exchange) -> None:
        self._leave(exchange)
        exchange.connection.close()

    # The threads of the answers.

    def _answer(self, waiting: _Waiting) -> None:
        while (exchange := waiting.get()) is not None:
            begun = exchange.begun
            assert begun is not None
            self._answered.append((exchange, begun.answer(exchange.received, exchange.connection)))
            self._wake()
            if self._is_closed.is_set():
                self._drop_answered()

    def _drop_answered(self) -> None:
        """After the close, in whichever thread finds them: end those that were being answered."""
        while self._answered:
            with contextlib.suppress(IndexError):
                self._answered.popleft()[0].connection.close()

    def _wake(self) -> None:
        # Full: it wakes anyway. Closed: there is nothing to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
