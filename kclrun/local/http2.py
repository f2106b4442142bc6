"""HTTP/2 without TLS beside HTTP/1.1, on one port.

It knows frames (by the package `h2`) and flow control, but not the content of the requests.
"""

# hypercorn (0.18, on `h2` too) was tried in place of this module, under this module's tests: a
# GOAWAY with NO_ERROR ended the client's open requests, so that the SDK for JavaScript would lose
# its answers again, and it acknowledged the bytes of a request before the application had read
# them, so that a client could send ahead of the reader without bound. Neither can be set, so this
# module stays.

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
from h2.errors import ErrorCodes as _Codes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kclrun.local.asgi import Scope

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Requests under way on one connection. The Java SDK opens another connection above it.
_STREAMS_MAX: Final = 128
# Bytes of request bodies that a connection may send ahead of their reader; one body may use all of
# it. The default of 64 KiB would stop a PutRecords of 10 MiB 160 times. (h2 checks a frame only
# when it is complete. A frame has at most 16 MiB, which is also the limit of a body.)
_WINDOW_BYTES: Final = 1024 * 1024
_WINDOW_BYTES_AT_FIRST: Final = 65_535
# The signed headers of an SDK are below 4 KiB; a session token may add as much.
_HEADERS_BYTES_MAX: Final = 64 * 1024
# These headers belong to HTTP/1.1 and are forbidden here (RFC 9113 8.2.2).
_HOP_HEADERS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
# A frame's head, and with it the fixed fields of a GOAWAY (RFC 9113 4.1 and 6.8).
_HEAD_BYTES: Final = 9
_GOAWAY_BYTES: Final = 17
_GOAWAY: Final = 7
# After the last answer to a client that has sent GOAWAY: the time for it to read the answer and
# close the connection.
_LINGER_S: Final = 5.0
_LOG: Final = logging.getLogger("uvicorn.error")


class Http1Or2Protocol(asyncio.Protocol):
    """Chooses between HTTP/2 and HTTP/1.1 by the first bytes of a connection.

    The Java KCL and its daemon begin with the 24 bytes of the HTTP/2 preface (prior knowledge, RFC
    9113 3.3). Any other connection goes to uvicorn's own protocol.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        # uvicorn calls `shutdown` on each member. Its type hint allows only its own protocols.
        self._connections: set[Any] = server_state.connections
        self._transport: asyncio.Transport
        self._silence_timer: asyncio.TimerHandle
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._silence_timer = asyncio.get_running_loop().call_later(
            self._config.timeout_keep_alive, transport.close
        )

    def data_received(self, data: bytes) -> None:
        self._read += data
        if _PREFACE.startswith(self._read):
            return  # a SETTINGS frame follows the whole preface at once
        transport = self._transport
        self._unregister()
        successor: asyncio.Protocol
        if self._read.startswith(_PREFACE):
            successor = _Http2Protocol(self._config, self._server_state)
        else:
            successor = HttpToolsProtocol(self._config, self._server_state, self._app_state)
        transport.set_protocol(successor)
        successor.connection_made(transport)
        successor.data_received(self._read)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._unregister()

    def shutdown(self) -> None:
        """The server ends before the first request."""
        self._transport.close()

    def _unregister(self) -> None:
        self._connections.discard(self)
        self._silence_timer.cancel()


class _GoawayFilter:
    """Keeps the GOAWAY frames with NO_ERROR of a client away from `h2`, and notes that one came.

    By such a frame a client says that it closes the connection after its open requests, and it
    waits for their answers (RFC 9113 6.8). The SDK for JavaScript sends one after every request.
    But `h2` sends and receives nothing more on a connection after a GOAWAY.
    """

    def __init__(self) -> None:
        self.has_goaway = False
        # The beginning of a frame whose kind is not known yet.
        self._begun = b""
        # The bytes that are still missing of the frame, or the preface, that has begun to arrive.
        self._left_bytes = len(_PREFACE)
        self._is_kept = True

    def kept(self, data: bytes) -> bytes:
        """The bytes of `data`, and those held back before, that `h2` may have."""
        data, self._begun = self._begun + data, b""
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            if not self._left_bytes and not self._begin(data[at : at + _GOAWAY_BYTES]):
                self._begun = data[at:]
                break
            piece = data[at : at + self._left_bytes]
            if self._is_kept:
                pieces.append(piece)
            self._left_bytes -= len(piece)
            at += len(piece)
        return b"".join(pieces)

    def _begin(self, head: bytes) -> bool:
        """Read the head of the next frame. Returns whether enough of it was there."""
        if len(head) < _HEAD_BYTES:
            return False
        length = int.from_bytes(head[:3], "big")
        stream_id = int.from_bytes(head[5:_HEAD_BYTES], "big") & 0x7FFF_FFFF
        # A malformed one is left to `h2`, which refuses it.
        is_goaway = head[3] == _GOAWAY and stream_id == 0 and length >= _GOAWAY_BYTES - _HEAD_BYTES
        if is_goaway and len(head) < _GOAWAY_BYTES:
            return False
        is_graceful = is_goaway and int.from_bytes(head[13:], "big") == _Codes.NO_ERROR
        self.has_goaway = self.has_goaway or is_graceful
        self._is_kept = not is_graceful
        self._left_bytes = _HEAD_BYTES + length
        return True


class _Http2Protocol(asyncio.Protocol):
    """One connection and its streams.

    uvicorn has its own HTTP/2 (`zttp`), but that buffers without bound if its client does not read.
    Here an application waits in `send` until the client has taken the data sent before, and at most
    `_WINDOW_BYTES` of a connection's requests wait to be read.
    """

    def __init__(self, config: Config, server_state: ServerState) -> None:
        self._app = config.loaded_app
        self._idle_s = config.timeout_keep_alive
        self._connections: set[Any] = server_state.connections
        self._tasks = server_state.tasks
        settings = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.h2 = h2.connection.H2Connection(settings)
        # Set here, so that the first SETTINGS frame has them. Later changes hold only after the
        # client has acknowledged them.
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
                SettingCodes.MAX_CONCURRENT_STREAMS: _STREAMS_MAX,
                SettingCodes.MAX_HEADER_LIST_SIZE: _HEADERS_BYTES_MAX,
            },
        )
        self._transport: asyncio.Transport
        self._idle: asyncio.TimerHandle
        self._exchanges: dict[int, _Exchange] = {}
        # The tasks of this connection's requests. The task of a reset stream may still run.
        self._running: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._goaways = _GoawayFilter()
        # The last answer was sent: what the client still sends is not read.
        self._is_over = False
        # The socket's buffer is full: its client does not read.
        self.is_write_paused = False

    # Called by asyncio and the server.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(_WINDOW_BYTES - _WINDOW_BYTES_AT_FIRST)
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            for event in self.h2.receive_data(self._goaways.kept(data)):
                self._take(event)
        except ProtocolError:
            self._close()  # The reason is in the GOAWAY frame that h2 has queued.
            return
        self.flush()
        if self._goaways.has_goaway:
            self._close_when_idle()

    def pause_writing(self) -> None:
        """The client does not read. Then its data is not read either, pings included, so that
        answers to it do not accumulate."""
        self.is_write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._transport.resume_reading()
        self._wake_senders()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._connections.discard(self)
        self._idle.cancel()
        for exchange in self._exchanges.values():
            exchange.mark_disconnected()
        self._exchanges.clear()

    def shutdown(self) -> None:
        """The server ends: accept no new streams, and close the connection after the last one."""
        self._is_ending = True
        if self._is_over:
            self._transport.close()
        else:
            self._close_when_idle()

    # Called by an exchange.

    def flush(self) -> None:
        """Write the frames that h2 has queued."""
        data = self.h2.data_to_send()
        if not (self._is_over or self._transport.is_closing()):
            self._transport.write(data)

    def finish(self, exchange: _Exchange) -> None:
        """An exchange has sent its answer, or never will."""
        if self._exchanges.pop(exchange.stream_id, None) is None:
            return
        if not exchange.is_answered or not exchange.is_read:
            # The answer was sent before the whole request had arrived: refuse the rest.
            code = _Codes.NO_ERROR if exchange.is_answered else _Codes.INTERNAL_ERROR
            with contextlib.suppress(ProtocolError):
                self.h2.reset_stream(exchange.stream_id, code)
        self.acknowledge(exchange.unread_bytes, exchange.stream_id)
        self._close_when_idle()

    def acknowledge(self, size_bytes: int, stream_id: int) -> None:
        """Bytes of a request have been read: the client may send as many more."""
        self.h2.acknowledge_received_data(size_bytes, stream_id)
        self.flush()

    # Internal.

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._begin(event)
            case h2.events.DataReceived():
                exchange = self._exchanges.get(event.stream_id)
                if exchange is None:
                    self.acknowledge(event.flow_controlled_length, event.stream_id)
                else:
                    exchange.take(event.data, event.flow_controlled_length)
            case h2.events.StreamEnded():
                if (exchange := self._exchanges.get(event.stream_id)) is not None:
                    exchange.end_request()
            case h2.events.StreamReset():
                if (exchange := self._exchanges.pop(event.stream_id, None)) is not None:
                    self.acknowledge(exchange.unread_bytes, exchange.stream_id)
                    exchange.mark_disconnected()
                    self._close_when_idle()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._wake_senders()
            case h2.events.ConnectionTerminated():
                # A GOAWAY with an error: the client that sent it expects no answer.
                self._close()

    def _begin(self, event: h2.events.RequestReceived) -> None:
        if self._is_ending or len(self._running) >= _STREAMS_MAX:
            # A stream that its client reset at once does not count as open, but its task runs.
            self.h2.reset_stream(event.stream_id, _Codes.REFUSED_STREAM)
            return
        self._idle.cancel()
        exchange = _Exchange(self, event.stream_id, self._scope(event))
        self._exchanges[event.stream_id] = exchange
        task = asyncio.get_running_loop().create_task(exchange.run(self._app))
        for tasks in (self._running, self._tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _scope(self, event: h2.events.RequestReceived) -> Scope:
        # h2 has checked that the pseudo-headers are there, once each and first (CONNECT, which has
        # no path, names no operation), or a host in place of the authority.
        headers = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        pseudo = {name: value for name, value in headers if name.startswith(b":")}
        kept = [header for header in headers if not header[0].startswith(b":")]
        if all(name != b"host" for name, _ in kept):
            kept.insert(0, (b"host", pseudo[b":authority"]))
        path, _, query = pseudo.get(b":path", b"*").partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "server": self._transport.get_extra_info("sockname"),
            "client": self._transport.get_extra_info("peername"),
            "scheme": "http",
            "method": pseudo[b":method"].decode("ascii", "replace"),
            "root_path": "",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": kept,
        }

    def _wake_senders(self) -> None:
        for exchange in self._exchanges.values():
            exchange.wake()

    def _end(self) -> None:
        self.h2.close_connection()
        self._close()

    def _end_after_client(self) -> None:
        """Send the end and let the client close the connection. If it were closed here, and the
        client's acknowledgement of the last answer arrived after that, the system would reset the
        connection, and the client could lose the rest of the answer."""
        if self._is_over:
            return
        self.h2.close_connection()
        self.flush()
        self._is_over = True
        self._transport.write_eof()
        self._idle = asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def _close(self) -> None:
        self.flush()
        self._transport.close()

    def _close_when_idle(self) -> None:
        """Without a request under way, close the connection: now, or when it was idle too long."""
        if self._exchanges:
            return
        self._idle.cancel()
        if self._is_ending:
            self._end()
        elif self._goaways.has_goaway:
            self._end_after_client()
        else:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end)


class _Exchange:
    """One request and its answer: the `receive` and `send` functions of an ASGI application."""

    def __init__(self, connection: _Http2Protocol, stream_id: int, scope: Scope) -> None:
        self.stream_id = stream_id
        self.is_answered = False
        # Whether the whole request has arrived.
        self.is_read = False
        # Bytes, with their padding, that the client has sent and the application has not read.
        self.unread_bytes = 0
        self._connection = connection
        self._scope = scope
        self._chunks: deque[bytes] = deque()
        self._is_disconnected = False
        # Whether the application has the whole request.
        self._is_taken = False
        self._has_begun = False
        self._changed = asyncio.Event()

    async def run(self, app: Any) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:  # noqa: BLE001 - a bug of the application is logged; the connection goes on.
            _LOG.exception("Exception in ASGI application")
            if not self._has_begun:
                await self._send({"type": "http.response.start", "status": 500})
                await self._send({"type": "http.response.body"})
        finally:
            self._connection.finish(self)

    def take(self, data: bytes, size_bytes: int) -> None:
        """Take a part of the request's body."""
        self._chunks.append(data)
        self.unread_bytes += size_bytes
        self.wake()

    def end_request(self) -> None:
        self.is_read = True
        self.wake()

    def mark_disconnected(self) -> None:
        """The client has disconnected or reset the stream."""
        self._is_disconnected = True
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        # After the end of the request, only the end of the connection is waited for.
        while not (self._chunks or self._is_disconnected or self.is_answered):
            if self.is_read and not self._is_taken:
                break
            await self._wait()
        if self._is_disconnected or self.is_answered:
            return {"type": "http.disconnect"}
        body = b"".join(self._chunks)
        self._chunks.clear()
        size_bytes, self.unread_bytes = self.unread_bytes, 0
        self._connection.acknowledge(size_bytes, self.stream_id)
        self._is_taken = self.is_read
        return {"type": "http.request", "body": body, "more_body": not self.is_read}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            if message["type"] == "http.response.start":
                self._begin_answer(message["status"], message.get("headers", ()))
                return
            if self._scope["method"] != "HEAD":
                await self._send_body(memoryview(message.get("body", b"")))
            if not (message.get("more_body", False) or self._is_disconnected):
                self._connection.h2.end_stream(self.stream_id)
                self.is_answered = True
                self.wake()
        except ProtocolError:
            self._is_disconnected = True  # The stream, or the connection, ended during the answer.
        finally:
            self._connection.flush()

    def _begin_answer(self, status: int, headers: Any) -> None:
        kept = [(name.lower(), value) for name, value in headers]
        kept = [header for header in kept if header[0] not in _HOP_HEADERS]
        if not self._is_disconnected:
            self._has_begun = True
            answer = [(b":status", b"%d" % status), *kept]
            self._connection.h2.send_headers(self.stream_id, answer)

    async def _send_body(self, body: memoryview) -> None:
        """Send in parts, as the client's windows and the socket allow."""
        protocol = self._connection.h2
        while body and not self._is_disconnected:
            room = protocol.local_flow_control_window(self.stream_id)
            if room <= 0 or self._connection.is_write_paused:
                await self._wait()
                continue
            piece = body[: min(room, protocol.max_outbound_frame_size)]
            protocol.send_data(self.stream_id, bytes(piece))
            self._connection.flush()
            body = body[len(piece) :]

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
