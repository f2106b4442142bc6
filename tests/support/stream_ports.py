"""The ports of one stream of the model: reading, writing, and listing its shards.

For simulations and tests without HTTP. It has no clock: `now` is called at every call. It behaves
like the readers of `aws/` and raises the same subclasses of `ServiceError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kclrun.local import consumers
from kclrun.local import stream as puts
from kclrun.local.iterators import ShardQuery
from kclrun.local.service import Kinesis
from kclrun.local.shard_log import StoredRecord
from kclrun.local.stream import Stream
from kclrun.model.reading import FetchedPage
from kclrun.model.record import PutEntry, PutResult, Record, StartPoint
from kclrun.model.shard import Shard
from kclrun.model.time import WallTime
from kclrun.ports import ShardFilter, StreamSummary

_HOUR_S: Final = 3600
# MaxResults of ListShards; the account's shard limit is twenty pages of it.
_SHARDS_A_PAGE: Final = 1000


class ModelStream:
    """A `ShardReader`, a `RecordPutter` and a `StreamAdmin` over a stream of `kinesis`."""

    def __init__(self, kinesis: Kinesis, name: str, now: Callable[[], WallTime]) -> None:
        self._kinesis = kinesis
        self._name = name
        self._now = now

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """As `ShardReader.iterator`. Raises: NotFound, InvalidRequest."""
        now = self._now()
        return self._kinesis.iterator(
            self._stream(now),
            shard_id,
            start.kind,
            now,
            sequence_number=start.sequence_number,
            timestamp=start.timestamp,
        )

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """As `ShardReader.fetch`. Raises: ExpiredIterator, Throttled, NotFound, InvalidRequest.

        `body_bytes` is the size of the payloads, because nothing is encoded here.
        """
        now = self._now()
        page = self._kinesis.fetch(iterator, limit, now)
        return FetchedPage(
            records=[_record(stored) for stored in page.records],
            next_iterator=page.next_iterator,
            millis_behind_latest=page.millis_behind_latest,
            children=page.children,
            body_bytes=sum(len(stored.data) for stored in page.records),
            served_at=now,
        )

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        """As `RecordPutter.put`. Raises: NotFound, InvalidRequest."""
        now = self._now()
        taken = [puts.PutEntry(e.data, e.partition_key, e.explicit_hash_key) for e in entries]
        results = self._kinesis.put_many(self._stream(now), taken, now)
        return tuple(PutResult(r.sequence_number, r.shard_id, r.error_code) for r in results)

    def prove(self) -> str:
        """As `RecordPutter.prove`: the model knows no permissions."""
        return "may write: proven"

    def summary(self) -> StreamSummary:
        """As `StreamAdmin.summary`. Raises: NotFound."""
        now = self._now()
        stream = self._stream(now)
        return StreamSummary(
            name=stream.name,
            arn=stream.arn,
            status=stream.status(now),
            retention_hours=int(stream.retention_s) // _HOUR_S,
            open_shards=len(stream.open_shards()),
            created_at=stream.created_at,
        )

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """As `StreamAdmin.list_shards`: all pages. Raises: NotFound, InvalidRequest."""
        now = self._now()
        query = ShardQuery()
        if shard_filter is not None:
            query = ShardQuery(shard_filter.kind, shard_filter.timestamp)
        page = self._kinesis.list_shards(self._stream(now), query, _SHARDS_A_PAGE, now)
        shards = list(page.shards)
        while page.next_token is not None:
            page = self._kinesis.list_more_shards(page.next_token, _SHARDS_A_PAGE, now)
            shards += page.shards
        return tuple(shard.describe() for shard in shards)

    def _stream(self, now: WallTime) -> Stream:
        return self._kinesis.stream(self._name, None, now)


class ModelSubscriber:
    """A `ShardSubscriber` of one consumer of a stream of the model, which it registers.

    Nothing waits: a subscription without an event says so at once, and its caller lets time pass.
    """

    def __init__(
        self, kinesis: Kinesis, name: str, now: Callable[[], WallTime], consumer: str = "test"
    ) -> None:
        self._now = now
        self._consumers = kinesis.consumers_of(kinesis.stream(name, None, now()))
        self._arn = self._consumers.register(consumer, now()).arn

    def subscribe(self, shard_id: str, start: StartPoint) -> ModelSubscription:
        """As `ShardSubscriber.subscribe`."""
        events = self._consumers.subscribe(
            self._consumers.consumer(None, self._arn),
            shard_id,
            start.kind,
            self._now(),
            sequence_number=start.sequence_number,
            timestamp=start.timestamp,
        )
        return ModelSubscription(events, self._now)


class ModelSubscription:
    """A `Subscription` of the model. A failure in the stream is raised."""

    def __init__(self, events: consumers.Subscription, now: Callable[[], WallTime]) -> None:
        self._events = events
        self._now = now
        self.is_over = False

    def next_page(self, timeout_s: float) -> FetchedPage | None:
        """As `Subscription.next_page`."""
        event = self._events.next_event(self._now())
        if isinstance(event, consumers.SubscriptionEnd):
            self.is_over = True
            if event.error is not None:
                raise event.error
        if not isinstance(event, consumers.SubscriptionEvent):
            return None
        return FetchedPage(
            records=[_record(stored) for stored in event.records],
            next_iterator=None,
            millis_behind_latest=event.millis_behind_latest,
            children=event.children,
            served_at=self._now(),
            continuation=event.continuation,
        )

    def close(self) -> None:
        """As `Subscription.close`."""
        self._events.end()


def _record(stored: StoredRecord) -> Record:
    return Record(stored.data, stored.partition_key, stored.sequence_number, stored.arrived_at)
