"""The embedded AWS of a test: Kinesis in a thread of the test's own process, on a clock of its own.

The other services are moto in a process of its own, started by the first request for one of them:
its import takes a second, and in this process a test's own `mock_aws` would empty the lease table.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, TypeVar

import msgspec
import uvicorn

from kclrun.errors import Unavailable
from kclrun.local.asgi import Receive, Scope, Send
from kclrun.local.forwarding import Forwarder
from kclrun.local.guard import Guard
from kclrun.local.http2 import Http1Or2Protocol
from kclrun.local.http_server import HttpServer
from kclrun.local.server import MOTO, START_MAX_S, ProcessSettings, ServiceProcess, listen
from kclrun.local.service import Kinesis
from kclrun.local.settings import KinesisSettings
from kclrun.model.time import WallTime

Returned = TypeVar("Returned")

# The server ends within its grace of a second.
_END_MAX_S: Final = 10.0
# A request of the test thread waits for those under way: milliseconds on an idle machine.
_CALL_MAX_S: Final = 60.0
# For a server on loopback: HTTP_PROXY is for others.
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServiceClock:
    """The time of the embedded Kinesis, in seconds since the epoch. It runs until it is frozen."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Run with the clock of this machine."""
        self._ahead_s = 0.0
        self._frozen_at: float | None = None

    def __call__(self) -> float:
        return time.time() + self._ahead_s if self._frozen_at is None else self._frozen_at

    def freeze(self, at: datetime | float | None = None) -> None:
        """Stand still: at this time (a datetime with a zone, or seconds since the epoch), else at
        the present one."""
        at = self() if at is None else at
        self._frozen_at = at.timestamp() if isinstance(at, datetime) else float(at)

    def run(self) -> None:
        """Go on from where it stands."""
        self._ahead_s, self._frozen_at = self() - time.time(), None

    def advance(self, by: timedelta | float) -> None:
        """Move it on, whether it stands or runs: records expire, iterators too. Seconds."""
        by_s = by.total_seconds() if isinstance(by, timedelta) else float(by)
        if self._frozen_at is None:
            self._ahead_s += by_s
        else:
            self._frozen_at += by_s


class InProcessAws:
    """A running embedded AWS. `endpoint` is that of every service; `clock` the time of Kinesis.

    Raises: Unavailable (no server in time).
    """

    def __init__(self) -> None:
        self.clock = ServiceClock()
        self._moto: ServiceProcess | None = None
        self._forwarder: Forwarder | None = None
        self._starting = asyncio.Lock()
        self._new_account()
        listener = listen(0)
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                Guard(self._answer),
                interface="asgi3",  # it is a method: uvicorn would guess
                loop="asyncio",
                http=Http1Or2Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="embedded-kinesis", daemon=True
        )
        self._thread.start()
        if not self._server.is_ready.wait(START_MAX_S):
            raise Unavailable(f"the embedded Kinesis was not ready within {START_MAX_S:.0f} s")

    def call(self, function: Callable[[Kinesis, WallTime], Returned]) -> Returned:
        """The result of a function of the model and its time, called in the server's thread: no
        request is under way meanwhile. Raises: what the function raises."""

        async def called() -> Returned:
            return function(self._kinesis, WallTime(self.clock()))

        future = asyncio.run_coroutine_threadsafe(called(), self._server.loop)
        return future.result(_CALL_MAX_S)

    def reset(self) -> None:
        """Forget everything in all services; the clock runs with that of this machine again."""
        self.clock.reset()
        self.call(lambda *_: self._new_account())
        if self._moto is not None:
            url = f"http://127.0.0.1:{self._moto.port}/moto-api/reset"
            request = urllib.request.Request(url, method="POST")
            _DIRECT.open(request, timeout=_CALL_MAX_S).close()

    def close(self) -> None:
        """End the server and moto's process."""
        if self._forwarder is not None:
            closing = asyncio.run_coroutine_threadsafe(self._forwarder.close(), self._server.loop)
            closing.result(_END_MAX_S)
        self._server.should_exit = True
        self._thread.join(_END_MAX_S)
        if self._moto is not None:
            self._moto.ask_to_end()
            self._moto.end()

    def _new_account(self) -> None:
        self._kinesis = Kinesis(KinesisSettings(), secrets.token_bytes(32))
        self._http_server = HttpServer(self._kinesis, self._elsewhere, clock=self.clock)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._http_server(scope, receive, send)

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._starting:
            if self._forwarder is None:
                self._forwarder = await asyncio.to_thread(self._start_moto)
        await self._forwarder(scope, receive, send)

    def _start_moto(self) -> Forwarder:
        # `reset` uses moto's interface, at a port that is not given to anyone.
        settings = ProcessSettings(serves_moto_api=True)
        self._moto = ServiceProcess(MOTO, listen(0), msgspec.json.encode(settings))
        self._moto.wait_ready(time.monotonic() + START_MAX_S)
        return Forwarder(self._moto.port)


class _Server(uvicorn.Server):
    """A server that says when it accepts connections, and in which loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.is_ready.set()
