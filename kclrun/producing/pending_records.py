"""The pending records of a producer, and the choice of the records in its next request.

Pure: time and chance are arguments.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kclrun import errors
from kclrun.codec.aggregator import Aggregator
from kclrun.codec.kpl import effective_hash_key
from kclrun.codec.record_sizes import REQUEST_BYTES_MAX, checked_size_bytes
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.shard import Shard
from kclrun.model.time import backoff_s
from kclrun.ports import Retry, classify
from kclrun.producing.flow_control import (
    Flow,
    ProducerMetrics,
    ProducerSettings,
    ShardFlow,
)

# The KPL's default. One request at a time has an aggregate of a key: 50 kB each 40 ms are 1 MiB/s.
AGGREGATE_BYTES_MAX: Final = 51_200
# Keys repeat: a cached one takes a tenth of the time of an MD5. With the longest keys it is 4 MB.
_hash_key_of: Final = functools.lru_cache(4096)(effective_hash_key)


class Part(NamedTuple):
    """One record of a request, its size, and its origin: the first `held` entries of a key
    queue."""

    entry: PutEntry
    size_bytes: int
    key_queue: KeyQueue
    held: int
    shard_queue: ShardQueue


class Request:
    """One PutRecords to be made: `entries`, in order. Return it with its outcome."""

    def __init__(self, sent_at: float, bytes_max: int) -> None:
        self.sent_at = sent_at
        self.parts: list[Part] = []
        self.shard_queues: dict[ShardQueue, int] = {}
        self.is_full_speed = True
        self._bytes_left = bytes_max

    @property
    def entries(self) -> tuple[PutEntry, ...]:
        return tuple(part.entry for part in self.parts)

    def has_room(self, size_bytes: int) -> bool:
        """Whether such a record fits. The first always fits: above the byte limit it is alone."""
        if not self.parts:
            return True
        return len(self.parts) < PUT_RECORDS_MAX and size_bytes <= self._bytes_left

    def take(self, part: Part) -> None:
        self.parts.append(part)
        self._bytes_left -= part.size_bytes

    def __repr__(self) -> str:
        return f"Request({len(self.parts)} records)"


class Packer:
    """Makes the next record of a key queue: its oldest entry, or an aggregate that begins with it.

    Only records of one key and one explicit hash key share an aggregate. An aggregate is stored
    whole in the shard of its first record. After a split that is not known here, records of other
    hash keys would be in a shard where consumers do not look for them.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        size_max = min(AGGREGATE_BYTES_MAX, settings.record_bytes_max)
        self._aggregator = Aggregator(size_max) if settings.aggregates else None

    def next_record(self, key_queue: KeyQueue) -> tuple[PutEntry, int, int]:
        """The record, its size, and how many of the key queue's entries it holds."""
        oldest, size_bytes = key_queue.entries[0]
        if self._aggregator is None or len(key_queue.entries) == 1:
            return oldest, size_bytes, 1
        held = 0
        for entry, _ in key_queue.entries:
            # An aggregate inside an aggregate would not be opened by readers.
            is_alike = entry.explicit_hash_key == oldest.explicit_hash_key
            if not is_alike or entry.user_records > 1:
                break
            if not self._aggregator.add(entry.partition_key, entry.data, entry.explicit_hash_key):
                break
            held += 1
        if held == 0:
            return oldest, size_bytes, 1
        made = self._aggregator.finish()
        if held == 1:
            return oldest, size_bytes, 1
        aggregate = PutEntry(made.data, made.partition_key, made.explicit_hash_key, held)
        return aggregate, aggregate.size_bytes, held


# A request is full at 500 records or at 5 MiB. Weight expresses both in records: a record above its
# share of the bytes weighs as many records as it takes the place of.
FULL_WEIGHT: Final = PUT_RECORDS_MAX
_SHARE_BYTES: Final = REQUEST_BYTES_MAX // PUT_RECORDS_MAX


def weight_of(size_bytes: int) -> int:
    """How many five-hundredths of a request a record fills."""
    return size_bytes // _SHARE_BYTES or 1


class KeyQueue:
    """The pending records of one key, oldest first, each with its size in bytes.

    At most one part of it is under way.
    `key` None: a record without an order to others. `shard_queue` is where the key queue
    waits to be sent; None while its first records are under way.
    """

    __slots__ = ("entries", "key", "shard_queue", "weight")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.entries: deque[tuple[PutEntry, int]] = deque()
        self.weight = 0
        self.shard_queue: ShardQueue | None = None


class ShardQueue:
    """One open shard: its flow control, and the key queues that can be sent there, in order.

    A queue that flow control slowed has one request under way at most, and rests after it.
    `fruitless_since` is the send time of the first request since the shard last accepted a record;
    None if the last request brought a record in.
    """

    __slots__ = (
        "flow",
        "fruitless_since",
        "is_listed",
        "is_resting",
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
        listed = sorted(
            (shard.hash_range.start, shard.shard_id) for shard in shards if shard.is_open
        )
        if not listed:
            raise errors.SettingsError("the stream lists no open shard to write to")
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

    def queue(self, key_queue: KeyQueue, *, first: bool = False) -> None:
        """Let a key queue wait for the shard of its oldest record; `first`: before all others."""
        oldest, _ = key_queue.entries[0]
        hash_key = _hash_key_of(oldest.partition_key, oldest.explicit_hash_key)
        # A listing without the lowest range is stale or torn: its first shard is used instead.
        shard_queue = self._in_order[(bisect.bisect_right(self._starts, hash_key) or 1) - 1]
        key_queue.shard_queue = shard_queue
        if first:
            shard_queue.ready.appendleft(key_queue)
        else:
            shard_queue.ready.append(key_queue)
        self._ready[shard_queue] = None
        self.weigh(shard_queue, key_queue.weight)

    def next_key_queue(self, shard_queue: ShardQueue) -> KeyQueue:
        """Take the next key queue out of the queue of a shard queue that is not empty."""
        key_queue = shard_queue.ready.popleft()
        key_queue.shard_queue = None
        self.weigh(shard_queue, -key_queue.weight)
        if not shard_queue.ready:
            del self._ready[shard_queue]
        return key_queue

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


_BACKOFF_BASE_S: Final = 0.1
_PUT: Final = "PutRecords"


class PendingRecords:
    """Decides for one producer. `is_stale`: an answer named a shard that is not in the map.

    The rule of order: no request holds a record of a partition key while an earlier record of the
    key is not acknowledged. PutRecords continues after a record that it refuses. So a request holds
    at most one record of a key (or one aggregate of them), and no two requests under way share a
    key. A refused record holds back only its key. Records of one partition key with different
    explicit hash keys are one key here; if they go to different shards, "in order" means
    acknowledged in order.
    """

    def __init__(self, shards: Iterable[Shard], settings: ProducerSettings, flow: Flow) -> None:
        self._settings = settings
        self._flow = flow
        self._shard_queues = ShardQueues(shards, flow)
        self._is_chained = settings.keeps_order or settings.aggregates
        self._key_queues: dict[str, KeyQueue] = {}
        self._packer = Packer(settings)
        self._open_since = math.inf
        self._held_until = -math.inf
        self._failures = 0
        self._failing_since: float | None = None
        self.is_stale = False
        self.waiting_records = self.waiting_bytes = 0
        self._records = self._user_records = self._bytes = 0
        self._requests = self._full_requests = self._refused = self._failed_requests = 0

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full: add no record now."""
        return (
            self.waiting_records >= self._settings.buffer_records_max
            or self.waiting_bytes >= self._settings.buffer_bytes_max
        )

    def add(self, entry: PutEntry) -> None:
        """Accept one record. Raises: LimitExceeded for one that the service never accepts."""
        self.add_checked(entry, checked_size_bytes(entry, self._settings.record_bytes_max))

    def add_checked(self, entry: PutEntry, size_bytes: int) -> None:
        """As `add`, for a record of which `checked_size_bytes` gave the size."""
        weight = weight_of(size_bytes)
        key = entry.partition_key if self._is_chained else None
        key_queue = None if key is None else self._key_queues.get(key)
        is_new = key_queue is None
        if key_queue is None:
            key_queue = KeyQueue(key)
            if key is not None:
                self._key_queues[key] = key_queue
        key_queue.entries.append((entry, size_bytes))
        key_queue.weight += weight
        if is_new:
            self._shard_queues.queue(key_queue)
        elif key_queue.shard_queue is not None:
            self._shard_queues.weigh(key_queue.shard_queue, weight)
        self.waiting_records += 1
        self.waiting_bytes += size_bytes

    def take(self, now: float, *, hurried: bool = False) -> Request | None:
        """The next request; None if nothing waits, or if it should wait longer.

        A request is due when it is full or when a record has lingered; with `hurried`, at once.
        """
        self._shard_queues.wake(now)
        if self._shard_queues.open_weight == 0 or now < self._held_until:
            return None
        self._open_since = min(self._open_since, now)
        has_lingered = now - self._open_since >= self._settings.linger_s
        if not (hurried or has_lingered or self._shard_queues.open_weight >= FULL_WEIGHT):
            return None
        request = self._filled(now)
        self._open_since = math.inf
        return request

    def due_at(self, now: float, *, hurried: bool = False) -> float:
        """When `take` may return a request if nothing is added or answered; else infinity."""
        if self._shard_queues.open_weight == 0:
            due_at = self._shard_queues.wakes_at()
        elif hurried:
            due_at = now
        else:
            due_at = min(self._open_since, now) + self._settings.linger_s
        return max(due_at, self._held_until)

    def settle(self, request: Request, results: Sequence[PutResult], now: float) -> None:
        """Handle the answer, with a result for each record.

        Raises: Throttled or Unavailable once a shard has accepted nothing for `give_up_after_s`,
        InvalidRequest for a record refused for good.
        """
        self._requests += 1
        self._full_requests += request.is_full_speed
        self._failures, self._failing_since = 0, None
        codes: dict[ShardQueue, str] = {}
        taken: set[ShardQueue] = set()
        # From the last to the first, so that the refused records end up in front, in their order.
        for part, result in zip(reversed(request.parts), reversed(results), strict=True):
            if result.error_code is None:
                taken.add(part.shard_queue)
                self._acknowledge(part, result)
            else:
                codes[part.shard_queue] = result.error_code
                self._refused += 1
                self._shard_queues.queue(part.key_queue, first=True)
        for shard_queue in request.shard_queues:
            refused, took = shard_queue in codes, shard_queue in taken
            self._note_answer(shard_queue, request.sent_at, now, refused=refused, took=took)
        for shard_queue, code in codes.items():
            self._give_up_on(shard_queue, code, now)

    def fail(self, request: Request, error: errors.ServiceError, now: float, chance: float) -> None:
        """The request failed as a whole: all of it is sent again, after a pause for all shards.

        `error` is Throttled, Unavailable or OutcomeUnknown. It is raised again, with the number of
        waiting records, once no request has succeeded for `give_up_after_s`. `chance` is in [0, 1).
        """
        self.put_back(request)
        if self._failing_since is None:
            self._failing_since = request.sent_at
        if now - self._failing_since >= self._settings.give_up_after_s:
            raise type(error)(
                f"{_PUT} failed for {now - self._failing_since:.0f} s,"
                f" {self.waiting_records} records are not acknowledged; the last: {error}",
                operation=_PUT,
                code=error.code,
            )
        self._failures += 1
        self._held_until = now + backoff_s(self._failures, chance, base_s=_BACKOFF_BASE_S)

    def put_back(self, request: Request) -> None:
        """The request failed as a whole: its records are the first to be sent again."""
        self._failed_requests += 1
        for part in reversed(request.parts):
            self._shard_queues.queue(part.key_queue, first=True)
        for shard_queue in request.shard_queues:
            self._shard_queues.answered(shard_queue)

    def forget_failures(self) -> None:
        """Try for another `give_up_after_s`."""
        self._failures, self._failing_since, self._held_until = 0, None, -math.inf
        self._shard_queues.forget_failures()

    def remap(self, shards: Iterable[Shard]) -> None:
        """Continue with a new listing. Raises: SettingsError if no shard is open."""
        self._shard_queues.remap(shards)
        self.is_stale = False

    def metrics(self, now: float) -> ProducerMetrics:
        return ProducerMetrics(
            records=self._records,
            user_records=self._user_records,
            bytes=self._bytes,
            requests=self._requests,
            full_requests=self._full_requests,
            refused_records=self._refused,
            failed_requests=self._failed_requests,
            waiting_records=self.waiting_records,
            waiting_bytes=self.waiting_bytes,
            shards=self._flow.metrics(now),
        )

    def _filled(self, now: float) -> Request:
        """Some records of every shard that may be sent to, then the remaining room in turn."""
        request = Request(now, self._settings.request_bytes_max)
        shard_queues = self._shard_queues.open()
        for shard_queue in shard_queues:
            shard_queue.flow.rest(now)
        for share in (max(1, PUT_RECORDS_MAX // len(shard_queues)), PUT_RECORDS_MAX):
            if not all(self._fill(request, shard_queue, share) for shard_queue in shard_queues):
                break
        for shard_queue in request.shard_queues:
            self._shard_queues.sent(shard_queue)
            self._shard_queues.end_turn(shard_queue)
        return request

    def _fill(self, request: Request, shard_queue: ShardQueue, share: int) -> bool:
        """Add records of the shard queue, up to `share` in total and within its flow control;
        whether the request still has room."""
        allowed = min(share, shard_queue.flow.batch_records)
        before = request.shard_queues.get(shard_queue, 0)
        count = 0
        has_room = True
        while shard_queue.ready and before + count < allowed:
            entry, size_bytes, held = self._packer.next_record(shard_queue.ready[0])
            has_room = request.has_room(size_bytes)
            if not has_room:
                break
            key_queue = self._shard_queues.next_key_queue(shard_queue)
            request.take(Part(entry, size_bytes, key_queue, held, shard_queue))
            count += 1
        if count:
            request.shard_queues[shard_queue] = before + count
            request.is_full_speed = request.is_full_speed and shard_queue.flow.is_off
        return has_room

    def _acknowledge(self, part: Part, result: PutResult) -> None:
        key_queue = part.key_queue
        for _ in range(part.held):
            entry, size_bytes = key_queue.entries.popleft()
            key_queue.weight -= weight_of(size_bytes)
            self.waiting_records -= 1
            self.waiting_bytes -= size_bytes
            self._user_records += entry.user_records
        self._records += 1
        self._bytes += part.size_bytes
        if result.shard_id is not None and result.shard_id != part.shard_queue.shard_id:
            self.is_stale = True
        if key_queue.entries:
            self._shard_queues.queue(key_queue)
        elif key_queue.key is not None:
            del self._key_queues[key_queue.key]

    def _note_answer(
        self, shard_queue: ShardQueue, sent_at: float, now: float, *, refused: bool, took: bool
    ) -> None:
        if refused:
            shard_queue.flow.refused(sent_at, now)
        else:
            shard_queue.flow.accepted(sent_at, now)
        if took:
            shard_queue.fruitless_since = None
        elif shard_queue.fruitless_since is None:
            shard_queue.fruitless_since = sent_at
        self._shard_queues.answered(shard_queue)

    def _give_up_on(self, shard_queue: ShardQueue, code: str, now: float) -> None:
        """Raise if sending to this shard again is useless."""
        retry = classify(code, 200, is_write=True, was_sent=True)
        if retry is Retry.GIVE_UP:
            raise errors.InvalidRequest(
                f"{_PUT}: a record for {shard_queue.shard_id} was refused with {code[:100]}",
                operation=_PUT,
                code=code,
            )
        since = shard_queue.fruitless_since
        if since is None or now - since < self._settings.give_up_after_s:
            return
        leaf = errors.Throttled if retry is Retry.AGAIN_SLOWER else errors.Unavailable
        raise leaf(
            f"{_PUT}: {shard_queue.shard_id} took no record for {now - since:.0f} s ({code});"
            f" {self.waiting_records} records are not acknowledged."
            " Add shards, or send it less",
            operation=_PUT,
            code=code,
        )
