"""The common part of both processes of the embedded AWS: a child process that serves HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec
import uvicorn

from kclrun.local.asgi import App
from kclrun.local.http2 import Http1Or2Protocol
from kclrun.local.server import READY, ProcessSettings

_STDIN: Final = 0
_SETTINGS_BYTES_MAX: Final = 64 * 1024
# A connection may be idle this long. botocore's pools keep their connections without bound.
_KEEP_ALIVE_S: Final = 300
# An SQS long poll may be under way at SIGTERM. It is aborted after this time.
_GRACE_S: Final = 1


class _Server(uvicorn.Server):
    """A server that writes `ready` when it accepts connections, and ends with its parent."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(_STDIN, self._stdin_readable)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    def _stdin_readable(self) -> None:
        """The parent writes nothing after the settings: a readable pipe has reached its end."""
        if not os.read(_STDIN, 1024):
            asyncio.get_running_loop().remove_reader(_STDIN)
            self.should_exit = True


def serve_as_child(make_app: Callable[[ProcessSettings], App]) -> NoReturn:
    """Serve until SIGTERM or until the parent ends, then end this process.

    The parent starts the child by exec with one argument, the descriptor of a listening socket that
    the parent has bound. The settings are the first line of standard input, because credentials
    must not be in arguments or in the environment. The child writes `ready` to standard output when
    it accepts connections. If standard input ends, the parent has ended.
    """
    listener = socket.socket(fileno=int(sys.argv[1]))
    # Unbuffered, so that only this line is read from the pipe.
    with open(_STDIN, "rb", buffering=0, closefd=False) as parent:
        line = parent.readline(_SETTINGS_BYTES_MAX)
    settings = msgspec.json.decode(line, type=ProcessSettings)
    config = uvicorn.Config(
        make_app(settings),
        loop="asyncio",
        http=Http1Or2Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    _Server(config).run(sockets=[listener])
    # Nothing is left to save. A normal exit would wait for the thread of an SQS long poll.
    os._exit(os.EX_OK)
