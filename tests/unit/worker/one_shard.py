"""A stream of one shard, as the reader and the admin of a lease process see it."""

import time
from collections import deque

from kclrun.local.iterators import ShardQuery
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record, StartPoint
from kclrun.model.time import WallTime

FIRST = "shardId-000000000000"


class Shard:
    """Reader and admin of a stream of one shard; `trouble` is met by the next calls, in order."""

    def __init__(self):
        self._kinesis = Kinesis(KinesisSettings(), b"fetch".ljust(32))
        self._kinesis.create_stream("s", 1, WallTime(self._now() - 60))
        self.trouble = deque()
        self.starts = []
        self.fetched_at = []
        self.iterators = []
        self.listings = 0
        self.listing_trouble = deque()
        self.silent_end = False
        self.behind = None

    @staticmethod
    def _now():
        return WallTime(time.time())

    @property
    def stream(self):
        return self._kinesis.stream("s", None, self._now())

    def put(self, data=b"x"):
        return self._kinesis.put(self.stream, PutEntry(data, "k"), self._now()).sequence_number

    def split(self):
        self._kinesis.split_shard(self.stream, FIRST, 2**127, self._now())

    def expire(self):
        """The retention passes over all that is closed."""
        self.stream.retention_s = 0.0

    def iterator(self, shard_id, kind, *, sequence_number=None, timestamp=None):
        self.starts.append(StartPoint(kind, sequence_number, timestamp))
        return self._kinesis.iterator(
            self.stream,
            shard_id,
            kind,
            self._now(),
            sequence_number=sequence_number,
            timestamp=timestamp,
        )

    def fetch(self, iterator, limit):
        self.fetched_at.append(time.monotonic())
        self.iterators.append(iterator)
        if self.trouble:
            trouble = self.trouble.popleft()
            if isinstance(trouble, BaseException):
                raise trouble
            return trouble
        page = self._kinesis.fetch(iterator, limit, self._now())
        records = [
            Record(each.data, each.partition_key, each.sequence_number) for each in page.records
        ]
        children = () if self.silent_end else page.children
        behind = page.millis_behind_latest if self.behind is None else self.behind
        return FetchedPage(records, page.next_iterator, behind, children)

    def list_shards(self, shard_filter=None):
        self.listings += 1
        if self.listing_trouble:
            raise self.listing_trouble.popleft()
        listed = self._kinesis.list_shards(self.stream, ShardQuery(), 100, self._now())
        return tuple(shard.describe() for shard in listed.shards)
