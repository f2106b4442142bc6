"""Records as Arrow rows: the columns of the source.

The first batch of a task is compared with the schema exactly, types and order: `string`, not
`large_string`; microseconds in UTC. `SCHEMA` says the same to Spark, as DDL.
Rule: a row a record, in their order; a batch is bounded in rows and in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kclrun.model.record import Record

__all__ = ["ARROW_SCHEMA", "SCHEMA", "record_batches"]

SCHEMA: Final = (
    "data binary, partitionKey string, explicitHashKey string, stream string, shardId string,"
    " sequenceNumber string, subSequenceNumber bigint, approximateArrivalTimestamp timestamp"
)
ARROW_SCHEMA: Final = pa.schema(
    [
        ("data", pa.binary()),
        ("partitionKey", pa.string()),
        ("explicitHashKey", pa.string()),
        ("stream", pa.string()),
        ("shardId", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        ("approximateArrivalTimestamp", pa.timestamp("us", tz="UTC")),
    ]
)

# What Spark itself puts into one batch (spark.sql.execution.arrow.maxRecordsPerBatch).
_ROWS_MAX: Final = 10_000
# Offsets of a binary column are 32-bit; and a batch exists several times on its way to the JVM.
_DATA_BYTES_MAX: Final = 32 * 2**20
_MICROSECONDS: Final = 1_000_000


def record_batches(
    records: Sequence[Record], stream: str, shard_id: str
) -> Iterator[pa.RecordBatch]:
    """The rows of some records of one shard, in their order; none for no records.

    Each batch has the schema `ARROW_SCHEMA`, at most 10,000 rows, and at most 32 MiB of data
    unless a single record is larger. `explicitHashKey` is null unless the record came out of an
    aggregate: GetRecords does not say it.
    """
    for first, last in _cuts(records):
        yield _batch(records[first:last], stream, shard_id)


def _cuts(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Where the batches begin and end."""
    size = sum([len(record.data) for record in records])
    if 0 < len(records) <= _ROWS_MAX and size <= _DATA_BYTES_MAX:
        yield 0, len(records)
        return
    first = size = 0
    for index, record in enumerate(records):
        length = len(record.data)
        if index > first and (index - first == _ROWS_MAX or size + length > _DATA_BYTES_MAX):
            yield first, index
            first, size = index, 0
        size += length
    if first < len(records):
        yield first, len(records)


def _batch(records: Sequence[Record], stream: str, shard_id: str) -> pa.RecordBatch:
    count = len(records)
    arrived_s = pa.array([each.approximate_arrival_timestamp for each in records], pa.float64())
    arrived_us = pc.round(pc.multiply(arrived_s, _MICROSECONDS)).cast(pa.int64())
    columns = [
        pa.array([each.data for each in records], pa.binary()),
        pa.array([each.partition_key for each in records], pa.string()),
        pa.array([each.explicit_hash_key for each in records], pa.string()),
        pa.repeat(pa.scalar(stream, pa.string()), count),
        pa.repeat(pa.scalar(shard_id, pa.string()), count),
        pa.array([each.sequence_number for each in records], pa.string()),
        pa.array([each.sub_sequence_number for each in records], pa.int64()),
        arrived_us.cast(ARROW_SCHEMA.field("approximateArrivalTimestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)
