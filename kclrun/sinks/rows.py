"""One emitted row as one line of JSON.

May not know: files, positions. Rule: a row that cannot be a line is refused before any byte of it
is buffered, and the message never shows a value. Next: `emitted_rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import LimitExceeded

__all__ = ["ROW_BYTES_MAX", "encode_row"]

# Over the 10 MiB a Kinesis record may have, base64 included; a greater row is a slip.
ROW_BYTES_MAX: Final = 16 * 2**20


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One row as a JSON line: dates in ISO 8601, Decimal as text, bytes as base64, NaN as null.

    Raises: TypeError for what JSON cannot hold; LimitExceeded above ROW_BYTES_MAX. Neither
    message shows a value.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"a row is a mapping of names to values, not {type(row).__name__}")
    try:
        line = msgspec.json.encode(row if type(row) is dict else dict(row))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error) if type(error) is TypeError else type(error).__name__
        raise TypeError(f"JSON cannot hold this row: {reason}") from None
    if len(line) >= ROW_BYTES_MAX:
        raise LimitExceeded(f"a row of {len(line)} bytes; at most {ROW_BYTES_MAX} are taken")
    return line + b"\n"
