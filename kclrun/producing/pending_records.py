"""The decisions of one producer: which records are in its next request, and what an answer means.

Pure: time and chance are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kclrun import errors
from kclrun.codec.record_sizes import checked_size_bytes
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.shard import Shard
from kclrun.model.time import backoff_s
from kclrun.ports import Retry, classify
from kclrun.producing.aggregate_queues import AggregateQueues
from kclrun.producing.backlog import Backlog
from kclrun.producing.flow_control import Flow, ProducerMetrics, ProducerSettings
from kclrun.producing.packing import Packer, Part, Request
from kclrun.producing.shard_queues import (
    KeyQueues,
    Receipt,
    ShardQueue,
    ShardQueues,
    Waiting,
    hash_key_of,
)

_BACKOFF_BASE_S: Final = 0.1
_PUT: Final = "PutRecords"
# A listing shows a new shard after some seconds. After so many listings without the shard that an
# answer named, that shard has expired, or never was: its records are sent again.
_LISTINGS_MAX: Final = 5
# A minute without any listing, at one a second: the trouble does not pass by itself.
_FAILED_LISTINGS_MAX: Final = 60


class _Misplaced(NamedTuple):
    """An aggregate that is in another shard than the listing says. Its records stay under way until
    a listing says which of them belong there."""

    part: Part
    shard_id: str
    sequence_number: str
    listings: int = 0
    failed_listings: int = 0


class PendingRecords:
    """Decides for one producer. `is_stale`: an answer named a shard that is not in the map.

    The rule of order: no request holds a record of a queue (`shard_queues.py`) while an earlier one
    of it is not acknowledged. PutRecords continues after a record that it refuses. So a request
    holds at most one record or aggregate of a queue, and no two requests under way share a queue.
    Single records have a queue for each partition key: a refused one holds back only its key.
    Records of one partition key with different explicit hash keys are one key; if they go to
    different shards, "in order" means acknowledged in order. Aggregates have one for each shard.

    `backlog` has the records, and what became of those with a receipt. With `fails_alone` in the
    settings a record that was not sent until its deadline, or that is refused for good, fails by
    itself; otherwise no record ever leaves without being in the stream, and the producer raises.
    """

    def __init__(self, shards: Iterable[Shard], settings: ProducerSettings, flow: Flow) -> None:
        self._settings = settings
        self._flow = flow
        self._shard_queues: ShardQueues = (
            AggregateQueues(shards, flow)
            if settings.aggregates
            else KeyQueues(shards, flow, keeps_order=settings.keeps_order)
        )
        self.backlog = Backlog(settings)
        self._packer = Packer(settings)
        self._misplaced: list[_Misplaced] = []
        self._open_since = math.inf
        self._held_until = -math.inf
        self._failures = 0
        self._failing_since: float | None = None
        self._last_failure: errors.ServiceError | None = None
        self.is_stale = False
        self._records = self._bytes = 0
        self._requests = self._full_requests = self._refused = self._failed_requests = 0

    def add(self, entry: PutEntry) -> None:
        """Accept one record. Raises: LimitExceeded for one that the service never accepts."""
        self.add_checked(entry, checked_size_bytes(entry, self._settings.record_bytes_max))

    @property
    def waits_for_listing(self) -> bool:
        """Whether acknowledged records wait for a new listing of the shards."""
        return bool(self._misplaced)

    def add_checked(self, entry: PutEntry, size_bytes: int, receipt: Receipt | None = None) -> bool:
        """As `add`, for a record of which `checked_size_bytes` gave the size. Returns whether a
        request is full now."""
        backlog = self.backlog
        backlog.records += 1
        backlog.bytes += size_bytes
        return self._shard_queues.add(entry, size_bytes, receipt)

    def take(self, now: float, *, hurried: bool = False) -> Request | None:
        """The next request; None if nothing waits, or if it should wait longer.

        A request is due when it is full or when a record has lingered; with `hurried`, at once.
        """
        self._shard_queues.wake(now)
        if self._shard_queues.open_weight == 0 or now < self._held_until:
            return None
        self._open_since = min(self._open_since, now)
        has_lingered = now - self._open_since >= self._settings.linger_s
        if not (hurried or has_lingered or self._shard_queues.is_full_request):
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

        Raises, without `fails_alone`: Throttled or Unavailable once a shard has accepted nothing
        for `give_up_after_s`, InvalidRequest for a record refused for good.
        """
        self._requests += 1
        self._full_requests += request.is_full_speed
        self._failures, self._failing_since, self._last_failure = 0, None, None
        codes: dict[ShardQueue, str] = {}
        taken: set[ShardQueue] = set()
        # From the last to the first, so that the refused records end up in front, in their order.
        for part, result in zip(reversed(request.parts), reversed(results), strict=True):
            if result.error_code is None:
                taken.add(part.shard_queue)
                self._acknowledge(part, result)
            else:
                codes[part.shard_queue] = part.shard_queue.last_code = result.error_code
                self._refused += 1
                self._put_part_back(part, result.error_code)
        for shard_queue in request.shard_queues:
            refused, took = shard_queue in codes, shard_queue in taken
            self._note_answer(shard_queue, request.sent_at, now, refused=refused, took=took)
        if not self._settings.fails_alone:
            for shard_queue, code in codes.items():
                self._give_up_on(shard_queue, code, now)

    def fail(self, request: Request, error: errors.ServiceError, now: float, chance: float) -> None:
        """The request failed as a whole: all of it is sent again, after a pause for all shards.

        `error` is Throttled, Unavailable or OutcomeUnknown. It is raised again, with the number of
        waiting records, once no request has succeeded for `give_up_after_s`. `chance` is in [0, 1).
        """
        self.put_back(request)
        self._last_failure = error
        if self._failing_since is None:
            self._failing_since = request.sent_at
        is_over = now - self._failing_since >= self._settings.give_up_after_s
        if is_over and not self._settings.fails_alone:
            raise type(error)(
                f"{_PUT} failed for {now - self._failing_since:.0f} s,"
                f" {self.backlog.records} records are not acknowledged; the last: {error}",
                operation=_PUT,
                code=error.code,
            )
        self._failures += 1
        self._held_until = now + backoff_s(self._failures, chance, base_s=_BACKOFF_BASE_S)

    def put_back(self, request: Request) -> None:
        """The request failed as a whole: its records are the first to be sent again."""
        self._failed_requests += 1
        for part in reversed(request.parts):
            self._put_part_back(part)
        for shard_queue in request.shard_queues:
            self._shard_queues.answered(shard_queue)

    def drop(self, request: Request, error: errors.KclrunError) -> None:
        """The request failed for good: its records fail, each with this error."""
        self._failed_requests += 1
        for part in request.parts:
            self._fail_part(part, error)
        for shard_queue in request.shard_queues:
            self._shard_queues.answered(shard_queue)

    def expire(self, now: float) -> None:
        """Records that were not sent until their deadline fail, with the reason."""
        for record, shard_queue in self._shard_queues.take_expired(now):
            why = _why_late(shard_queue, self._last_failure, self.backlog.records)
            self.backlog.fail([record], why)

    def fail_all(self, error: errors.KclrunError) -> None:
        """Every record is given up."""
        for queue in self._shard_queues.everything():
            self.backlog.fail(queue.pop(len(queue.entries)), error)

    def forget_failures(self) -> None:
        """Try for another `give_up_after_s`."""
        self._failures, self._failing_since, self._held_until = 0, None, -math.inf
        self._shard_queues.forget_failures()

    def remap(self, shards: Iterable[Shard]) -> None:
        """Continue with a new listing. Raises: SettingsError if no shard is open."""
        self._shard_queues.remap(shards)
        self.is_stale = False
        misplaced, self._misplaced = self._misplaced, []
        for aggregate in misplaced:
            self._place(aggregate._replace(listings=aggregate.listings + 1))

    def listing_failed(self) -> None:
        """The shards could not be listed: records that wait for it are sent again in the end."""
        misplaced, self._misplaced = self._misplaced, []
        for aggregate in misplaced:
            self._place(aggregate._replace(failed_listings=aggregate.failed_listings + 1))

    def metrics(self, now: float) -> ProducerMetrics:
        return ProducerMetrics(
            records=self._records,
            user_records=self.backlog.delivered,
            bytes=self._bytes,
            requests=self._requests,
            full_requests=self._full_requests,
            refused_records=self._refused,
            failed_requests=self._failed_requests,
            waiting_records=self.backlog.records,
            waiting_bytes=self.backlog.bytes,
            failed_records=self.backlog.failed,
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
        count = size_bytes = 0
        has_room = True
        while shard_queue.ready and before + count < allowed:
            part = self._packer.next_record(shard_queue)
            has_room = request.has_room(part.size_bytes)
            if not has_room:
                break
            self._shard_queues.take(shard_queue)
            request.take(part)
            count += 1
            size_bytes += part.size_bytes
        if count:
            shard_queue.flow.sending(count, size_bytes, request.sent_at)
            request.shard_queues[shard_queue] = before + count
            request.is_full_speed = request.is_full_speed and not shard_queue.flow.is_slow
        return has_room

    def _acknowledge(self, part: Part, result: PutResult) -> None:
        shard_id, number = result.shard_id or "", result.sequence_number or ""
        self._records += 1
        self._bytes += part.size_bytes
        if shard_id and shard_id != part.shard_queue.shard_id:
            self.is_stale = True
            if part.is_of_several_hash_keys:
                self._misplaced.append(_Misplaced(part, shard_id, number))
                return
        records = part.queue.pop(part.held)
        self.backlog.deliver(records, shard_id, number, 0 if part.is_aggregate else None)
        self._shard_queues.settled(part.queue)

    def _place(self, aggregate: _Misplaced) -> None:
        """By a new listing: the records that belong to the aggregate's shard are there, the others
        are sent again."""
        part, shard_id, number, listings, failed_listings = aggregate
        hash_range = self._shard_queues.range_of(shard_id)
        may_be_listed = listings < _LISTINGS_MAX and failed_listings < _FAILED_LISTINGS_MAX
        if hash_range is None and may_be_listed:
            self._misplaced.append(aggregate)
            self.is_stale = True
            return
        again: list[Waiting] = []
        for index, record in enumerate(part.queue.pop(part.held)):
            if hash_range is not None and hash_key_of(record.entry) in hash_range:
                self.backlog.deliver([record], shard_id, number, index)
            else:
                again.append(record)
        self._refused += len(again)
        part.queue.put_first(again)
        self._shard_queues.settled(part.queue, first=True)

    def _put_part_back(self, part: Part, code: str = "") -> None:
        """To the front; or it fails, if it is refused for good and fails alone."""
        if code and self._settings.fails_alone and _is_for_good(code):
            where = f"a record for {part.shard_queue.shard_id}"
            self._fail_part(part, _refused_for_good(where, code))
            return
        self._shard_queues.settled(part.queue, first=True)

    def _fail_part(self, part: Part, error: errors.KclrunError) -> None:
        self.backlog.fail(part.queue.pop(part.held), error)
        self._shard_queues.settled(part.queue)

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
        if _is_for_good(code):
            raise _refused_for_good(f"a record for {shard_queue.shard_id}", code)
        since = shard_queue.fruitless_since
        if since is None or now - since < self._settings.give_up_after_s:
            return
        leaf = errors.Throttled if _is_throttling(code) else errors.Unavailable
        raise leaf(
            f"{_PUT}: {shard_queue.shard_id} took no record for {now - since:.0f} s ({code});"
            f" {self.backlog.records} records are not acknowledged."
            " Add shards, or send it less",
            operation=_PUT,
            code=code,
        )


def _is_for_good(code: str) -> bool:
    return classify(code, 200, is_write=True, was_sent=True) is Retry.GIVE_UP


def _is_throttling(code: str) -> bool:
    return classify(code, 200, is_write=True, was_sent=True) is Retry.AGAIN_SLOWER


def _refused_for_good(what: str, code: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"{_PUT}: {what} was refused with {code[:100]}", operation=_PUT, code=code
    )


def _why_late(
    shard_queue: ShardQueue, failure: errors.ServiceError | None, waiting: int
) -> errors.ServiceError:
    """Why a record of this shard was not sent in time."""
    if shard_queue.last_code:
        leaf = errors.Throttled if _is_throttling(shard_queue.last_code) else errors.Unavailable
        return leaf(
            f"{_PUT}: {shard_queue.shard_id} did not take the record in time"
            f" ({shard_queue.last_code}). Add shards, or send it less",
            operation=_PUT,
            code=shard_queue.last_code,
        )
    if failure is not None:
        return failure.reworded(f"{_PUT}: the record was not sent in time; the last: {failure}")
    return errors.Unavailable(
        f"{_PUT}: the record was not sent in time: {waiting} others wait, and this"
        " machine or its network does not send them fast enough",
        operation=_PUT,
    )
