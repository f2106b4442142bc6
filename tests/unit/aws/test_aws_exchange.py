"""An HTTP answer, byte by byte: which are whole, which are none, what a connection is worth."""

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kclrun.aws import connecting
from kclrun.aws.http import exchange as exchanging
from kclrun.aws.http.exchange import Answer, exchange
from kclrun.aws.http.heads import HEADERS_MAX, BrokenAnswer, encode_request, parse_head
from kclrun.aws.operations import GET_RECORDS, UPDATE_ITEM
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.errors import OutcomeUnknown, Unavailable
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S
from tests.support.tables import over_rows

HEAD = encode_request("/", {"Host": "h"}, b"{}")
SMALL = b"HTTP/1.1 200 OK\r\nDate: today\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;why=not\r\nhel\r\n02\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nhello"


@contextmanager
def peer_sending(*pieces: bytes, closes: bool = True) -> Iterator[socket.socket]:
    """Our end of a connection whose other end says `pieces`, then closes, or goes silent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.2)
        for piece in pieces:
            theirs.sendall(piece)
        if closes:
            theirs.shutdown(socket.SHUT_WR)
        yield ours


def answered(*pieces: bytes, body_max: int = 100, closes: bool = False) -> tuple[Answer, bool]:
    with peer_sending(*pieces, closes=closes) as ours:
        return exchange(ours, HEAD, b"{}", body_max)


def refused(*pieces: bytes, body_max: int = 100) -> str:
    with pytest.raises(BrokenAnswer) as raised:
        answered(*pieces, body_max=body_max, closes=True)
    return str(raised.value)


# What is sent


def test_a_request_leaves_in_one_piece():
    with peer_sending(SMALL) as ours:
        sent: list[bytes] = []

        class Noting:
            recv, recv_into = ours.recv, ours.recv_into

            def sendall(self, data: bytes, /) -> None:
                sent.append(data)

        exchange(Noting(), HEAD, b"{}", 100)

    assert sent == [
        b"POST / HTTP/1.1\r\nAccept-Encoding: identity\r\nContent-Length: 2\r\nHost: h\r\n\r\n{}"
    ]


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "SECRET\u00e9CANARY"])
def test_a_header_that_would_end_early_is_not_sent_and_not_shown(value):
    with pytest.raises(ValueError, match="line break or is not ASCII") as raised:
        encode_request("/", {"x-amz-security-token": value}, b"")

    assert value not in f"{raised.value!r} {raised.value.__context__!r}"


def test_an_answer_to_a_request_that_was_cut_off_is_read_and_the_connection_is_not_kept():
    """A proxy may refuse a large body and close before it has read it."""

    class Deaf:
        def __init__(self, ours: socket.socket) -> None:
            self.recv, self.recv_into = ours.recv, ours.recv_into

        def sendall(self, data: bytes, /) -> None:
            raise BrokenPipeError

    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"
    with peer_sending(refusal, closes=False) as ours:
        answer, is_reusable = exchange(Deaf(ours), HEAD, b"{}", 100)

    assert (answer.status, is_reusable) == (413, False)


# Whole answers


class Cut:
    """Our end of a connection that has the pieces of an answer, one at a time."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [piece for piece in pieces if piece]

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def recv_into(self, place: memoryview, /) -> int:
        piece = self.recv(0)
        taken = min(len(piece), len(place))
        place[:taken] = piece[:taken]
        if piece[taken:]:
            self._pieces.insert(0, piece[taken:])
        return taken


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("answer", [SMALL, CHUNKED, INTERIM + SMALL, INTERIM + CHUNKED])
def test_an_answer_is_the_same_wherever_it_was_cut_on_its_way(answer):
    cuts = [[answer[:at], answer[at:]] for at in range(len(answer))]
    cuts += [[answer[at : at + size] for at in range(0, len(answer), size)] for size in range(1, 9)]

    for pieces in cuts:
        found, is_kept = exchange(Cut(*pieces), HEAD, b"{}", 100)
        assert (found.status, bytes(found.body), is_kept) == (200, b"hello", True), pieces


def test_the_bounds_of_an_answers_head_are_those_that_are_explained():
    assert (exchanging.HEAD_BYTES_MAX, exchanging.INTERIM_MAX) == (65_536, 8)


@pytest.mark.parametrize(
    ("answer", "is_kept"), [(SMALL, True), (CHUNKED, True), (UNTIL_CLOSED, False)]
)
def test_a_body_is_bounded_by_its_length_by_chunks_or_by_the_end(answer, *, is_kept):
    got, is_reusable = answered(answer, closes=answer is UNTIL_CLOSED)

    assert (got.status, bytes(got.body), is_reusable) == (200, b"hello", is_kept)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("framing", [b"Content-Length: 7", b"Transfer-Encoding: chunked", b"A: b"])
def test_some_answers_have_no_body_whatever_they_say(status, framing):
    got, is_reusable = answered(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n")

    assert (got.body, is_reusable) == (b"", True)


def test_interim_answers_are_passed_over_but_not_for_ever():
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"

    got, is_reusable = answered(interim + SMALL)

    assert (got.status, got.body, is_reusable) == (200, b"hello", True)
    assert "interim" in refused(interim * 4 + SMALL)
    assert "another protocol" in refused(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + SMALL)


def test_a_large_body_is_received_into_one_buffer():
    body = bytes(range(256)) * 4096
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = threading.Thread(target=theirs.sendall, args=(whole,))
        sending.start()
        got, is_reusable = exchange(ours, HEAD, b"{}", 2**24)
        sending.join(timeout=HUNG_S)

    assert (got.body == body, is_reusable) == (True, True)


def test_header_names_are_lower_case_and_repeated_ones_are_joined():
    head = parse_head(b"HTTP/1.1 400\r\nX-A:1\r\nx-b: \t two words \t\r\nx-a: \xe9\r\nX-C:")

    assert (head.status, head.headers) == (400, {"x-a": "1, \xe9", "x-b": "two words", "x-c": ""})


def test_a_head_has_as_many_headers_as_its_bound_and_an_answer_may_have_no_length():
    headers = b"".join(b"\r\nA%d: 1" % number for number in range(HEADERS_MAX))
    assert len(parse_head(b"HTTP/1.1 200 OK" + headers).headers) == HEADERS_MAX

    found, is_kept = exchange(Cut(UNTIL_CLOSED, b", ", b"world"), HEAD, b"{}", 12)
    assert (bytes(found.body), is_kept) == (b"hello, world", False)

    sixteen = CHUNKED[: CHUNKED.index(b"3;")] + b"10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n"
    assert bytes(answered(sixteen)[0].body) == b"x" * 16


@pytest.mark.parametrize("spare", [0, -1])
def test_a_part_of_a_head_is_read_to_its_bound(monkeypatch, spare):
    head = SMALL.partition(b"\r\n\r\n")[0]
    monkeypatch.setattr(exchanging, "HEAD_BYTES_MAX", len(head) + spare)

    for pieces in ([SMALL], [SMALL[:20], SMALL[20:]]):
        if spare < 0:
            with pytest.raises(BrokenAnswer, match="head is longer than"):
                exchange(Cut(*pieces), HEAD, b"{}", 100)
        else:
            assert exchange(Cut(*pieces), HEAD, b"{}", 100)[0].body == b"hello"


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def during(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    return error


@over_rows(
    ("error", "said"),
    [
        (ConnectionRefusedError(111, "refused"), "ConnectionRefusedError (refused)"),
        (OSError("without a number"), "OSError"),
        (caused(ValueError("secret"), OSError(5, "of the cause")), "ValueError (of the cause)"),
        (during(ValueError(), OSError(5, "before")), "ValueError (before)"),
        (ValueError("secret", OSError(5, "inside")), "ValueError (inside)"),
        (caused(OSError("vague"), OSError(5, "inner")), "OSError (inner)"),
        (ValueError("secret"), "ValueError"),
    ],
)
def test_a_failure_is_named_by_its_innermost_cause(error, said):
    assert connecting.describe(error) == said


# When a connection is used again


@over_rows(
    "said",
    [
        SMALL.replace(b"Date: today", b"Connection: close"),
        SMALL.replace(b"Date: today", b"connection: Close"),
        SMALL.replace(b"HTTP/1.1", b"HTTP/1.0"),
        SMALL + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        SMALL + b"!",
        CHUNKED + b"!",
        CHUNKED.replace(b"Transfer", b"Content-Length: 3\r\nTransfer", 1),
    ],
)
def test_a_connection_with_a_doubt_is_not_used_again(said):
    got, is_reusable = answered(said)

    assert (bytes(got.body), is_reusable) == (b"hello", False)


# What is no answer


@pytest.mark.parametrize("whole", [SMALL, CHUNKED])
def test_an_answer_cut_at_any_byte_is_no_answer(whole):
    for length in range(len(whole)):
        text = refused(whole[:length])
        assert "cut short" in text if length else text == "closed unanswered", length


@pytest.mark.parametrize("whole", [SMALL, CHUNKED])
def test_an_answer_that_stops_at_any_byte_is_a_time_out(whole):
    for length in range(len(whole)):
        with peer_sending(whole[:length], closes=False) as ours:
            ours.settimeout(0.001)
            with pytest.raises(TimeoutError):
                exchange(ours, HEAD, b"{}", 100)


MALFORMED = [
    b"",
    b"SSH-2.0-OpenSSH_9.6",
    b"HTTP/2 200 OK",
    b"HTTP/1.1 200OK",
    b"HTTP/1.1 99 Low",
    b"HTTP/1.1 600 High",
    b"HTTP/1.1 2\xb20 Superscript",
    b"HTTP/1.1 200 OK\nDate: x",
    b"HTTP/1.1 200 OK\r\nno colon",
    b"HTTP/1.1 200 OK\r\n: no name",
    b"HTTP/1.1 200 OK\r\nA: 1\r\nno colon\r\nB: 2",
    b"HTTP/1.1 200 OK\r\nblank : x",
    b"HTTP/1.1 200 OK\r\nA: 1\r\n folded",
    b"HTTP/1.1 200 OK\r\nA: 1\nB: 2",
    b"HTTP/1.1 200 OK\r\nA: \0",
    b"HTTP/1.1 200 OK" + b"\r\nA: 1" * (HEADERS_MAX + 1),
    b"HTTP/1.1 200 OK\r\nContent-Length: -1",
    b"HTTP/1.1 200 OK\r\nContent-Length: +1",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0x5",
    b"HTTP/1.1 200 OK\r\nContent-Length: \xb2",
    b"HTTP/1.1 200 OK\r\nContent-Length:",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6",
    b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 19,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
]


@over_rows("head", MALFORMED)
def test_a_malformed_head_is_no_answer_and_is_not_quoted(head):
    text = refused(head + b"\r\n\r\n" + b"hello")

    assert text.startswith("the answer")
    assert not any(len(word) > 3 and word in text for word in ("SSH", "folded", "blank", "9999"))


@over_rows(
    "chunks",
    [b"\r\n", b"-1\r\n", b"g\r\n", b"3\r\nhello\r\n", b"1" * 17 + b"\r\n", b"5 5\r\nhello"],
)
def test_a_malformed_chunk_is_no_answer(chunks):
    head = CHUNKED[: CHUNKED.index(b"3;")]

    assert "chunk" in refused(head + chunks + b"\r\n" * 3)


# Limits


def test_a_head_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(exchanging, "HEAD_BYTES_MAX", 1000)

    assert "longer than 1000 bytes" in refused(b"HTTP/1.1 200 OK\r\nA: " + b"a" * 2000)
    assert "longer than 1000 bytes" in refused(SMALL.replace(b"today", b"a" * 1000))


@over_rows(
    "said",
    [
        SMALL.replace(b": 5", b": 101"),
        SMALL.replace(b": 5", b": " + b"9" * 18),
        CHUNKED.replace(b"02\r\n", b"62\r\n"),
        CHUNKED.replace(b"02\r\n", b"f" * 16 + b"\r\n"),
        UNTIL_CLOSED + b"a" * 96,
    ],
)
def test_a_body_beyond_the_limit_is_refused_before_it_is_held(said):
    assert refused(said) == "the answer is longer than 100 bytes"


@pytest.mark.parametrize("said", [SMALL, CHUNKED, UNTIL_CLOSED])
def test_a_body_of_exactly_the_limit_is_taken(said):
    got, _ = answered(said, body_max=5, closes=said is UNTIL_CLOSED)

    assert bytes(got.body) == b"hello"


def test_trailers_without_an_end_are_refused():
    assert "trailers" in refused(CHUNKED[:-2] + b"A: 1\r\n" * HEADERS_MAX)


# Through the client


def test_small_requests_leave_at_once(server, make_client):
    client = make_client(server.url)
    client.call(GET_RECORDS, b"{}")

    (kept,) = client._transport._idle
    assert kept.stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_peer_that_is_silent_is_named_with_the_time_it_was(server, make_client):
    server.be_silent()

    with pytest.raises(OutcomeUnknown, match=r"silent for 0\.3 s after it was sent"):
        make_client(server.url, read_timeout_s=0.3).call(UPDATE_ITEM, b"{}")


def test_an_answer_without_a_length_ends_with_its_connection(server, make_client):
    server.reply(body=b"until closed", declare_length=False, then_close=True)
    client = make_client(server.url)

    assert client.call(GET_RECORDS, b"{}").body == b"until closed"
    client.call(GET_RECORDS, b"{}")

    assert [request.connection for request in server.requests] == [1, 2]


def test_bytes_after_an_answer_are_nobodys_answer(server, make_client):
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstale"
    server.reply(body=b"{}" + extra, headers={"Content-Length": "2"}, declare_length=False)
    client = make_client(server.url)

    assert client.call(GET_RECORDS, b"{}").body == b"{}"
    assert client.call(GET_RECORDS, b"{}").body == b"{}"

    assert server.connections == 2


def test_a_garbled_answer_leaves_a_write_unknown(server, make_client):
    server.reply(headers={"Content-Length": "two"}, declare_length=False)
    server.reply(headers={"Content-Length": "two"}, declare_length=False)
    client = make_client(server.url)

    with pytest.raises(OutcomeUnknown, match="Content-Length is not a number after it was sent"):
        client.call(UPDATE_ITEM, b"{}")
    with pytest.raises(Unavailable, match="Content-Length is not a number"):
        client.call(GET_RECORDS, b"{}")


def test_a_ninth_thread_waits_for_a_connection_and_none_is_lost(server, make_client):
    client = make_client(server.url, read_timeout_s=60.0)
    threads = [
        threading.Thread(target=lambda: [client.call(GET_RECORDS, b"{}") for _ in range(20)])
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HUNG_S)

    assert len(server.requests) == 320
    assert server.connections <= 8
    assert len(client._transport._idle) == server.connections


def test_where_no_connection_becomes_free_nothing_was_sent(server, make_client):
    client = make_client(server.url, connections_max=1, connect_timeout_s=0.05, read_timeout_s=0.05)
    client._transport._permits.acquire()

    with pytest.raises(Unavailable, match="became free before anything was sent"):
        client.call(UPDATE_ITEM, b"{}")

    client._transport._permits.release()
    assert server.requests == []


def test_a_client_that_is_forgotten_closes_its_connections(server):
    held = HeldCredentials(WireCredentials("k", "s"))
    client = WireClient(WireEndpoint(server.url, "r", "r"), held, service="kinesis")
    client.call(GET_RECORDS, b"{}")
    sock = client._transport._idle[0].stream
    assert isinstance(sock, socket.socket)

    del client
    gc.collect()

    assert sock.fileno() == -1
