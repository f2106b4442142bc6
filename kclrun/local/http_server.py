"""The embedded AWS's endpoint: answers Kinesis requests and forwards all others.

An ASGI application: X-Amz-Target names the operation, Content-Type its encoding (JSON or CBOR). It
reads the clock, so that the model need not. It does not know processes. Only our own bugs are
logged, never a payload, key, token or credential.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Final

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
from kclrun.local.signatures import (
    Credentials,
    SignatureRefused,
    SignedRequest,
    signed_region,
    signed_service,
    verify,
)
from kclrun.model.time import WallTime

_TARGET_PREFIX: Final = b"Kinesis_20131202."
# 10 MiB of data is 13.4 MiB in base64. 500 keys of 256 characters in six-byte JSON escapes and
# the field names need less than the rest.
_BODY_BYTES_MAX: Final = 16 * 1024 * 1024


class HttpServer:
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
        is_kinesis = target.startswith(_TARGET_PREFIX) or signed_service(scope) == "kinesis"
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
