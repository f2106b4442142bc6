"""Rows of Spark as records to put, and what a row must hold to become one.

Rule: a row that cannot become a record is an error that says which and how many, never a gap.
Values, keys among them, never reach a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kclrun.codec.hash_keys import parse_hash_key
from kclrun.errors import LimitExceeded, SinkError
from kclrun.model.outgoing import PutEntry
from kclrun.spark.sink.columns import DATA, EXPLICIT_HASH_KEY, PARTITION_KEY

__all__ = ["KEY_CHARACTERS_MAX", "put_entries"]

# A partition key has 1 to 256 Unicode characters (PutRecordsRequestEntry).
KEY_CHARACTERS_MAX: Final = 256


def put_entries(
    batch: pa.RecordBatch, *, rows_before: int, record_bytes_max: int
) -> list[PutEntry]:
    """The records of one Arrow batch, a row each, in its order.

    `rows_before` is how many rows of the partition came earlier; `record_bytes_max` bounds data
    and key together, as the service counts them. Raises: SinkError naming the column, how many
    rows of the batch are wrong and where the first of them is.
    """
    check = _Check(batch.num_rows, rows_before)
    data = _as_binary(batch.column(DATA))
    keys = batch.column(PARTITION_KEY)
    check.refuse(pc.is_null(data), f"{DATA} is null")
    check.refuse(pc.is_null(keys), f"{PARTITION_KEY} is null")
    check.text(keys, PARTITION_KEY)
    check.refuse(pc.equal(pc.binary_length(keys), 0), f"{PARTITION_KEY} is empty")
    check.refuse(
        pc.greater(pc.utf8_length(keys), KEY_CHARACTERS_MAX),
        f"{PARTITION_KEY} is longer than {KEY_CHARACTERS_MAX} characters",
    )
    size = pc.add(pc.cast(pc.binary_length(data), pa.int64()), pc.binary_length(keys))
    check.refuse(
        pc.greater(size, record_bytes_max),
        f"{DATA} and {PARTITION_KEY} are more than {record_bytes_max} bytes (option"
        " maxRecordBytes; a stream takes 1 MiB, or up to 10 MiB where that was set on it)",
    )
    return [
        PutEntry(each, key, hash_key)
        for each, key, hash_key in zip(
            data.to_pylist(), keys.to_pylist(), _hash_keys(batch, check), strict=True
        )
    ]


class _Check:
    """Refuses rows of one batch, and says where in the partition they are."""

    def __init__(self, rows: int, rows_before: int) -> None:
        self._rows = rows
        self._rows_before = rows_before

    def refuse(self, wrong: pa.BooleanArray, why: str) -> None:
        count = pc.sum(wrong).as_py()
        if count:
            self.refuse_at(pc.index(wrong, value=True).as_py(), count, why)

    def refuse_at(self, index: int, count: int, why: str) -> None:
        raise SinkError(
            f"{why} in {count} of {self._rows} rows: the first is row"
            f" {self._rows_before + index + 1} of its partition\n"
            "Rows before it may be in the stream already; none is left out. Filter such rows out"
            " or give them a value before the sink"
        )

    def text(self, column: pa.Array, name: str) -> None:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            # Not chained: the original may quote the bytes.
            raise SinkError(
                f"{name} is no UTF-8 text in a batch of {self._rows} rows that begins with row"
                f" {self._rows_before + 1} of its partition: it was cast from bytes; encode them,"
                " as with base64(…)"
            ) from None


def _as_binary(column: pa.Array) -> pa.Array:
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _hash_keys(batch: pa.RecordBatch, check: _Check) -> Sequence[str | None]:
    if EXPLICIT_HASH_KEY not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(EXPLICIT_HASH_KEY)
    check.text(column, EXPLICIT_HASH_KEY)
    texts: list[str | None] = column.to_pylist()
    wrong = [index for index, text in enumerate(texts) if not _is_hash_key(text)]
    if wrong:
        check.refuse_at(
            wrong[0],
            len(wrong),
            f"{EXPLICIT_HASH_KEY} is no decimal number from 0 to 2^128 - 1",
        )
    return texts


def _is_hash_key(text: str | None) -> bool:
    try:
        return text is None or parse_hash_key(text) >= 0
    except LimitExceeded:
        return False
