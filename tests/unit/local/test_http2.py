"""One port answers HTTP/1.1 and HTTP/2 without TLS, and holds no more than it says."""

import asyncio
import logging

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from kclrun.local.asgi import read_body, respond
from tests.unit.local.http2_client import HUNG_S, Client, connect, opened, serving

WINDOW_BYTES = 1024 * 1024
STREAMS_MAX = 128


async def echo(scope, receive, send):
    """Answers with what it was sent, after the version it was asked by."""
    body = await read_body(receive, 64 * WINDOW_BYTES)
    about = f"{scope['http_version']} {scope['method']} {scope['path']}?".encode()
    own = [(b"x-own-" + name, value) for name, value in scope["headers"] if name in {b"host", b"x"}]
    own += [(b"X-Upper", b"1"), (b"connection", b"close"), (b"x-raw", scope["raw_path"])]
    assert (
        scope["http_version"] != "2" or len([n for n, _ in scope["headers"] if n == b"host"]) == 1
    )
    await respond(send, 200, own, about + scope["query_string"] + b"|" + body)


async def ask_by_http_1(port, pieces):
    reader, writer = await opened(port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    return head, body


def test_one_port_answers_both_versions():
    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask("/a%20b?c=d", b"two", more=[("x", "y")])
        assert await client.answer(stream) == ("200", b"2 POST /a b?c=d|two")
        head = client.heads[stream]
        own = {name: value for name, value in head.items() if name.startswith("x-")}
        assert own == {
            "x-own-host": "here:1",
            "x-own-x": "y",
            "x-upper": "1",
            "x-raw": "/a%20b",
        }
        assert "connection" not in head
        twice = await client.ask(more=[("host", "here:1")])
        assert (await client.answer(twice))[0] == "200"
        assert client.ends[twice] == "ended"

        request = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\none"
        head, body = await ask_by_http_1(port, [request])
        assert (head.split()[1], body) == (b"200", b"1.1 POST /x?|one")

    serving(scenario, echo)


def test_the_version_is_found_however_the_first_bytes_are_cut():
    async def scenario(port, _state):
        client = Client(*await opened(port))
        for byte in client.h2.data_to_send():
            client.writer.write(bytes([byte]))
            await client.writer.drain()
        assert (await client.answer(await client.ask()))[0] == "200"

        # A PUT and the preface have their first letter in common.
        pieces = [b"P", b"UT / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"]
        assert (await ask_by_http_1(port, pieces))[1] == b"1.1 PUT /?|"
        # It may be shorter than the preface.
        assert (await ask_by_http_1(port, [b"GET / HTTP/1.0\r\n\r\n"]))[1] == b"1.0 GET /?|"

    serving(scenario, echo)


def test_requests_of_one_connection_do_not_wait_for_each_other():
    async def scenario(port, _state):
        client = await connect(port)
        slow = await client.ask("/slow", b"a", ends=False)
        quick = await client.ask("/quick")
        assert (await client.answer(quick))[0] == "200"
        assert slow not in client.ends

        client.h2.end_stream(slow)
        await client.flush()
        assert (await client.answer(slow))[1].endswith(b"|a")

    serving(scenario, echo)


def test_a_body_above_the_window_passes_both_ways():
    async def scenario(port, _state):
        client = await connect(port)
        body = bytes(range(256)) * (3 * WINDOW_BYTES // 256)
        _, answer = await client.answer(await client.ask("/", body))
        assert answer.partition(b"|")[2] == body

    serving(scenario, echo)


def test_a_client_sends_no_more_than_the_window_ahead_of_the_reader():
    begun = asyncio.Event()

    async def reads_nothing(scope, receive, send):
        begun.set()
        await asyncio.Event().wait()

    async def scenario(port, _state):
        client = await connect(port)
        await client.until(lambda: client.h2.outbound_flow_control_window == WINDOW_BYTES)
        streams = [await client.ask("/", ends=False) for _ in range(3)]
        await client.ask("/", b"x" * (WINDOW_BYTES - 10), ends=False)
        await begun.wait()

        # Three more streams of the same connection share what is left.
        assert [client.h2.local_flow_control_window(each) for each in streams] == [10, 10, 10]

    serving(scenario, reads_nothing)


@pytest.mark.parametrize("leaves", ["reset", "close"])
def test_a_reader_that_has_the_whole_request_waits_for_its_client_to_leave(leaves):
    has_request, has_left = asyncio.Event(), asyncio.Event()

    async def serves(scope, receive, send):
        assert await read_body(receive, WINDOW_BYTES) == b"all of it"
        has_request.set()
        message = await receive()
        assert message["type"] == "http.disconnect"
        has_left.set()

    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask("/", b"all of it")
        await has_request.wait()
        assert not has_left.is_set()
        if leaves == "reset":
            client.h2.reset_stream(stream)
            await client.flush()
        else:
            client.writer.close()
        await asyncio.wait_for(has_left.wait(), HUNG_S)

    serving(scenario, serves)


def test_a_reader_hears_that_its_answer_is_complete():
    heard = []

    async def serves(scope, receive, send):
        await read_body(receive, WINDOW_BYTES)
        hears = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await respond(send, 200, [], b"")
        heard.append((await hears)["type"])

    async def scenario(port, _state):
        client = await connect(port)
        await client.answer(await client.ask())

    serving(scenario, serves)
    assert heard == ["http.disconnect"]


def test_an_application_waits_until_its_client_took_what_it_sent():
    sent_bytes = 0

    async def endless(scope, receive, send):
        nonlocal sent_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            sent_bytes += 4096

    async def scenario(port, _state):
        client = await connect(port)
        client.reads_bodies = False
        stream = await client.ask()
        # The client's window, of HTTP/2's default size, is filled to the last byte …
        await client.until(lambda: len(client.bodies[stream]) == 65_535)
        # … and the piece that did not fit waits with the application.
        assert sent_bytes == 65_535 // 4096 * 4096

        client.h2.acknowledge_received_data(65_535, stream)
        await client.flush()
        await client.until(lambda: len(client.bodies[stream]) == 2 * 65_535)

    serving(scenario, endless)


def test_an_application_waits_for_a_client_that_does_not_read_its_socket():
    """Whose windows are as large as HTTP/2 allows."""
    sent_bytes = 0

    async def endless(scope, receive, send):
        nonlocal sent_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            sent_bytes += 65_536

    async def scenario(port, state):
        client = await connect(port)
        client.reads_bodies = False
        client.h2.increment_flow_control_window(2**31 - 1 - 65_535)
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        client.writer.transport.pause_reading()
        stream = await client.ask()
        protocols = state.connections
        while not any(getattr(each, "is_write_paused", False) for each in protocols):
            await asyncio.sleep(0)
        (server,) = protocols
        assert not server._transport.is_reading(), "its pings would be answered"
        waiting = sent_bytes
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent_bytes == waiting

        client.writer.transport.resume_reading()
        await client.until(lambda: len(client.bodies[stream]) > waiting + 2**18)

    serving(scenario, endless)


def test_requests_under_way_are_bounded_even_when_their_streams_were_reset():
    begun = 0

    async def never(scope, receive, send):
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    async def scenario(port, _state):
        client = await connect(port)
        await client.until(lambda: client.h2.remote_settings.max_concurrent_streams == STREAMS_MAX)
        for _ in range(STREAMS_MAX):
            stream = await client.ask()
            client.h2.reset_stream(stream)
        await client.flush()
        refused = await client.ask()
        await client.until(lambda: refused in client.ends)

        assert client.ends[refused] == ErrorCodes.REFUSED_STREAM
        assert begun == STREAMS_MAX

    serving(scenario, never)


@pytest.mark.parametrize(
    "more",
    [[("x", "y" * 70_000)], [("x-a", "1"), (":late", "pseudo")], [("Upper", "case")]],
    ids=["too-long", "pseudo-header-behind", "upper-case"],
)
def test_headers_out_of_bounds_end_the_connection(more):
    async def scenario(port, state):
        client = await connect(port)
        client.h2.config.normalize_outbound_headers = False
        await client.ask(more=more)
        while not client.is_closed:
            await client.read()

        assert client.goaway is not None
        assert not state.tasks

    serving(scenario, echo)


def test_bytes_that_are_no_frames_end_the_connection():
    async def scenario(port, state):
        client = await connect(port)
        # One byte of data, for the connection itself.
        client.writer.write(bytes([0, 0, 1, 0, 0, 0, 0, 0, 0, 0]))
        while not client.is_closed:
            await client.read()

        assert client.goaway is not None
        assert not state.connections

    serving(scenario, echo)


def test_a_method_without_a_path_is_answered_like_any_other():
    async def scenario(port, _state):
        client = await connect(port)
        stream = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream, [(":method", "CONNECT"), (":authority", "here:1")])
        client.h2.end_stream(stream)
        await client.flush()
        while not (client.is_closed or stream in client.ends):
            await client.read()

        if client.is_closed:
            assert client.goaway is not None, "the end is told, and is not a fault of ours"
        else:
            assert client.heads[stream][":status"] == "200"

    serving(scenario, echo)


def test_a_ping_is_answered_and_the_end_of_a_server_ends_what_has_not_begun():
    async def scenario(port, state):
        client = await connect(port)
        client.h2.ping(b"12345678")
        await client.flush()
        await client.until(lambda: client.pongs == [b"12345678"])

        reader, _ = await opened(port)
        while len(state.connections) < 2:
            await asyncio.sleep(0)
        for connection in list(state.connections):
            connection.shutdown()
        assert await reader.read() == b""
        while not client.is_closed:
            await client.read()
        assert client.goaway == ErrorCodes.NO_ERROR
        while state.connections:
            await asyncio.sleep(0)

    serving(scenario, echo)


def test_a_connection_that_its_client_ends_is_closed():
    async def scenario(port, _state):
        client = await connect(port)
        await client.answer(await client.ask())
        client.h2.close_connection()
        await client.flush()
        while not client.is_closed:
            await client.read()

    serving(scenario, echo)


def test_a_request_may_take_longer_than_a_connection_may_be_idle():
    async def slow(scope, receive, send):
        await asyncio.sleep(0.1)
        await respond(send, 200, [], b"late")

    async def scenario(port, _state):
        client = await connect(port)
        assert await client.answer(await client.ask()) == ("200", b"late")
        assert await client.answer(await client.ask()) == ("200", b"late")

    serving(scenario, slow, timeout_keep_alive=0.05)


@pytest.mark.parametrize("begins", [False, True])
def test_an_application_that_ends_without_an_answer_resets_its_stream(caplog, begins):
    async def ends(scope, receive, send):
        if scope["path"] == "/well":
            await respond(send, 200, [], b"well")
        elif begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise RuntimeError("a planted fault")

    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask()
        await client.until(lambda: stream in client.ends)
        assert client.ends[stream] == ErrorCodes.INTERNAL_ERROR
        assert client.heads.get(stream, {}).get(":status") == ("200" if begins else None)
        assert await client.answer(await client.ask("/well")) == ("200", b"well")

    with caplog.at_level(logging.CRITICAL, "uvicorn.error"):
        serving(scenario, ends)


def test_a_part_of_a_request_is_given_and_a_head_is_sent_when_it_is_there():
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def by_parts(scope, receive, send):
        waits.set()
        part = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": part})

    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask(ends=False)
        await waits.wait()
        client.h2.send_data(stream, b"part")
        await client.flush()
        await client.until(lambda: stream in client.heads)
        goes_on.set()
        assert await client.answer(stream) == ("200", b"part")

    serving(scenario, by_parts)


def test_a_request_without_a_body_and_one_that_names_its_host_otherwise():
    async def scenario(port, _state):
        client = await connect(port)
        stream = client.h2.get_next_available_stream_id()
        head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), ("host", "there")]
        client.h2.send_headers(stream, head, end_stream=True)
        await client.flush()
        assert await client.answer(stream) == ("200", b"2 GET /?|")
        assert client.heads[stream]["x-own-host"] == "there"

    serving(scenario, echo)


def test_a_head_is_answered_without_a_body():
    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask(method="HEAD")
        assert await client.answer(stream) == ("200", b"")
        assert client.heads[stream]["content-length"] == str(len(b"2 HEAD /?|"))

    serving(scenario, echo)


def test_a_fault_of_the_application_is_a_500_and_the_connection_goes_on(caplog):
    async def faulty(scope, receive, send):
        if scope["path"] == "/fault":
            raise RuntimeError("a planted fault")
        await respond(send, 200, [], b"well")

    async def scenario(port, _state):
        client = await connect(port)
        assert await client.answer(await client.ask("/fault")) == ("500", b"")
        assert await client.answer(await client.ask("/well")) == ("200", b"well")

    with caplog.at_level(logging.CRITICAL, "uvicorn.error"):
        serving(scenario, faulty)


def test_an_answer_before_the_whole_request_ends_the_stream_and_frees_the_window():
    async def refuses(scope, receive, send):
        await respond(send, 413, [], b"too large")

    async def scenario(port, _state):
        client = await connect(port)
        await client.until(lambda: client.h2.outbound_flow_control_window == WINDOW_BYTES)
        for _ in range(3):
            stream = await client.ask("/", b"x" * 400_000, ends=False)
            await client.until(lambda stream=stream: stream in client.ends)
            assert client.heads[stream][":status"] == "413"
            await client.until(lambda stream=stream: client.ends[stream] == ErrorCodes.NO_ERROR)
        # Three times 400,000 bytes were sent; unless they are given back the window is empty.
        await client.until(lambda: client.h2.outbound_flow_control_window >= WINDOW_BYTES // 2)

    serving(scenario, refuses)


def test_a_reset_gives_back_the_window_that_was_not_read():
    async def reads_nothing(scope, receive, send):
        await asyncio.Event().wait()

    async def scenario(port, _state):
        client = await connect(port)
        await client.until(lambda: client.h2.outbound_flow_control_window == WINDOW_BYTES)
        for _ in range(3):
            stream = await client.ask("/", b"x" * 400_000, ends=False)
            client.h2.ping(b"12345678")
            await client.flush()
            await client.until(lambda: client.pongs)  # all of it has arrived
            client.pongs.clear()
            client.h2.reset_stream(stream)
            await client.flush()

    serving(scenario, reads_nothing)


def test_a_reader_learns_that_its_client_wants_no_answer():
    learned = asyncio.Event()

    async def waits(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        learned.set()

    async def scenario(port, _state):
        client = await connect(port)
        stream = await client.ask("/", b"x", ends=False)
        client.h2.reset_stream(stream)
        await client.flush()
        await asyncio.wait_for(learned.wait(), HUNG_S)

        learned.clear()
        await client.ask("/", b"x", ends=False)
        client.writer.close()
        await asyncio.wait_for(learned.wait(), HUNG_S)

    serving(scenario, waits)


def test_a_stop_lets_requests_end_and_takes_no_more():
    async def scenario(port, state):
        client = await connect(port)
        stream = await client.ask("/", b"a", ends=False)
        await client.until(lambda: client.h2.outbound_flow_control_window > 65_535)
        while not state.tasks:
            await asyncio.sleep(0)
        for connection in list(state.connections):
            connection.shutdown()
        late = await client.ask("/late")
        client.h2.end_stream(stream)
        await client.flush()
        assert (await client.answer(stream))[1].endswith(b"|a")
        while not client.is_closed:
            await client.read()

        assert client.ends.get(late) == ErrorCodes.REFUSED_STREAM

    serving(scenario, echo)


@pytest.mark.seconds
def test_an_idle_connection_is_closed():
    async def scenario(port, state):
        client = await connect(port)
        # A request is open from the first on, so that the connection is not idle before the end.
        answered, unended = await client.ask(), await client.ask("/", b"x", ends=False)
        await client.answer(answered)
        # Its last request ends without an answer.
        client.h2.reset_stream(unended)
        await client.flush()
        await opened(port)
        unused = await connect(port)
        for each in (client, unused):
            while not each.is_closed:
                await each.read()
            assert each.goaway == ErrorCodes.NO_ERROR
        while state.connections:
            await asyncio.sleep(0.01)

    serving(scenario, echo, timeout_keep_alive=1.0)


def test_streams_above_the_bound_end_the_connection():
    async def never(scope, receive, send):
        await asyncio.Event().wait()

    async def scenario(port, _state):
        client = await connect(port)
        client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 10_000
        for _ in range(STREAMS_MAX + 1):
            await client.ask()
        while not client.is_closed:
            client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 10_000
            await client.read()

        assert client.goaway is not None

    serving(scenario, never)
