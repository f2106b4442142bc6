"""The one endpoint: Kinesis is answered here, every other request is passed on.

An ASGI application: X-Amz-Target names the operation (AWS JSON 1.1). Knows the clock, so that the
model need not. May not know: processes, ports. Rule: no payload, key, token or credential is
logged; nothing is logged at all but our own bugs. Look next: `operations.py`, `forwarding.py`.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Final

from kclrun.local.asgi import (
    App,
    BodyTooLarge,
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
)
from kclrun.local.operations import Answer, answer
from kclrun.local.service import REGION, Kinesis
from kclrun.local.signatures import Credentials, SignatureRefused, SignedRequest, verify
from kclrun.model.time import WallTime

__all__ = ["HttpFace"]

_TARGET_PREFIX: Final = b"Kinesis_20131202."
# 10 MiB of data is 13.4 MiB in base64; 500 keys of 256 characters in six-byte JSON escapes and
# the field names stay below the rest.
_BODY_BYTES_MAX: Final = 16 * 1024 * 1024
_SCOPE: Final = re.compile(rb"Credential=[^/,]*/\d{8}/([a-z0-9-]{1,64})/([a-z0-9-]{1,64})/")
_CONTENT_TYPE: Final = (b"content-type", b"application/x-amz-json-1.1")
_TOO_LARGE: Final = Answer(
    413,
    b'{"__type":"RequestEntityTooLargeException","message":"The request is above 16 MiB."}',
)
_NO_CBOR: Final = Answer(
    415,
    b'{"__type":"SerializationException","message":"The embedded Kinesis speaks JSON only: turn'
    b" CBOR off in the client (Java: -Daws.cborEnabled=false or AWS_CBOR_DISABLE=1)." + b'"}',
)


class HttpFace:
    """Kinesis over HTTP. `elsewhere` answers the rest; `credentials` None lets everybody in."""

    def __init__(
        self, kinesis: Kinesis, elsewhere: App | None, credentials: Credentials | None = None
    ) -> None:
        self._kinesis = kinesis
        self._elsewhere = elsewhere
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. The server calls it for HTTP only (lifespan and web sockets are off)."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        target = headers.get(b"x-amz-target", b"")
        scope_match = _SCOPE.search(headers.get(b"authorization", b""))
        is_kinesis = target.startswith(_TARGET_PREFIX) or (
            scope_match is not None and scope_match[2] == b"kinesis"
        )
        if not is_kinesis and self._elsewhere is not None:
            await self._elsewhere(scope, receive, send)
            return
        region = REGION if scope_match is None else scope_match[1].decode("ascii")
        try:
            body = await read_body(receive, _BODY_BYTES_MAX)
        except ClientGone:
            return
        except BodyTooLarge:
            await self._send(send, _TOO_LARGE)
            return
        operation = target.removeprefix(_TARGET_PREFIX).decode("latin-1")
        await self._send(send, self._answer(scope, headers, operation, body, region))

    def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], operation: str, body: bytes, region: str
    ) -> Answer:
        now = time.time()
        if self._credentials is not None:
            try:
                verify(SignedRequest.of(scope, body), self._credentials, now)
            except SignatureRefused as refusal:
                return Answer(refusal.status, refusal.json_body())
        if b"cbor" in headers.get(b"content-type", b""):
            return _NO_CBOR
        return answer(self._kinesis, operation, body, WallTime(now), region)

    async def _send(self, send: Send, given: Answer) -> None:
        request_id = (b"x-amzn-requestid", str(uuid.uuid4()).encode())
        await respond(send, given.status, (_CONTENT_TYPE, request_id), given.body)
