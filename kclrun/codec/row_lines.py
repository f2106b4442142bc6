"""One emitted row as one JSON line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from kclrun.errors import LimitExceeded

# More than the 10 MiB of the largest Kinesis record in base64; a larger row is a mistake.
ROW_BYTES_MAX: Final = 16 * 2**20
_FAILURES: Final = (TypeError, ValueError, OverflowError, RecursionError)
# Users may choose names of any length.
_NAME_SHOWN_MAX: Final = 64
_encode: Final = msgspec.json.Encoder().encode


def encode_row_line(row: Mapping[str, Any]) -> bytes:
    """One row as a JSON line: dates in ISO 8601, Decimal as text, bytes as base64.

    A row that cannot be a line is refused before any byte of it is buffered.
    Raises: TypeError for a value that JSON cannot represent (also NaN and Infinity, which would be
    null), with the name of the value;
    LimitExceeded above ROW_BYTES_MAX. Neither message shows a value.
    """
    if type(row) is not dict:
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a mapping of names to values, not {type(row).__name__}")
        row = dict(row)
    try:
        line = _encode(row)
    except _FAILURES as error:
        raise TypeError(f"JSON cannot hold this row: {_named(row)}{_reason(error)}") from None
    if b"null" in line:
        for name, value in row.items():
            if (why := changed_in_json(value)) is not None:
                raise TypeError(f"JSON cannot hold this row: {repr(name)[:_NAME_SHOWN_MAX]}: {why}")
    if len(line) >= ROW_BYTES_MAX:
        raise LimitExceeded(f"a row of {len(line)} bytes; at most {ROW_BYTES_MAX} are taken")
    return line + b"\n"


def changed_in_json(value: Any) -> str | None:
    """What JSON would change in this value, which it can represent otherwise; None if nothing: NaN
    and Infinity would be null, and of two names that are one as texts, one is lost."""
    if type(value) is str or value is None:
        return None
    return _changed(msgspec.to_builtins(value, builtin_types=(datetime, date, Decimal)))


def _changed(value: Any) -> str | None:
    inner: Iterable[Any] = ()
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, dict):
        if len({key if type(key) is str else str(key) for key in value}) < len(value):
            return "two names that are one as texts"
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    return next((why for inner_value in inner if (why := _changed(inner_value)) is not None), None)


def _named(row: Mapping[str, Any]) -> str:
    """The name of the value that JSON cannot represent; empty if the name itself is the problem."""
    for name, value in row.items():
        try:
            _encode(value)
        except _FAILURES:
            return f"{repr(name)[:_NAME_SHOWN_MAX]}: "
    return ""


def _reason(error: Exception) -> str:
    return str(error) if type(error) is TypeError else type(error).__name__
