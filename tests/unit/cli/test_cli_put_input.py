import hashlib
import io
import sys
from types import SimpleNamespace

import pytest

from kclrun.aws import put_records
from kclrun.cli import put
from kclrun.cli.put import entries, format_of
from kclrun.errors import SettingsError, Unavailable
from kclrun.model.record import PutEntry


def read(text: bytes, kind: str, key: str | None = None) -> list[PutEntry]:
    return list(entries(io.BytesIO(text), kind, key))


def test_the_format_follows_from_the_name() -> None:
    assert [format_of(name) for name in ("a.CSV", "b.jsonl", "c.ndjson", "d.log", "-")] == [
        "csv",
        "jsonl",
        "jsonl",
        "text",
        "text",
    ]


def test_a_csv_row_becomes_a_json_object() -> None:
    (entry,) = read(b'\xef\xbb\xbfcarrier,note\r\nAA,"two\nlines"\r\n', "csv", "carrier")

    assert (entry.partition_key, entry.data) == ("AA", b'{"carrier":"AA","note":"two\\nlines"}')


def test_a_json_line_goes_as_it_stands() -> None:
    (entry,) = read(b'{ "k": 7, "x": [1] }\n', "jsonl", "k")

    assert (entry.partition_key, entry.data) == ("7", b'{ "k": 7, "x": [1] }')


def test_lines_of_text_are_routed_by_their_hash() -> None:
    first, second = read(b"a\r\n\nb", "text")

    assert (first.data, second.data) == (b"a", b"b")
    assert first.partition_key == hashlib.md5(b"a").hexdigest()


@pytest.mark.parametrize(
    ("text", "kind", "key", "said"),
    [
        (b"a,b\n1\n", "csv", None, "line 2: not as many columns"),
        (b"a,b\n1,2,3\n", "csv", None, "line 2: not as many columns"),
        (b"a,b\n1,2\n", "csv", "c", "--key c: no such column; there are a, b"),
        (b"a\n\xff\n", "csv", None, "not readable as CSV"),
        (b'{"a": 1}\n[1]\n', "jsonl", None, "line 2: not a JSON object"),
        (b'{"a": 1}\n', "jsonl", "b", "line 1: no text or number in b"),
        (b'{"a": ""}\n', "jsonl", "a", "line 1: the key has 0 characters"),
        (b"x" * (2**20 + 9), "text", None, "line 1: longer than 1 MiB"),
        (b"x" * 2**20, "text", None, "a record holds 1 MiB at most"),
        (b"x\n", "text", "k", "--key names a column"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    text: bytes, kind: str, key: str | None, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(text, kind, key)

    assert said in str(caught.value)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    source = io.BytesIO(b"a\n" * 1000)
    rows = entries(source, "text", None)
    next(rows)

    assert source.tell() == 2


@pytest.mark.parametrize(
    ("types", "looks", "said"),
    [
        (True, True, "Reading rows from standard input, a row a line; Ctrl-D ends them\n"),
        (False, True, "Reading rows from standard input, a row a line\n"),
        (False, False, ""),
    ],
)
def test_a_person_is_told_that_rows_are_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, types: bool, looks: bool, said: str
) -> None:
    source, told = io.BytesIO(b"a\n"), io.StringIO()
    monkeypatch.setattr(told, "isatty", lambda: looks)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=source, isatty=lambda: types))
    monkeypatch.setattr(sys, "stderr", told)

    with put._opened("-") as opened:
        assert opened is source

    assert told.getvalue() == said


def test_a_put_that_fails_says_how_many_rows_are_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    aws = SimpleNamespace(kinesis_client=None, settings=SimpleNamespace(only_stream="s"))

    def send(_client: object, _stream: str, batch: tuple[PutEntry, ...]) -> None:
        if told:
            raise Unavailable("PutRecords: no answer")

    monkeypatch.setattr(put_records, "send_all", send)
    rows = iter([PutEntry(b"x", "k")] * 700)

    with pytest.raises(Unavailable, match="no answer\n500 rows are in the stream for certain"):
        put._put_all(aws, rows, told.append, aggregate=False, ordered=False)
    assert told == [500]
