"""Laws of reading an HTTP answer: any bytes give a value or the named failure, in any pieces."""

from hypothesis import given
from hypothesis import strategies as st

from kclrun.aws.http.exchange import Answer, exchange
from kclrun.aws.http.heads import HEADERS_MAX, BrokenAnswer, encode_request, parse_head

BODY_MAX = 64
HEAD = encode_request("/", {}, b"")


class Dealt:
    """A stream that deals out bytes in pieces of given sizes, over and over, then ends."""

    def __init__(self, said: bytes, sizes: list[int]) -> None:
        self._said = said
        self._sizes = sizes
        self._turn = 0

    def sendall(self, data: bytes, /) -> None:
        pass

    def recv(self, most: int, /) -> bytes:
        size = min(most, self._sizes[self._turn % len(self._sizes)])
        self._turn += 1
        piece, self._said = self._said[:size], self._said[size:]
        return piece

    def recv_into(self, buffer: memoryview, /) -> int:
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
TOKENS = st.text("abcXYZ-_.!~", min_size=1, max_size=8)
VALUES = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=12)
FRAMING = st.sampled_from(
    [
        ("Content-Length", "5"),
        ("content-length", "0"),
        ("Content-Length", "65"),
        ("Transfer-Encoding", "chunked"),
        ("Transfer-Encoding", "gzip"),
        ("Connection", "close"),
    ]
)
LINE_ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", " "])
STATUS_LINES = st.sampled_from(
    ["HTTP/1.1 200 OK", "HTTP/1.0 200", "HTTP/1.1 100 Continue", "HTTP/1.1 204 x", "HTTP/9 1"]
)


@st.composite
def almost_answers(draw: st.DrawFn) -> bytes:
    headers = draw(st.lists(st.tuples(TOKENS, VALUES) | FRAMING, max_size=5))
    lines = [draw(STATUS_LINES), *(f"{name}: {value}" for name, value in headers), ""]
    head = "".join(line + draw(LINE_ENDS) for line in lines)
    return head.encode("latin-1") + draw(st.binary(max_size=30) | chunked_bodies())


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    chunks = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=4))
    return b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A sound answer and its body, of each framing that there is."""
    headers = draw(st.lists(st.tuples(TOKENS, VALUES), max_size=4))
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers)
    interim = draw(st.sampled_from(["", "HTTP/1.1 100 Continue\r\n\r\n"]))
    head = f"{interim}HTTP/1.1 200 OK{lines}"
    chunks = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=3))
    body = b"".join(chunks)
    sent = body
    match draw(st.sampled_from(["length", "chunks", "close"])):
        case "length":
            head += f"\r\nContent-Length: {len(body)}"
        case "chunks":
            head += "\r\nTransfer-Encoding: chunked"
            sent = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    return head.encode("latin-1") + b"\r\n\r\n" + sent, body


def read(said: bytes, sizes: list[int]) -> tuple[Answer, bool] | str:
    try:
        return exchange(Dealt(said, sizes), HEAD, b"", BODY_MAX)
    except BrokenAnswer as error:
        return str(error)


@given(st.binary() | almost_answers(), SIZES)
def test_any_bytes_are_an_answer_within_limits_or_the_named_failure(said, sizes):
    got = read(said, sizes)

    if not isinstance(got, str):
        answer, _ = got
        assert len(answer.body) <= BODY_MAX
        assert 200 <= answer.status <= 599
        assert len(answer.headers) <= HEADERS_MAX


@given(st.binary() | almost_answers().map(lambda said: said.partition(b"\r\n\r\n")[0]))
def test_any_head_is_parsed_or_refused_by_name(head):
    try:
        parsed = parse_head(head)
        _ = parsed.length, parsed.is_chunked, parsed.keeps_alive
    except BrokenAnswer:
        return
    assert all(name == name.lower() for name in parsed.headers)
    assert not any(set("\r\n\0") & set(value) for value in parsed.headers.values())


@given(answers(), SIZES)
def test_a_sound_answer_is_the_same_however_it_is_cut_into_pieces(sound, sizes):
    said, body = sound

    whole, in_pieces = read(said, [len(said)]), read(said, sizes)

    assert whole == in_pieces
    assert not isinstance(whole, str)
    assert whole[0].body == body


@given(almost_answers(), SIZES)
def test_an_unsound_answer_fails_however_it_is_cut_into_pieces(said, sizes):
    whole, in_pieces = read(said, [len(said)]), read(said, sizes)

    assert isinstance(whole, str) == isinstance(in_pieces, str)
