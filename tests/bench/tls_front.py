"""TLS before a server that has none, as a process: `python -m bench.tls_front FD PORT CERTIFICATE`.

It ends TLS and passes the bytes on. Its CPU is a server's, which no figure counts.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.support.certificates import bundle_with, certificate_for, presenting

_END_MAX_S = 5.0
_READ_BYTES = 64 * 1024


class OwnCa:
    """A certificate for 127.0.0.1 and a CA bundle that has it. A context manager."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self.certificate = certificate_for("127.0.0.1", Path(self._folder.name))
        self.bundle = str(bundle_with(self.certificate))
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


class TlsFront:
    """The https:// address of a server on this host. A context manager; leaving it ends the
    process."""

    def __init__(self, url: str, ca: OwnCa) -> None:
        self._port = urlsplit(url).port
        self._certificate = ca.certificate

    def __enter__(self) -> str:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        arguments = [str(listener.fileno()), str(self._port), str(self._certificate)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.tls_front", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise ChildProcessError("the TLS front did not start; its message is above")
        return url

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


async def _serve(listener_fd: int, port: int, certificate: Path) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))

    listener = socket.socket(fileno=listener_fd)
    server = await asyncio.start_server(
        pass_on, sock=listener, backlog=512, ssl=presenting(certificate)
    )
    async with server:
        print("ready", flush=True)
        # Standard input ends when the bench has ended.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
