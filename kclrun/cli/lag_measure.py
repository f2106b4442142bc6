"""How far one position of a shard is behind: asked of the stream itself, a read or two.

The lag is the age of the oldest record above the checkpoint, by the service's clock: what a
reader of the results waits for, and what retention will take away. An application that is up to
date shows up to `checkpoint.every` of it, since only a checkpoint is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.consuming.start_point import first_start
from kclrun.errors import (
    InvalidRequest,
    NotFound,
    RecordError,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model.backoff import backoff_s
from kclrun.model.lease import Lease
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.model.record import Record
from kclrun.model.sequence import LATEST, ExtendedSequenceNumber
from kclrun.model.stream_key import shard_id_of
from kclrun.model.time import WallTime
from kclrun.ports import FetchedPage, ShardReader

__all__ = ["Lag", "lag_of_lease", "measure"]

T = TypeVar("T")

# The checkpoint's own record, which may be an aggregate with more in it, and the one after it.
_RECORDS_A_CALL: Final = 2
# Behind the tip a page may be empty: gaps are stepped over, within reason and the pace of five
# reads a second that the application shares.
_PAGES_MAX: Final = 5
_PAGE_PAUSE_S: Final = 0.25
# A reader of its own and ours meet at the limit now and then: three tries at doubling pauses
# take half a second, five three seconds.
_ATTEMPTS_MAX: Final = 5
# An answer's date has whole seconds, and its way takes time: this far apart clocks agree.
_CLOCKS_AGREE_S: Final = 1.5


class Lag(msgspec.Struct, frozen=True):
    """What was found. `behind_s` None is "not known", and `note` says why.

    `oldest_at` is the arrival of the oldest record above the position, None where there is none or
    it was not found; `is_trimmed`: records above the position may be gone already.
    """

    behind_s: float | None
    oldest_at: WallTime | None = None
    is_trimmed: bool = False
    note: str = ""


def lag_of_lease(lease: Lease, start_at: WallTime | None, reader: ShardReader) -> Lag:
    """The lag of a lease's checkpoint; `start_at` is the instant of `start:`, if it is one."""
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
    """The lag of what is above `position`, read from `start`.

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
    iterator: str | None = _patiently(
        lambda: reader.iterator(
            shard, start.kind, sequence_number=start.sequence_number, timestamp=start.timestamp
        )
    )
    is_trimmed = False
    page: FetchedPage | None = None
    for number in range(_PAGES_MAX):
        if iterator is None:
            break
        if number:
            time.sleep(_PAGE_PAUSE_S)
        page = _patiently(partial(reader.fetch, iterator, _RECORDS_A_CALL))
        if page.records and not is_trimmed:
            is_trimmed = _lacks(page.records[0], start, position)
        unread = drop_until(open_aggregates(page.records), position)
        if unread:
            return _behind(unread[0], page, is_trimmed=is_trimmed)
        if not page.records and not page.millis_behind_latest:
            break
        iterator = page.next_iterator
    behind_ms = page.millis_behind_latest if page is not None and iterator is not None else 0
    note = "no record found so near; what the service says" if behind_ms else ""
    return Lag((behind_ms or 0) / 1000, is_trimmed=is_trimmed, note=note)


def _lacks(first: Record, start: StartPoint, position: ExtendedSequenceNumber) -> bool:
    """The checkpoint's own record is not where reading there begins: retention has taken it."""
    is_there = start.kind is IteratorType.AT_SEQUENCE_NUMBER
    return is_there and first.sequence_number != position.sequence_number


def _behind(oldest: Record, page: FetchedPage, *, is_trimmed: bool) -> Lag:
    oldest_at = WallTime(oldest.approximate_arrival_timestamp)
    behind_s = max(0.0, _service_now(page.served_at) - oldest_at)
    note = "the checkpoint's record is past retention: records may be lost" if is_trimmed else ""
    return Lag(behind_s, oldest_at, is_trimmed=is_trimmed, note=note)


def _service_now(served_at: WallTime | None) -> float:
    """Now by the service's clock; by the host's, which is finer, where the two agree."""
    now = time.time()
    return now if served_at is None or abs(now - served_at) <= _CLOCKS_AGREE_S else served_at


def _patiently(call: Callable[[], T]) -> T:
    """What `call` returns, asked again a few times while the service is throttled or away."""
    for attempt in range(1, _ATTEMPTS_MAX):
        try:
            return call()
        except (Throttled, Unavailable):
            # No crowd to keep out of step with: half of the jitter is as good as any.
            time.sleep(backoff_s(attempt, 0.5, base_s=0.2))
    return call()
