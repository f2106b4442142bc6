"""The columns of emitted rows, and the check of each row. Pure.

`row_types.py` has the types and their text. Destinations make their columns of it. It knows none of
them.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final, assert_never

import msgspec

from kclrun.errors import RowMismatch
from kclrun.model.row_types import (
    PLAIN_NAME,
    ArrayType,
    Column,
    DataType,
    DecimalType,
    MapType,
    SimpleType,
    StructType,
    columns_of,
)


class RowSchema:
    """The columns of an output. `check` is called for each emitted row."""

    def __init__(self, columns: Iterable[Column], setting: str = "output") -> None:
        self.columns: Final = tuple(columns)
        self._setting = setting
        self._check = _struct_check(self.columns)

    @classmethod
    def parse(cls, text: str, setting: str = "output") -> RowSchema:
        """The schema that `output.schema` names, or that of the output of another `setting`.

        Raises: ValueError with the place in the text.
        """
        return cls(columns_of(text), setting)

    def check(self, row: object) -> dict[str, Any]:
        """The row with every column, in their order, each value as its type has it in Python.

        `row` is a mapping, a dataclass instance or a msgspec.Struct. A column that it lacks is
        None, if it may be. Instants without a time zone are UTC. Texts in ISO 8601 are taken for
        dates and timestamps, and numbers in texts for decimals; neither a number nor a time is ever
        rounded to fit.
        Raises: RowMismatch, which names the column and the types, never the value.
        """
        try:
            return self._check(row)
        except _Misfit as misfit:
            where = misfit.where.removeprefix(".")
            column = f"column {where}: " if where else ""
            raise RowMismatch(
                f"the row does not fit {self._setting}.schema: {column}{misfit}"
            ) from None

    def __str__(self) -> str:
        return ", ".join(map(str, self.columns))


# The values that stay as they are where a row becomes a mapping of plain values.
_PLAIN_VALUES: Final = (bytes, bytearray, memoryview, datetime, date, Decimal)


def row_mapping(row: object) -> Mapping[str, Any]:
    """A row as a mapping: of a Struct or a dataclass instance its fields, with enumerations and
    UUIDs as plain values. Raises: TypeError for other objects."""
    if isinstance(row, Mapping):
        return row
    is_record = dataclasses.is_dataclass(row) and not isinstance(row, type)
    if isinstance(row, msgspec.Struct) or is_record:
        values = msgspec.to_builtins(row, builtin_types=_PLAIN_VALUES)
        if isinstance(values, dict):
            return values
    raise TypeError(
        "a row is a mapping of names to values, a dataclass instance or a msgspec.Struct,"
        f" not {type(row).__name__}"
    )


# Checks: a value as its type has it, or _Misfit.
Check = Callable[[Any], Any]

_INTEGER_BITS: Final = {"byte": 8, "short": 16, "int": 32, "long": 64}
# The largest number of the type float, 2**128 - 2**104.
_FLOAT_MAX: Final = 3.4028234663852886e38
_INFINITY: Final = float("inf")
# Texts of names and types in a message are cut there: rows may come from a payload.
_NAME_SHOWN_MAX: Final = 64


class _Misfit(Exception):
    """A value does not fit. `where` is its place within the row, as `.orders[3].price`."""

    def __init__(self, words: str, where: str = "") -> None:
        super().__init__(words)
        self.where = where

    def within(self, outer: str) -> _Misfit:
        return _Misfit(str(self), outer + self.where)


def _unlike(expected: object, value: object) -> _Misfit:
    return _Misfit(f"expected {expected}, got {type(value).__name__}")


def _check_of(kind: DataType) -> Check:
    match kind:
        case SimpleType(name) if name in _INTEGER_BITS:
            return _integer_check(kind)
        case SimpleType(name):
            return _SIMPLE[name]
        case DecimalType():
            return _decimal_check(kind)
        case ArrayType(element):
            return _array_check(kind, _check_of(element))
        case MapType(key, value):
            return _map_check(kind, _check_of(key), _check_of(value))
        case StructType(columns):
            return _struct_check(columns)
        case _:
            assert_never(kind)


def _string(value: Any) -> str:
    if type(value) is not str:
        plain = _plain(value)
        if type(plain) is not str:
            raise _unlike("string", value)
        value = plain
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Misfit("a text with half a surrogate pair") from None
    return str(value)


def _plain(value: Any) -> Any:
    """The plain value of an enumeration, a UUID or a subclass of str; others as they are."""
    try:
        return msgspec.to_builtins(value, builtin_types=_PLAIN_VALUES)
    except (TypeError, ValueError, RecursionError):
        return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _unlike("boolean", value)
    return value


def _limit(kind: DataType) -> int:
    """Integers of this type are below it, and not below its negative; 0 for other types."""
    bits = _INTEGER_BITS.get(str(kind))
    return 1 << (bits - 1) if bits else 0


def _integer_check(kind: SimpleType) -> Check:
    name, limit = kind.name, _limit(kind)

    def check(value: Any) -> int:
        if type(value) is not int:
            value, given = _plain(value), value
            if type(value) is not int:
                raise _unlike(name, given)
        if not -limit <= value < limit:
            raise _Misfit(f"a number outside the range of {name}")
        return value

    return check


def _double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise _unlike("double", value)
    try:
        number = float(value)
    except OverflowError:
        raise _Misfit("a number outside the range of double") from None
    if type(value) is int and number != value:
        raise _Misfit("a number with more digits than double has")
    return number


def _float(value: Any) -> float:
    number = _double(value)
    if _FLOAT_MAX < abs(number) < _INFINITY:
        raise _Misfit("a number outside the range of float")
    [kept] = _FLOAT.unpack(_FLOAT.pack(number))
    if kept != number and number == number and _read_back(kept) != number:  # noqa: PLR0124 - not NaN
        raise _Misfit("a number with more digits than float has")
    return number


_FLOAT: Final = struct.Struct("<f")


def _read_back(kept: float) -> float:
    """The number of the shortest text of a float, which a reader of it sees."""
    for digits in range(1, 9):
        text = float(f"{kept:.{digits}g}")
        if _FLOAT.unpack(_FLOAT.pack(text))[0] == kept:
            return text
    return float(f"{kept:.9g}")


def _binary(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _unlike("binary", value)
    return bytes(value)


def _date(value: Any) -> date:
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise _Misfit("expected date, got a text that is not an ISO 8601 date") from None
    if not isinstance(value, date) or isinstance(value, datetime):
        raise _unlike("date", value)
    return value


# Digits of a second that Python would cut in silence.
_NANOSECONDS: Final = re.compile(r"[.,]\d{6}0*[1-9]")
_SHORTER: Final = "a time with nanoseconds: timestamp has microseconds"


def _timestamp(value: Any) -> datetime:
    if isinstance(value, str):
        if _NANOSECONDS.search(value):
            raise _Misfit(_SHORTER)
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise _Misfit("expected timestamp, got a text that is not in ISO 8601") from None
    elif getattr(value, "nanosecond", 0):  # of pandas
        raise _Misfit(_SHORTER)
    if not isinstance(value, datetime):
        raise _unlike("timestamp", value)
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise _Misfit("an instant outside the range of timestamp") from None


def _decimal_check(kind: DecimalType) -> Check:
    last_digit = Decimal(1).scaleb(-kind.scale)
    exactly = Context(prec=kind.precision, traps=[Inexact, InvalidOperation])

    def check(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, Decimal | int | str | float):
            raise _unlike(kind, value)
        try:
            # The shortest text of a float is the number that was meant.
            number = Decimal(repr(value) if isinstance(value, float) else value)
        except (InvalidOperation, ValueError):
            raise _Misfit(f"expected {kind}, got a text that is not a number") from None
        if not number.is_finite():
            raise _Misfit(f"expected {kind}, got a number that is not finite")
        try:
            return number.quantize(last_digit, context=exactly)
        except (Inexact, InvalidOperation):
            raise _Misfit(f"a number with more digits than {kind} has") from None

    return check


_SIMPLE: Final[Mapping[str, Check]] = {
    "string": _string,
    "boolean": _boolean,
    "float": _float,
    "double": _double,
    "binary": _binary,
    "date": _date,
    "timestamp": _timestamp,
}


def _array_check(kind: ArrayType, check: Check) -> Check:
    def check_array(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise _unlike(kind, value)
        checked = []
        for index, element in enumerate(value):
            try:
                checked.append(None if element is None else check(element))
            except _Misfit as misfit:
                raise misfit.within(f"[{index}]") from None
        return checked

    return check_array


def _map_check(kind: MapType, check_key: Check, check_value: Check) -> Check:
    def check_map(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _unlike(kind, value)
        where = "[a key]"  # keys are values: not shown
        try:
            checked = {}
            for key, entry in value.items():
                where = "[a key]"
                checked_key = check_key(key)
                where = "[a value]"
                checked[checked_key] = None if entry is None else check_value(entry)
        except _Misfit as misfit:
            raise misfit.within(where) from None
        return checked

    return check_map


# The types whose values are looked at without a call, in the fast path: most need no look beyond
# their class, texts may have half a surrogate pair, and integers have a range.
_AS_THEY_ARE: Final[Mapping[str, type]] = {
    "boolean": bool,
    "double": float,
    "binary": bytes,
    "string": str,
    **dict.fromkeys(_INTEGER_BITS, int),
}


def _struct_check(columns: Iterable[Column]) -> Callable[[object], dict[str, Any]]:
    """Of a row or of a value of a struct type. This is the hot path of every row."""
    plan = tuple(
        (
            column.name,
            _AS_THEY_ARE.get(str(column.type)),
            _limit(column.type),
            _check_of(column.type),
            column.nullable,
        )
        for column in columns
    )
    names = frozenset(column.name for column in columns)

    def check_struct(value: object) -> dict[str, Any]:
        try:
            row = value if type(value) is dict else row_mapping(value)
        except TypeError as error:
            raise _Misfit(str(error)) from None
        if not names.issuperset(row):
            # Names that are not texts are refused, too: they are in no schema.
            unknown = next(name for name in row if name not in names)
            raise _Misfit("is not in the schema", f".{_shown(unknown)}")
        checked = {}
        for name, as_it_is, limit, check, nullable in plan:
            cell: Any = row.get(name)
            kind = type(cell)
            if kind is as_it_is and (
                cell.isascii() if kind is str else kind is not int or -limit <= cell < limit
            ):
                checked[name] = cell
            elif cell is not None:
                try:
                    checked[name] = check(cell)
                except _Misfit as misfit:
                    raise misfit.within(f".{_shown(name)}") from None
            elif nullable:
                checked[name] = None
            else:
                raise _Misfit("is NOT NULL and has no value", f".{_shown(name)}")
        return checked

    return check_struct


def _shown(name: object) -> str:
    return (name if isinstance(name, str) and PLAIN_NAME.fullmatch(name) else repr(name))[
        :_NAME_SHOWN_MAX
    ]
