"""A client that announces the end of its connection by GOAWAY gets the answers it waits for."""

import asyncio

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame

from kclrun.local.asgi import read_body, respond
from tests.unit.local.http2_client import HUNG_S, connect, serving

LARGE = bytes(range(256)) * 4 * 1024  # 16 windows of a client with the settings of HTTP/2


def goaway(code=ErrorCodes.NO_ERROR, debug=b""):
    """The frame as a client sends it that goes on reading; `h2` sends none and goes on."""
    return GoAwayFrame(0, last_stream_id=0, error_code=code, additional_data=debug).serialize()


async def large(scope, receive, send):
    await respond(send, 200, [], LARGE + await read_body(receive, 1024))


async def until_closed(client):
    while not client.is_closed:
        await client.read()


@pytest.mark.parametrize(
    "frames",
    [
        [goaway()],
        [goaway(debug=b"no more requests")],
        [goaway()[:4], goaway()[4:]],
        [bytes([byte]) for byte in goaway(debug=b"by bytes")],
        [goaway(), goaway()],
    ],
    ids=["whole", "with-a-text", "in-two-parts", "by-bytes", "twice"],
)
def test_the_answers_of_open_requests_arrive_whole_and_then_the_connection_ends(frames):
    async def scenario(port, state):
        client = await connect(port)
        streams = [await client.ask("/", b"%d" % number) for number in range(3)]
        for frame in frames:
            client.writer.write(frame)
            await client.writer.drain()
            await asyncio.sleep(0)
        for number, stream in enumerate(streams):
            status, body = await client.answer(stream)
            assert (status, body == LARGE + b"%d" % number) == ("200", True)
        await until_closed(client)
        assert client.goaway == ErrorCodes.NO_ERROR

        client.writer.close()
        while state.connections:
            await asyncio.sleep(0)

    serving(scenario, large)


def test_a_request_whose_body_is_still_sent_after_the_goaway_is_answered():
    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask("/", b"first ", ends=False)
        client.writer.write(goaway())
        client.h2.send_data(stream, b"second", end_stream=True)
        await client.flush()
        _, body = await client.answer(stream)
        assert body.endswith(b"first second")
        await until_closed(client)

    serving(scenario, large)


def test_a_request_in_the_segment_of_the_goaway_is_answered():
    """A GOAWAY of a client says nothing about requests of its own (RFC 9113 6.8)."""

    async def scenario(port, _state):
        client = await connect(port)
        await client.answer(await client.ask())
        stream = client.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "h")]
        client.h2.send_headers(stream, head, end_stream=True)
        client.writer.write(goaway() + client.h2.data_to_send())
        assert (await client.answer(stream))[0] == "200"
        await until_closed(client)

    serving(scenario, large)


def test_what_is_pushed_goes_on_until_the_client_ends_it():
    pushed = asyncio.Queue()

    async def pushes(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (event := await pushed.get()) is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def scenario(port, _state):
        client = await connect(port)
        pushed.put_nowait(b"0")
        stream = await client.ask()
        await client.until(lambda: client.bodies[stream] == b"0")
        client.writer.write(goaway())
        for number in range(1, 4):
            pushed.put_nowait(b"%d" % number)
            await client.until(lambda n=number: client.bodies[stream].endswith(b"%d" % n))
        pushed.put_nowait(None)
        assert await client.answer(stream) == ("200", b"0123")
        await until_closed(client)

    serving(scenario, pushes)


def test_a_connection_without_a_request_ends_at_the_goaway():
    async def scenario(port, _state):
        client = await connect(port)
        client.writer.write(goaway())
        await until_closed(client)
        assert client.goaway == ErrorCodes.NO_ERROR

    serving(scenario, large)


@pytest.mark.parametrize(
    "frame",
    [
        goaway(ErrorCodes.PROTOCOL_ERROR),
        # Malformed ones: on a request's stream, and without an error code.
        goaway()[:5] + b"\0\0\0\1" + goaway()[9:],
        b"\0\0\4" + goaway()[3:13],
    ],
    ids=["with-an-error", "on-a-stream", "too-short"],
)
def test_any_other_goaway_ends_the_open_requests(frame):
    begun, left = asyncio.Event(), asyncio.Event()

    async def waits(scope, receive, send):
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def scenario(port, _state):
        client = await connect(port)
        await client.ask("/", b"x")
        await begun.wait()
        client.writer.write(frame)
        await asyncio.wait_for(left.wait(), HUNG_S)

    serving(scenario, waits)
