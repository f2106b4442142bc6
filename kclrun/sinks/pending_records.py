"""What a producer holds, and which records make up its next request.

The rule of order: of one partition key no request holds a record while an earlier one is not
acknowledged. PutRecords goes on after a record it refuses, so a request holds one record of a key
(or one aggregate of them) at most, and no two requests under way share a key. A refused record so
holds back its key and nothing else. Records of one partition key with different explicit hash
keys are one key here; where they go to different shards, "in order" means acknowledged in order.

Pure: time and chance are arguments. Look next: `lanes.py`, `flow_control.py`, `put_request.py`;
the shell is `kinesis_producer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from kclrun.errors import InvalidRequest, ServiceError, Throttled, Unavailable
from kclrun.model.backoff import backoff_s
from kclrun.model.outgoing import PutEntry, PutResult
from kclrun.model.shard import Shard
from kclrun.ports import Retry, classify
from kclrun.sinks.flow_control import BATCH_RECORDS_MAX, Flow
from kclrun.sinks.lanes import FULL_WEIGHT, Chain, Lane, Lanes, weight_of
from kclrun.sinks.producing import ProducerMetrics, ProducerSettings
from kclrun.sinks.put_request import Packer, Part, Request, checked_size_bytes

__all__ = ["PendingRecords"]

_BACKOFF_BASE_S: Final = 0.1
_PUT: Final = "PutRecords"


class PendingRecords:
    """Decides for one producer. `is_stale`: an answer named a shard that is not in the map."""

    def __init__(self, shards: Iterable[Shard], settings: ProducerSettings, flow: Flow) -> None:
        self._settings = settings
        self._flow = flow
        self._lanes = Lanes(shards, flow)
        self._is_chained = settings.keeps_order or settings.aggregates
        self._chains: dict[str, Chain] = {}
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
        """Whether no more should be added now."""
        return (
            self.waiting_records >= self._settings.buffer_records_max
            or self.waiting_bytes >= self._settings.buffer_bytes_max
        )

    def add(self, entry: PutEntry) -> None:
        """Take one record. Raises: LimitExceeded for one that the service never takes."""
        size_bytes = checked_size_bytes(entry, self._settings.record_bytes_max)
        weight = weight_of(size_bytes)
        key = entry.partition_key if self._is_chained else None
        chain = None if key is None else self._chains.get(key)
        if chain is None:
            chain = Chain(key)
            chain.entries.append((entry, size_bytes))
            chain.weight = weight
            if key is not None:
                self._chains[key] = chain
            self._lanes.queue(chain)
        else:
            chain.entries.append((entry, size_bytes))
            chain.weight += weight
            if chain.lane is not None:
                self._lanes.weigh(chain.lane, weight)
        self.waiting_records += 1
        self.waiting_bytes += size_bytes

    def take(self, now: float, *, hurried: bool = False) -> Request | None:
        """The next request, or None while there is nothing to send or reason to wait.

        One is due when it is full, when something has lingered, or, `hurried`, at once.
        """
        self._lanes.wake(now)
        if self._lanes.open_weight == 0 or now < self._held_until:
            return None
        self._open_since = min(self._open_since, now)
        has_lingered = now - self._open_since >= self._settings.linger_s
        if not (hurried or has_lingered or self._lanes.open_weight >= FULL_WEIGHT):
            return None
        request = self._filled(now)
        self._open_since = math.inf
        return request

    def due_at(self, now: float, *, hurried: bool = False) -> float:
        """When `take` may have something if nothing is added or answered; else infinity."""
        if self._lanes.open_weight == 0:
            due_at = self._lanes.wakes_at()
        elif hurried:
            due_at = now
        else:
            due_at = min(self._open_since, now) + self._settings.linger_s
        return max(due_at, self._held_until)

    def settle(self, request: Request, results: Sequence[PutResult], now: float) -> None:
        """Take in the answer, a result for each record.

        Raises: Throttled or Unavailable once a shard has taken nothing for `give_up_after_s`,
        InvalidRequest for a record refused for good.
        """
        self._requests += 1
        self._full_requests += request.is_full_speed
        self._failures, self._failing_since = 0, None
        codes: dict[Lane, str] = {}
        taken: set[Lane] = set()
        # From the last to the first, so that the refused end up in front in their order.
        for part, result in zip(reversed(request.parts), reversed(results), strict=True):
            if result.error_code is None:
                taken.add(part.lane)
                self._acknowledge(part, result)
            else:
                codes[part.lane] = result.error_code
                self._refused += 1
                self._lanes.queue(part.chain, first=True)
        for lane in request.lanes:
            self._hear(lane, request.sent_at, now, refused=lane in codes, took=lane in taken)
        for lane, code in codes.items():
            self._give_up_on(lane, code, now)

    def fail(self, request: Request, error: ServiceError, now: float, chance: float) -> None:
        """The request failed as a whole: all of it is sent again, after a pause for all shards.

        `error` is Throttled, Unavailable or OutcomeUnknown; raised again, with what waits, once
        nothing has succeeded for `give_up_after_s`. `chance` is in [0, 1).
        """
        self._failed_requests += 1
        for part in reversed(request.parts):
            self._lanes.queue(part.chain, first=True)
        for lane in request.lanes:
            self._lanes.answered(lane)
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

    def remap(self, shards: Iterable[Shard]) -> None:
        """Go on with a new listing. Raises: SettingsError if no shard is open."""
        self._lanes.remap(shards)
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
        """Something of every shard that may be sent to, then what room is left in turn."""
        request = Request(now, self._settings.request_bytes_max)
        lanes = self._lanes.open()
        for lane in lanes:
            lane.flow.rest(now)
        share = max(1, BATCH_RECORDS_MAX // len(lanes))
        has_room = all(self._fill(request, lane, share) for lane in lanes)
        if has_room:
            for lane in lanes:
                if not self._fill(request, lane, BATCH_RECORDS_MAX):
                    break
        for lane in request.lanes:
            self._lanes.sent(lane)
            self._lanes.end_turn(lane)
        return request

    def _fill(self, request: Request, lane: Lane, share: int) -> bool:
        """Add what the lane has and may, up to `share` in all; whether the request has room."""
        allowed = min(share, lane.flow.batch_records)
        before = request.lanes.get(lane, 0)
        count = 0
        has_room = True
        while lane.ready and before + count < allowed:
            entry, size_bytes, held = self._packer.next_record(lane.ready[0])
            has_room = request.has_room(size_bytes)
            if not has_room:
                break
            request.take(Part(entry, size_bytes, self._lanes.next_chain(lane), held, lane))
            count += 1
        if count:
            request.lanes[lane] = before + count
            request.is_full_speed = request.is_full_speed and lane.flow.is_off
        return has_room

    def _acknowledge(self, part: Part, result: PutResult) -> None:
        chain = part.chain
        for _ in range(part.held):
            entry, size_bytes = chain.entries.popleft()
            chain.weight -= weight_of(size_bytes)
            self.waiting_records -= 1
            self.waiting_bytes -= size_bytes
            self._user_records += entry.user_records
        self._records += 1
        self._bytes += part.size_bytes
        if result.shard_id is not None and result.shard_id != part.lane.shard_id:
            self.is_stale = True
        if chain.entries:
            self._lanes.queue(chain)
        elif chain.key is not None:
            del self._chains[chain.key]

    def _hear(self, lane: Lane, sent_at: float, now: float, *, refused: bool, took: bool) -> None:
        if refused:
            lane.flow.refused(sent_at, now)
        else:
            lane.flow.accepted(sent_at, now)
        if took:
            lane.fruitless_since = None
        elif lane.fruitless_since is None:
            lane.fruitless_since = sent_at
        self._lanes.answered(lane)

    def _give_up_on(self, lane: Lane, code: str, now: float) -> None:
        """Raise if there is no sense in sending to this shard again."""
        retry = classify(code, 200, is_write=True, was_sent=True)
        if retry is Retry.GIVE_UP:
            raise InvalidRequest(
                f"{_PUT}: a record for {lane.shard_id} was refused with {code[:100]}",
                operation=_PUT,
                code=code,
            )
        fruitless_s = 0.0 if lane.fruitless_since is None else now - lane.fruitless_since
        if fruitless_s < self._settings.give_up_after_s:
            return
        leaf = Throttled if retry is Retry.AGAIN_SLOWER else Unavailable
        raise leaf(
            f"{_PUT}: {lane.shard_id} took no record for {fruitless_s:.0f} s ({code});"
            f" {self.waiting_records} records are not acknowledged."
            " Add shards, or send it less",
            operation=_PUT,
            code=code,
        )
