"""Records as Arrow rows: exactly the schema, a row a record, batches within bounds."""

from datetime import UTC, datetime

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructType, TimestampType

from kclrun.model.record import Record
from kclrun.spark.executor.reading import ARROW_SCHEMA, SCHEMA, record_batches

SHARD = "shardId-000000000000"


def record(index=0, *, data=b"payload", **more):
    return Record(data, f"key-{index}", str(4959 + index), 1_700_000_000.123 + index, **more)


def rows_of(*records):
    return [row for batch in record_batches(records, "orders", SHARD) for row in batch.to_pylist()]


def test_the_schema_for_spark_and_the_schema_of_the_rows_are_the_same():
    types = {
        "binary": BinaryType(),
        "string": StringType(),
        "bigint": LongType(),
        "timestamp": TimestampType(),
    }
    declared = StructType()
    for column in SCHEMA.split(","):
        name, kind = column.split()
        declared = declared.add(name, types[kind])

    # What PySpark compares the first batch of a task with.
    assert to_arrow_schema(declared, timezone="UTC").equals(ARROW_SCHEMA)
    [batch] = record_batches([record()], "orders", SHARD)
    assert batch.schema.equals(ARROW_SCHEMA)


def test_a_row_says_all_that_is_known_of_a_record():
    [row] = rows_of(record(3, data=b"\x00\xff"))

    assert row == {
        "data": b"\x00\xff",
        "partitionKey": "key-3",
        "explicitHashKey": None,
        "stream": "orders",
        "shardId": SHARD,
        "sequenceNumber": "4962",
        "subSequenceNumber": 0,
        "approximateArrivalTimestamp": datetime(2023, 11, 14, 22, 13, 23, 123000, UTC),
    }


def test_only_a_user_record_of_an_aggregate_has_an_explicit_hash_key():
    plain, opened = (
        record(0),
        record(1, sub_sequence_number=7, explicit_hash_key="340282366", aggregated=True),
    )

    rows = rows_of(plain, opened)

    assert [row["explicitHashKey"] for row in rows] == [None, "340282366"]
    assert [row["subSequenceNumber"] for row in rows] == [0, 7]


def test_arrival_times_are_exact_to_the_millisecond_far_into_the_future():
    times = [0.0, 0.001, 1_700_000_000.999, 1_763_729_233.007, 4_102_444_799.999]
    rows = rows_of(*[Record(b"", "key", "1", at) for at in times])

    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    in_us = [
        round((row["approximateArrivalTimestamp"] - epoch).total_seconds() * 1e6) for row in rows
    ]
    assert in_us == [0, 1000, 1_700_000_000_999_000, 1_763_729_233_007_000, 4_102_444_799_999_000]


def test_batches_keep_the_order_and_stay_within_ten_thousand_rows():
    records = [record(index) for index in range(25_000)]

    batches = list(record_batches(records, "orders", SHARD))

    assert [batch.num_rows for batch in batches] == [10_000, 10_000, 5_000]
    numbers = pa.chunked_array([batch.column("sequenceNumber") for batch in batches]).to_pylist()
    assert numbers == [each.sequence_number for each in records]
    assert list(record_batches([], "orders", SHARD)) == []


def test_batches_stay_within_32_mib_of_data_unless_one_record_is_larger():
    mib = b"x" * 2**20
    records = [record(index, data=mib * size) for index, size in enumerate([10, 10, 12, 1, 40, 1])]

    batches = list(record_batches(records, "orders", SHARD))

    assert [batch.num_rows for batch in batches] == [3, 1, 1, 1]
