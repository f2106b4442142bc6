"""The records that wait for aggregates: one queue for each shard, whatever the keys. Pure.

An aggregate of the next records of a shard is under way at a time, so the records of a shard arrive
in their order. After a reshard, a record must not overtake an earlier one of its key that is still
under way in an aggregate of the old shard. So a new shard waits for the old ones whose hash keys it
has: for each, until its aggregate is settled and the rest of its queue has moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kclrun.model.record import PutEntry
from kclrun.model.shard import HASH_KEY_MAX, Shard
from kclrun.producing.flow_control import Flow
from kclrun.producing.shard_queues import OrderedQueue, Receipt, ShardQueue, ShardQueues, Waiting

# The KPL's default. One request at a time has an aggregate of a shard: 50 kB each 40 ms are the
# 1 MiB/s that a shard takes.
AGGREGATE_BYTES_MAX: Final = 51_200
# Keys repeat. To look one up takes a twentieth of the time of its MD5. With keys of 50 characters
# it is 2 MB, with the longest 16 MB.
_KEYS_MAX: Final = 16_384


class ShardOrder(OrderedQueue):
    """The pending records of one shard, for the hash keys `first` to `last`; weighed in bytes.
    `behind`: how many queues of older shards have to be settled first."""

    __slots__ = ("behind", "first", "home", "last")

    home: ShardQueue

    def __init__(self, first: int, last: int) -> None:
        super().__init__(None)
        self.first, self.last = first, last
        self.behind = 0

    def shares_keys_with(self, other: ShardOrder) -> bool:
        return self.first <= other.last and other.first <= self.last


class AggregateQueues(ShardQueues):
    """A queue for each shard. A request is full when one has a full aggregate."""

    def __init__(self, shards: Iterable[Shard], flow: Flow) -> None:
        # As the shards, by hash range.
        self._orders: list[ShardOrder] = []
        # Of shards that are not listed any more, or not with the same hash keys: under way.
        self._older: set[ShardOrder] = set()
        self._of_key: dict[str, ShardOrder] = {}
        super().__init__(shards, flow)

    def add(self, entry: PutEntry, size_bytes: int, receipt: Receipt | None) -> bool:
        order = None
        if entry.explicit_hash_key is None:
            order = self._of_key.get(entry.partition_key)
        if order is None:
            order = self._order_of(entry)
        entries = order.entries
        entries.append(Waiting(entry, size_bytes, size_bytes, receipt))
        order.weight += size_bytes
        shard_queue = order.shard_queue
        if shard_queue is None:
            if len(entries) == 1:
                self._wait(order)
            return False
        # As `weigh`, which is a third of the time of this method.
        shard_queue.weight += size_bytes
        if shard_queue.is_resting:
            return False
        self.open_weight += size_bytes
        return shard_queue.weight >= AGGREGATE_BYTES_MAX

    @property
    def is_full_request(self) -> bool:
        return any(shard_queue.weight >= AGGREGATE_BYTES_MAX for shard_queue in self.open())

    def settled(self, queue: OrderedQueue, *, first: bool = False) -> None:
        assert isinstance(queue, ShardOrder)
        queue.is_under_way = False
        if queue in self._older:
            self._hand_over(queue)
        elif queue.entries:
            self._wait(queue)

    def everything(self) -> Iterator[OrderedQueue]:
        yield from self._orders
        yield from self._older

    def _forget(self, queue: OrderedQueue) -> None:
        """It stays: it is its shard's."""

    def _requeue(self, waiting: Sequence[OrderedQueue]) -> None:
        self._of_key.clear()
        before = {(order.first, order.last): order for order in self._orders}
        ends = [start - 1 for start in self._starts[1:]] + [HASH_KEY_MAX]
        # A listing without the lowest range is stale or torn: its first shard is used instead.
        starts = [0, *self._starts[1:]]
        self._orders = [
            before.pop(keys) if keys in before else ShardOrder(*keys)
            for keys in zip(starts, ends, strict=True)
        ]
        self._older |= {order for order in before.values() if order.is_under_way}
        for order in before.values():
            if not order.is_under_way:
                for record in order.entries:
                    self._order_of(record.entry).put_last(record)
        for order, order.home in zip(self._orders, self._in_order, strict=True):
            order.behind = sum(order.shares_keys_with(older) for older in self._older)
            order.shard_queue = None
            if order.entries and not order.is_under_way:
                self._wait(order)

    def _order_of(self, entry: PutEntry) -> ShardOrder:
        order = self._orders[self.number_of(entry)]
        if entry.explicit_hash_key is None:
            if len(self._of_key) >= _KEYS_MAX:
                self._of_key.clear()
            self._of_key[entry.partition_key] = order
        return order

    def _wait(self, order: ShardOrder) -> None:
        if not order.behind:
            self._queue(order, order.home)

    def _hand_over(self, older: ShardOrder) -> None:
        """What is left of an older shard's queue goes before the records of the shards that have
        its keys now; those that waited for no other go on."""
        self._older.discard(older)
        for record in reversed(older.entries):
            self._order_of(record.entry).put_first([record])
        for order in self._orders:
            if order.shares_keys_with(older):
                order.behind -= 1
                if order.entries:
                    self._wait(order)
