"""The lines of `kclrun tail`: a record as a line of text, or as a JSON object for programs.

With any payload, a record is one line and does not move the cursor [S6]. The JSON has every byte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import click

from kclrun.model.record import Record
from kclrun.model.stream import short_name
from kclrun.model.text import escaped, escaped_in_json

# From a shard id and a record to the line without its end.
LineMaker = Callable[[str, Record], str]

# Most keys are shorter; the column aligns the payloads.
_KEY_COLUMN: Final = 12
_KEY_CHARS_MAX: Final = 32
_SHARD_COLUMN: Final = 3
# The data have at least so many columns. On a very narrow terminal the line may therefore wrap.
_DATA_COLUMNS_MIN: Final = 16


def as_json(shard_id: str, record: Record) -> str:
    """One JSON object. `data` is text if the payload is UTF-8, else base64: see `encoding`."""
    try:
        data, encoding = record.data.decode(), "utf-8"
    except UnicodeDecodeError:
        data, encoding = base64.b64encode(record.data).decode(), "base64"
    shown: dict[str, Any] = {
        "shard": shard_id,
        "sequence_number": record.sequence_number,
        "sub_sequence_number": record.sub_sequence_number,
        "partition_key": record.partition_key,
        "arrived_at": _moment(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "aggregated": record.aggregated,
        "encoding": encoding,
        "data": data,
    }
    if record.explicit_hash_key is not None:
        shown["explicit_hash_key"] = record.explicit_hash_key
    if record.malformed:
        shown["malformed"] = True
    return escaped_in_json(json.dumps(shown, ensure_ascii=False))


def for_people(*, columns_max: int | None, with_date: bool, with_colours: bool) -> LineMaker:
    """Lines of arrival time (UTC), shard, key and data.

    `columns_max` is the width of the terminal. It is None if the output is not a terminal; then
    lines are not cut.
    """
    pattern = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
    style = click.style if with_colours else _plain

    def line(shard_id: str, record: Record) -> str:
        moment = _moment(record)
        time_text = f"{moment.strftime(pattern)}.{moment.microsecond // 1000:03d}"
        shard = escaped(short_name(shard_id)).rjust(_SHARD_COLUMN)
        key = _cut(escaped(record.partition_key), _KEY_CHARS_MAX).ljust(_KEY_COLUMN)
        data = escaped(record.data.decode("utf-8", "backslashreplace"))
        if record.malformed:
            data = f"(a malformed aggregate) {data}"
        if columns_max is not None:
            used = _columns(f"{time_text}  {shard}  {key}  ")
            data = _cut(data, max(_DATA_COLUMNS_MIN, columns_max - used))
        return "  ".join(
            (style(time_text, dim=True), style(shard, fg="cyan"), style(key, bold=True), data)
        )

    return line


def _plain(text: str, **_: Any) -> str:
    return text


def _moment(record: Record) -> datetime:
    return datetime.fromtimestamp(record.approximate_arrival_timestamp, UTC)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, columns_max: int) -> str:
    """The beginning of `text`, with … if text is cut off."""
    if len(text) <= columns_max and _columns(text) <= columns_max:
        return text
    from rich.cells import set_cell_size

    # No character is wider than two columns: more of the text cannot fit.
    return set_cell_size(text[:columns_max], columns_max - 1).rstrip() + "…"
