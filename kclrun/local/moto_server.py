"""Answers the services other than Kinesis: an ASGI application over moto's WSGI application."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

import msgspec

from kclrun.local.asgi import (
    BodyTooLarge,
    ClientGone,
    Receive,
    Scope,
    Send,
    date_header,
    read_body,
    respond,
)
from kclrun.local.signatures import (
    Credentials,
    SignatureRefused,
    SignedRequest,
    signed_region,
    verify,
)
from kclrun.model.quotas import DELIVERY_BYTES_MAX

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


class MotoServer:
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
