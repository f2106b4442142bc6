"""A stream of a test: put, reshard, and look at its records, by calls of the model itself."""

from __future__ import annotations

from collections.abc import Iterable

from kclrun.local.in_process import InProcessAws
from kclrun.local.service import Kinesis
from kclrun.local.stream import PutEntry, Stream
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import Record
from kclrun.model.time import WallTime
from kclrun.testing.records import RecordLike, make_records


class TestStream:
    """A stream of the embedded AWS; it is made if it is missing. Every call has happened when it
    returns. Raises: a ServiceError leaf, as the service would answer."""

    __test__ = False  # pytest would collect it

    def __init__(self, aws: InProcessAws, name: str = "test", shards: int = 1) -> None:
        self.name = name
        self._aws = aws

        def make(kinesis: Kinesis, now: WallTime) -> None:
            if all(stream.name != name for stream in kinesis.streams(now)):
                kinesis.create_stream(name, shards, now)

        aws.call(make)

    def another(self, name: str, shards: int = 1) -> TestStream:
        """A stream beside it, for an application that reads several."""
        return TestStream(self._aws, name, shards)

    def put(self, items: Iterable[RecordLike]) -> None:
        """Put records in order: bytes, text, `(key, data)` pairs, or what `make_record` takes."""
        entries = [
            PutEntry(bytes(record.data), record.partition_key, record.explicit_hash_key)
            for record in make_records(items)
        ]
        for at in range(0, len(entries), PUT_RECORDS_MAX):
            part = entries[at : at + PUT_RECORDS_MAX]
            self._aws.call(
                lambda kinesis, now, part=part: kinesis.put_many(  # type: ignore[misc]
                    self._of(kinesis, now), part, now
                )
            )

    def shards(self) -> list[str]:
        """The ids of the open shards, in the order of their hash ranges."""
        return self._aws.call(
            lambda kinesis, now: [shard.shard_id for shard in self._of(kinesis, now).open_shards()]
        )

    def split(self, shard_id: str | None = None) -> None:
        """Split a shard, or the first open one, in its middle."""

        def split(kinesis: Kinesis, now: WallTime) -> None:
            stream = self._of(kinesis, now)
            shard = stream.shard(shard_id, now) if shard_id else stream.open_shards()[0]
            middle = (shard.hash_range.start + shard.hash_range.end + 1) // 2
            kinesis.split_shard(stream, shard.shard_id, middle, now)

        self._aws.call(split)

    def merge(self, shard_id: str | None = None) -> None:
        """Merge a shard, or the first open one, with the next one by hash range.

        Raises: IndexError for the last one.
        """

        def merge(kinesis: Kinesis, now: WallTime) -> None:
            stream = self._of(kinesis, now)
            shards = [shard.shard_id for shard in stream.open_shards()]
            at = shards.index(shard_id) if shard_id else 0
            stream.merge(shards[at], shards[at + 1], now)

        self._aws.call(merge)

    def records(self) -> list[Record]:
        """All records that have not expired, shard by shard, oldest shard first."""
        return self._aws.call(lambda kinesis, now: _records(self._of(kinesis, now), now))

    def _of(self, kinesis: Kinesis, now: WallTime) -> Stream:
        return kinesis.stream(self.name, None, now)


def _records(stream: Stream, now: WallTime) -> list[Record]:
    return [
        Record(
            data=stored.data,
            partition_key=stored.partition_key,
            sequence_number=stored.sequence_number,
            approximate_arrival_timestamp=stored.arrived_at,
        )
        for shard in stream.shards(now)
        for stored in shard.page(shard.start, shard.end - shard.start, 1 << 40)
    ]
