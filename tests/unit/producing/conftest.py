"""A Kinesis stream of the pure model, in a time that only its users move."""

from collections.abc import Sequence

import pytest

from kclrun.codec.kpl import effective_hash_key, open_aggregates
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.record import IteratorType, PutEntry, PutResult, Record, StartPoint
from kclrun.model.shard import Shard
from kclrun.model.time import WallTime
from tests.support.stream_ports import ModelStream


class VirtualStream:
    """A RecordPutter whose requests take `latency_s`, with the service's limits or without."""

    def __init__(self, shards: int, *, limits: bool, latency_s: float = 0.02) -> None:
        settings = KinesisSettings(limits=AWS_LIMITS if limits else None)
        self.kinesis = Kinesis(settings, b"virtual time".ljust(32))
        self.now = 1_700_000_000.0
        self.latency_s = latency_s
        self.kinesis.create_stream("s", shards, WallTime(self.now))
        self.now += 1.0
        self.model = ModelStream(self.kinesis, "s", lambda: WallTime(self.now))

    def clock(self) -> float:
        return self.now

    def wait(self, pause_s: float) -> None:
        self.now += pause_s

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        self.now += self.latency_s
        return self.model.put(entries)

    def shards(self) -> tuple[Shard, ...]:
        return self.model.list_shards()

    def split(self, shard_id: str) -> None:
        stream = self.kinesis.stream("s", None, WallTime(self.now))
        shard = next(each for each in self.shards() if each.shard_id == shard_id)
        middle = (shard.hash_range.start + shard.hash_range.end) // 2 + 1
        self.kinesis.split_shard(stream, shard_id, middle, WallTime(self.now))
        self.now += 1.0

    def read(self) -> dict[str, list[Record]]:
        """Every user record, by shard; a child's id comes after its parents'."""
        return {shard.shard_id: self._read(shard.shard_id) for shard in self.shards()}

    def read_as_the_kcl(self) -> dict[str, list[Record]]:
        """As `read`, without the user records that are outside of their shard's hash keys."""
        ranges = {shard.shard_id: shard.hash_range for shard in self.shards()}
        return {
            shard_id: [
                record
                for record in records
                if effective_hash_key(record.partition_key, record.explicit_hash_key)
                in ranges[shard_id]
            ]
            for shard_id, records in self.read().items()
        }

    def _read(self, shard_id: str) -> list[Record]:
        iterator = self.model.iterator(shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        records: list[Record] = []
        while iterator is not None:
            self.now += 5.0
            page = self.model.fetch(iterator, 10_000)
            records += page.records
            iterator = None if page.millis_behind_latest == 0 else page.next_iterator
        return list(open_aggregates(records))


@pytest.fixture
def virtual_stream():
    """Makes a stream: `virtual_stream(4, limits=True)`."""
    return VirtualStream
