"""Rows to the bytes of a file: JSON lines, CSV or Parquet.

Each row is encoded when user code emits it, so that a row that fits in no file is refused there.
This module does not know where files are.
"""

from __future__ import annotations

import base64
import csv
import operator
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from kclrun.codec.row_lines import changed_in_json, encode_row_line
from kclrun.errors import SettingsError
from kclrun.model import row_schema, row_types

# A reader of Parquet takes a row group at once. At these sizes the rows of a group are encoded, and
# wait in memory as Python's values no longer.
_GROUP_ROWS_MAX: Final = 128 * 1024
_GROUP_BYTES_MAX: Final = 16 * 2**20
# A value of a fixed size, and the reference to any other value.
_VALUE_BYTES: Final = 8
# The last value of an encoded row of Parquet.
_size_of: Final = operator.itemgetter(-1)


class RowFile(Protocol):
    """One file as it grows."""

    @property
    def waiting_bytes(self) -> int:
        """The bytes, about, of the rows that were added and not returned yet by `add`."""
        ...

    def add(self, rows: Sequence[Any]) -> bytes:
        """The next bytes of the file, if there are some already."""
        ...

    def end(self) -> bytes:
        """The last bytes of the file."""
        ...


class RowFormat(Protocol):
    """How rows become files. `encode` may be called by any thread."""

    suffix: str
    content_type: str

    def encode(self, row: Any) -> tuple[Any, int]:
        """The row as `RowFile.add` takes it, and its size in bytes. With a schema the row is as
        `RowSchema.check` returns it. Raises: TypeError and LimitExceeded, naming the column and
        never a value."""
        ...

    def new_file(self) -> RowFile:
        """A file without rows."""
        ...


def row_format(name: str, schema: str | None) -> RowFormat:
    """The format `json`, `csv` or `parquet`. Raises: SettingsError if it needs a schema and has
    none, or an extra of kclrun that is not installed."""
    columns = None if schema is None else row_schema.RowSchema.parse(schema)
    if name == "json":
        return _JsonLines()
    if columns is None:
        raise SettingsError(f"format: {name} needs `schema`, the columns and their types")
    return _Csv(columns) if name == "csv" else _Parquet(columns)


class _Lines:
    """A file of whole lines, as they were encoded."""

    waiting_bytes = 0

    def __init__(self, head: bytes) -> None:
        self._head = head

    def add(self, rows: Sequence[bytes]) -> bytes:
        head, self._head = self._head, b""
        return head + b"".join(rows) if head else b"".join(rows)

    def end(self) -> bytes:
        return b""


class _JsonLines:
    suffix = "jsonl"
    content_type = "application/x-ndjson"

    def encode(self, row: Any) -> tuple[bytes, int]:
        line = encode_row_line(row)
        return line, len(line)

    def new_file(self) -> RowFile:
        return _Lines(b"")


class _Csv:
    """CSV of RFC 4180 in UTF-8 with a header. None is an empty cell; `true` and `false`; ISO 8601;
    base64 for bytes; JSON for arrays, maps and structs."""

    suffix = "csv"
    content_type = "text/csv; charset=utf-8; header=present"

    def __init__(self, schema: row_schema.RowSchema) -> None:
        self._schema = schema
        self._cells = tuple(_cell(column.type) for column in schema.columns)
        self._line: Callable[[Sequence[Any]], str] = csv.writer(_Echo()).writerow

    def encode(self, row: Any) -> tuple[bytes, int]:
        try:
            cells = [
                value if cell is None or value is None else cell(value)
                for cell, value in zip(self._cells, row.values(), strict=True)
            ]
        except ValueError:
            encode_row_line(row)  # names the column
            raise
        line = self._line(cells).encode()
        return line, len(line)

    def new_file(self) -> RowFile:
        names = [column.name for column in self._schema.columns]
        return _Lines(self._line(names).encode())


class _Echo:
    """`writerow` returns what `write` returns."""

    def write(self, line: str) -> str:
        return line


def _cell(kind: row_types.DataType) -> Callable[[Any], str] | None:
    """How a value becomes the text of a cell; None if the csv module does it right."""
    match kind:
        case row_types.SimpleType("boolean"):
            return lambda value: "true" if value else "false"
        case row_types.SimpleType("binary"):
            return lambda value: base64.b64encode(value).decode()
        case row_types.SimpleType("timestamp"):
            return datetime.isoformat
        case row_types.SimpleType() | row_types.DecimalType():
            return None
        case _:
            return _json_cell


def _json_cell(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    if "null" in text and (changed := changed_in_json(value)) is not None:
        raise ValueError(changed)
    return text


class _Parquet:
    """Parquet through pyarrow, compressed with Snappy. A row is a tuple of its values and, last,
    of its size."""

    suffix = "parquet"
    content_type = "application/vnd.apache.parquet"

    def __init__(self, schema: row_schema.RowSchema) -> None:
        self._arrow = arrow_schema(schema)
        # The columns whose values have sizes of their own.
        self._varying = tuple(
            (column.name, str(column.type) not in {"string", "binary"})
            for column in schema.columns
            if not isinstance(column.type, row_types.SimpleType)
            or column.type.name in {"string", "binary"}
        )
        self._fixed = _VALUE_BYTES * len(schema.columns)

    def encode(self, row: Any) -> tuple[tuple[Any, ...], int]:
        size = self._fixed
        for name, is_nested in self._varying:
            value = row[name]
            if value is not None:
                size += len(msgspec.json.encode(value)) if is_nested else len(value)
        return (*row.values(), size), size

    def new_file(self) -> RowFile:
        return _ParquetFile(self._arrow)


class _ParquetFile:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._written = _Written()
        self._writer: Any = None
        self._columns: list[list[Any]] = [[] for _ in schema]
        self._values_of = [operator.itemgetter(n) for n in range(len(self._columns))]
        self._waiting = 0
        self.waiting_bytes = 0

    def add(self, rows: Sequence[tuple[Any, ...]]) -> bytes:
        # Each call appends to the columns. Turning the rows of a whole group at once takes four
        # times as long, because they have left the processor's cache, and `zip(*rows)` makes an
        # iterator for each row.
        for waiting, value_of in zip(self._columns, self._values_of, strict=True):
            waiting.extend(map(value_of, rows))
        self._waiting += len(rows)
        self.waiting_bytes += sum(map(_size_of, rows))
        if self._waiting >= _GROUP_ROWS_MAX or self.waiting_bytes >= _GROUP_BYTES_MAX:
            self._write_group()
        return self._written.take()

    def end(self) -> bytes:
        self._write_group()
        self._writer.close()
        return self._written.take()

    def _write_group(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._written, self._schema)
        if not self._waiting:
            return
        arrays = [
            _arrow_array(pa, column, field.type)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch, row_group_size=self._waiting)
        for column in self._columns:
            column.clear()
        self._waiting = self.waiting_bytes = 0


def _arrow_array(pa: Any, column: Sequence[Any], kind: Any) -> Any:
    if pa.types.is_map(kind):  # Arrow takes the items of a map
        column = [None if value is None else list(value.items()) for value in column]
    return pa.array(column, type=kind)


class _Written:
    """The file object that pyarrow writes to. It keeps the bytes until `take`."""

    closed = False

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: Any) -> int:
        self._bytes += data
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


_ARROW_NAMES: Final = {
    "string": "string",
    "boolean": "bool_",
    "byte": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "binary": "binary",
    "date": "date32",
}


def arrow_schema(schema: row_schema.RowSchema) -> Any:
    """The schema of Arrow with these columns, as Spark maps its types. Raises: SettingsError
    without pyarrow."""
    try:
        import pyarrow as pa
    except ImportError:
        raise SettingsError(
            "format: parquet needs pyarrow: pip install 'kclrun[parquet]'"
        ) from None
    return pa.schema([_field(pa, column) for column in schema.columns])


def _field(pa: Any, column: row_types.Column) -> Any:
    return pa.field(column.name, _arrow_type(pa, column.type), nullable=column.nullable)


def _arrow_type(pa: Any, kind: row_types.DataType) -> Any:
    match kind:
        case row_types.SimpleType("timestamp"):
            return pa.timestamp("us", tz="UTC")
        case row_types.SimpleType(name):
            return getattr(pa, _ARROW_NAMES[name])()
        case row_types.DecimalType(precision, scale):
            return pa.decimal128(precision, scale)
        case row_types.ArrayType(element):
            return pa.list_(_arrow_type(pa, element))
        case row_types.MapType(key, value):
            return pa.map_(_arrow_type(pa, key), _arrow_type(pa, value))
        case row_types.StructType(columns):
            return pa.struct([_field(pa, column) for column in columns])
