"""A stream of one shard, as the reader and the admin of a lease process see it; a fetch thread."""

import functools
import time
from collections import deque
from types import SimpleNamespace

from kclrun.lease.commands import AllowDelivery
from kclrun.lease.policy import Pacing
from kclrun.local.iterators import ShardQuery
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import WallTime
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.worker.delivery_queue import DeliveryQueue, QueueClosed, QueueLimits
from kclrun.worker.fetching import FetchPlan, FetchThread, ShardSource
from kclrun.worker.sharing import daemon_thread, rest_together_s
from tests.patience import HUNG_S

FIRST = "shardId-000000000000"
WHOLE = HashRange(0, HASH_KEY_MAX)
BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)


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

    def iterator(self, shard_id, start):
        self.starts.append(start)
        return self._kinesis.iterator(
            self.stream,
            shard_id,
            start.kind,
            self._now(),
            sequence_number=start.sequence_number,
            timestamp=start.timestamp,
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
            Record(
                *(each.data, each.partition_key, each.sequence_number),
                approximate_arrival_timestamp=each.arrived_at,
            )
            for each in page.records
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


def fetch_host(**methods):
    """A `FetchHost` whose methods are these; the others do nothing."""

    def ignored(*_):
        return None

    names = ("warn", "records_lost", "broke", "reached_tip", "report")
    return SimpleNamespace(**dict.fromkeys(names, ignored) | methods)


class Quick(Pacing):
    """Pauses after failures are the pacing's own tests; here they only cost time."""

    def __init__(self):
        super().__init__(0.01, floor_s=0.001)
        self.throttles = 0

    def after_throttle(self, chance):
        self.throttles += 1
        return 0.001

    def after_error(self, chance):
        return 0.001


class Fetching:
    def __init__(
        self,
        shard,
        *,
        start=BEGINNING,
        checkpoint=TRIM_HORIZON,
        pacing=None,
        now=time.monotonic,
        expiry_apart_s=0.02,
        subscriber=None,
        meter=None,
        **plan,
    ):
        self.queue = DeliveryQueue(
            QueueLimits(buffer_bytes=2**20, batch_max=10_000), time.monotonic
        )
        self.warnings, self.lost, self.broken, self.heats, self.tips = [], [], [], [], []
        self.thread = FetchThread(
            FetchPlan(
                shard_id=FIRST,
                start=start,
                checkpoint=checkpoint,
                expiry=ExpiryWatch(FIRST, WHOLE, (), apart_s=expiry_apart_s),
                pacing=pacing or Quick(),
                **plan,
            ),
            ShardSource(shard, shard, subscriber),
            self.queue,
            fetch_host(
                warn=self.warnings.append,
                records_lost=lambda position, text: self.lost.append((position, text)),
                broke=self._break,
                reached_tip=lambda: self.tips.append(self.thread.view.fetched),
                report=self.heats.append,
            ),
            threads=SimpleNamespace(
                make_thread=daemon_thread, rest_s=functools.partial(rest_together_s, 0.0)
            ),
            now=now,
            meter=meter,
        )

    def __enter__(self):
        self.queue.allow_delivery(AllowDelivery(time.monotonic() + 60, 10**9, 10**9))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.queue.close()
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()

    def _break(self, error):
        self.broken.append(error)
        self.queue.close()

    def task(self):
        task = self.queue.next_task()
        assert not isinstance(task, QueueClosed), self.broken
        return task

    def payloads(self, count):
        found = []
        while len(found) < count:
            found += [record.data for record in self.task().records]
        return found
