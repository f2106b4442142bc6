"""The columns of emitted rows: parsed from a text in Spark's SQL types, and each row checked. Pure.

    carrier string NOT NULL, flights long, fares array<decimal(10,2)>, tags map<string,string>

Destinations make their columns of it. It knows none of them.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final, Literal, assert_never

import msgspec

from kclrun.errors import RowMismatch

SimpleName = Literal[
    "string",
    "boolean",
    "byte",
    "short",
    "int",
    "long",
    "float",
    "double",
    "binary",
    "date",
    "timestamp",
]


class SimpleType(msgspec.Struct, frozen=True):
    """A type without parameters. In a checked row: str, bool, int, float, bytes, date, or a
    datetime in UTC."""

    name: SimpleName

    def __str__(self) -> str:
        return self.name


class DecimalType(msgspec.Struct, frozen=True):
    """Decimal numbers of `precision` digits, `scale` of them behind the point."""

    precision: int
    scale: int

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})"


class ArrayType(msgspec.Struct, frozen=True):
    """In a checked row a list; each element is of its type, or None."""

    element: DataType

    def __str__(self) -> str:
        return f"array<{self.element}>"


class MapType(msgspec.Struct, frozen=True):
    """In a checked row a dict; a value may be None, a key may not."""

    key: DataType
    value: DataType

    def __str__(self) -> str:
        return f"map<{self.key},{self.value}>"


class StructType(msgspec.Struct, frozen=True):
    """In a checked row a dict of all its columns."""

    columns: tuple[Column, ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(map(str, self.columns))}>"


DataType = SimpleType | DecimalType | ArrayType | MapType | StructType


class Column(msgspec.Struct, frozen=True):
    """One column. Without `nullable` each row must have a value for it."""

    name: str
    type: DataType
    nullable: bool = True

    def __str__(self) -> str:
        name = self.name if _PLAIN.fullmatch(self.name) else f"`{self.name.replace('`', '``')}`"
        return f"{name}: {self.type}{'' if self.nullable else ' NOT NULL'}"


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
        return cls(_Parser(text).columns(), setting)

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
    return (name if isinstance(name, str) and _PLAIN.fullmatch(name) else repr(name))[
        :_NAME_SHOWN_MAX
    ]


_PLAIN: Final = re.compile(r"[A-Za-z_0-9]+")
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_0-9]+)"
    r"|(?P<mark>[<>(),:]))",
    re.DOTALL,
)
_ALIASES: Final[Mapping[str, SimpleName]] = {
    "string": "string",
    "boolean": "boolean",
    "byte": "byte",
    "tinyint": "byte",
    "short": "short",
    "smallint": "short",
    "int": "int",
    "integer": "int",
    "long": "long",
    "bigint": "long",
    "float": "float",
    "real": "float",
    "double": "double",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp",
}
_DECIMALS: Final = frozenset({"decimal", "dec", "numeric"})
# Spark's decimals: at most 38 digits; without parameters 10, none of them behind the point.
_DIGITS_MAX: Final = 38
_DIGITS: Final = 10
# A deeper type is a mistake; Python's stack bears some hundred.
_DEPTH_MAX: Final = 20


class _Parser:
    """Reads Spark's DDL: `name type [NOT NULL] [COMMENT 'text'], …`; a colon may follow a name."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"cannot be read from {text[at:].strip()[:20]!r} on")
            self._tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
            at = match.end()
        self._tokens.append(("end", ""))
        self._at = 0

    def columns(self) -> tuple[Column, ...]:
        """All columns of the text."""
        columns = self._columns(0)
        if self._tokens[self._at][0] != "end":
            raise self._unexpected("a comma")
        return columns

    def _columns(self, depth: int) -> tuple[Column, ...]:
        columns = [self._column(depth)]
        while self._takes(","):
            columns.append(self._column(depth))
        seen: set[str] = set()
        for column in columns:
            folded = column.name.casefold()
            if folded in seen:
                raise ValueError(
                    f"names the column {column.name} twice; upper and lower case are not"
                    " distinguished"
                )
            seen.add(folded)
        return tuple(columns)

    def _column(self, depth: int) -> Column:
        group, token = self._tokens[self._at]
        if group not in {"quoted", "word"}:
            raise self._unexpected("the name of a column")
        self._at += 1
        name = token[1:-1].replace("``", "`") if group == "quoted" else token
        self._takes(":")
        kind = self._type(depth)
        is_needed = self._takes("not")
        if is_needed:
            self._expect("null")
        if self._takes("comment"):
            if self._tokens[self._at][0] != "text":
                raise self._unexpected("a comment in single quotes")
            self._at += 1
        return Column(name, kind, nullable=not is_needed)

    def _type(self, depth: int) -> DataType:
        if depth > _DEPTH_MAX:
            raise ValueError(f"has types nested deeper than {_DEPTH_MAX}")
        group, token = self._tokens[self._at]
        name = token.lower() if group == "word" else ""
        if name in _ALIASES:
            self._at += 1
            return SimpleType(_ALIASES[name])
        if name in _DECIMALS:
            self._at += 1
            return self._decimal()
        if name not in {"array", "map", "struct"}:
            known = ", ".join([*dict.fromkeys(_ALIASES.values()), "decimal(p,s)"])
            raise self._unexpected(f"a type ({known}, array<…>, map<…,…>, struct<…>)")
        self._at += 1
        self._expect("<")
        made: DataType
        if name == "array":
            made = ArrayType(self._type(depth + 1))
        elif name == "map":
            key = self._type(depth + 1)
            self._expect(",")
            made = MapType(key, self._type(depth + 1))
            if not isinstance(key, SimpleType | DecimalType):
                raise ValueError(f"has a map whose keys are {key}: only simple types can be keys")
        else:
            made = StructType(self._columns(depth + 1))
        self._expect(">")
        return made

    def _decimal(self) -> DecimalType:
        precision, scale = _DIGITS, 0
        if self._takes("("):
            precision = self._number()
            scale = self._number() if self._takes(",") else 0
            self._expect(")")
        if not 1 <= precision <= _DIGITS_MAX or scale > precision:
            raise ValueError(
                f"has decimal({precision},{scale}): expected 1 to {_DIGITS_MAX} digits,"
                " and not more than those behind the point"
            )
        return DecimalType(precision, scale)

    def _number(self) -> int:
        group, token = self._tokens[self._at]
        if group != "word" or not token.isdigit() or len(token) > 2:
            raise self._unexpected("a number of digits")
        self._at += 1
        return int(token)

    def _takes(self, token: str) -> bool:
        group, found = self._tokens[self._at]
        is_there = group in {"word", "mark"} and found.lower() == token
        self._at += is_there
        return is_there

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise self._unexpected(token)

    def _unexpected(self, expected: str) -> ValueError:
        group, token = self._tokens[self._at]
        before = " ".join(word for _, word in self._tokens[max(0, self._at - 3) : self._at])
        found = "the end" if group == "end" else repr(token[:20])
        after = f" after {before!r}" if before else ""
        return ValueError(f"expected {expected}{after}, got {found}")
