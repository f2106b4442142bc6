"""Rows to files: what a reader gets back is what was emitted, as the schema has it."""

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow import parquet

from kclrun.errors import SettingsError
from kclrun.outputs import row_files
from kclrun.outputs.row_files import row_format

SCHEMA = (
    "name string NOT NULL, is_late boolean, tiny byte, small short, count int, number long,"
    " ratio float, price double, data binary, day date, at timestamp, exact decimal(12,3),"
    " tags array<string>, fares map<string,long>, place struct<lat: double, lon: double>"
)
FULL = {
    "name": 'ä, "b"\nc',
    "is_late": True,
    "tiny": -128,
    "small": 32767,
    "count": 7,
    "number": 2**62,
    "ratio": 0.5,
    "price": 1e300,
    "data": b"\x00\xff",
    "day": date(2013, 1, 31),
    "at": datetime(2013, 1, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "exact": Decimal("123456789.125"),
    "tags": ["a", None],
    "fares": {"x": 1, "y": None},
    "place": {"lat": 1.5, "lon": None},
}
EMPTY = dict.fromkeys(FULL) | {"name": ""}


def written(form, rows, *, at_once=2):
    file = form.new_file()
    encoded = [form.encode(row)[0] for row in rows]
    parts = [file.add(encoded[n : n + at_once]) for n in range(0, len(encoded), at_once)]
    return b"".join([*parts, file.end()])


def test_parquet_gives_every_value_back_with_its_type():
    form = row_format("parquet", SCHEMA)
    table = parquet.read_table(io.BytesIO(written(form, [FULL, EMPTY])))
    back = table.to_pylist(maps_as_pydicts="strict")
    assert back == [FULL, EMPTY]
    assert table.schema.field("at").type == pa.timestamp("us", tz="UTC")
    assert not table.schema.field("name").nullable


def test_rows_of_a_parquet_file_leave_memory_in_row_groups(monkeypatch):
    monkeypatch.setattr(row_files, "_GROUP_ROWS_MAX", 10)
    form = row_format("parquet", "n long, s string")
    file = form.new_file()
    sizes, parts = [], []
    for n in range(25):
        encoded, size = form.encode({"n": n, "s": "abcd"})
        assert size == 20
        parts.append(file.add([encoded]))
        sizes.append(file.waiting_bytes)
    parts.append(file.end())
    assert sizes == [20 * (n % 10) for n in range(1, 26)]
    found = parquet.ParquetFile(io.BytesIO(b"".join(parts)))
    assert [found.metadata.row_group(n).num_rows for n in range(3)] == [10, 10, 5]
    assert [row["n"] for row in found.read().to_pylist()] == list(range(25))


def test_csv_has_a_header_and_texts_that_can_be_read_back():
    content = written(row_format("csv", SCHEMA), [FULL, EMPTY, EMPTY], at_once=1).decode()
    head, full, empty, _ = csv.reader(io.StringIO(content, newline=""))
    assert head == list(FULL)
    assert full == [
        'ä, "b"\nc',
        "true",
        "-128",
        "32767",
        "7",
        str(2**62),
        "0.5",
        "1e+300",
        "AP8=",
        "2013-01-31",
        "2013-01-31T23:59:59.999999+00:00",
        "123456789.125",
        '["a",null]',
        '{"x":1,"y":null}',
        '{"lat":1.5,"lon":null}',
    ]
    assert empty == [""] * len(FULL)


@pytest.mark.parametrize("schema", [None, "a long, b string"])
def test_json_lines_are_the_rows_as_they_were_checked(schema):
    assert written(row_format("json", schema), [{"b": 1}, {"a": 2}]) == b'{"b":1}\n{"a":2}\n'


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_a_format_with_columns_needs_a_schema(name):
    with pytest.raises(SettingsError, match=f"format: {name} needs `schema`"):
        row_format(name, None)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "schema", "wrap"),
    [
        ("json", None, lambda number: number),
        ("json", None, lambda number: [1, {"deep": (None, number)}]),
        ("json", "n double", lambda number: number),
        ("csv", "n array<double>", lambda number: [None, number]),
        ("csv", "n struct<x double>", lambda number: {"x": number}),
    ],
)
def test_a_number_that_would_become_null_is_refused_with_its_column(name, schema, wrap, number):
    row = {"m": None, "n": wrap(number)} if schema is None else {"n": wrap(number)}
    with pytest.raises(TypeError, match="'n': a number that is not finite"):
        row_format(name, schema).encode(row)


def test_nulls_and_texts_of_null_are_what_they_are():
    row = {"a": None, "b": "null", "c": [None, {"d": None}], "e": 1.5}
    line, _ = row_format("json", None).encode(row)
    assert line == b'{"a":null,"b":"null","c":[null,{"d":null}],"e":1.5}\n'
