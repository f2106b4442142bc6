"""The records that wait in a producer: a queue for each key, the queues of the keys by shard. Pure.

`pending_records.py` decides what is sent from here, and what an answer means.
"""

from __future__ import annotations

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
    """One record that waits or is under way. `receipt` None: the producer reports no single
    record."""

    entry: PutEntry
    size_bytes: int
    receipt: Receipt | None


def hash_key_of(entry: PutEntry) -> int:
    """The hash key by which the service chooses the shard."""
    return _hash_key_of(entry.partition_key, entry.explicit_hash_key)


# A request is full at 500 records or at 5 MiB. Weight expresses both in records: a record above its
# share of the bytes weighs as many records as it takes the place of.
FULL_WEIGHT: Final = PUT_RECORDS_MAX
_SHARE_BYTES: Final = REQUEST_BYTES_MAX // PUT_RECORDS_MAX


def weight_of(size_bytes: int) -> int:
    """How many five-hundredths of a request a record fills."""
    return size_bytes // _SHARE_BYTES or 1


class KeyQueue:
    """The pending records of one key, oldest first.

    At most one part of it is under way.
    `key` None: a record without an order to others. `shard_queue` is where the key queue
    waits to be sent; None while its first records are under way.
    """

    __slots__ = ("entries", "key", "shard_queue", "weight")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.entries: deque[Waiting] = deque()
        self.weight = 0
        self.shard_queue: ShardQueue | None = None


class ShardQueue:
    """One open shard: its flow control, and the key queues that can be sent there, in order.

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
        self.ready: deque[KeyQueue] = deque()
        self.weight = 0
        self.under_way = 0
        self.is_resting = False
        self.is_listed = True
        self.fruitless_since: float | None = None
        self.last_code = ""


class Expired(NamedTuple):
    """A record that waited until its deadline, and where it waited."""

    record: Waiting
    key_queue: KeyQueue
    shard_queue: ShardQueue


class ShardQueues:
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

    def remap(self, shards: Iterable[Shard]) -> None:
        """Use a new listing; waiting key queues move to the shard queue that they belong to now."""
        shards = tuple(shards)
        listed = sorted(
            (shard.hash_range.start, shard.shard_id) for shard in shards if shard.is_open
        )
        if not listed:
            raise errors.SettingsError("the stream lists no open shard to write to")
        self._ranges = {shard.shard_id: shard.hash_range for shard in shards}
        waiting = [key_queue for shard_queue in self._in_order for key_queue in shard_queue.ready]
        for shard_queue in self._in_order:
            shard_queue.ready.clear()
            shard_queue.weight = 0
            shard_queue.is_listed = False
        self._in_order = [self._shard_queue(shard_id) for _, shard_id in listed]
        self._starts = [start for start, _ in listed]
        self._by_id = {shard_queue.shard_id: shard_queue for shard_queue in self._in_order}
        self._flow.keep(self._by_id)
        # The shard queues with ready key queues, in the order of their turns; those that rest.
        self._ready: dict[ShardQueue, None] = {}
        self._resting = {
            shard_queue: None for shard_queue in self._in_order if shard_queue.is_resting
        }
        self._wakes_at = -math.inf
        self.open_weight = 0
        for key_queue in waiting:
            self.queue(key_queue)

    def _shard_queue(self, shard_id: str) -> ShardQueue:
        shard_queue = self._by_id.get(shard_id)
        if shard_queue is None:
            shard_queue = ShardQueue(shard_id, self._flow.of(shard_id))
            # An earlier producer may have left it in the middle of a pause.
            shard_queue.is_resting = not shard_queue.flow.is_off
        shard_queue.is_listed = True
        return shard_queue

    def shard_of(self, entry: PutEntry) -> ShardQueue:
        """Where the service puts the record, by the last listing."""
        # A listing without the lowest range is stale or torn: its first shard is used instead.
        number = bisect.bisect_right(self._starts, hash_key_of(entry)) or 1
        return self._in_order[number - 1]

    def range_of(self, shard_id: str) -> HashRange | None:
        """The hash keys of a shard of the last listing, open or closed; None if it is not there."""
        return self._ranges.get(shard_id)

    def queue(self, key_queue: KeyQueue, *, first: bool = False) -> None:
        """Let a key queue wait for the shard of its oldest record; `first`: before all others."""
        shard_queue = key_queue.shard_queue = self.shard_of(key_queue.entries[0].entry)
        if first:
            shard_queue.ready.appendleft(key_queue)
        else:
            shard_queue.ready.append(key_queue)
        self._ready[shard_queue] = None
        self.weigh(shard_queue, key_queue.weight)

    def take(self, shard_queue: ShardQueue, count: int) -> None:
        """Take the next key queues out of the queue of a shard queue that has so many."""
        ready = shard_queue.ready
        weight = 0
        for _ in range(count):
            key_queue = ready.popleft()
            key_queue.shard_queue = None
            weight += key_queue.weight
        self.weigh(shard_queue, -weight)
        if not ready:
            del self._ready[shard_queue]

    def take_expired(self, now: float) -> list[Expired]:
        """Take out the records that have waited until their deadline. A record that is under way
        stays. It looks at each key that waits."""
        expired: list[Expired] = []
        for shard_queue in list(self._ready):
            before = len(expired)
            for key_queue in shard_queue.ready:
                entries = key_queue.entries
                while entries and (oldest := entries[0]).receipt and oldest.receipt.deadline <= now:
                    entries.popleft()
                    weight = weight_of(oldest.size_bytes)
                    key_queue.weight -= weight
                    self.weigh(shard_queue, -weight)
                    expired.append(Expired(oldest, key_queue, shard_queue))
            if len(expired) > before:
                shard_queue.ready = deque(queue for queue in shard_queue.ready if queue.entries)
                if not shard_queue.ready:
                    del self._ready[shard_queue]
        return expired

    def weigh(self, shard_queue: ShardQueue, added: int) -> None:
        """A key queue that waits in `shard_queue` has grown, been added or been removed."""
        shard_queue.weight += added
        if not shard_queue.is_resting:
            self.open_weight += added

    def open(self) -> Sequence[ShardQueue]:
        """The shard queues that have key queues and may be sent to, in the order of their turns."""
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
        """When the next pause of a shard queue with key queues ends; infinity if none pauses."""
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
