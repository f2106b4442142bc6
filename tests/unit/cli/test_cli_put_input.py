import hashlib
import io
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.aws import put_records
from kclrun.cli import put
from kclrun.cli.program import run_program
from kclrun.cli.put import entries, format_of
from kclrun.codec.record_sizes import RecordLimit
from kclrun.errors import AccessDenied, InvalidRequest, SettingsError
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from tests.unit.cli.memory_site import Clock


def limit(raised: int | None = None) -> RecordLimit:
    """That of a stream whose owner has raised it, or not."""
    return RecordLimit(lambda: raised, clock=lambda: 0.0, wait=lambda _: None)


def read(
    text: bytes, kind: str, key: str | None = None, raised: int | None = None
) -> list[PutEntry]:
    return list(entries(io.BytesIO(text), kind, key, limit(raised)))


def test_the_format_follows_from_the_name():
    assert [format_of(name) for name in ("a.CSV", "b.jsonl", "c.ndjson", "d.log", "-")] == [
        "csv",
        "jsonl",
        "jsonl",
        "text",
        "text",
    ]


def test_a_csv_row_becomes_a_json_object():
    (entry,) = read(b'\xef\xbb\xbfcarrier,note\r\nAA,"two\nlines"\r\n', "csv", "carrier")

    assert (entry.partition_key, entry.data) == ("AA", b'{"carrier":"AA","note":"two\\nlines"}')


def test_a_json_line_goes_as_it_stands():
    (entry,) = read(b'{ "k": 7, "x": [1] }\n', "jsonl", "k")

    assert (entry.partition_key, entry.data) == ("7", b'{ "k": 7, "x": [1] }')


def test_lines_of_text_are_routed_by_their_hash():
    first, second = read(b"a\r\n\nb", "text")

    assert (first.data, second.data) == (b"a", b"b")
    assert first.partition_key == hashlib.md5(b"a").hexdigest()


@pytest.mark.parametrize(
    ("text", "kind", "key", "said"),
    [
        (b"a,b\n1\n", "csv", None, "line 2: not as many columns"),
        (b"a,b\n1,2,3\n", "csv", None, "line 2: not as many columns"),
        (b"a,b\n1,2\n", "csv", "c", "--key c: no such column; there are a, b"),
        (b"", "csv", "c", "--key c: no such column; there are none"),
        (b'a\n1\n"1"2\n', "csv", None, "line 3: not readable as CSV: ',' expected after"),
        (b'a\n"' + b"x" * (10 * 2**20 + 1), "csv", None, "line 2: longer than 10 MiB"),
        pytest.param(
            *(b'a\n"' + b"x\n" * 10 * 2**20, "csv", None, "not readable as CSV: field larger than"),
            marks=pytest.mark.seconds,
        ),
        (b"a,b,a\n1,2,3\n", "csv", None, "line 1: two columns have the name 'a'; rename one"),
        (b"a\n\n1\n", "csv", "b", "--key b"),
        (b'{"a": true}\n', "jsonl", "a", "line 1: no text or number in a"),
        (
            b'{"a": "%s"}\n' % (b"k" * 257),
            "jsonl",
            "a",
            "line 1: a partition key has 257 characters",
        ),
        (b"a\n\xff\n", "csv", None, "not UTF-8, after line 0"),
        (b'{"a": 1}\n[1]\n', "jsonl", None, "line 2: not a JSON object"),
        (b'{"a": 1}\n', "jsonl", "b", "line 1: no text or number in b"),
        (b'{"a": ""}\n', "jsonl", "a", "line 1: a partition key has 0 characters"),
        (b"x" * (10 * 2**20 + 9), "text", None, "line 1: longer than 10 MiB"),
        (b"x" * 2**20, "text", None, "its key included; at most 1048576 are taken"),
        (b"x\n", "text", "k", "--key names a column"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(text, kind, key, said):
    with pytest.raises(SettingsError) as caught:
        read(text, kind, key)

    assert said in str(caught.value)


def test_the_longest_key_and_the_longest_line_are_taken():
    (entry,) = read(b'{"a": "%s"}\n' % (b"k" * 256), "jsonl", "a")
    assert entry.partition_key == "k" * 256
    key = 32  # a hash in hexadecimal digits
    (entry,) = read(b"x" * (2**20 - key) + b"\r\n", "text")
    assert entry.size_bytes == 2**20
    with pytest.raises(SettingsError, match="at most 1048576 are taken"):
        read(b"x" * 2**20 + b"\r\n", "text")
    with pytest.raises(SettingsError, match="line 2: a record has 1048611 bytes"):
        read(b"x\n" + b"x" * (2**20 + 3), "text")
    (entry,) = read(b"x" * (2**21 - key), "text", raised=2**21)
    assert entry.size_bytes == 2**21
    with pytest.raises(SettingsError, match="at most 2097152 are taken"):
        read(b"x" * 2**21, "text", raised=2**21)
    assert [number.partition_key for number in read(b"a\n1\n2\n", "csv", "a")] == ["1", "2"]
    assert read(b"a\n1\n", "csv")[0].data == b'{"a":"1"}'


def test_a_column_of_a_csv_row_may_be_as_large_as_a_record():
    text = b"x" * 500_000  # Python's own limit is 128 KiB
    assert read(b"a\n" + text + b"\n", "csv")[0].data == b'{"a":"' + text + b'"}'


def test_nothing_is_read_before_it_is_asked_for():
    source = io.BytesIO(b"a\n" * 1000)
    rows = entries(source, "text", None, limit())
    next(rows)

    assert source.tell() == 2


@pytest.mark.parametrize(
    ("types", "looks", "said"),
    [
        (True, True, "Reading rows from standard input, a row a line; Ctrl-D ends them\n"),
        (False, True, "Reading rows from standard input, a row a line\n"),
        (
            True,
            False,
            "Reading rows from standard input, a row a line; Ctrl-D ends them\n",
        ),
        (False, False, ""),
    ],
)
def test_a_person_is_reported_that_rows_are_read_from_standard_input(
    monkeypatch, types, looks, said
):
    source, reported = io.BytesIO(b"a\n"), io.StringIO()
    monkeypatch.setattr(reported, "isatty", lambda: looks)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=source, isatty=lambda: types))
    monkeypatch.setattr(sys, "stderr", reported)

    with put._opened("-") as opened:
        assert opened is source

    assert reported.getvalue() == said


# What is sent, and what is said


class Sent:
    """In place of Kinesis: the requests that a put makes, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str = "http://127.0.0.1:1") -> None:
        self.clock = Clock()
        self.requests: list[list[str]] = []
        self.made: list[object] = []
        self.took_s = 2.0
        self.fails: Exception | None = None
        self.url = url
        monkeypatch.setattr(put, "time", self.clock)
        monkeypatch.setattr("kclrun.cli.services.Aws", self.aws)
        monkeypatch.setattr(put_records, "WirePutter", lambda _client, _stream: self)
        monkeypatch.setattr("kclrun.local.filling.make_stream", self.make)

    def aws(self, settings: Any) -> SimpleNamespace:
        return SimpleNamespace(
            settings=settings,
            kinesis_client="client",
            kinesis=SimpleNamespace(url=self.url),
            called_stream=lambda name: f"the stream {name}",
            credentials=SimpleNamespace(current=lambda: "credentials"),
            stream=SimpleNamespace(list_shards=lambda: [build_shard()]),
        )

    def make(self, *made: object) -> bool:
        self.made.append(made)
        return len(self.made) != 2

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        if self.requests and self.fails is not None:
            raise self.fails
        self.clock.now += self.took_s
        self.requests.append([each.data.decode(errors="replace") for each in entries])
        return tuple(PutResult("1", build_shard().shard_id) for _ in entries)


def build_shard() -> Shard:
    return Shard("shardId-000000000000", HashRange(0, HASH_KEY_MAX), "1")


@pytest.fixture
def sent(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("a\nb\nc\n")
    (tmp_path / "rows.csv").write_text("n\n1\n2\n")
    return Sent(monkeypatch)


LINE = "put --stream s --endpoint http://127.0.0.1:1"


def test_rows_of_a_file_are_sent_and_counted(sent, capsys):
    assert run_program([*LINE.split(), "rows.txt"]) == 0
    assert sent.requests == [["a", "b", "c"]]
    assert capsys.readouterr() == ("3 rows put in 2.0 s (2/s)\n", "")
    sent.took_s = 0.0
    assert run_program([*LINE.split(), "rows.csv", "--ordered"]) == 0
    assert sent.requests[1] == ['{"n":"1"}', '{"n":"2"}']
    assert capsys.readouterr().out.startswith("2 rows put in 0.0 s (2,000,000,000/s)")
    assert run_program([*LINE.split(), "rows.csv", "--format", "text"]) == 0
    assert sent.requests[2] == ["n", "1", "2"]
    assert run_program([*LINE.split(), "no.txt"]) == 78
    assert "Cannot put: no.txt: No such file or directory" in capsys.readouterr().err


def test_a_stream_is_made_first_and_only_on_this_machine(sent, capsys):
    for shards in ("1", "2", "3"):
        assert run_program([*LINE.split(), "--create", shards, "rows.txt"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "Made" in line]
    # The second was there.
    assert said == ["Made the stream s with 1 shard", "Made the stream s with 3 shards"]
    assert [made[1:] for made in sent.made] == [("s", n, "credentials") for n in (1, 2, 3)]  # type: ignore[index]
    sent.url = "https://kinesis.eu-west-1.amazonaws.com"
    assert run_program([*LINE.split(), "--create", "2", "rows.txt"]) == 78
    assert "--stream-name s --shard-count 2" in capsys.readouterr().err
    assert len(sent.made) == 3


def test_an_interrupted_put_says_how_far_it_got(sent, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    sent.clock.acts.append(interrupt)
    assert run_program([*LINE.split(), "rows.txt", "--rate", "2"]) == 130
    reported = capsys.readouterr()
    assert (reported.out, reported.err.strip()) == (
        "",
        "Interrupted: 1 rows are in the stream for certain",
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AccessDenied("no", operation="PutRecords"), 77),
        (InvalidRequest("no", operation="PutRecords"), 78),
    ],
)
def test_a_put_that_fails_says_how_many_rows_are_in_the_stream(sent, capsys, error, code):
    sent.fails = error
    assert run_program([*LINE.split(), "rows.txt", "--rate", "2"]) == code
    assert "1 rows are in the stream for certain" in capsys.readouterr().err
    assert sent.requests == [["a"]]


def test_the_rows_before_one_that_cannot_be_used_are_in_the_stream(sent, capsys, tmp_path):
    (tmp_path / "rows.csv").write_text("n\n1\n2\n3,4\n5\n")
    assert run_program([*LINE.split(), "rows.csv"]) == 78
    assert sent.requests == [['{"n":"1"}', '{"n":"2"}']]
    reported = capsys.readouterr().err
    assert "line 4: not as many columns as the header" in reported
    assert "2 rows are in the stream for certain" in reported


def test_ordered_holds_one_record_of_a_key_in_a_request_and_aggregate_many_in_a_record(
    sent, capsys, tmp_path
):
    (tmp_path / "rows.csv").write_text("k\na\na\nb\n")
    assert run_program([*LINE.split(), "rows.csv", "--key", "k", "--ordered"]) == 0
    assert [len(request) for request in sent.requests] == [2, 1]
    assert run_program([*LINE.split(), "rows.csv", "--key", "k", "--aggregate"]) == 0
    assert [len(request) for request in sent.requests[2:]] == [1]
    assert capsys.readouterr().out.count("3 rows put in") == 2


def test_at_a_rate_rows_wait_for_their_turn_and_none_is_held(sent):
    rows = [PutEntry(b"%d" % n, "k") for n in range(3)]

    def paced(rate: int | None, *given: PutEntry | None) -> tuple[list[Any], list[float]]:
        sent.clock.slept.clear()
        return list(put._paced(iter(given), rate)), list(sent.clock.slept)

    assert paced(None, *rows) == (rows, [])
    # Half a second is longer than held rows may wait.
    assert paced(2, *rows) == ([rows[0], None, rows[1], None, rows[2]], [0.5, 0.5])
    assert paced(8, *rows) == (rows, [0.125, 0.125])
    # A pause of the pipe is no row.
    assert paced(8, rows[0], None, rows[1]) == ([rows[0], None, rows[1]], [0.125])


def test_the_rows_of_a_pipe_come_as_they_are_and_its_silence_too(monkeypatch):
    monkeypatch.setattr(put, "_IDLE_S", 0.01)
    go = threading.Event()
    entry = PutEntry(b"x", "k")

    def rows() -> Any:
        yield entry
        go.wait(60)
        yield entry
        raise SettingsError("line 3")

    came = put._as_they_come(rows())
    assert next(came) is entry
    reader = next(each for each in threading.enumerate() if each.name == "input")
    assert reader.daemon
    assert next(came) is None
    go.set()
    assert next(each for each in came if each is not None) is entry
    with pytest.raises(SettingsError, match="line 3"):
        list(came)
    assert [each for each in put._as_they_come(iter([entry, entry])) if each] == [entry, entry]


def test_standard_input_is_read_as_it_comes_and_a_person_sees_the_progress(sent, monkeypatch):
    sent.took_s = 0.5
    reported = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal gets no bar
    monkeypatch.setattr(reported, "isatty", lambda: True)
    came: list[object] = []
    monkeypatch.setattr(put, "_as_they_come", lambda rows: came.append("as they come") or rows)
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb\n"), isatty=lambda: False)
    )
    monkeypatch.setattr(sys, "stderr", reported)

    assert run_program(LINE.split()) == 0

    assert (sent.requests, came) == ([["a", "b"]], ["as they come"])
    assert "2 rows, 4/s" in reported.getvalue()
    assert run_program([*LINE.split(), "rows.txt"]) == 0
    assert len(came) == 1
