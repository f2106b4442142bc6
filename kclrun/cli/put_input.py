"""Lines of a file into entries to put: CSV, JSON lines or text, one record a row, streamed.

A record is the row as it stands in the input: a JSON line and a text line byte for byte, a CSV row
as the JSON object of its columns. Rule: a line that cannot be used is named by its number, and
never repeated in the message.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, BinaryIO, Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.outgoing import PutEntry

__all__ = ["FORMATS", "entries", "format_of"]

FORMATS: Final = ("csv", "jsonl", "text")
_BY_SUFFIX: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
# PutRecords takes 1 MiB a record, key included, unless the stream was set to take more.
_RECORD_BYTES_MAX: Final = 2**20
_KEY_CHARS_MAX: Final = 256


def format_of(name: str) -> str:
    """The format a file's name promises; text for anything else, standard input too."""
    return _BY_SUFFIX.get(PurePath(name).suffix.lower(), "text")


def entries(source: BinaryIO, kind: str, key: str | None) -> Iterator[PutEntry]:
    """One entry for each row. `key` is the column or field that routes; None hashes the row.

    Raises: SettingsError naming the line, for a row without the key, broken JSON, or too long.
    """
    rows = {"csv": _csv_rows, "jsonl": _json_rows, "text": _text_rows}[kind](source, key)
    for number, data, routed_by in rows:
        partition_key = routed_by if routed_by is not None else _hash(data)
        if not 0 < len(partition_key) <= _KEY_CHARS_MAX:
            raise SettingsError(
                f"line {number}: the key has {len(partition_key)} characters; 1 to"
                f" {_KEY_CHARS_MAX} are possible"
            )
        entry = PutEntry(data, partition_key)
        if entry.size_bytes > _RECORD_BYTES_MAX:
            raise SettingsError(f"line {number}: {len(data):,} bytes; a record holds 1 MiB at most")
        yield entry


Row = tuple[int, bytes, str | None]


def _text_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    if key is not None:
        raise SettingsError("--key names a column or field, and text has none: --format csv|jsonl")
    for number, line in _lines(source):
        yield number, line, None


def _json_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in _lines(source):
        try:
            fields = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SettingsError(f"line {number}: not a JSON object") from None
        yield number, line, None if key is None else _key_of(fields, key, number)


def _csv_rows(source: BinaryIO, key: str | None) -> Iterator[Row]:
    text = io.TextIOWrapper(source, encoding="utf-8-sig", newline="")
    try:
        reader = csv.DictReader(text, strict=True)
        if key is not None and key not in (reader.fieldnames or ()):
            raise SettingsError(f"--key {key}: no such column; there are {_columns(reader)}")
        for row in reader:
            if None in row or None in row.values():
                raise SettingsError(f"line {reader.line_num}: not as many columns as the header")
            data = msgspec.json.encode(row)
            yield reader.line_num, data, None if key is None else _key_of(row, key, reader.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise SettingsError(f"not readable as CSV: {type(error).__name__}") from None
    finally:
        if not source.closed:
            text.detach()  # whoever opened the source closes it


def _columns(reader: csv.DictReader[str]) -> str:
    return ", ".join(reader.fieldnames or ()) or "none"


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines without their ends, empty ones left out, none read further than a record may be."""
    number = 0
    while line := source.readline(_RECORD_BYTES_MAX + 3):
        number += 1
        if len(line) > _RECORD_BYTES_MAX + 2:
            raise SettingsError(f"line {number}: longer than 1 MiB, the most a record holds")
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield number, stripped


def _key_of(fields: dict[str, Any], key: str, number: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise SettingsError(f"line {number}: no text or number in {key}, which --key names")
    return str(value)


def _hash(data: bytes) -> str:
    """A key that spreads rows evenly and sends equal rows to the same shard."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
