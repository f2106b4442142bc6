"""An ASGI application on loopback, served by a thread of the test, and requests to it by hand."""

import asyncio
import contextlib
import http.client
import threading
from urllib.parse import urlsplit

import pytest
import uvicorn
from botocore.exceptions import ClientError
from uvicorn.server import ServerState

from kclrun.local.http2 import Http1Or2Protocol
from tests.patience import HUNG_S


@contextlib.contextmanager
def served(app, forwarder=None):
    """Serve `app` as the processes of the embedded AWS do. Yields its endpoint.

    `forwarder` is the part of it that keeps connections.
    """
    config = uvicorn.Config(
        app,
        http=Http1Or2Protocol,
        lifespan="off",
        access_log=False,
        server_header=False,
        date_header=False,
    )
    config.load()
    state, loop = ServerState(), asyncio.new_event_loop()
    server = loop.run_until_complete(
        loop.create_server(lambda: Http1Or2Protocol(config, state, {}), "127.0.0.1", 0)
    )

    async def end():
        server.close()
        for connection in list(state.connections):
            transport = getattr(connection, "_transport", None) or connection.transport
            transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for kept in forwarder._idle if forwarder is not None else ():
            kept.writer.transport.abort()
        await asyncio.sleep(0)
        await loop.shutdown_default_executor()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(HUNG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(endpoint, method, path, body=None, headers=None, **more):
    """Status, headers and body of an answer over HTTP/1.1."""
    where = urlsplit(endpoint)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HUNG_S)
    try:
        connection.request(method, path, body, headers or {}, **more)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def post(endpoint, target, body, headers=None):
    return ask(endpoint, "POST", "/", body, {"X-Amz-Target": target, **(headers or {})})


def code_of(call, **arguments):
    """The error code and the HTTP status of a call that is refused."""
    with pytest.raises(ClientError) as refusal:
        call(**arguments)
    answer = refusal.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]
