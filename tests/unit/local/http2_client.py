"""A client of HTTP/2 by hand, and a server of an application for it."""

import asyncio
import contextlib
from collections import defaultdict

import h2.config
import h2.connection
import h2.events
import uvicorn
from h2.errors import ErrorCodes
from uvicorn.server import ServerState

from kclrun.local.http2 import Http1Or2Protocol
from tests.patience import HUNG_S, TEST_S

OPENED: list[asyncio.StreamWriter] = []


class Client:
    """A client of HTTP/2 with prior knowledge over one connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="latin-1")
        )
        # The tests send what no honest client sends.
        self.h2.config.validate_outbound_headers = False
        self.heads, self.bodies, self.ends = {}, defaultdict(bytes), {}
        self.is_closed = False
        self.reads_bodies = True
        self.goaway = None
        self.pongs = []
        self.h2.initiate_connection()

    async def flush(self):
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def ask(self, path="/", body=b"", *, method="POST", ends=True, more=()):
        stream = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http")]
        self.h2.send_headers(stream, [*headers, (":authority", "here:1"), *more])
        await self.flush()
        sent = 0
        while sent < len(body):
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if room:
                self.h2.send_data(stream, body[sent : sent + room])
                sent += room
                await self.flush()
            else:
                await self.read()
        if ends:
            self.h2.end_stream(stream)
            await self.flush()
        return stream

    async def read(self):
        """Take in what arrives next."""
        try:
            data = await asyncio.wait_for(self.reader.read(65_536), HUNG_S)
        except ConnectionResetError:
            # Its answer to what came before the GOAWAY met a socket that was closed already.
            if self.goaway is None:
                raise
            data = b""
        if not data:
            self.is_closed = True
            return
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.ResponseReceived():
                    self.heads[event.stream_id] = dict(event.headers)
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    if self.reads_bodies:
                        size = event.flow_controlled_length
                        self.h2.acknowledge_received_data(size, event.stream_id)
                case h2.events.StreamEnded():
                    self.ends[event.stream_id] = "ended"
                case h2.events.StreamReset():
                    self.ends[event.stream_id] = ErrorCodes(event.error_code)
                case h2.events.ConnectionTerminated():
                    self.goaway = ErrorCodes(event.error_code)
                case h2.events.PingAckReceived():
                    self.pongs.append(event.ping_data)
        await self.flush()

    async def until(self, condition):
        while not condition():
            assert not self.is_closed
            await self.read()

    async def answer(self, stream):
        await self.until(lambda: stream in self.ends)
        return self.heads.get(stream, {}).get(":status"), self.bodies[stream]


def serving(scenario, app, **config):
    """Run `scenario(port, state)` against a server of `app`.

    uvicorn closes a connection that is idle for 5 s, which a starved machine is between two
    requests of one test: here only a test that names `timeout_keep_alive` sees that.
    """

    async def run():
        state = ServerState()
        settings = uvicorn.Config(
            app,
            http=Http1Or2Protocol,
            lifespan="off",
            access_log=False,
            **({"timeout_keep_alive": int(HUNG_S)} | config),
        )
        settings.load()
        loop = asyncio.get_running_loop()
        made = []

        def accepted():
            made.append(Http1Or2Protocol(settings, state, {}))
            return made[-1]

        server = await loop.create_server(accepted, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            await asyncio.wait_for(scenario(port, state), TEST_S)
        finally:
            server.close()
            while OPENED:
                writer = OPENED.pop()
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            # Those that are closing, too: one with bytes to send would outlive the loop.
            for connection in (*made, *state.connections):
                transport = getattr(connection, "_transport", None) or connection.transport
                if transport is not None:
                    transport.abort()
            for task in list(state.tasks):
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)

    asyncio.run(run())


async def opened(port):
    """A connection that is closed with the server, by whatever way a test ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    OPENED.append(writer)
    return reader, writer


async def connect(port):
    client = Client(*await opened(port))
    await client.flush()
    return client
