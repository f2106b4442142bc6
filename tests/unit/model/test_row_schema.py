"""`output.schema`: its text parsed once, each row checked; messages never show a value."""

import dataclasses
import enum
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import msgspec
import pytest

from kclrun.errors import RowMismatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.row_types import Column, DecimalType, SimpleType
from tests.support.tables import over_rows


class Nanoseconds(datetime):
    """As the times of pandas."""

    nanosecond = 7


SECRET = "4111-1111"


class Colour(enum.Enum):
    RED = "red"


class Code(enum.IntEnum):
    ONE = 1


class Leg(msgspec.Struct):
    to: str
    miles: int | None = None


@dataclasses.dataclass
class Flight:
    carrier: str
    legs: list[Leg]


@over_rows(
    ("text", "same_as"),
    [
        ("carrier string, flights long", "carrier: string, flights: long"),
        (
            "a BIGINT, b Integer, c tinyint, d smallint, e real",
            "a: long, b: int, c: byte, d: short, e: float",
        ),
        (
            "a decimal, b dec(5), c numeric(38, 38)",
            "a: decimal(10,0), b: decimal(5,0), c: decimal(38,38)",
        ),
        ("a: string not null comment 'it\\'s, (so)', b date", "a: string NOT NULL, b: date"),
        ("`a b` int, `a``b` int, `1` int, 2x int", "`a b`: int, `a``b`: int, 1: int, 2x: int"),
        (
            "a array < map<string,struct<x:int NOT NULL,y timestamp>> >",
            "a: array<map<string,struct<x: int NOT NULL, y: timestamp>>>",
        ),
        ("string string, not boolean, date date", "string: string, not: boolean, date: date"),
    ],
)
def test_a_schema_is_read_as_spark_reads_it_and_its_text_gives_it_again(text, same_as):
    schema = RowSchema.parse(text)
    assert str(schema) == same_as
    assert RowSchema.parse(str(schema)).columns == schema.columns


def test_columns_have_names_types_and_whether_they_may_be_null():
    assert RowSchema.parse("a long, b decimal(5,2) NOT NULL").columns == (
        Column("a", SimpleType("long")),
        Column("b", DecimalType(5, 2), nullable=False),
    )


@over_rows(
    ("text", "said"),
    [
        ("", "expected the name of a column, got the end"),
        ("a", "expected a type (string, boolean, byte, short, int, long, float, double, binary,"),
        ("a int,", "expected the name of a column after 'a int ,', got the end"),
        ("a int b int", "expected a comma after 'a int', got 'b'"),
        ("a text", "after 'a', got 'text'"),
        ("a int NOT", "expected null after 'a int NOT', got the end"),
        ("a array<int", "expected > after 'array < int', got the end"),
        ("a map<string>", "expected , after 'map < string', got '>'"),
        ("a map<array<int>,int>", "a map whose keys are array<int>"),
        ("a decimal(39)", "decimal(39,0): expected 1 to 38 digits"),
        ("a decimal(3,4)", "decimal(3,4)"),
        ("a decimal(x)", "expected a number of digits after 'a decimal (', got 'x'"),
        ("a int comment x", "expected a comment in single quotes after 'a int comment', got 'x'"),
        ("Carrier int, carrier int", "names the column carrier twice"),
        ("a struct<b int, B int>", "names the column B twice"),
        ("a int; b int", "cannot be read from '; b int' on"),
        ("a " + "array<" * 30 + "int" + ">" * 30, "nested deeper than 20"),
    ],
)
def test_a_text_that_is_not_a_schema_is_refused_with_the_place(text, said):
    with pytest.raises(ValueError) as caught:
        RowSchema.parse(text)
    assert said in str(caught.value)


NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)


@over_rows(
    ("column", "given", "checked"),
    [
        ("string", "é", "é"),
        ("string", Colour.RED, "red"),
        ("string", uuid.UUID(int=7), str(uuid.UUID(int=7))),
        ("boolean", True, True),
        ("byte", -128, -128),
        ("long", 2**63 - 1, 2**63 - 1),
        ("int", Code.ONE, 1),
        ("double", 1, 1.0),
        ("double", float("inf"), float("inf")),
        ("float", 3.4028234663852886e38, 3.4028234663852886e38),
        ("binary", bytearray(b"x"), b"x"),
        ("date", date(2013, 1, 1), date(2013, 1, 1)),
        ("date", "2013-01-01", date(2013, 1, 1)),
        ("timestamp", datetime(2013, 1, 1, 12), NOON),
        ("timestamp", datetime(2013, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))), NOON),
        ("timestamp", "2013-01-01T12:00:00Z", NOON),
        ("decimal(5,2)", 7, Decimal("7.00")),
        ("decimal(5,2)", "-999.99", Decimal("-999.99")),
        ("decimal(5,2)", 1.1, Decimal("1.10")),
        ("decimal(5,2)", Decimal("1.1000"), Decimal("1.10")),
        ("array<int>", (1, None), [1, None]),
        ("map<string,date>", {"a": "2013-01-01", "b": None}, {"a": date(2013, 1, 1), "b": None}),
        ("struct<to string, miles long>", Leg("LGA"), {"to": "LGA", "miles": None}),
    ],
)
def test_a_value_that_fits_is_as_its_type_has_it(column, given, checked):
    row = RowSchema.parse(f"n {column}").check({"n": given})
    assert row == {"n": checked}
    assert type(row["n"]) is type(checked)
    if isinstance(checked, Decimal):
        assert str(row["n"]) == str(checked)


@over_rows(
    ("column", "given", "said"),
    [
        ("string", 4111, "column n: expected string, got int"),
        ("string", SECRET + "\ud800", "column n: a text with half a surrogate pair"),
        ("boolean", 1, "column n: expected boolean, got int"),
        ("long", True, "column n: expected long, got bool"),
        ("long", 4111.0, "column n: expected long, got float"),
        ("long", SECRET, "column n: expected long, got str"),
        ("byte", 128, "column n: a number outside the range of byte"),
        ("int", -(2**31) - 1, "column n: a number outside the range of int"),
        ("double", SECRET, "column n: expected double, got str"),
        ("double", 10**400, "column n: a number outside the range of double"),
        ("float", 3.5e38, "column n: a number outside the range of float"),
        ("double", 2**53 + 1, "column n: a number with more digits than double has"),
        ("float", 0.123456789, "column n: a number with more digits than float has"),
        ("float", 1e-50, "column n: a number with more digits than float has"),
        ("float", 16_777_217, "column n: a number with more digits than float has"),
        ("timestamp", "2013-01-01T00:00:00.123456789Z", "column n: a time with nanoseconds"),
        ("timestamp", "2013-01-01T00:00:00,1234567", "column n: a time with nanoseconds"),
        ("timestamp", Nanoseconds(2013, 1, 1), "column n: a time with nanoseconds"),
        ("binary", SECRET, "column n: expected binary, got str"),
        ("date", NOON, "column n: expected date, got datetime"),
        ("date", SECRET, "column n: expected date, got a text that is not an ISO 8601 date"),
        ("timestamp", date(2013, 1, 1), "column n: expected timestamp, got date"),
        ("timestamp", SECRET, "column n: expected timestamp, got a text that is not in ISO 8601"),
        (
            "timestamp",
            datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
            "column n: an instant outside the range of timestamp",
        ),
        ("decimal(5,2)", "1.005", "column n: a number with more digits than decimal(5,2) has"),
        ("decimal(5,2)", 1000, "column n: a number with more digits than decimal(5,2) has"),
        ("decimal(5,2)", SECRET, "column n: expected decimal(5,2), got a text that is not a"),
        ("decimal(5,2)", float("nan"), "column n: expected decimal(5,2), got a number that is not"),
        ("decimal(5,2)", True, "column n: expected decimal(5,2), got bool"),
        ("array<int>", SECRET, "column n: expected array<int>, got str"),
        ("array<int>", [1, SECRET], "column n[1]: expected int, got str"),
        ("map<int,int>", [1], "column n: expected map<int,int>, got list"),
        ("map<int,int>", {SECRET: 1}, "column n[a key]: expected int, got str"),
        ("map<int,int>", {1: SECRET}, "column n[a value]: expected int, got str"),
        (
            "struct<legs array<struct<miles int NOT NULL>>>",
            {"legs": [{"miles": 1}, {"miles": SECRET}]},
            "column n.legs[1].miles: expected int, got str",
        ),
        (
            "struct<miles int NOT NULL>",
            {},
            "column n.miles: is NOT NULL and has no value",
        ),
        ("struct<miles int>", {"to": SECRET}, "column n.to: is not in the schema"),
        ("struct<miles int>", 7, "column n: a row is a mapping of names to values, a dataclass"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_column_and_never_shown(column, given, said):
    with pytest.raises(RowMismatch) as caught:
        RowSchema.parse(f"n {column}").check({"n": given})
    assert said in str(caught.value)
    assert "4111" not in str(caught.value)


@over_rows(
    ("row", "said"),
    [
        ({"flights": 1}, "column carrier: is NOT NULL and has no value"),
        ({"carrier": None}, "column carrier: is NOT NULL and has no value"),
        ({"carrier": "AA", "miles": SECRET}, "column miles: is not in the schema"),
        ({"carrier": "AA", "a\n" * 99: SECRET}, "column 'a\\na\\n"),
        ({"carrier": "AA", 7: SECRET}, "column 7: is not in the schema"),
        (SECRET, "output.schema: a row is a mapping of names to values, a dataclass instance or"),
        (Leg, "output.schema: a row is a mapping"),
        (Flight("AA", []), "column legs: is not in the schema"),
    ],
)
def test_a_row_with_other_columns_is_refused(row, said):
    with pytest.raises(RowMismatch) as caught:
        RowSchema.parse("carrier string NOT NULL, flights long").check(row)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_checked_row_has_every_column_in_order_whether_mapping_dataclass_or_struct():
    schema = RowSchema.parse("carrier string, flights long")
    assert list(schema.check({"flights": 2}).items()) == [("carrier", None), ("flights", 2)]
    legs = RowSchema.parse("legs array<struct<to string, miles long>>, carrier string")
    assert legs.check(Flight("AA", [Leg("LGA", 7)])) == {
        "legs": [{"to": "LGA", "miles": 7}],
        "carrier": "AA",
    }


@over_rows(
    "number", [0.1, 1 / 4, 3.4e38, 1e-45, 123456.0, 0.10000000149011612, float("nan"), -0.0, 7]
)
def test_a_float_takes_what_is_read_back_as_it_was_given(number):
    [checked] = RowSchema.parse("n float").check({"n": number}).values()
    assert repr(checked) == repr(float(number))


def test_a_timestamp_takes_microseconds_and_zeros_behind_them():
    [checked] = (
        RowSchema.parse("n timestamp").check({"n": "2013-01-01T00:00:00.123456000Z"}).values()
    )
    assert checked.microsecond == 123456
