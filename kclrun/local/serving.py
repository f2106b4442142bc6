"""What both processes of the embedded AWS have in common: being a child that serves.

A child is started by exec with one argument, the descriptor of a listening socket that its parent
has bound. Its settings are the first line of standard input; it says `ready` on standard output
when it accepts connections; it ends on SIGTERM, or when standard input ends: the parent is gone.
Rule: credentials travel by that pipe, never by arguments or the environment.
"""

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
from kclrun.local.process_settings import READY, ProcessSettings

__all__ = ["serve_as_child"]

_STDIN: Final = 0
_SETTINGS_BYTES_MAX: Final = 64 * 1024
# A connection may rest this long between requests; botocore's pools keep theirs without bound.
_KEEP_ALIVE_S: Final = 300
# An SQS long poll may be under way at SIGTERM; it is cut off after this.
_GRACE_S: Final = 1


class _Server(uvicorn.Server):
    """Says when it is ready, and ends with its parent."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(_STDIN, self._parent_spoke)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    def _parent_spoke(self) -> None:
        """The parent says nothing after the settings: what can be read is the end of the pipe."""
        if not os.read(_STDIN, 1024):
            asyncio.get_running_loop().remove_reader(_STDIN)
            self.should_exit = True


def serve_as_child(make_app: Callable[[ProcessSettings], App]) -> NoReturn:
    """Serve until told to stop, then end this process."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    # Unbuffered, so that nothing but the line is taken from the pipe.
    with open(_STDIN, "rb", buffering=0, closefd=False) as parent:
        line = parent.readline(_SETTINGS_BYTES_MAX)
    settings = msgspec.json.decode(line, type=ProcessSettings)
    config = uvicorn.Config(
        make_app(settings),
        loop="asyncio",
        http="httptools",
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
    # Nothing is left to save, and a long poll of SQS may still sleep in a thread that a normal
    # exit would wait for.
    os._exit(os.EX_OK)
