"""A proxy that knows which operation of AWS it passes on, and does harm where it is told to.

A door is a loopback port before one service, for one manager. What no fault concerns goes through
byte for byte, signature and Host header included, so signed requests stay valid (but for `page`,
which writes into the request). Each fault that hits is noted as one line of JSON: when, on which
door, which operation, and which rows of a lease table it asked for.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import time
from collections import deque

import msgspec

from tests.chaos.faults import PAGE_SIZES, refusal

# The embedded AWS takes bodies of 16 MiB; a head is below 64 kB everywhere.
_LIMIT_BYTES = 64 * 1024
_PIECES = 8
_ECHOES_MAX = 1_000
# Closing with unsent time zero resets the connection instead of ending it.
_RESET = struct.pack("ii", 1, 0)


# The operation whose answer comes over minutes, and the faults that hit its request.
STREAMED = "SubscribeToShard"
_BEFORE_A_STREAM = ("throttle", "fail", "cut_before", "stall")


class Door(msgspec.Struct, frozen=True):
    """`port` is where the service listens."""

    name: str
    port: int


class _Message(msgspec.Struct):
    """A request or an answer: its head with the blank line, its headers, its body."""

    head: bytes
    headers: dict[str, str]
    body: bytes

    @property
    def whole(self):
        return self.head + self.body

    @property
    def target(self):
        return self.headers.get("x-amz-target", "")


class _Cut(Exception):
    """The connection to the client ends here, after `sent`."""

    def __init__(self, sent=b""):
        super().__init__()
        self.sent = sent


class FaultProxy:
    """Open doors with `open`, then `foresee` faults and `begin`; `now` is monotonic, in seconds."""

    def __init__(self, seed, notes_path, now=time.monotonic):
        self._chance = random.Random(seed)
        self._notes = os.open(notes_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._now = now
        self._began = None
        self._coming = deque()
        self._present = []
        self._servers = []
        self._echoes = set()
        self._serving = set()
        self.passed = 0

    async def open(self, door):
        """The port that leads to this door."""

        async def served(reader, writer):
            # A task that waits for a stream is referred to by that stream alone, weakly: it would
            # be collected while a subscription is silent.
            task = asyncio.current_task()
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            await self._serve(door, reader, writer)

        server = await asyncio.start_server(served, "127.0.0.1", 0, limit=_LIMIT_BYTES)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    def foresee(self, faults):
        """In addition to those foreseen before."""
        self._coming = deque(sorted([*self._coming, *faults], key=lambda fault: fault.start_s))

    def begin(self):
        """The zero of the faults' times."""
        self._began = self._now()

    def calm(self):
        """No fault hits from now on."""
        self._coming.clear()
        self._present.clear()

    async def close(self):
        for server in self._servers:
            server.close()
        for echo in self._echoes:
            echo.cancel()
        os.close(self._notes)

    def _at_s(self):
        return float("-inf") if self._began is None else self._now() - self._began

    async def _serve(self, door, reader, writer):
        service = _Service(door.port)
        try:
            while (request := await _read_message(reader)) is not None:
                await self._answer(door, request, service, writer)
        except _Cut as cut:
            writer.write(cut.sent)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if not cut.sent and self._chance.random() < 0.5:
                _reset_at_close(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # one side went away: so does the other
        finally:
            service.close()
            writer.close()

    async def _answer(self, door, request, service, writer):
        operation = request.target.rpartition(".")[2]
        fault = self._fault_for(door, operation)
        if operation == STREAMED and (fault is None or fault.kind not in _BEFORE_A_STREAM):
            await self._stream(door, request, service, writer)
        elif fault is None:
            self.passed += 1
            writer.write((await service.ask(request)).whole)
        else:
            self._note(door, operation, fault, request)
            answer = await self._harmed(fault, request, service)
            if fault.kind == "slice":
                await _write_slowly(writer, answer, fault.seconds)
            else:
                writer.write(answer)
        await writer.drain()

    async def _stream(self, door, request, service, writer):
        """Pass on an answer that lasts for minutes; a fault hits a piece of it. Raises: _Cut, at
        the latest when the answer ends."""
        await service.begin(request)
        while piece := await service.piece():
            fault = self._fault_for(door, STREAMED)
            if fault is not None:
                self._note(door, STREAMED, fault, request)
                if fault.kind in ("delay", "slice", "stall"):
                    await asyncio.sleep(fault.seconds)
                if fault.kind == "cut_amid":
                    raise _Cut(piece[: len(piece) // 2])
                if fault.kind not in ("delay", "slice"):
                    raise _Cut
            writer.write(piece)
            await writer.drain()
        raise _Cut

    def _fault_for(self, door, operation):
        """Of several, the one that began last."""
        at_s = self._at_s()
        self._present = [each for each in self._present if each.start_s + each.duration_s > at_s]
        while self._coming and self._coming[0].start_s <= at_s:
            self._present.append(self._coming.popleft())
        for fault in reversed(self._present):
            if fault.concerns(door.name, operation, at_s) and self._chance.random() < fault.share:
                return fault
        return None

    async def _harmed(self, fault, request, service):
        """The bytes to answer with. Raises: _Cut."""
        kind = fault.kind
        if kind in ("throttle", "fail", "expire"):
            return refusal(kind, request.target, self._chance.random()).as_answer()
        if kind in ("cut_before", "stall"):
            await asyncio.sleep(fault.seconds if kind == "stall" else 0)
            raise _Cut
        if kind == "delay":
            await asyncio.sleep(fault.seconds / 2)
        answer = await service.ask(_in_small_pages(request) if kind == "page" else request)
        if kind == "delay":
            await asyncio.sleep(fault.seconds / 2)
        elif kind == "cut_after":
            raise _Cut
        elif kind == "cut_amid":
            raise _Cut(answer.whole[: len(answer.whole) // 2])
        elif kind == "fail_after":
            return refusal("fail", request.target, self._chance.random()).as_answer()
        elif kind == "repeat":
            answer = await service.ask(request)
        elif kind == "echo" and len(self._echoes) < _ECHOES_MAX:
            echo = asyncio.create_task(_echo(request, service.port, fault.seconds))
            self._echoes.add(echo)
            echo.add_done_callback(self._echoes.discard)
        return answer.whole

    def _note(self, door, operation, fault, request):
        line = {
            "at": time.monotonic(),
            "door": door.name,
            "operation": operation,
            "kind": fault.kind,
            "seconds": fault.seconds,
            "keys": _lease_keys(request),
        }
        os.write(self._notes, json.dumps(line).encode() + b"\n")


class _Service:
    """The connection to the service behind one client's connection."""

    def __init__(self, port):
        self.port = port
        self._reader = self._writer = None

    async def ask(self, request):
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=_LIMIT_BYTES
            )
        self._writer.write(request.whole)
        await self._writer.drain()
        answer = await _read_message(self._reader)
        if answer is None:
            raise ConnectionResetError("the service ended the connection")
        return answer

    async def begin(self, request):
        """Ask for an answer that comes in `piece`s. The connection is of no more use after it."""
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=_LIMIT_BYTES
        )
        self._writer.write(request.whole)
        await self._writer.drain()

    async def piece(self):
        """The next bytes of the answer; none at its end."""
        return await self._reader.read(_LIMIT_BYTES)

    def close(self):
        if self._writer is not None:
            self._writer.close()


async def _echo(request, port, after_s):
    """What was delayed on its way arrives when nobody waits for it any more."""
    await asyncio.sleep(after_s)
    service = _Service(port)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await service.ask(request)
    service.close()


async def _read_message(reader):
    """A whole request or answer, or None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    headers = {}
    for line in head.decode("latin-1").split("\r\n")[1:-2]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return _Message(head, headers, body)


async def _write_slowly(writer, answer, over_s):
    size = max(1, len(answer) // _PIECES)
    for start in range(0, len(answer), size):
        writer.write(answer[start : start + size])
        await writer.drain()
        await asyncio.sleep(over_s / _PIECES)


def _in_small_pages(request):
    asked = json.loads(request.body)
    asked[PAGE_SIZES[request.target.rpartition(".")[2]]] = 2
    body = json.dumps(asked).encode()
    lines = [
        line
        for line in request.head.split(b"\r\n")[:-2]
        if not line.lower().startswith(b"content-length:")
    ]
    lines.append(b"content-length: %d" % len(body))
    return _Message(b"\r\n".join(lines) + b"\r\n\r\n", request.headers, body)


def _lease_keys(request):
    """Of which rows a request to DynamoDB spoke."""
    if not request.target.startswith("DynamoDB"):
        return []
    asked = json.loads(request.body)
    parts = [asked, *(next(iter(part.values())) for part in asked.get("TransactItems", ()))]
    places = [part.get("Key") or part.get("Item") or {} for part in parts]
    return [place["leaseKey"]["S"] for place in places if "leaseKey" in place]


def _reset_at_close(writer):
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
