"""What processors emit, on its way into the DataFrame: JSON lines, then Arrow batches.

Rule: a row leaves only after the call that emitted it returned, so a call that raises can be given
again without a row twice; what Spark makes of the task decides about all of them. Bounded: by
what one call may emit, and by the size of a batch. Next: `hosting.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pyarrow as pa

from kclrun.errors import LimitExceeded, SinkError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.rows import ROW_BYTES_MAX, encode_row
from kclrun.spark.fused.tenure import Ack

__all__ = [
    "ACK",
    "ARROW_SCHEMA",
    "BATCH_BYTES_MAX",
    "BATCH_ROWS_MAX",
    "CALL_BYTES_MAX",
    "ROW",
    "SCHEMA",
    "EmittedRows",
    "ack_batch",
]

# The two kinds of rows that leave a task: emitted ones, and one account of each range.
ROW: Final = "row"
ACK: Final = "ack"
SCHEMA: Final = (
    "kind string, shardId string, sequenceNumber string, subSequenceNumber bigint, row string"
)
ARROW_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("shardId", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        ("row", pa.string()),
    ]
)
# What Spark itself puts into one batch (spark.sql.execution.arrow.maxRecordsPerBatch).
BATCH_ROWS_MAX: Final = 10_000
# A batch exists three times on its way: as lines, as Arrow, and in the JVM.
BATCH_BYTES_MAX: Final = 8 * 2**20
# The rows of one call wait in memory until it returns: sixteen of the largest.
CALL_BYTES_MAX: Final = 16 * ROW_BYTES_MAX


class EmittedRows:
    """The rows of one shard that have not left yet.

    Around each call of user code `begin_call`, then `end_call` or `take_back_call`; `cover` when
    user code asks for a checkpoint. `emit` may come from any thread of it.
    """

    def __init__(self, shard_id: str) -> None:
        self._shard_id = shard_id
        self._lines: list[bytes] = []
        # Rows so far belong to these positions, so many to each.
        self._runs: list[tuple[ExtendedSequenceNumber, int]] = []
        self._bytes = 0
        self._position: ExtendedSequenceNumber | None = None
        self._call_start = 0
        self._call_bytes = 0
        self._rows_total = 0
        self._lock = threading.Lock()

    def emit(self, row: Mapping[str, Any]) -> None:
        """Add one row. Raises: TypeError, LimitExceeded as `encode_row`; LimitExceeded when one
        call emits more than 256 MiB; SinkError outside a call."""
        line = encode_row(row)[:-1]  # a line of a file, without its end
        with self._lock:
            if self._position is None:
                raise SinkError("emit() is for process_records and shard_ended, while they run")
            if self._call_bytes + len(line) > CALL_BYTES_MAX:
                raise LimitExceeded(
                    f"one call emitted more than {CALL_BYTES_MAX} bytes, which wait in memory"
                    " until it returns: set fetch.batch_max lower"
                )
            self._call_bytes += len(line)
            self._lines.append(line)

    def begin_call(self, position: ExtendedSequenceNumber) -> None:
        """User code is called; its rows belong to `position`, that of the last record given."""
        with self._lock:
            self._position = position
            self._call_start = len(self._lines)
            self._call_bytes = 0

    def cover(self) -> None:
        """A checkpoint was admitted: the rows emitted until now stay, whatever the call does."""
        with self._lock:
            self._settle()

    def take_back_call(self) -> None:
        """The call raised: its rows go, but for those that a checkpoint covers."""
        with self._lock:
            del self._lines[self._call_start :]
            self._position = None

    def end_call(self) -> None:
        """The call returned: its rows may leave."""
        with self._lock:
            self._settle()
            self._position = None

    def count(self) -> int:
        """Rows that left since this was last asked."""
        total, self._rows_total = self._rows_total, 0
        return total

    def batches(self, *, all_of_them: bool = False) -> Iterator[pa.RecordBatch]:
        """Rows in Arrow, in the order they were emitted; less than a batch waits for more, unless
        `all_of_them` are asked for. Call it when no user code runs."""
        if not all_of_them and len(self._lines) < BATCH_ROWS_MAX and self._bytes < BATCH_BYTES_MAX:
            return
        lines, runs = self._lines, self._runs
        self._lines, self._runs, self._bytes = [], [], 0
        self._rows_total += len(lines)
        numbers = [position.sequence_number for position, n in runs for _ in range(n)]
        subs = [position.sub_sequence_number for position, n in runs for _ in range(n)]
        for first, last in _cuts(lines):
            yield _batch(
                ROW, self._shard_id, numbers[first:last], subs[first:last], lines[first:last]
            )

    def _settle(self) -> None:
        """What was emitted in this call so far can no more be taken back."""
        rows = len(self._lines) - self._call_start
        if rows and self._position is not None:
            self._runs.append((self._position, rows))
            self._bytes += sum(map(len, self._lines[self._call_start :]))
        self._call_start = len(self._lines)


def ack_batch(ack: Ack) -> pa.RecordBatch:
    """The account of a range as a row of its own kind."""
    return _batch(ACK, ack.shard_id, [ack.position], [0], [msgspec.json.encode(ack)])


def _cuts(lines: list[bytes]) -> Iterator[tuple[int, int]]:
    """Batches of at most BATCH_ROWS_MAX rows and, unless a single row is larger, as many bytes."""
    first = size = 0
    for index, line in enumerate(lines):
        if index - first == BATCH_ROWS_MAX or (size and size + len(line) > BATCH_BYTES_MAX):
            yield first, index
            first, size = index, 0
        size += len(line)
    if first < len(lines):
        yield first, len(lines)


def _batch(
    kind: str, shard_id: str, numbers: list[str], subs: list[int], lines: list[bytes]
) -> pa.RecordBatch:
    rows = pa.array(lines, pa.binary()).cast(pa.string())
    columns = [
        pa.repeat(kind, len(lines)),
        pa.repeat(shard_id, len(lines)),
        pa.array(numbers, pa.string()),
        pa.array(subs, pa.int64()),
        rows,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)
