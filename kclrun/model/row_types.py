"""The types of the columns of emitted rows, and how they are written: Spark's SQL types. Pure.

    carrier string NOT NULL, flights long, fares array<decimal(10,2)>, tags map<string,string>

Must not know: values of rows, destinations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

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
        name = self.name if PLAIN_NAME.fullmatch(self.name) else f"`{self.name.replace('`', '``')}`"
        return f"{name}: {self.type}{'' if self.nullable else ' NOT NULL'}"


PLAIN_NAME: Final = re.compile(r"[A-Za-z_0-9]+")


_TOKEN: Final = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_0-9]+)"
    r"|(?P<mark>[<>(),:]))",
    re.DOTALL,
)
_DECIMALS: Final = frozenset({"decimal", "dec", "numeric"})
# Spark's decimals: at most 38 digits; without parameters 10, none of them behind the point.
_DIGITS_MAX: Final = 38
_DIGITS: Final = 10
# A deeper type is a mistake; Python's stack bears some hundred.
_DEPTH_MAX: Final = 20
# The names of the simple types, as Spark reads them.
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
        if is_there:
            self._at += 1
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


def columns_of(text: str) -> tuple[Column, ...]:
    """The columns that the text names. Raises: ValueError with the place in the text."""
    return _Parser(text).columns()
