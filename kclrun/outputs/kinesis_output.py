"""Rows as records of a Kinesis stream: at least once, in order per key, over the producer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kclrun.errors import LimitExceeded, ServiceError, SinkError
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.model.record import PutEntry
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.outputs.message_output import RowEncoder, naming
from kclrun.ports import RecordPutter, StreamAdmin, record_limit
from kclrun.processor import Row
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer

# As in `message_output.py`.
GIVE_UP_AFTER_S: Final = 10.0
# Without `key` in the settings, so many rows share a partition key: that saves most of the MD5s,
# and a request reaches 50 shards.
_ROWS_A_KEY: Final = 10


class KinesisOutput:
    """Implements `ports.Output`. `add` sends ahead without waiting; `commit` waits for everything.

    Without `key` in the settings rows are spread over the stream's shards, in no order.
    """

    stores_cursor = False

    def __init__(
        self, place: OutputDestination, of: RowsOf, putter: RecordPutter, admin: StreamAdmin
    ) -> None:
        self._where = f"the stream {place.kinesis}"
        self._encoder = RowEncoder(place)
        self._shard_id = of.shard_id
        self._rows = 0
        self._putter = putter
        self._admin = admin
        self._limit = record_limit(admin)
        self._settings = ProducerSettings(
            keeps_order=bool(place.key),
            aggregates=place.aggregates,
            give_up_after_s=GIVE_UP_AFTER_S,
        )
        self._producer: KinesisProducer | None = None
        self._upto = Cursor(TRIM_HORIZON)

    def encode(self, row: Row) -> tuple[Any, int]:
        line, key = self._encoder(row)
        if key is None:
            key = f"{self._shard_id}-{self._rows // _ROWS_A_KEY}"
            self._rows += 1
        entry = PutEntry(line[:-1], key)
        try:
            size_bytes = self._limit.checked_size_bytes(entry)
        except LimitExceeded as error:
            raise LimitExceeded(f"a row does not fit into {self._where}: {error}") from None
        return (entry, size_bytes), size_bytes

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: lists the shards. A former owner is not kept from sending."""
        try:
            shards = self._admin.list_shards()
        except ServiceError as error:
            raise self._failed(error) from None
        self._producer = KinesisProducer(
            self._putter, shards, self._settings, relist=self._admin.list_shards
        )
        self._upto = at
        return at

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        """As `Output.add`; it never fails. If a request fails, the next `commit` raises."""
        assert self._producer is not None, "begin was called"
        self._upto = upto
        try:
            self._producer.extend(rows)
        except ServiceError:
            return  # the producer has the rows, and raises the same in `commit`

    @property
    def unsent_bytes(self) -> int:
        """As `Output.unsent_bytes`: records that are not acknowledged."""
        return 0 if self._producer is None else self._producer.pending.backlog.bytes

    def commit(self) -> Cursor:
        assert self._producer is not None, "begin was called"
        try:
            self._producer.resume()
            self._producer.flush()
        except ServiceError as error:
            raise self._failed(error) from None
        return self._upto

    def check(self) -> str:
        """As `Output.check`: lists the shards, and puts what the stream can never accept."""
        try:
            open_shards = sum(shard.is_open for shard in self._admin.list_shards())
            return f"{self._where}, {open_shards} open shards; {self._putter.prove()}"
        except ServiceError as error:
            raise naming(self._where, error) from None

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()

    def _failed(self, error: ServiceError) -> SinkError:
        waiting = 0 if self._producer is None else self._producer.pending.backlog.records
        left = f" ({waiting} records wait)" if waiting else ""
        return SinkError(f"cannot put into {self._where}: {error}{left}")
