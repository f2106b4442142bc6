"""The embedded AWS's endpoint: answers Kinesis requests and forwards all others.

An ASGI application: X-Amz-Target names the operation, Content-Type its encoding (JSON or CBOR). It
reads the clock, so that the model need not. It does not know processes. Only our own bugs are
logged, never a payload, key, token or credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

import httptools
import msgspec

from kclrun.codec.event_stream import CONTENT_TYPE
from kclrun.local.asgi import (
    App,
    BodyTooLarge,
    ClientGone,
    Receive,
    Scope,
    Send,
    date_header,
    read_body,
    respond,
)
from kclrun.local.consumers import Subscription, SubscriptionEnd, SubscriptionEvent
from kclrun.local.operations import (
    Answer,
    Encoding,
    answer,
    error_answer,
    event_message,
    exception_message,
    initial_response,
)
from kclrun.local.service import Kinesis
from kclrun.local.signatures import Credentials, SignatureRefused, SignedRequest, verify
from kclrun.model.quotas import DELIVERY_BYTES_MAX
from kclrun.model.stream import LOOPBACK_REGION
from kclrun.model.time import WallTime

# A WSGI application (PEP 3333), called with an ASGI request. Body and answer are in memory as a
# whole, so the caller must bound the body.
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
# Status, headers, body.
WsgiAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]


def wsgi_environ(scope: Scope, body: bytes) -> dict[str, Any]:
    """The request as WSGI describes it (PEP 3333)."""
    path = scope["raw_path"].decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    host, port = scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": f"{path}?{query}" if query else path,
        "REQUEST_URI": f"{path}?{query}" if query else path,
        "SERVER_NAME": host,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").upper().replace("-", "_")
        if name in ("CONTENT_LENGTH", "TRANSFER_ENCODING"):
            continue
        key = name if name == "CONTENT_TYPE" else f"HTTP_{name}"
        value = raw_value.decode("latin-1")
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    return environ


def call_wsgi(moto: WsgiApp, environ: dict[str, Any]) -> WsgiAnswer:
    """One request through a WSGI application; its answer as a whole."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], _exc_info: object = None
    ) -> Callable[[bytes], None]:
        started.append((status, headers))
        return written.append

    pieces = moto(environ, start_response)
    try:
        content = b"".join((*written, *pieces))
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    status, headers = started[-1]
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    if environ["REQUEST_METHOD"] != "HEAD" and not any(
        name == b"content-length" for name, _ in encoded
    ):
        encoded.append((b"content-length", str(len(content)).encode()))
    return int(status.split(" ", 1)[0]), encoded, content


# Forwards a request to another server on loopback, and its answer back, in parts.
_PIECE_BYTES: Final = 64 * 1024
# A busy demo has a few boto3 clients with a pool of 10 connections each. So many idle connections
# are kept. Further ones are closed after their request.
_IDLE_MAX: Final = 64
# The upstream server keeps idle connections far longer, so it never closes one that is reused here.
_IDLE_AGE_MAX_S: Final = 30.0
_HOP_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"expect", b"proxy-connection"})
_ANSWER_HOP_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_UNAVAILABLE: Final = (
    b'{"__type":"ServiceUnavailableException","message":"The process behind the embedded endpoint'
    b' does not answer."}'
)


class _Parsing:
    """Collects the parsed parts of one answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: deque[bytes] = deque()
        self.has_headers = False
        self.is_complete = False
        self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_headers = True
        # Read here: after the end of the answer the parser always returns False.
        self.is_reusable = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Connection:
    """One connection to the upstream server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    def is_fresh(self) -> bool:
        is_young = time.monotonic() - self.idle_since < _IDLE_AGE_MAX_S
        return is_young and not self.reader.at_eof() and not self.writer.is_closing()


class Forwarder:
    """An ASGI application that forwards requests to `port` on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_answered = False

        async def send_noting(message: Any) -> None:
            nonlocal has_answered
            has_answered = True
            await send(message)

        connection = None
        try:
            connection = await self._connection()
            await self._send_request(connection, scope, receive)
            is_reusable = await self._relay_answer(connection, scope["method"], send_noting)
        except ClientGone:
            self._drop(connection)
        except (OSError, httptools.HttpParserError, asyncio.IncompleteReadError):
            self._drop(connection)
            if has_answered:
                raise  # A part of the answer was sent: the server must close the connection.
            await respond(
                send, 503, [(b"content-type", b"application/x-amz-json-1.1")], _UNAVAILABLE
            )
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        else:
            self._keep(connection, is_reusable=is_reusable)

    async def close(self) -> None:
        """Close the idle connections, and each other one after its answer."""
        self._is_closed = True
        while self._idle:
            writer = self._idle.pop().writer
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            self._drop(connection)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_PIECE_BYTES)
        return _Connection(reader, writer)

    def _keep(self, connection: _Connection, *, is_reusable: bool) -> None:
        # Its client may have had the whole answer, and ended this server, before we are here.
        if not is_reusable or self._is_closed or len(self._idle) >= _IDLE_MAX:
            self._drop(connection)
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _drop(self, connection: _Connection | None) -> None:
        if connection is not None:
            connection.writer.close()

    async def _send_request(self, connection: _Connection, scope: Scope, receive: Receive) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        names = {name for name, _ in headers}
        if scope["http_version"] == "2" and b"content-length" not in names:
            # HTTP/2 needs no length. In HTTP/1.1 chunks mark the end of the body.
            headers.append((b"transfer-encoding", b"chunked"))
        is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        lines = [b"%s %s%s HTTP/1.1" % (scope["method"].encode(), scope["raw_path"], query)]
        lines += [b"%s: %s" % header for header in headers]
        writer = connection.writer
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
                await writer.drain()
        if is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _relay_answer(self, connection: _Connection, method: str, send: Send) -> bool:
        """Send the answer back. Returns whether the connection may be used again."""
        answer = _Parsing()
        is_started = False
        while not answer.is_complete:
            piece = await connection.reader.read(_PIECE_BYTES)
            if not piece:
                raise asyncio.IncompleteReadError(b"", None)
            answer.parser.feed_data(piece)
            if answer.has_headers and not is_started:
                is_started = True
                await send(_start(answer.parser.get_status_code(), answer.headers))
                if method == "HEAD":
                    break  # Its Content-Length is not followed by a body.
            while answer.pieces:
                body = answer.pieces.popleft()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return answer.is_reusable


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    kept = [header for header in headers if header[0] not in _ANSWER_HOP_HEADERS]
    return {"type": "http.response.start", "status": status, "headers": kept}


# The other services are answered by moto.

# boto3 uploads in parts of 8 MiB; a single PutObject may be larger, but is held in memory here.
_MOTO_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
# An SQS long poll sleeps in its thread for up to 20 s. Several may do so, and S3 still answers.
_THREADS: Final = 8
_CHANGES_PREFIX: Final = b"DynamoDBStreams_20120810."
# The ASGI server sets these itself.
_SERVERS_HEADERS: Final = frozenset({b"connection", b"date", b"transfer-encoding"})
_TOO_LARGE: Final = (
    b'<?xml version="1.0"?><Error><Code>EntityTooLarge</Code>'
    b"<Message>The embedded service takes up to 256 MiB a request.</Message></Error>"
)
# moto takes any number of bytes; Firehose up to 4 MiB a request, before base64.
_PUT_RECORD_BATCH: Final = b"Firehose_20150804.PutRecordBatch"
_FIREHOSE_TOO_LARGE: Final = (
    b'{"__type":"InvalidArgumentException","message":"Records size exceeds 4 MB limit"}'
)
# The services that answer in XML have other codes for the same refusals.
_XML_CODES: Final = {
    "InvalidSignatureException": "SignatureDoesNotMatch",
    "IncompleteSignatureException": "IncompleteSignature",
    "MissingAuthenticationTokenException": "MissingAuthenticationToken",
    "UnrecognizedClientException": "InvalidClientTokenId",
}
_S3_CODES: Final = _XML_CODES | {
    "MissingAuthenticationTokenException": "AccessDenied",
    "UnrecognizedClientException": "InvalidAccessKeyId",
}


# A signature names the region and the service that it is for.
_SCOPE: Final = re.compile(rb"Credential=[^/,]*/\d{8}/([A-Za-z0-9-]{1,64})/([a-z0-9-]{1,64})/")


def signed_region(scope: Scope) -> str:
    """The region of a request, which its client chose: that of its signature. A request without a
    signature in its headers is for the default region, as moto has it."""
    signed = _signed(scope)
    return LOOPBACK_REGION if signed is None else signed[1].decode("ascii")


def _signed(scope: Scope) -> re.Match[bytes] | None:
    return _SCOPE.search(dict(scope["headers"]).get(b"authorization", b""))


class MotoFace:
    """An ASGI application over moto's WSGI application.

    DynamoDB requests are answered one at a time, so that a condition and its write are one step. In
    the same thread, `changes` answers requests for DynamoDB Streams instead of moto: operation,
    body and region, to status and body. A few threads answer the other requests, so that an SQS
    long poll does not block them. With credentials, an unsigned request does not reach moto.
    """

    def __init__(
        self,
        moto: WsgiApp,
        credentials: Credentials | None,
        changes: Callable[[str, bytes, str], tuple[int, bytes]] | None = None,
    ) -> None:
        self._moto = moto
        self._credentials = credentials
        self._changes = changes
        self._one_by_one = ThreadPoolExecutor(1, thread_name_prefix="dynamodb")
        self._side_by_side = ThreadPoolExecutor(_THREADS, thread_name_prefix="moto")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, _MOTO_BODY_BYTES_MAX)
        except ClientGone:
            return
        except BodyTooLarge:
            await respond(send, 413, [(b"content-type", b"application/xml")], _TOO_LARGE)
            return
        if self._credentials is not None:
            try:
                verify(SignedRequest.of(scope, body), self._credentials, time.time())
            except SignatureRefused as refusal:
                await _refuse(send, refusal, dict(scope["headers"]))
                return
        headers = dict(scope["headers"])
        target = headers.get(b"x-amz-target", b"")
        if target == _PUT_RECORD_BATCH and _is_too_large(body):
            content_type = (b"content-type", b"application/x-amz-json-1.1")
            await respond(send, 400, [content_type], _FIREHOSE_TOO_LARGE)
            return
        pool = self._one_by_one if target.startswith(b"DynamoDB") else self._side_by_side
        loop = asyncio.get_running_loop()
        if self._changes is not None and target.startswith(_CHANGES_PREFIX):
            operation = target.removeprefix(_CHANGES_PREFIX).decode("latin-1")
            status, content = await loop.run_in_executor(
                pool, self._changes, operation, body, signed_region(scope)
            )
            content_type = (b"content-type", b"application/x-amz-json-1.0")
            await respond(send, status, [content_type], content)
            return
        status, answer_headers, content = await loop.run_in_executor(
            pool, call_wsgi, self._moto, wsgi_environ(scope, body)
        )
        kept = [header for header in answer_headers if header[0] not in _SERVERS_HEADERS]
        kept.append(date_header())
        await send({"type": "http.response.start", "status": status, "headers": kept})
        await send({"type": "http.response.body", "body": content})


class _Data(msgspec.Struct, rename="pascal"):
    data: bytes


class _Batch(msgspec.Struct, rename="pascal"):
    records: list[_Data]


def _is_too_large(body: bytes) -> bool:
    """Whether the records are above Firehose's limit. A malformed body is left to moto."""
    if len(body) <= DELIVERY_BYTES_MAX:
        return False
    try:
        records = msgspec.json.decode(body, type=_Batch).records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return sum(len(record.data) for record in records) > DELIVERY_BYTES_MAX


async def _refuse(send: Send, refusal: SignatureRefused, headers: dict[bytes, bytes]) -> None:
    """Send a refusal in the service's format: JSON, the XML of the query protocol, or S3's XML."""
    if b"x-amz-target" in headers:
        content_type = (b"content-type", b"application/x-amz-json-1.0")
        await respond(send, 400, [content_type], refusal.json_body())
        return
    is_query = b"x-www-form-urlencoded" in headers.get(b"content-type", b"")
    codes = _XML_CODES if is_query else _S3_CODES
    code = codes.get(refusal.code, refusal.code)
    error = f"<Error><Code>{code}</Code><Message>{escape(str(refusal))}</Message></Error>"
    body = f"<ErrorResponse>{error}</ErrorResponse>" if is_query else error
    content_type = (b"content-type", b"application/xml")
    await respond(send, 403, [content_type], f'<?xml version="1.0"?>{body}'.encode())


_TARGET_PREFIX: Final = b"Kinesis_20131202."
# 10 MiB of data is 13.4 MiB in base64. 500 keys of 256 characters in six-byte JSON escapes and
# the field names need less than the rest.
_BODY_BYTES_MAX: Final = 16 * 1024 * 1024


class HttpFace:
    """Kinesis over HTTP. `elsewhere` answers other requests; with `credentials` None every request
    is accepted. `clock` is the time of the service, in seconds since the epoch. `note` takes the
    caller of each subscription, as it names itself."""

    def __init__(
        self,
        kinesis: Kinesis,
        elsewhere: App | None,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.time,
        note: Callable[[str, Subscription], None] = lambda _caller, _taken: None,
    ) -> None:
        self._note = note
        self._kinesis = kinesis
        self._elsewhere = elsewhere
        self._credentials = credentials
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. The server calls it for HTTP only (lifespan and web sockets are off)."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        target = headers.get(b"x-amz-target", b"")
        signed = _signed(scope)
        is_kinesis = target.startswith(_TARGET_PREFIX) or (
            signed is not None and signed[2] == b"kinesis"
        )
        if not is_kinesis and self._elsewhere is not None:
            await self._elsewhere(scope, receive, send)
            return
        encoding = Encoding.of(headers.get(b"content-type", b""))
        given: Answer | Subscription
        try:
            body = await read_body(receive, _BODY_BYTES_MAX)
        except ClientGone:
            return
        except BodyTooLarge:
            too_large = "The request is above 16 MiB."
            given = error_answer(413, "RequestEntityTooLargeException", too_large, encoding)
        else:
            operation = target.removeprefix(_TARGET_PREFIX).decode("latin-1")
            given = self._answer(scope, operation, body, encoding)
        request_id = (b"x-amzn-requestid", str(uuid.uuid4()).encode())
        if isinstance(given, Subscription):
            self._note(headers.get(b"user-agent", b"").decode("latin-1"), given)
            start = [(b"content-type", CONTENT_TYPE), request_id, date_header(self._clock)]
            await send({"type": "http.response.start", "status": 200, "headers": start})
            await _push(given, encoding, receive, send, self._clock)
            return
        about = ((b"content-type", encoding.value), request_id)
        await respond(send, given.status, about, given.body, self._clock)

    def _answer(
        self, scope: Scope, operation: str, body: bytes, encoding: Encoding
    ) -> Answer | Subscription:
        now = self._clock()
        if self._credentials is not None:
            try:
                verify(SignedRequest.of(scope, body), self._credentials, now)
            except SignatureRefused as refusal:
                return error_answer(400, refusal.code, str(refusal), encoding)
        kinesis = self._kinesis.in_region(signed_region(scope))
        return answer(kinesis, operation, body, WallTime(now), encoding=encoding)


async def _push(
    subscription: Subscription,
    encoding: Encoding,
    receive: Receive,
    send: Send,
    clock: Callable[[], float],
) -> None:
    """Send the events of a subscription until its end, or until its client has gone. A client that
    does not read stops the sending: `send` waits for it."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    subscription.changed = changed.set
    gone = loop.create_task(_until_gone(receive, changed))
    try:
        await _send_part(send, initial_response(encoding))
        while not gone.done():
            changed.clear()
            event = subscription.next_event(WallTime(clock()))
            if isinstance(event, SubscriptionEvent):
                await _send_part(send, event_message(event, encoding))
            elif isinstance(event, SubscriptionEnd):
                if event.error is not None:
                    await _send_part(send, exception_message(event.error, encoding))
                await send({"type": "http.response.body", "body": b""})
                return
            else:
                timer = loop.call_later(subscription.due_at() - clock(), changed.set)
                await changed.wait()
                timer.cancel()
    finally:
        subscription.end()
        gone.cancel()


async def _until_gone(receive: Receive, changed: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    changed.set()


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
