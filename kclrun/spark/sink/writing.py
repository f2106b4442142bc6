"""`kclrun.spark.write`: puts a DataFrame into a stream, with its rows in order if requested.

A Python sink cannot ask Spark for a partitioning. So this function brings the rows of a key
together before they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkAttributeError
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import col
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StringType

from kclrun.codec.kpl import parse_hash_key
from kclrun.codec.record_sizes import RecordLimit
from kclrun.errors import LimitExceeded, SettingsError, SinkError
from kclrun.model.quotas import PARTITION_KEY_CHARACTERS_MAX
from kclrun.model.record import PutEntry
from kclrun.spark.option_reading import sink_settings
from kclrun.spark.option_table import text_of
from kclrun.spark.sink.columns import DATA, EXPLICIT_HASH_KEY, PARTITION_KEY, check_columns
from kclrun.spark.sink.shards import open_shards

# Turns rows of Spark into records to put, and checks that each row can become one.
#
# A row that cannot become a record is an error that names the row's place and the count of such
# rows; no row is left out. Values, including keys, never appear in a message.


def put_entries(
    batch: pa.RecordBatch, *, rows_before: int, record_bytes_max: int | RecordLimit
) -> list[PutEntry]:
    """The records of one Arrow batch, one for each row, in its order.

    `rows_before` is how many rows of the partition came earlier; `record_bytes_max` bounds data
    and key together, as the service counts them: the option, or the stream's limit. Raises:
    SinkError naming the column, the number of wrong rows in the batch and the place of the first.
    """
    check = _Check(batch.num_rows, rows_before)
    data = _as_binary(batch.column(DATA))
    keys = batch.column(PARTITION_KEY)
    check.refuse(pc.is_null(data), f"{DATA} is null")
    check.refuse(pc.is_null(keys), f"{PARTITION_KEY} is null")
    check.text(keys, PARTITION_KEY)
    check.refuse(pc.equal(pc.binary_length(keys), 0), f"{PARTITION_KEY} is empty")
    check.refuse(
        pc.greater(pc.utf8_length(keys), PARTITION_KEY_CHARACTERS_MAX),
        f"{PARTITION_KEY} is longer than {PARTITION_KEY_CHARACTERS_MAX} characters",
    )
    size = pc.add(pc.cast(pc.binary_length(data), pa.int64()), pc.binary_length(keys))
    bytes_max, source = _limit_of(record_bytes_max, pc.max(size).as_py() or 0)
    check.refuse(
        pc.greater(size, bytes_max),
        f"{DATA} and {PARTITION_KEY} are more than {bytes_max} bytes ({source})",
    )
    return list(map(PutEntry, data.to_pylist(), keys.to_pylist(), _hash_keys(batch, check)))


def _limit_of(given: int | RecordLimit, largest: int) -> tuple[int, str]:
    """The limit that matters for the largest record of a batch, and where it is from, in words."""
    if isinstance(given, int):
        return given, "option maxRecordBytes"
    bytes_max = given.covering(largest)
    return bytes_max, f"the limit of the stream{given.unknown}"


class _Check:
    """Refuses rows of one batch, and names their place in the partition."""

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
                f"{name} is not UTF-8 text in a batch of {self._rows} rows that begins with row"
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
            f"{EXPLICIT_HASH_KEY} is not a decimal number from 0 to 2^128 - 1",
        )
    return texts


def _is_hash_key(text: str | None) -> bool:
    try:
        if text is not None:
            parse_hash_key(text)
    except LimitExceeded:
        return False
    return True


_FORMAT: Final = "kclrun"
_ORDER: Final = "__order{}"


def write(  # noqa: PLR0913 - public: the columns and options of a write, by name
    df: DataFrame,
    stream: str,
    *,
    key: str | Column,
    data: str | Column,
    explicit_hash_key: str | Column | None = None,
    ordered: bool = True,
    order_by: str | Column | Sequence[str | Column] = (),
    partitions: int | None = None,
    keys_are_together: bool = False,
    options: Mapping[str, object] | None = None,
) -> DataStreamWriter | Any:  # or None, which callers should not have to rule out
    """Write a batch DataFrame to a Kinesis stream now, or prepare the query of a streaming one.

    A batch DataFrame is written when this returns (None): every row was acknowledged. For a
    streaming one it returns Spark's DataStreamWriter, to be given a checkpoint, a trigger and
    `start()`; leave its format, options of the sink and output mode (append) alone. For update
    mode use `foreachBatch(lambda rows, _: kclrun.spark.write(rows, …))`.

    `stream` is a name or an ARN. `key`, `data` and `explicit_hash_key` are columns, by name or
    as a Column: `data` is binary or string, the others are cast to string. `options` are those of
    the sink (`options.py`): region, endpointUrl, roleArn, aggregate and so on; None counts as not
    given.

    Delivery is at least once. A failed task is tried again as a whole, and so is a batch whose
    query ended before its commit: rows that were in the stream already are put again, in their
    order. (With `spark.speculation` two attempts may run at the same time, and their rows mix:
    leave it off where order matters.)

    Order, within one key (nothing holds between keys):

    - A key's rows are put in the order in which they stand in their one partition, also when the
      stream throttles. So a request holds one record of a key: with few keys and many rows, set
      the option `aggregate` (a request then holds one aggregate of a key). With `ordered` false
      neither holds: later records overtake refused ones.
    - They are in one partition because rows are repartitioned by key. That shuffle keeps no
      order among rows that came from different partitions: name the columns to sort by in
      `order_by` (ascending), and the rows of a key go out in that order within each batch. For
      rows of the kclrun source: `[length("sequenceNumber"), "sequenceNumber",
      "subSequenceNumber"]`. A streaming DataFrame is then written through `foreachBatch`.
    - With `keys_are_together` Spark does not shuffle the rows, and writes them as they were read.
      It is for rows of the kclrun source that passed select, filter and the like only, and kept
      their keys.

    `partitions` is how many tasks write after the shuffle; by default as many as run at once.

    Raises, before anything is put: SettingsError for an option or a column the sink refuses;
    NotFound, AccessDenied, Unavailable where the stream cannot be listed from here.
    """
    sort_columns = _listed(order_by)
    if keys_are_together and (sort_columns or partitions is not None):
        raise SettingsError(
            "kclrun.spark.write: keys_are_together leaves the rows where they are, so order_by and"
            " partitions cannot be kept: leave one or the other out"
        )
    if partitions is not None and partitions < 1:
        raise SettingsError(f"kclrun.spark.write: partitions is {partitions}; expected 1 or more")
    settings = _options(stream, options or {}, ordered=ordered)
    columns = [_text(key).alias(PARTITION_KEY), _column(data).alias(DATA)]
    if explicit_hash_key is not None:
        columns.append(_text(explicit_hash_key).alias(EXPLICIT_HASH_KEY))
    rows = df.select(*columns)
    check_columns([(field.name, field.dataType.simpleString()) for field in rows.schema])
    open_shards(sink_settings(settings).address)
    if keys_are_together:
        return _written(rows, settings)
    order = [_column(column).alias(_ORDER.format(at)) for at, column in enumerate(sort_columns)]
    return _written_by_key(df.select(*columns, *order), settings, len(order), partitions)


def _listed(order_by: str | Column | Sequence[str | Column]) -> Sequence[str | Column]:
    """A single column as a list; a text would otherwise be split into letters."""
    return [order_by] if isinstance(order_by, str | Column) else order_by


def _written_by_key(
    rows: DataFrame, settings: Mapping[str, str], ordered_by: int, partitions: int | None
) -> DataStreamWriter | None:
    count = partitions or _tasks_at_once(rows)
    by_key = rows.repartition(count, PARTITION_KEY) if count else rows.repartition(PARTITION_KEY)
    if not ordered_by:
        return _written(by_key, settings)
    order = [_ORDER.format(at) for at in range(ordered_by)]
    if not rows.isStreaming:
        return _written(by_key.sortWithinPartitions(*order).drop(*order), settings)

    # Spark does not sort a streaming DataFrame; each of its micro-batches is an ordinary one.
    def write_batch(batch: DataFrame, _batch_id: int) -> None:
        _written_by_key(batch, settings, ordered_by, partitions)

    return rows.writeStream.foreachBatch(write_batch)


def _written(rows: DataFrame, settings: Mapping[str, str]) -> DataStreamWriter | None:
    if rows.isStreaming:
        return rows.writeStream.format(_FORMAT).outputMode("append").options(**settings)
    rows.write.format(_FORMAT).mode("append").options(**settings).save()
    return None


def _options(stream: str, options: Mapping[str, object], *, ordered: bool) -> dict[str, str]:
    reserved = {"streamname", "streamarn", "ordering"}
    if twice := sorted(name for name in options if name.casefold() in reserved):
        raise SettingsError(
            f"kclrun.spark.write: {', '.join(twice)} among options: give the stream as the second"
            " argument, and ordered=True or False"
        )
    named = "streamARN" if stream.startswith("arn:") else "streamName"
    ordering = "key" if ordered else "none"
    return {
        **{name: text_of(value) for name, value in options.items() if value is not None},
        named: stream,
        "ordering": ordering,
    }


def _column(named: str | Column) -> Column:
    return col(named) if isinstance(named, str) else named


def _text(named: str | Column) -> Column:
    return _column(named).cast(StringType())


def _tasks_at_once(rows: DataFrame) -> int | None:
    """Spark's cores; None where Spark does not report them (Spark Connect): its default is used."""
    try:
        return rows.sparkSession.sparkContext.defaultParallelism
    except PySparkAttributeError:
        return None
