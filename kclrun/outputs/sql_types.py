"""The types of a table's columns: how the values of a row are checked, converted and sent.

What a column cannot take is refused at the row, and no value is changed on its way: a cast never
cuts or rounds. A type whose texts only the database can read is checked by the database, at
the commit (`row_trials.py`).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import Enum
from typing import Any, Final
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

from kclrun.codec.row_lines import changed_in_json
from kclrun.errors import RowMismatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.row_types import Column, DataType, DecimalType, SimpleType

Convert = Callable[[Any], Any]


class Misfit(Exception):
    """A value that a column cannot take, in words without the value."""


class How(msgspec.Struct, frozen=True):
    """How the values of one type are sent. `type` is None for a type that rows are not checked
    against; `convert` checks, too, and raises Misfit. `bind` is the type of the parameters, `cast`
    what PostgreSQL makes of them. `length` is that of texts. `is_read_there`: only the database can
    read the texts of the type."""

    type: DataType | None
    bind: Any
    cast: Any = None
    convert: Convert | None = None
    length: int | None = None
    is_read_there: bool = False


class _Named(sa.types.UserDefinedType[Any]):
    """A type of PostgreSQL by its name, without the limits of its column: a cast to it cuts and
    rounds nothing, and the assignment to the column refuses what does not fit."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        return self.name


def how_of(dialect: str, kind: Any, name: str | None = None, base: str | None = None) -> How:
    """How values of a column's type are sent. `name`: that of the type in PostgreSQL, and `base`
    that of the type below it, with its limits, if it is a domain or an array of one."""
    if dialect == "postgresql":
        return _postgres(kind, name, base)
    special = _mysql(kind) if dialect == "mysql" else _sqlite(kind) if dialect == "sqlite" else None
    return special or _common(dialect, kind) or How(None, kind)


def _common(dialect: str, kind: Any) -> How | None:
    """Types that all databases have; None for other types."""
    how: How | None = None
    match kind:
        case sa.JSON():
            how = How(None, sa.Text(), cast=kind, convert=_as_json)
        case sa.Boolean():
            how = How(SimpleType("boolean"), sa.Boolean())
        case sa.Integer():
            how = How(_integer(dialect, kind), sa.BigInteger())
        case sa.Float():
            is_short = dialect == "postgresql" and isinstance(kind, sa.REAL)
            how = How(SimpleType("float" if is_short else "double"), sa.Double())
        case sa.Numeric():
            how = _numeric(kind)
        case sa.Enum():
            how = How(None, sa.Text(), convert=_one_of(kind.enums))
        case sa.String():
            how = How(SimpleType("string"), sa.Text(), length=kind.length)
        case sa.DateTime():
            is_aware = dialect == "postgresql" and kind.timezone
            how = How(
                SimpleType("timestamp"),
                sa.DateTime(timezone=is_aware),
                convert=_instant(_digits(dialect, kind), is_aware=is_aware),
            )
        case sa.Date():
            how = How(SimpleType("date"), sa.Date())
        case sa.LargeBinary():
            how = How(SimpleType("binary"), sa.LargeBinary())
    return how


def _sqlite(kind: Any) -> How | None:
    match kind:
        case sa.Float():
            return How(SimpleType("double"), sa.Double(), convert=_not_nan)
        case sa.Numeric():  # the column's affinity makes a number of it again
            return How(None, sa.Text(), convert=_of_sqlite)
        case sa.String() if not isinstance(kind, sa.Enum):  # it knows no lengths
            return How(SimpleType("string"), sa.Text())
        case sa.Time():
            return How(None, sa.Time(), convert=lambda value: _time(value, 6))
    return None


# The bits of MySQL's integers.
_BITS: Final[tuple[tuple[Any, int], ...]] = (
    (mysql.TINYINT, 8),
    (mysql.SMALLINT, 16),
    (mysql.MEDIUMINT, 24),
    (mysql.BIGINT, 64),
    (mysql.INTEGER, 32),
)


def _mysql(kind: Any) -> How | None:
    match kind:
        case _ if isinstance(kind, tuple(known for known, _ in _BITS)):
            # A TINYINT may be a boolean, and an unsigned BIGINT has more than a long.
            is_large = isinstance(kind, mysql.BIGINT) and kind.unsigned
            is_other = is_large or isinstance(kind, mysql.TINYINT)
            known = None if is_other else SimpleType("long")
            return How(known, sa.BigInteger(), convert=_integer_of_mysql(kind))
        case mysql.YEAR():
            return How(None, sa.BigInteger(), convert=_year)
        case mysql.SET():
            return How(None, sa.Text(), convert=_some_of(tuple(kind.values)))
        case mysql.TIME():
            digits = kind.fsp or 0
            return How(None, sa.Time(), convert=lambda value: _time(value, digits))
        case mysql.BIT():
            return None
        case sa.Float() if kind.scale is not None and kind.precision is not None:
            check = _decimals(kind.precision, kind.scale)
            return How(None, sa.Double(), convert=lambda value: float(check(value)))
        case sa.Float():
            is_short = isinstance(kind, sa.FLOAT) and not isinstance(kind, sa.DOUBLE)
            number = SimpleType("float" if is_short else "double")
            return How(number, sa.Double(), convert=_finite)
        case sa.BINARY():
            length = kind.length or 1
            return How(SimpleType("binary"), sa.LargeBinary(), convert=_bytes_of(length))
    return None


def _postgres(kind: Any, name: str | None, base: str | None = None) -> How:
    if isinstance(kind, postgresql.DOMAIN):  # its checks are those of the database
        return _postgres(_limited(kind.data_type, base or ""), name)
    cast = kind if name is None else _Named(name)
    if isinstance(kind, sa.ARRAY):
        element = _postgres(kind.item_type, None, base)
        return How(None, sa.Text(), cast=cast, convert=_array(element))
    sent = _sent_as_text(kind)
    if sent is not None:
        return How(None, sa.Text(), cast=cast, convert=sent)
    common = _common("postgresql", kind) if name not in _CUT else None
    if common is None:
        most = _CUT.get(name or "")
        convert = _as_literal if most is None else _bytes_max(most)
        return How(None, sa.Text(), cast=cast, convert=convert, is_read_there=most is None)
    return common if common.cast is None else msgspec.structs.replace(common, cast=cast)


_LIMITS: Final = re.compile(r"\((\d+)(?:,(-?\d+))?\)")


def _limited(kind: Any, base: str) -> Any:
    """The type below a domain with its limits, which SQLAlchemy does not tell."""
    found = _LIMITS.search(base)
    if found is None:
        return kind
    limit, scale = int(found[1]), int(found[2] or 0)
    match kind:
        case postgresql.BIT():
            return postgresql.BIT(limit, varying=kind.varying)
        case sa.String():
            return type(kind)(limit)
        case sa.Numeric():
            return sa.Numeric(limit, scale)
        case sa.DateTime():
            return postgresql.TIMESTAMP(timezone=kind.timezone, precision=limit)
        case sa.Time():
            return postgresql.TIME(timezone=kind.timezone, precision=limit)
        case postgresql.INTERVAL():
            return postgresql.INTERVAL(precision=limit, fields=kind.fields)
    return kind


# Types of PostgreSQL that cut a longer text, and their bytes.
_CUT: Final = {"name": 63, '"char"': 1}


def _sent_as_text(kind: Any) -> Convert | None:  # noqa: C901, PLR0912 - one case a type
    """How a value of this type of PostgreSQL becomes a text; None if it is sent otherwise."""
    match kind:
        case postgresql.JSONB():
            return _as_jsonb
        case sa.JSON():
            return _as_json
        case sa.Enum():
            return _one_of(kind.enums)
        case sa.Uuid():
            return _uuid
        case postgresql.INET():
            return lambda value: _address(value, ipaddress.ip_interface)
        case postgresql.CIDR():
            return lambda value: _address(value, ipaddress.ip_network)
        case postgresql.MACADDR():
            return lambda value: _mac(value, (6,))
        case postgresql.MACADDR8():
            return lambda value: _mac(value, (6, 8))
        case sa.Time():
            digits, has_zone = _digits("postgresql", kind), kind.timezone
            return lambda value: _time(value, digits, has_zone=has_zone).isoformat()
        case postgresql.INTERVAL():
            digits = 6 if kind.precision is None else kind.precision
            return lambda value: _interval(value, digits, kind.fields)
        case postgresql.BIT():
            return _bits(kind.length or 0, is_varying=kind.varying)
        case postgresql.MONEY():
            return _money
        case postgresql.HSTORE():
            return _hstore
    return None


def _checked(kind: DataType, value: Any) -> Any:
    try:
        return RowSchema([Column("value", kind)]).check({"value": value})["value"]
    except RowMismatch as mismatch:
        _, _, words = str(mismatch).rpartition("column value: ")
        raise Misfit(words) from None


# Numbers.


def _integer(dialect: str, kind: sa.Integer) -> SimpleType:
    if dialect != "postgresql":
        return SimpleType("long")
    if isinstance(kind, sa.SmallInteger):
        return SimpleType("short")
    return SimpleType("long" if isinstance(kind, sa.BigInteger) else "int")


def _integer_of_mysql(kind: Any) -> Convert:
    bits = next(bits for known, bits in _BITS if isinstance(kind, known))
    low, high = (0, 1 << bits) if kind.unsigned else (-(1 << (bits - 1)), 1 << (bits - 1))
    takes_booleans = isinstance(kind, mysql.TINYINT)

    def check(value: Any) -> int:
        value = _plain(value)
        if type(value) is not int and not (takes_booleans and type(value) is bool):
            raise Misfit(f"expected an integer, got {type(value).__name__}")
        if not low <= value < high:
            raise Misfit(f"a number outside {low} to {high - 1}")
        return int(value)

    return check


def _year(value: Any) -> int:
    if type(value) is not int or not (value == 0 or 1901 <= value <= 2155):
        raise Misfit("expected a year of four digits, 1901 to 2155")
    return value


def _numeric(kind: sa.Numeric[Any]) -> How:
    digits, scale = kind.precision, kind.scale or 0
    if digits is None:
        return How(None, sa.Numeric(), convert=_number)
    if digits <= 38 and 0 <= scale <= digits:
        return How(DecimalType(digits, scale), sa.Numeric())
    return How(None, sa.Numeric(), convert=_decimals(digits, scale))


def _as_decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Misfit(f"expected a number, got {type(value).__name__}")
    return Decimal(repr(float(value))) if isinstance(value, float) else Decimal(value)


# PostgreSQL's own limits of a numeric without precision.
_BEFORE_MAX, _BEHIND_MAX = 131_072, 16_383


def _number(value: Any) -> Decimal:
    number = _as_decimal(value)
    if number.is_finite() and number:
        behind = -int(number.as_tuple().exponent)
        if number.adjusted() >= _BEFORE_MAX or behind > _BEHIND_MAX:
            raise Misfit("a number that is too great, or has too many digits behind the point")
    return number


def _decimals(precision: int, scale: int) -> Convert:
    """Numbers of so many digits, for limits that `output.schema` does not have."""
    last_digit = Decimal(1).scaleb(-scale)
    exactly = Context(prec=max(precision, 1), traps=[Inexact, InvalidOperation])

    def check(value: Any) -> Decimal:
        number = _as_decimal(value)
        if not number.is_finite():
            raise Misfit("a number that is not finite")
        try:
            return number.quantize(last_digit, context=exactly)
        except (Inexact, InvalidOperation):
            raise Misfit(
                f"a number with more digits than numeric({precision},{scale}) has"
            ) from None

    return check


def _of_sqlite(value: Any) -> str:
    """SQLite keeps a number as an integer of 64 bits, or as a double."""
    number = _as_decimal(value)
    if not number.is_finite():
        raise Misfit("a number that is not finite")
    is_integer = number == number.to_integral_value() and abs(number) < 2**63
    if not is_integer and Decimal(repr(float(number))) != number:
        raise Misfit("a number with more digits than SQLite keeps, which are some 15")
    return str(number)


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise Misfit("NaN, which SQLite would make NULL")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise Misfit("a number that is not finite")
    return value


def _money(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = Decimal(value)
        except InvalidOperation:
            raise Misfit("expected a number, got a text that is none") from None
    return str(_decimals(18, 2)(value))


# Texts.


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _text(value: Any, what: str = "text") -> str:
    return (
        str(_checked(SimpleType("string"), value)) if isinstance(value, str) else _no(what, value)
    )


def _no(what: str, value: Any) -> Any:
    raise Misfit(f"expected {what}, got {type(value).__name__}")


def _one_of(known: Any) -> Convert:
    values = frozenset(known)

    def check(value: Any) -> str:
        value = _plain(value)
        if not isinstance(value, str) or value not in values:
            raise Misfit("expected one of the values of its type, got another one")
        return str(value)

    return check


def _some_of(known: tuple[str, ...]) -> Convert:
    def check(value: Any) -> str:
        given = value.split(",") if isinstance(value, str) and value else value or []
        if not isinstance(given, list | tuple | set | frozenset) or not set(given) <= set(known):
            raise Misfit("expected some of the values of its type")
        return ",".join(member for member in known if member in given)

    return check


def _bytes_max(most: int) -> Convert:
    def check(value: Any) -> str:
        text = _text(value)
        if len(text.encode()) > most:
            raise Misfit(f"takes {most} bytes, and not more")
        return text

    return check


def _bytes_of(length: int) -> Convert:
    def check(value: bytes) -> bytes:
        if len(value) != length:
            raise Misfit(f"takes {length} bytes exactly: others are filled up, or cut")
        return value

    return check


def _uuid(value: Any) -> str:
    if isinstance(value, UUID):
        return str(value)
    try:
        return str(UUID(_text(value, "a UUID")))
    except ValueError:
        raise Misfit("expected a UUID, got a text that is not one") from None


def _address(value: Any, parse: Callable[[str], Any]) -> str:
    text = _text(value, "an address")
    try:
        if "%" in text:  # a zone, which PostgreSQL does not keep
            raise ValueError
        return str(parse(text))
    except ValueError:
        raise Misfit("expected an address, got a text that is not one") from None


_MAC: Final = re.compile(
    r"([0-9a-f]{2}([:-]))(?:[0-9a-f]{2}\2)+[0-9a-f]{2}|(?:[0-9a-f]{4}[.-])+[0-9a-f]{4}"
    r"|[0-9a-f]{6}[:-][0-9a-f]{6}|[0-9a-f]+",
    re.ASCII | re.IGNORECASE,
)


def _mac(value: Any, sizes: tuple[int, ...]) -> str:
    digits = re.sub(r"[:.-]", "", value) if isinstance(value, str) else ""
    if len(digits) // 2 not in sizes or len(digits) % 2 or not _MAC.fullmatch(value):
        raise Misfit("expected an address of a network card")
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))


def _bits(length: int, *, is_varying: bool) -> Convert:
    def check(value: Any) -> str:
        if not isinstance(value, str) or set(value) - {"0", "1"}:
            raise Misfit("expected a text of 0 and 1")
        if length and (len(value) > length if is_varying else len(value) != length):
            raise Misfit(f"takes {length} bits, not {len(value)}")
        return value

    return check


# Times.


def _digits(dialect: str, kind: Any) -> int:
    """The digits of a second that a type of times keeps."""
    if dialect == "mysql":
        return getattr(kind, "fsp", None) or 0
    precision = getattr(kind, "precision", None) if dialect == "postgresql" else None
    return 6 if precision is None else int(precision)


def _refuse_more(microsecond: int, digits: int) -> None:
    if microsecond % 10 ** (6 - min(digits, 6)):
        raise Misfit(f"more than {digits} digits of a second")


def _instant(digits: int, *, is_aware: bool) -> Convert:
    def check(value: dt.datetime) -> dt.datetime:
        _refuse_more(value.microsecond, digits)
        return value if is_aware else value.replace(tzinfo=None)

    return check


# Digits of a second that Python would cut in silence.
_NANOSECONDS: Final = re.compile(r"[.,]\d{6}0*[1-9]")


def _time(value: Any, digits: int, *, has_zone: bool = False) -> dt.time:
    if isinstance(value, str):
        if _NANOSECONDS.search(value):
            raise Misfit(f"more than {digits} digits of a second")
        try:
            return _time(dt.time.fromisoformat(value), digits, has_zone=has_zone)
        except ValueError:
            raise Misfit("expected a time, got a text that is not one in ISO 8601") from None
    if not isinstance(value, dt.time):
        raise Misfit(f"expected a time, got {type(value).__name__}")
    _refuse_more(value.microsecond, digits)
    if value.tzinfo is not None and not has_zone:
        raise Misfit("a time with a zone, which the column does not keep")
    if value.utcoffset() is None and has_zone:
        return value.replace(tzinfo=dt.UTC)
    return value


_RANKS: Final = ("year", "month", "day", "hour", "minute", "second")
_UNITS: Final = {
    **dict.fromkeys(("millennium", "millennia", "century", "centuries", "decade", "decades"), 0),
    **dict.fromkeys(("year", "years", "yr", "yrs", "y"), 0),
    **dict.fromkeys(("month", "months", "mon", "mons"), 1),
    **dict.fromkeys(("week", "weeks", "w", "day", "days", "d"), 2),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3),
    **dict.fromkeys(("minute", "minutes", "min", "mins", "m"), 4),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 5),
    **dict.fromkeys(("millisecond", "milliseconds", "ms", "microsecond", "microseconds", "us"), 5),
}
_PART: Final = re.compile(
    r"[+-]?\d+(?P<fraction>\.\d+)?\s*(?P<unit>[a-z]+)|[+-]?\d+:\d{1,2}(?P<clock>:\d{1,2}(\.\d+)?)?"
)
_ISO_INTERVAL: Final = re.compile(
    r"P(?=[\dT+-])(?:[+-]?\d+Y)?(?:[+-]?\d+M)?(?:[+-]?\d+W)?(?:[+-]?\d+D)?"
    r"(?:T(?=[\d+-])(?:[+-]?\d+H)?(?:[+-]?\d+M)?(?:[+-]?\d+(?:\.\d{1,6})?S)?)?"
)


def _interval(value: Any, digits: int, fields: str | None) -> str:
    """A timedelta, or a text in PostgreSQL's own form (`1 day 02:03:04`) or in ISO 8601."""
    if isinstance(value, dt.timedelta):
        _refuse_more(value.microseconds, digits)
        rank = next(
            (at for at, unit in ((5, 60), (4, 3_600), (3, 86_400)) if value.seconds % unit), 2
        )
        rank = 5 if value.microseconds else rank
        text = f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    else:
        text = _text(value, "an interval").strip()
        rank = _rank(text, digits)
    least = _RANKS.index(fields.split()[-1].lower()) if fields else 5
    if rank > least:
        raise Misfit(f"an interval with more than its {fields} says")
    return text


def _rank(text: str, digits: int) -> int:
    """The smallest unit of an interval's text. Raises: Misfit if it is not one."""
    if _NANOSECONDS.search(text) or (digits < 6 and "." in text):
        raise Misfit(f"more than {digits} digits of a second")
    if _ISO_INTERVAL.fullmatch(text):
        return 5 if "T" in text else 2
    rest = text.lower().removeprefix("@").removesuffix("ago").strip()
    rank, at = 0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        unit = None if part is None else part["unit"]
        if part is None or (unit is not None and unit not in _UNITS):
            break
        rank = max(rank, 5 if unit is None or part["fraction"] else _UNITS[unit])
        at = part.end() + len(rest[part.end() :]) - len(rest[part.end() :].lstrip())
    if not rest or at < len(rest):
        raise Misfit("expected an interval, got a text that is not one")
    return rank


# Documents and arrays.


def _as_json(value: Any) -> str:
    changed = changed_in_json(value)
    if changed is not None:
        raise Misfit(changed)
    return msgspec.json.encode(value).decode()


def _as_jsonb(value: Any) -> str:
    text = _as_json(value)
    # PostgreSQL has no character NUL. An escaped backslash before `u0000` makes another text.
    if "\\u0000" in text and re.search(r"(?<!\\)(?:\\\\)*\\u0000", text):
        raise Misfit("a text with the character NUL")
    return text


def _hstore(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise Misfit(f"expected a map of texts, got {type(value).__name__}")
    return ",".join(
        f"{_quoted(_text(key))}=>{'NULL' if each is None else _quoted(_text(each))}"
        for key, each in value.items()
    )


def _as_literal(value: Any) -> str:
    """The text that PostgreSQL reads as a value of any other type."""
    if isinstance(value, bool | int | float | str | Decimal):
        return str(value)
    return str(msgspec.to_builtins(value))


def _quoted(text: str) -> str:
    if "\0" in text:
        raise Misfit("a text with the character NUL")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_LEVELS_MAX: Final = 6  # PostgreSQL's arrays


def _array(element: How) -> Convert:
    """Arrays of checked elements, as the text of the whole array."""

    def text_of(value: Any) -> str:
        return "NULL" if value is None else _quoted(_element_text(element, value))

    def level(value: list[Any] | tuple[Any, ...], depth: int) -> tuple[str, tuple[int, ...]]:
        if depth > _LEVELS_MAX:
            raise Misfit(f"an array of more than {_LEVELS_MAX} dimensions")
        parts = [
            level(element, depth + 1)
            if isinstance(element, list | tuple)
            else (text_of(element), ())
            for element in value
        ]
        shapes = {shape for _, shape in parts}
        if len(shapes) > 1 or (depth > 1 and not parts):
            raise Misfit("an array whose inner arrays are empty, or of different lengths")
        texts = ",".join(text for text, _ in parts)
        return f"{{{texts}}}", (len(parts), *next(iter(shapes), ()))

    def check(value: Any) -> str:
        if not isinstance(value, list | tuple):
            raise Misfit(f"expected an array, got {type(value).__name__}")
        return level(value, 1)[0]

    return check


def _element_text(element: How, value: Any) -> str:
    if element.type is not None:
        value = _checked(element.type, value)
    if element.convert is not None:
        value = element.convert(value)
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, str) and element.length is not None and len(value) > element.length:
        raise Misfit(f"an element of {len(value)} characters: it takes {element.length}")
    return value.isoformat() if isinstance(value, dt.date) else str(value)
