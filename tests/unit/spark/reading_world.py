"""A stream in virtual time, and what can go wrong between it and a reader."""

import threading

from kclrun.errors import ExpiredIterator, Throttled, Unavailable
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.reading import FetchedPage
from kclrun.model.time import WallTime
from kclrun.spark.executor.reading import Clocks, read_ranges
from kclrun.spark.offsets import ShardRange
from kclrun.spark.options import SourceSettings, StreamAddress
from tests.support.stream_ports import ModelStream

HOUR_S = 3600.0
STREAM = "orders"


class World:
    """The model, its clock, and a reader's view of it: calls are counted, faults are asked for."""

    def __init__(self, *, shards=1, limits=None, page_max=10_000):
        self.now = 1_700_000_000.0
        self.kinesis = Kinesis(KinesisSettings(limits=limits), b"reading tests".ljust(32))
        self.kinesis.create_stream(STREAM, shards, self.wall())
        self.port = ModelStream(self.kinesis, STREAM, self.wall)
        self.page_max = page_max
        self.calls = []
        self.limits = []
        self.fault = lambda call: None
        self._lock = threading.Lock()

    def wall(self):
        return WallTime(self.now)

    def sleep(self, seconds):
        with self._lock:
            self.now += seconds

    @property
    def clocks(self):
        return Clocks(monotonic=self.wall, wall=self.wall, chance=lambda: 0.5, sleep=self.sleep)

    @property
    def stream(self):
        return self.kinesis.stream(STREAM, None, self.wall())

    @property
    def shard_ids(self):
        return [shard.shard_id for shard in self.port.list_shards()]

    def put(self, count=1, *, data=None, every_s=0.001, shard=None):
        """Records into one open shard (the first unless said); their sequence numbers."""
        open_shards = {each.shard_id: each for each in self.stream.open_shards()}
        hash_key = open_shards[shard or next(iter(open_shards))].hash_range.start
        numbers = []
        for index in range(count):
            payload = b"%d" % index if data is None else data
            _, record = self.stream.put(payload, f"key-{index}", hash_key, self.wall())
            numbers.append(record.sequence_number)
            self.now += every_s
        return numbers

    # The ports, as the reader is given them.

    def iterator(self, shard_id, start):
        with self._lock:
            self.calls.append(start.kind.value)
            self.fault("iterator")
            return self.port.iterator(shard_id, start)

    def fetch(self, iterator, limit):
        with self._lock:
            self.calls.append("fetch")
            self.limits.append(limit)
            answer = self.fault("fetch")
            if isinstance(answer, FetchedPage):
                return answer
            return self.port.fetch(iterator, min(limit, self.page_max))

    def summary(self):
        self.calls.append("summary")
        return self.port.summary()

    # Reading.

    def pages(self, *ranges, clocks=None, **options):
        settings = SourceSettings(address=StreamAddress(stream=STREAM), **options)
        return read_ranges(self, ranges, settings, admin=self, clocks=clocks or self.clocks)

    def read(self, *ranges, **options):
        """The records of the ranges, all together; a shard's in the order they came."""
        return [record for page in self.pages(*ranges, **options) for record in page.records]

    def numbers(self, *ranges, **options):
        return [record.sequence_number for record in self.read(*ranges, **options)]

    def range(self, begin, end, *, shard=None, **more):
        return ShardRange(shard or self.shard_ids[0], begin, end, **more)


def empty(iterator, *, behind_ms=0):
    """An answer without records that leaves the reader where it is."""
    return FetchedPage(records=[], next_iterator=iterator, millis_behind_latest=behind_ms)


def refusal(name):
    leaf = {"expired": ExpiredIterator, "throttled": Throttled, "down": Unavailable}[name]
    return leaf(f"GetRecords: {name}", operation="GetRecords", code=name)
