"""Measures the lag of a position in a shard by one or two reads of the stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

import msgspec

from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.config.units import StartPosition
from kclrun.consuming.policy import first_start
from kclrun.errors import (
    InvalidRequest,
    NotFound,
    RecordError,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model.lease import Lease
from kclrun.model.reading import FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard, ShardGraph
from kclrun.model.stream import called, shard_id_of
from kclrun.model.time import WallTime, backoff_s
from kclrun.ports import ShardReader, next_page, open_iterator


class Unleased(msgspec.Struct, frozen=True):
    """An unread shard without a lease: its start point (None: its tip), and the reason."""

    shard_id: str
    start: StartPoint | None
    note: str


def unleased(
    shards: Iterable[Shard], leases: Mapping[str, Lease], first: StartPosition
) -> tuple[Unleased, ...]:
    """The listed shards without a lease that were not read.

    A shard with a descendant that has a lease was read: its own row was cleaned up [P13]. In a
    table with rows, a new lease begins at the beginning of its shard. In an empty table it begins
    at `start:` (`first`).
    """
    graph = ShardGraph(shards)
    has_begun = bool(leases)
    is_read: dict[str, bool] = {}

    def was_read(shard_id: str) -> bool:
        # Shard ids increase from parents to children, so the recursion is as deep as the number of
        # the shard's reshards.
        if shard_id not in is_read:
            is_read[shard_id] = any(
                child in leases or was_read(child) for child in graph.children_of(shard_id)
            )
        return is_read[shard_id]

    return tuple(
        Unleased(
            shard.shard_id,
            StartPoint(IteratorType.TRIM_HORIZON) if has_begun else _first_start(first),
            _why(graph, shard.shard_id, leases) if has_begun else "not begun: there is no lease",
        )
        for shard in graph
        if shard.shard_id not in leases and not was_read(shard.shard_id)
    )


def waiting_for(lease: Lease, leases: Mapping[str, Lease]) -> tuple[str, ...]:
    """The parents that must end before this lease may be read."""
    return tuple(
        parent
        for parent in sorted(lease.parents)
        if parent in leases and not leases[parent].is_ended
    )


def _why(graph: ShardGraph, shard_id: str, leases: Mapping[str, Lease]) -> str:
    parents = [parent for parent in graph.parents_of(shard_id) if parent in leases]
    if any(not leases[parent].is_ended for parent in parents):
        return f"no lease yet: it is made when {' and '.join(map(called, parents))} ended"
    return "no lease: a running manager makes one within a few cycles"


def _first_start(first: StartPosition) -> StartPoint | None:
    if first.sentinel == LATEST:
        return None
    if first.sentinel == TRIM_HORIZON:
        return StartPoint(IteratorType.TRIM_HORIZON)
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=first.at)


T = TypeVar("T")

# The record of the checkpoint, which may be an aggregate with later user records, and the next one.
_RECORDS_A_CALL: Final = 2
# Before the tip a page may be empty. A few empty pages are skipped, slowly: the application needs
# its part of the five reads a second.
_PAGES_MAX: Final = 5
_PAGE_PAUSE_S: Final = 0.25
# The application's reader and ours sometimes exceed the limit together. Three attempts with
# doubling pauses take half a second, five attempts three seconds.
_ATTEMPTS_MAX: Final = 5
# The Date of an answer has whole seconds, and the answer takes time. Within this difference two
# clocks count as equal.
_CLOCKS_AGREE_S: Final = 1.5


class Lag(msgspec.Struct, frozen=True):
    """The lag of a position. `behind_s` None is "unknown", and `note` has the reason.

    The lag is the age of the oldest record above the checkpoint, by the service's clock. A reader
    of the results waits for this record, and retention will trim it. Only the checkpoint is known
    here, so an application that is up to date has a lag of up to `checkpoint.every`.

    `oldest_at` is the arrival of the oldest record above the position, None if it does not exist or
    was not found; `is_trimmed`: records above the position may be trimmed already.
    """

    behind_s: float | None
    oldest_at: WallTime | None = None
    is_trimmed: bool = False
    note: str = ""


def lag_of_lease(lease: Lease, start_at: WallTime | None, reader: ShardReader) -> Lag:
    """The lag of a lease's checkpoint; `start_at` is `start:` if it is an instant."""
    if lease.checkpoint == LATEST and lease.latest_pinned_at is None:
        return Lag(None, note="not begun: it is to begin at the tip of that moment")
    try:
        start = first_start(lease, start_at, WallTime(time.time()))
    except SettingsError as error:
        return Lag(None, note=str(error))
    return measure(reader, shard_id_of(lease.key), start, lease.checkpoint)


def measure(
    reader: ShardReader, shard: str, start: StartPoint, position: ExtendedSequenceNumber
) -> Lag:
    """The lag of the records above `position`, read from `start`.

    Raises: AccessDenied; any other failure is a Lag with its reason.
    """
    try:
        return _measured(reader, shard, start, position)
    except NotFound:
        return Lag(None, is_trimmed=True, note="the stream has no such shard any more")
    except (Throttled, Unavailable, InvalidRequest, RecordError) as error:
        return Lag(None, note=f"not known: {error}".split("\n", 1)[0])


def _measured(
    reader: ShardReader, shard: str, start: StartPoint, position: ExtendedSequenceNumber
) -> Lag:
    cursor = PageCursor(start)
    cursor.opened(_patiently(partial(open_iterator, reader, shard, start)))
    is_trimmed = False
    page: FetchedPage | None = None
    for number in range(_PAGES_MAX):
        if number:
            time.sleep(_PAGE_PAUSE_S)
        page = _patiently(partial(next_page, reader, shard, cursor, _RECORDS_A_CALL))
        if page.records and not is_trimmed:
            is_trimmed = _lacks(page.records[0], start, position)
        unread = drop_until(open_aggregates(page.records), position)
        if unread:
            return _behind(unread[0], page, is_trimmed=is_trimmed)
        if page.is_empty_tip or page.next_iterator is None:
            break
    assert page is not None, "at least one page is read"
    behind_ms = 0 if page.next_iterator is None else page.millis_behind_latest
    note = "no record found so near; what the service says" if behind_ms else ""
    return Lag((behind_ms or 0) / 1000, is_trimmed=is_trimmed, note=note)


def _lacks(first: Record, start: StartPoint, position: ExtendedSequenceNumber) -> bool:
    """Whether the record of the checkpoint is missing at its position: retention has trimmed it."""
    is_there = start.kind is IteratorType.AT_SEQUENCE_NUMBER
    return is_there and first.sequence_number != position.sequence_number


def _behind(oldest: Record, page: FetchedPage, *, is_trimmed: bool) -> Lag:
    oldest_at = WallTime(oldest.approximate_arrival_timestamp)
    behind_s = max(0.0, _service_now(page.served_at) - oldest_at)
    note = "the checkpoint's record is past retention: records may be lost" if is_trimmed else ""
    return Lag(behind_s, oldest_at, is_trimmed=is_trimmed, note=note)


def _service_now(served_at: WallTime | None) -> float:
    """Now by the service's clock, or by the host's if they agree, because the host's is finer."""
    now = time.time()
    return now if served_at is None or abs(now - served_at) <= _CLOCKS_AGREE_S else served_at


def _patiently(call: Callable[[], T]) -> T:
    """The value of `call`, repeated a few times while it is throttled or AWS is unavailable."""
    for attempt in range(1, _ATTEMPTS_MAX):
        try:
            return call()
        except (Throttled, Unavailable):
            # There are no other callers to spread apart: half of the jitter is sufficient.
            time.sleep(backoff_s(attempt, 0.5, base_s=0.2))
    return call()
