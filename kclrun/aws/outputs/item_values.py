"""A row as an item of a DynamoDB table: its values, its key, and what refuses it before the table.

A refusal names the column, and never the value. This module does not know requests.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Context, Decimal, Inexact
from typing import Any, Final
from uuid import UUID

import msgspec

from kclrun import errors
from kclrun.aws.outputs.item_tables import IndexColumn, ItemTable, KeyColumn
from kclrun.model.quotas import (
    ITEM_BYTES_MAX,
    KIB,
    NESTED_LEVELS_MAX,
    NUMBER_DIGITS_MAX,
    PARTITION_KEY_BYTES_MAX,
    SORT_KEY_BYTES_MAX,
)
from kclrun.processor import Row

# The attribute of ours in each item.
MARK: Final = "kclrun_mark"
# A kilobyte of an item is the mark's.
_ITEM_BYTES_MAX: Final = ITEM_BYTES_MAX - KIB
_KEY_BYTES_MAX: Final = (PARTITION_KEY_BYTES_MAX, SORT_KEY_BYTES_MAX)
_EXPONENTS: Final = range(-130, 126)
_EXACTLY: Final = Context(prec=NUMBER_DIGITS_MAX, traps=[Inexact])
_INT_MAX: Final = 10**NUMBER_DIGITS_MAX

Key = tuple[str, ...]
Encoded = tuple[Key, bytes, int]
Attribute = dict[str, Any]

_encode: Final = msgspec.json.Encoder().encode


def encode_item(row: Row, table: ItemTable) -> Encoded:
    """The key, the JSON and the size of an item. Raises: TypeError, LimitExceeded."""
    item: Attribute = {}
    for name, value in row.items():
        if type(name) is not str or not name or name == MARK:
            raise TypeError(f"column {repr(name)[:64]} cannot be the name of an attribute")
        try:
            item[name] = _attribute(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            why = str(error) if type(error) is TypeError else type(error).__name__
            raise TypeError(f"column {name[:64]}: {why}") from None
    key = tuple(_key_part(at, column, item, table) for at, column in enumerate(table.key))
    for indexed in table.indexed:
        _check_indexed(indexed, item, table)
    try:
        encoded = _encode(item)
    except UnicodeEncodeError:
        raise TypeError(f"column {_broken(item)}: a text with half a surrogate pair") from None
    if len(encoded) > _ITEM_BYTES_MAX and _size(item) > _ITEM_BYTES_MAX:
        raise errors.LimitExceeded(f"an item above DynamoDB's {_ITEM_BYTES_MAX:,} bytes")
    return key, encoded, len(encoded)


def _key_part(at: int, column: KeyColumn, item: Attribute, table: ItemTable) -> str:
    name, kind = column.attribute_name, column.attribute_type
    given = item.get(name)
    if given is None or "NULL" in given:
        raise TypeError(f"column {name} is of the key of {table.name}: the row has no value")
    if kind not in given:
        raise TypeError(f"column {name}: the key of {table.name} has the type {kind}")
    text = str(given[kind])
    if not 0 < _key_size(kind, text) <= _KEY_BYTES_MAX[at]:
        raise TypeError(f"column {name} is of the key: it takes 1 to {_KEY_BYTES_MAX[at]:,} bytes")
    # Two texts of one number are one item.
    return str(Decimal(text).normalize(_EXACTLY)) if kind == "N" else text


def _check_indexed(column: IndexColumn, item: Attribute, table: ItemTable) -> None:
    given = item.get(column.name)
    if given is None:  # the index does not have the item
        return
    what = f"column {column.name}: the index {column.index} of {table.name}"
    if column.type not in given:
        raise TypeError(f"{what} has the type {column.type}; a row may lack the column")
    most = _KEY_BYTES_MAX[column.at]
    if not 0 < _key_size(column.type, str(given[column.type])) <= most:
        raise TypeError(f"{what} takes 1 to {most:,} bytes")


def _key_size(kind: str, text: str) -> int:
    return len(base64.b64decode(text)) if kind == "B" else len(text.encode(errors="replace"))


def _attribute(value: Any, depth: int = 0) -> Attribute:
    """A value in DynamoDB's JSON, within so many lists and maps. Raises: TypeError, without the
    value."""
    match value:
        case _ if depth > NESTED_LEVELS_MAX:
            raise TypeError(f"lists and maps nested deeper than {NESTED_LEVELS_MAX} levels")
        case str():
            return {"S": str(value)}
        case None:
            return {"NULL": True}
        case bool():
            return {"BOOL": value}
        case int() | float() | Decimal():
            return {"N": _number(value)}
        case bytes() | bytearray() | memoryview():
            return {"B": base64.b64encode(value).decode()}
        case list() | tuple():
            return {"L": [_attribute(item, depth + 1) for item in value]}
        case Mapping():
            return _map(value, depth + 1)
        case date() | datetime():
            return {"S": value.isoformat()}
        case UUID():
            return {"S": str(value)}
        case set() | frozenset() if value:
            return _set(value)
    raise TypeError(f"DynamoDB has no type for {type(value).__name__}")


def _map(value: Mapping[Any, Any], depth: int) -> Attribute:
    if not all(type(name) is str for name in value):
        raise TypeError("a map whose names are not texts")
    if "" in value:
        raise TypeError("a map with an empty name")
    return {"M": {name: _attribute(each, depth) for name, each in value.items()}}


def _set(value: set[Any] | frozenset[Any]) -> Attribute:
    members = [_attribute(member) for member in value]
    kinds = {kind for member in members for kind in member}
    if len(kinds) != 1 or not kinds <= {"S", "N", "B"}:
        raise TypeError("a set whose members are not all texts, all numbers or all bytes")
    [kind] = kinds
    texts = sorted(str(member[kind]) for member in members)
    if "" in texts:
        raise TypeError("a set with an empty member")
    if len(set(texts)) < len(texts):
        raise TypeError("a set with two members of one value")
    return {f"{kind}S": texts}


def _number(value: float | Decimal) -> str:
    if type(value) is int and -_INT_MAX < value < _INT_MAX:
        return str(value)
    # `float` first: a subclass may have another `repr`, such as `np.float64(1.5)` of NumPy.
    number = Decimal(repr(float(value)) if isinstance(value, float) else value)
    if not number.is_finite():
        raise TypeError("a number that is not finite")
    try:
        number = number.normalize(_EXACTLY)
    except Inexact:
        number = Decimal("Infinity")
    if number and (not number.is_finite() or number.adjusted() not in _EXPONENTS):
        raise TypeError(
            f"a number with more than {NUMBER_DIGITS_MAX} digits, or too great or too small"
        )
    return str(number or 0)  # DynamoDB has one zero: -0 would be a second key for it


def _broken(item: Attribute) -> str:
    for name, attribute in item.items():
        try:
            _encode({name: attribute})
        except UnicodeEncodeError:
            break
    return name[:64]


def _size(attribute: Any) -> int:
    """The bytes of an item as DynamoDB counts them, or more."""
    if isinstance(attribute, dict):
        binary = attribute.get("B")
        if isinstance(binary, str):  # in base64
            return 1 + len(binary) * 3 // 4
        return sum(len(name.encode()) + 3 + _size(value) for name, value in attribute.items())
    if isinstance(attribute, list):
        return sum(1 + _size(value) for value in attribute)
    return len(attribute.encode()) if isinstance(attribute, str) else 1
