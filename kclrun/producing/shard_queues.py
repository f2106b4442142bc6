"""The records that wait in a producer, in queues that keep an order, and these by shard. Pure.

Single records have a queue for each partition key. Aggregates have one for each shard: an aggregate
holds any keys. `pending_records.py` decides which records are sent from here, and what an answer
means.
"""

from __future__ import annotations

import abc
import bisect
import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from kclrun import errors
from kclrun.codec.kpl import effective_hash_key
from kclrun.codec.record_sizes import REQUEST_BYTES_MAX
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry
from kclrun.model.shard import HashRange, Shard
from kclrun.producing.flow_control import Flow, ShardFlow

# Keys repeat: a cached one takes a tenth of the time of an MD5. With the longest keys it is 4 MB.
_hash_key_of: Final = functools.lru_cache(4096)(effective_hash_key)


class Receipt(Protocol):
    """What a caller keeps of one record. `deadline`: a record that was not sent until then fails
    alone. A time of the producer's clock."""

    deadline: float


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """One record that waits or is under way. `weight`: of a full request, `FULL_WEIGHT` parts.
    `receipt` None: the producer reports no single record."""

    entry: PutEntry
    size_bytes: int
    weight: int
    receipt: Receipt | None


def hash_key_of(entry: PutEntry) -> int:
    """The hash key by which the service chooses the shard."""
    return _hash_key_of(entry.partition_key, entry.explicit_hash_key)


# A request is full at 500 records or at 5 MiB. Weight expresses both in records: a record above its
# share of the bytes weighs as many records as it takes the place of.
FULL_WEIGHT: Final = PUT_RECORDS_MAX
_SHARE_BYTES: Final = REQUEST_BYTES_MAX // PUT_RECORDS_MAX


class OrderedQueue:
    """Pending records that keep their order, oldest first: of one key, or of all keys of a shard.

    At most one part of it is under way: its first records then, and `shard_queue` is None. While it
    waits to be sent, `shard_queue` is where. `key` None: it has no key. `weight` is of all records.
    """

    __slots__ = ("entries", "is_under_way", "key", "shard_queue", "weight")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.entries: deque[Waiting] = deque()
        self.weight = 0
        self.is_under_way = False
        self.shard_queue: ShardQueue | None = None

    def pop(self, count: int) -> list[Waiting]:
        """Take its first records out."""
        popleft = self.entries.popleft
        taken = [popleft() for _ in range(count)]
        self.weight -= sum([record.weight for record in taken])
        return taken

    def put_last(self, record: Waiting) -> None:
        self.entries.append(record)
        self.weight += record.weight

    def put_first(self, records: Iterable[Waiting]) -> None:
        """Put records back, before all others."""
        records = [*records]
        self.entries.extendleft(reversed(records))
        self.weight += sum([record.weight for record in records])


class ShardQueue:
    """One open shard: its flow control, and the queues that can be sent there, in order.

    A queue that flow control slowed has one request under way at most, and rests after it.
    `fruitless_since` is the send time of the first request since the shard last accepted a record;
    None if the last request brought a record in. `last_code` is that of the last refusal.
    """

    __slots__ = (
        "flow",
        "fruitless_since",
        "is_listed",
        "is_resting",
        "last_code",
        "ready",
        "shard_id",
        "under_way",
        "weight",
    )

    def __init__(self, shard_id: str, flow: ShardFlow) -> None:
        self.shard_id = shard_id
        self.flow = flow
        self.ready: deque[OrderedQueue] = deque()
        self.weight = 0
        self.under_way = 0
        self.is_resting = False
        self.is_listed = True
        self.fruitless_since: float | None = None
        self.last_code = ""


class Expired(NamedTuple):
    """A record that waited until its deadline, and where it waited."""

    record: Waiting
    shard_queue: ShardQueue


class ShardQueues(abc.ABC):
    """All open shards of a stream, by hash range. `open_weight` could be sent now.

    The map may be stale. A record then waits in the queue of a closed shard, which only means that
    it shares that queue's pauses. Pure: `now` is an argument.

    Raises: SettingsError if no shard is open.
    """

    def __init__(self, shards: Iterable[Shard], flow: Flow) -> None:
        self._flow = flow
        self._by_id: dict[str, ShardQueue] = {}
        self._in_order: list[ShardQueue] = []
        self.remap(shards)

    @abc.abstractmethod
    def add(self, entry: PutEntry, size_bytes: int, receipt: Receipt | None) -> bool:
        """Keep a record behind the others of its queue. Returns whether a request is full now."""

    @property
    @abc.abstractmethod
    def is_full_request(self) -> bool:
        """Whether what may be sent now is worth a request at once."""

    @abc.abstractmethod
    def settled(self, queue: OrderedQueue, *, first: bool = False) -> None:
        """The records of a queue that were under way are settled. Those that are left wait again,
        `first`: before all others of the shard."""

    @abc.abstractmethod
    def everything(self) -> Iterator[OrderedQueue]:
        """Every queue that has records."""

    @abc.abstractmethod
    def _forget(self, queue: OrderedQueue) -> None:
        """The queue has no record left."""

    @abc.abstractmethod
    def _requeue(self, waiting: Sequence[OrderedQueue]) -> None:
        """Let queues that waited by the last map wait by this one."""

    def remap(self, shards: Iterable[Shard]) -> None:
        """Use a new listing; waiting queues move to the shard queue that they belong to now."""
        shards = tuple(shards)
        listed = sorted(
            (shard.hash_range.start, shard.shard_id) for shard in shards if shard.is_open
        )
        if not listed:
            raise errors.SettingsError("the stream lists no open shard to write to")
        self._ranges = {shard.shard_id: shard.hash_range for shard in shards}
        waiting = [queue for shard_queue in self._in_order for queue in shard_queue.ready]
        for shard_queue in self._in_order:
            shard_queue.ready.clear()
            shard_queue.weight = 0
            shard_queue.is_listed = False
        self._in_order = [self._shard_queue(shard_id) for _, shard_id in listed]
        self._starts = [start for start, _ in listed]
        self._by_id = {shard_queue.shard_id: shard_queue for shard_queue in self._in_order}
        self._flow.keep(self._by_id)
        # The shard queues with ready queues, in the order of their turns; those that rest.
        self._ready: dict[ShardQueue, None] = {}
        self._resting = {
            shard_queue: None for shard_queue in self._in_order if shard_queue.is_resting
        }
        self._wakes_at = -math.inf
        self.open_weight = 0
        self._requeue(waiting)

    def _shard_queue(self, shard_id: str) -> ShardQueue:
        shard_queue = self._by_id.get(shard_id)
        if shard_queue is None:
            shard_queue = ShardQueue(shard_id, self._flow.of(shard_id))
            # An earlier producer may have left it in the middle of a pause.
            shard_queue.is_resting = not shard_queue.flow.is_off
        shard_queue.is_listed = True
        return shard_queue

    def number_of(self, entry: PutEntry) -> int:
        """The number of the open shard, by its hash keys, where the service puts the record."""
        # A listing without the lowest range is stale or torn: its first shard is used instead.
        return (bisect.bisect_right(self._starts, hash_key_of(entry)) or 1) - 1

    def range_of(self, shard_id: str) -> HashRange | None:
        """The hash keys of a shard of the last listing, open or closed; None if it is not there."""
        return self._ranges.get(shard_id)

    def take(self, shard_queue: ShardQueue) -> OrderedQueue:
        """Take the next queue out: its first records are under way from now on."""
        queue = shard_queue.ready.popleft()
        queue.shard_queue = None
        queue.is_under_way = True
        self.weigh(shard_queue, -queue.weight)
        if not shard_queue.ready:
            del self._ready[shard_queue]
        return queue

    def take_expired(self, now: float) -> list[Expired]:
        """Take out the records that have waited until their deadline. A record that is under way
        stays. It looks at each queue that waits."""
        expired: list[Expired] = []
        for shard_queue in list(self._ready):
            before = len(expired)
            for queue in shard_queue.ready:
                entries = queue.entries
                while entries and (oldest := entries[0]).receipt and oldest.receipt.deadline <= now:
                    queue.pop(1)
                    self.weigh(shard_queue, -oldest.weight)
                    expired.append(Expired(oldest, shard_queue))
                if not entries:
                    queue.shard_queue = None
                    self._forget(queue)
            if len(expired) > before:
                shard_queue.ready = deque(queue for queue in shard_queue.ready if queue.entries)
                if not shard_queue.ready:
                    del self._ready[shard_queue]
        return expired

    def _queue(self, queue: OrderedQueue, shard_queue: ShardQueue, *, first: bool = False) -> None:
        queue.shard_queue = shard_queue
        if first:
            shard_queue.ready.appendleft(queue)
        else:
            shard_queue.ready.append(queue)
        self._ready[shard_queue] = None
        self.weigh(shard_queue, queue.weight)

    def weigh(self, shard_queue: ShardQueue, added: int) -> None:
        """A queue that waits in `shard_queue` has grown, been added or been removed."""
        shard_queue.weight += added
        if not shard_queue.is_resting:
            self.open_weight += added

    def open(self) -> Sequence[ShardQueue]:
        """The shard queues that have queues and may be sent to, in the order of their turns."""
        return [shard_queue for shard_queue in self._ready if not shard_queue.is_resting]

    def end_turn(self, shard_queue: ShardQueue) -> None:
        """The shard queue comes after all others from now on."""
        if shard_queue in self._ready:
            del self._ready[shard_queue]
            self._ready[shard_queue] = None

    def sent(self, shard_queue: ShardQueue) -> None:
        """A request with records of this shard queue is under way."""
        shard_queue.under_way += 1
        if not shard_queue.flow.is_off:
            self._rest(shard_queue)

    def answered(self, shard_queue: ShardQueue) -> None:
        """That request was answered or failed, and flow control knows it."""
        shard_queue.under_way -= 1
        if shard_queue.flow.is_off:
            self._wake(shard_queue)
        else:
            self._rest(shard_queue)
            self._wakes_at = min(self._wakes_at, shard_queue.flow.resume_at)

    def wake(self, now: float) -> None:
        """Open the shard queues whose pause is over."""
        if now < self._wakes_at:
            return
        for shard_queue in [*self._rested()]:
            if shard_queue.flow.resume_at <= now:
                self._wake(shard_queue)
        ends = (shard_queue.flow.resume_at for shard_queue in self._rested())
        self._wakes_at = min(ends, default=math.inf)

    def forget_failures(self) -> None:
        """Forget since when each shard has accepted no record."""
        for shard_queue in self._in_order:
            shard_queue.fruitless_since = None

    def wakes_at(self) -> float:
        """When the next pause of a shard queue with queues ends; infinity if none pauses."""
        ends = (shard_queue.flow.resume_at for shard_queue in self._rested() if shard_queue.ready)
        return min(ends, default=math.inf)

    def _rested(self) -> Iterator[ShardQueue]:
        return (shard_queue for shard_queue in self._resting if not shard_queue.under_way)

    def _rest(self, shard_queue: ShardQueue) -> None:
        if shard_queue.is_resting or not shard_queue.is_listed:
            return
        shard_queue.is_resting = True
        self._resting[shard_queue] = None
        self.open_weight -= shard_queue.weight

    def _wake(self, shard_queue: ShardQueue) -> None:
        if not shard_queue.is_resting:
            return
        shard_queue.is_resting = False
        self._resting.pop(shard_queue, None)
        self.open_weight += shard_queue.weight


class KeyQueues(ShardQueues):
    """A queue for each partition key; without `keeps_order`, for each record."""

    def __init__(self, shards: Iterable[Shard], flow: Flow, *, keeps_order: bool) -> None:
        self._keeps_order = keeps_order
        self._by_key: dict[str, OrderedQueue] = {}
        self._unordered: set[OrderedQueue] = set()
        super().__init__(shards, flow)

    def add(self, entry: PutEntry, size_bytes: int, receipt: Receipt | None) -> bool:
        weight = size_bytes // _SHARE_BYTES or 1
        queue = self._by_key.get(entry.partition_key) if self._keeps_order else None
        is_new = queue is None
        if queue is None:
            queue = self._new(entry.partition_key)
        queue.entries.append(Waiting(entry, size_bytes, weight, receipt))
        queue.weight += weight
        if is_new:
            self._wait(queue)
        elif queue.shard_queue is not None:
            self.weigh(queue.shard_queue, weight)
        return self.open_weight >= FULL_WEIGHT

    @property
    def is_full_request(self) -> bool:
        return self.open_weight >= FULL_WEIGHT

    def settled(self, queue: OrderedQueue, *, first: bool = False) -> None:
        queue.is_under_way = False
        if queue.entries:
            self._wait(queue, first=first)
        else:
            self._forget(queue)

    def everything(self) -> Iterator[OrderedQueue]:
        yield from self._by_key.values()
        yield from self._unordered

    def _forget(self, queue: OrderedQueue) -> None:
        if queue.key is None:
            self._unordered.discard(queue)
        else:
            self._by_key.pop(queue.key, None)

    def _requeue(self, waiting: Sequence[OrderedQueue]) -> None:
        for queue in waiting:
            self._wait(queue)

    def _new(self, key: str) -> OrderedQueue:
        if not self._keeps_order:
            queue = OrderedQueue(None)
            self._unordered.add(queue)
        else:
            queue = self._by_key[key] = OrderedQueue(key)
        return queue

    def _wait(self, queue: OrderedQueue, *, first: bool = False) -> None:
        """For the shard of its oldest record."""
        shard_queue = self._in_order[self.number_of(queue.entries[0].entry)]
        self._queue(queue, shard_queue, first=first)
