"""One shard's search for the bound of a batch: the next page to read, and its meaning [A3, A8].

A generator yields each read and is sent its page. So a search whose budget is spent goes on in a
later tick. Every bound is at a record that GetRecords returned, or at the end of the shard.
Timestamps only find records. Away from the tip, bounds are exclusive. Pure.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import msgspec

from kclrun.model.record import Record
from kclrun.spark.planning import shard_cursor
from kclrun.spark.positions import SHARD_END, after, at_timestamp, before

# Where no time leads to the bound: pages of the size that a batch may inline of a shard by default.
_PAGE_BYTES: Final = 512 * 1024
# The same at the tip, where no row may be inlined: the page is read twice, which takes 1.3 s of the
# bytes that a shard may waste (`_WASTED_BYTES_PER_SECOND`).
_STEP_BYTES_MIN: Final = 256 * 1024
# Records differ in size: a page that must fit is requested with an eighth to spare.
_STEP_SHARE: Final = 7 / 8
# Halving a window of a day ten times leaves 84 s of records, which reading reaches.
_PROBES_MAX: Final = 10


class BatchTarget(msgspec.Struct, frozen=True):
    """The target of all shards together: the first record at or after `until_ms`, or the tip.

    `only_heads` asks for only the first record after each position; `takes_all` accepts no bound
    short of the tip. `page_bytes` is the size of a page that executors need not read again.
    """

    until_ms: int
    page_bytes: int
    is_tip: bool = False
    only_heads: bool = False
    takes_all: bool = False


class Want(msgspec.Struct, frozen=True):
    """The next page of a run."""

    page_run: shard_cursor.PageRun
    limit: int


BoundSearch = Generator[Want, tuple[shard_cursor.Paged | shard_cursor.Refused, int], None]
# The records of one page; None where the service refused to make the iterator.
_Reading = Generator[
    Want, tuple[shard_cursor.Paged | shard_cursor.Refused, int], list[Record] | None
]


def find_bound(cursor: shard_cursor.ShardCursor, target: BatchTarget) -> BoundSearch:
    """Look for a bound; `cursor.finding` improves with each page.

    Sent: the page, and a time that the service's clock had reached when the page was requested.
    """
    kept = cursor.kept
    needs_head = target.only_heads or not kept.base.is_exact
    is_fresh = False
    while needs_head and kept.first is None and not (is_fresh and _is_over(kept)):
        if (yield from _read(cursor, kept, cursor.sample_limit)) is None:
            return
        is_fresh = True
    if kept.is_ended and kept.first is None and kept.is_given:
        # The shard ended, and its iterator was made at LATEST: the range may have rows before that
        # iterator, and only the timestamp shows them.
        cursor.kept = shard_cursor.PageRun(kept.base, cursor.rows_bytes_max)
        yield from find_bound(cursor, target)
        return
    if target.only_heads:
        if kept.is_ended and kept.first is None:
            cursor.find(SHARD_END)
        return
    if target.is_tip and cursor.is_misled(target.until_ms):
        yield from _step_on(cursor, target)
        return
    if target.is_tip and not cursor.is_busy and not is_fresh:
        yield from _read(cursor, kept, cursor.page_limit(target.page_bytes))
        is_fresh = True
    if target.is_tip and is_fresh and kept.is_pushed and not _is_over(kept):
        is_found = yield from _read_pushed(cursor, target)
        if is_found:
            return
    if _is_resolved(cursor, kept, target, is_fresh=is_fresh):
        return
    found = yield from _jump(cursor, target)
    if not found:
        yield from _follow(cursor, target)


def _jump(
    cursor: shard_cursor.ShardCursor, target: BatchTarget
) -> Generator[Want, tuple[shard_cursor.Paged | shard_cursor.Refused, int], bool]:
    """Look at the first record at or after the time. False: only reading on finds the bound."""
    ahead = shard_cursor.PageRun(at_timestamp(target.until_ms), cursor.rows_bytes_max)
    while True:
        records = yield from _read(cursor, ahead, cursor.sample_limit)
        if records is None:
            return False
        if records or _is_over(ahead):
            break
    if not records:
        if ahead.is_ended:
            cursor.find(SHARD_END)
        return ahead.is_ended
    first = records[0]
    bound = before(first.sequence_number)
    if target.is_tip and (
        bound <= cursor.position or cursor.kept.reached.covers(first.sequence_number)
    ):
        cursor.misled_until_ms = shard_cursor.arrival_ms(first)
        yield from _step_on(cursor, target)
        return True
    if cursor.kept.reached.covers(first.sequence_number):
        return False
    if bound <= cursor.position:
        return _stays(cursor, ahead, first)
    ahead.begin_at(bound)
    cursor.ahead = ahead
    cursor.find(bound, at=first)
    if target.is_tip:
        cursor.is_busy = not _is_over(ahead)
        _take_over(cursor, ahead)
    return True


def _read_pushed(
    cursor: shard_cursor.ShardCursor, target: BatchTarget
) -> Generator[Want, tuple[shard_cursor.Paged | shard_cursor.Refused, int], bool]:
    """Read on while pages come from a subscription: they are at the tip, and cost no call.

    False once a page was polled. A page that is not full holds the last record that had come. Short
    of the tip the bound is before the last record, as everywhere.
    """
    kept, limit = cursor.kept, cursor.page_limit(target.page_bytes)
    while kept.is_pushed:
        records = yield from _read(cursor, kept, limit)
        if records is None or _take_over(cursor, kept):
            return True
        if kept.is_pushed and len(records) < limit:
            if kept.last is not None and kept.last is not kept.first:
                cursor.find(before(kept.last.sequence_number), at=kept.last)
            return True
    return False


def _step_on(cursor: shard_cursor.ShardCursor, target: BatchTarget) -> BoundSearch:
    """Read one page: every time leads back to a record that is stamped ahead of its time [A8].

    One page only, so that its rows can be inlined: bytes that are read twice make the shard rest.
    A batch that takes all has no later batch: it reads to the tip.
    """
    front = cursor.kept
    limit = cursor.page_limit(max(_STEP_BYTES_MIN, int(target.page_bytes * _STEP_SHARE)))
    while target.takes_all or front.last is None or front.last is front.first:
        records = yield from _read(cursor, front, limit)
        if records is None or _take_over(cursor, front):
            return
    cursor.find(before(front.last.sequence_number), at=front.last)


def _stays(cursor: shard_cursor.ShardCursor, ahead: shard_cursor.PageRun, first: Record) -> bool:
    """The time leads to the record that the batch begins at: behind the tip, the batch ends where
    it begins."""
    if before(first.sequence_number) == cursor.position:
        ahead.begin_at(cursor.position)
        cursor.kept = ahead
    return True


def _follow(cursor: shard_cursor.ShardCursor, target: BatchTarget) -> BoundSearch:
    """Read on from the kept iterator, to the tip or to the first record that is late enough.

    If the shard proves to hold many records, times in between are tried first.
    """
    front = cursor.kept
    for _ in range(_PROBES_MAX):
        limit = cursor.page_limit(_PAGE_BYTES)
        records = yield from _read(cursor, front, limit)
        if records is None or _ends_in(cursor, front, records, target):
            return
        if len(records) < limit:
            break
        between_ms = (shard_cursor.arrival_ms(records[-1]) + target.until_ms) // 2
        records.clear()  # thousands of searches may wait here, for calls or for answers
        probed = shard_cursor.PageRun(at_timestamp(between_ms), cursor.rows_bytes_max)
        sample = yield from _read(cursor, probed, cursor.sample_limit)
        if not sample or front.reached.covers(sample[0].sequence_number):
            break
        probed.begin_at(before(sample[0].sequence_number))
        cursor.ahead = front = probed
        cursor.find(front.base, at=sample[0])
        if _ends_in(cursor, front, sample, target):
            return
    while True:
        records = yield from _read(cursor, front, cursor.page_limit(_PAGE_BYTES))
        if records is None or _ends_in(cursor, front, records, target):
            return
        records.clear()


def _ends_in(
    cursor: shard_cursor.ShardCursor,
    front: shard_cursor.PageRun,
    records: list[Record],
    target: BatchTarget,
) -> bool:
    """Whether the page just read settles the bound; otherwise note the position it reached."""
    late = next((row for row in records if shard_cursor.arrival_ms(row) >= target.until_ms), None)
    if late is not None and not target.is_tip:
        if cursor.kept.first is None or late.sequence_number != cursor.kept.first.sequence_number:
            cursor.find(before(late.sequence_number), at=late)
        return True
    if _take_over(cursor, front):
        return True
    if front.last is not None and front.last is not front.first:
        cursor.find(before(front.last.sequence_number), at=front.last)
    return False


def _is_resolved(
    cursor: shard_cursor.ShardCursor,
    kept: shard_cursor.PageRun,
    target: BatchTarget,
    *,
    is_fresh: bool,
) -> bool:
    """Whether the kept records already determine the batch's end."""
    if target.is_tip:
        return is_fresh and _take_over(cursor, kept)
    head_ms = cursor.head_ms
    if head_ms is not None and head_ms >= target.until_ms:
        return True
    late = next(
        (row for row in kept.rows or () if shard_cursor.arrival_ms(row) >= target.until_ms), None
    )
    if late is not None:
        cursor.find(before(late.sequence_number), at=late)
        return True
    is_dropped = kept.last is not None and shard_cursor.arrival_ms(kept.last) >= target.until_ms
    return is_fresh and not is_dropped and _take_over(cursor, kept)


def _take_over(cursor: shard_cursor.ShardCursor, page_run: shard_cursor.PageRun) -> bool:
    """If the run reached the tip or the shard's end, that is the bound. Returns: whether it did."""
    if page_run.is_ended:
        cursor.find(SHARD_END)
    elif page_run.at_tip and page_run.last is not None:
        cursor.find(after(page_run.last.sequence_number), tip_ms=page_run.tip_ms)
    return _is_over(page_run)


def _is_over(page_run: shard_cursor.PageRun) -> bool:
    return page_run.is_ended or page_run.at_tip


def _read(cursor: shard_cursor.ShardCursor, page_run: shard_cursor.PageRun, limit: int) -> _Reading:
    answer, asked_ms = yield Want(page_run, limit)
    if isinstance(answer, shard_cursor.Refused):
        return None
    seen_before_at = page_run.tip_seen_at
    is_sought = page_run is not cursor.kept and page_run.last is None  # it begins at a time
    sought_ms = page_run.base.timestamp_ms if is_sought else None
    records = page_run.absorb(answer, asked_ms)
    if len(answer.page.records) >= limit:
        # A full page has not looked further: the shard may have ended right there.
        page_run.tip_ms = None
    seen_s = None
    if page_run.at_tip and seen_before_at is not None:
        # All records since the shard was last seen empty: their own span does not contain pauses.
        seen_s = answer.sent_at - seen_before_at
    elif sought_ms is not None and len(records) > 1:
        # A time falls between two bursts of records more often than into one: the time before the
        # first record counts as well.
        seen_s = (shard_cursor.arrival_ms(records[-1]) - sought_ms) / 1000
    cursor.density = shard_cursor.density_of(records, page_run.page_bytes, seen_s) or cursor.density
    cursor.lag_ms = answer.page.millis_behind_latest
    return records
