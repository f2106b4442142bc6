"""What is not Kinesis: DynamoDB, CloudWatch, S3 and SQS, as moto answers them.

An ASGI application over moto's WSGI one. Rules: DynamoDB requests are answered one at a time, so
that a condition and its write are one step; the others by a few threads, so that a long poll of
SQS holds up nobody; with credentials, nothing unsigned reaches moto.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from xml.sax.saxutils import escape

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
from kclrun.local.signatures import Credentials, SignatureRefused, SignedRequest, verify
from kclrun.local.wsgi import WsgiApp, call_wsgi, wsgi_environ

__all__ = ["MotoFace"]

# boto3 uploads in parts of 8 MiB; a single PutObject may be larger, but is held in memory here.
_BODY_BYTES_MAX: Final = 256 * 1024 * 1024
# SQS long polls sleep in their thread for up to 20 s; eight may do so and S3 still answers.
_THREADS: Final = 8
# The server in front sets these itself.
_SERVERS_HEADERS: Final = frozenset({b"connection", b"date", b"transfer-encoding"})
_TOO_LARGE: Final = (
    b'<?xml version="1.0"?><Error><Code>EntityTooLarge</Code>'
    b"<Message>The embedded service takes up to 256 MiB a request.</Message></Error>"
)
# The services that answer in XML have names of their own for the same refusals.
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


class MotoFace:
    """An ASGI application over moto's WSGI one."""

    def __init__(self, moto: WsgiApp, credentials: Credentials | None) -> None:
        self._moto = moto
        self._credentials = credentials
        self._one_by_one = ThreadPoolExecutor(1, thread_name_prefix="dynamodb")
        self._side_by_side = ThreadPoolExecutor(_THREADS, thread_name_prefix="moto")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, _BODY_BYTES_MAX)
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
        is_dynamodb = headers.get(b"x-amz-target", b"").startswith(b"DynamoDB")
        pool = self._one_by_one if is_dynamodb else self._side_by_side
        loop = asyncio.get_running_loop()
        status, answer_headers, content = await loop.run_in_executor(
            pool, call_wsgi, self._moto, wsgi_environ(scope, body)
        )
        kept = [header for header in answer_headers if header[0] not in _SERVERS_HEADERS]
        kept.append(date_header())
        await send({"type": "http.response.start", "status": status, "headers": kept})
        await send({"type": "http.response.body", "body": content})


async def _refuse(send: Send, refusal: SignatureRefused, headers: dict[bytes, bytes]) -> None:
    """A refusal as the service asked would word it: JSON, the query protocol's XML, or S3's."""
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
