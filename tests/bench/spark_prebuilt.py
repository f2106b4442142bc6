"""A data source without a source: Arrow batches made before, again and again, without end.

What Spark itself costs at this many rows: the ceiling of any source in Python, and the feed of the
sink. Options: `rowsPerPartition`, `partitions`, `payloadBytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from bench.spark_stream import sequence_number
from kclrun.model.record import Record
from kclrun.spark.executor.reading import SCHEMA, record_batches

# What one page of the real source becomes.
BATCH_ROWS: Final = 10_000
_ARRIVED_AT: Final = 1_772_366_400.25


@cache
def prebuilt_batch(payload_bytes: int, rows: int = BATCH_ROWS) -> pa.RecordBatch:
    """Rows as the real source makes them; once a process."""
    data = b"x" * payload_bytes
    records = [
        Record(
            data=data,
            partition_key=f"key-{n:08d}",
            sequence_number=sequence_number(n),
            approximate_arrival_timestamp=_ARRIVED_AT,
        )
        for n in range(rows)
    ]
    (batch,) = record_batches(records, "prebuilt", "shardId-000000000000")
    return batch


class PrebuiltSource(DataSource):
    """`format("bench-prebuilt")`."""

    @classmethod
    def name(cls) -> str:
        return "bench-prebuilt"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: object) -> _Reader:
        return _Reader({name.lower(): int(value) for name, value in self.options.items()})


class _Reader(DataSourceStreamReader):
    """There is always one batch more."""

    def __init__(self, options: dict[str, int]) -> None:
        self._options = options

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": 0}

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:
        return {"batch": start["batch"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._options["partitions"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left, payload_bytes = self._options["rowsperpartition"], self._options["payloadbytes"]
        while left > 0:
            batch = prebuilt_batch(payload_bytes)
            yield batch.slice(0, min(left, BATCH_ROWS))
            left -= BATCH_ROWS
