"""One shard's search for the bound of a batch: the next page to read, and its meaning [A3, A8].

A generator yields the next read and is sent the page, so that it can continue in a later tick when
its calls are used up. Every bound is at a record that GetRecords returned, or at the end of the
shard. Timestamps only find records. Away from the tip, bounds are exclusive. Pure.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import msgspec

from kclrun.model.record import Record
from kclrun.spark.positions import SHARD_END, Place, after, at_timestamp, before
from kclrun.spark.scout.track import Paged, Refused, Stretch, Track, arrival_ms, density_of

# Where only reading on helps: pages of the size that a batch may inline for a shard by default.
_PAGE_BYTES: Final = 512 * 1024
# Where no time helps at the tip and no row may be inlined: read twice, 1.3 s of a shard's share.
_STEP_BYTES_MIN: Final = 256 * 1024
# Records differ in size: a page that must fit is requested with an eighth to spare.
_STEP_SHARE: Final = 7 / 8
# Halving a window of a day ten times leaves 84 s of records, which reading reaches.
_PROBES_MAX: Final = 10


class Aim(msgspec.Struct, frozen=True):
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
    """The next page of a stretch."""

    stretch: Stretch
    limit: int


Walk = Generator[Want, tuple[Paged | Refused, int], None]
# The records of one page; None where the service refused to open the stretch.
_Reading = Generator[Want, tuple[Paged | Refused, int], list[Record] | None]


def walk(track: Track, aim: Aim) -> Walk:
    """Look for a bound; `track.finding` improves with each page.

    Sent: the page, and a service time that had surely been reached when it was requested.
    """
    kept = track.kept
    needs_head = kept.first is None and (aim.only_heads or not kept.base.is_exact)
    is_fresh = False
    while needs_head and kept.first is None and not (is_fresh and _is_over(kept)):
        if (yield from _read(track, kept, track.sample_limit)) is None:
            return
        is_fresh = True
    if needs_head and kept.is_ended and kept.first is None and kept.is_given:
        # LATEST of a shard that ended: only the timestamp can show whether its range has rows.
        track.kept = Stretch(kept.base, track.rows_bytes_max)
        yield from walk(track, aim)
        return
    if aim.only_heads:
        _take_end(track, kept)
        return
    if aim.is_tip and track.is_misled(aim.until_ms):
        yield from _step_on(track, aim)
        return
    if aim.is_tip and not track.is_busy and not is_fresh:
        yield from _read(track, kept, track.page_limit(aim.page_bytes))
        is_fresh = True
    if _is_resolved(track, kept, aim, is_fresh=is_fresh):
        return
    found = yield from _jump(track, aim)
    if not found:
        yield from _follow(track, aim)


def _jump(track: Track, aim: Aim) -> Generator[Want, tuple[Paged | Refused, int], bool]:
    """Look at the first record at or after the time; False if reading on must find the bound."""
    ahead = Stretch(at_timestamp(aim.until_ms), track.rows_bytes_max)
    while True:
        records = yield from _read(track, ahead, track.sample_limit)
        if records is None:
            return False
        if records or _is_over(ahead):
            break
    if not records:
        if ahead.is_ended:
            track.find(SHARD_END)
        return ahead.is_ended
    first = records[0]
    bound = before(first.sequence_number)
    if aim.is_tip and (bound <= track.position or track.kept.reached.covers(first.sequence_number)):
        track.misled_until_ms = arrival_ms(first)
        yield from _step_on(track, aim)
        return True
    if track.kept.reached.covers(first.sequence_number):
        return False
    if bound <= track.position:
        return _stays(track, ahead, first)
    ahead.begin_at(bound)
    track.ahead = ahead
    track.find(bound, at=first)
    if aim.is_tip:
        track.is_busy = not _is_over(ahead)
        _take_over(track, ahead)
    return True


def _step_on(track: Track, aim: Aim) -> Walk:
    """Every time leads back, to a record stamped ahead of its time: one page is progress [A8].

    It reads one page only, so that its rows can be inlined: bytes read twice make a shard rest.
    A batch that takes all has no later batch to continue in: it reads to the tip.
    """
    front = track.kept
    limit = track.page_limit(max(_STEP_BYTES_MIN, int(aim.page_bytes * _STEP_SHARE)))
    while aim.takes_all or front.last is None or front.last is front.first:
        records = yield from _read(track, front, limit)
        if records is None or _take_over(track, front):
            return
    track.find(before(front.last.sequence_number), at=front.last)


def _stays(track: Track, ahead: Stretch, first: Record) -> bool:
    """The time leads to the record that the batch begins at: behind the tip, that is the answer."""
    if track.kept.first is None and before(first.sequence_number) == track.position:
        ahead.begin_at(track.position)
        track.kept = ahead
    return True


def _follow(track: Track, aim: Aim) -> Walk:
    """Read on from the kept iterator, to the tip or to the first record that is late enough.

    If the shard proves to hold many records, times in between are tried first.
    """
    front = track.kept
    for _ in range(_PROBES_MAX):
        limit = track.page_limit(_PAGE_BYTES)
        records = yield from _read(track, front, limit)
        if records is None or _ends_in(track, front, records, aim):
            return
        if len(records) < limit:
            break
        between_ms = (arrival_ms(records[-1]) + aim.until_ms) // 2
        records.clear()  # thousands of walks may wait here, for calls or for answers
        probed = Stretch(at_timestamp(between_ms), track.rows_bytes_max)
        sample = yield from _read(track, probed, track.sample_limit)
        if not sample or front.reached.covers(sample[0].sequence_number):
            break
        probed.begin_at(before(sample[0].sequence_number))
        track.ahead = front = probed
        track.find(front.base, at=sample[0])
        if _ends_in(track, front, sample, aim):
            return
    while True:
        records = yield from _read(track, front, track.page_limit(_PAGE_BYTES))
        if records is None or _ends_in(track, front, records, aim):
            return
        records.clear()


def _ends_in(track: Track, front: Stretch, records: list[Record], aim: Aim) -> bool:
    """Whether the page just read settles the bound; otherwise note the position it reached."""
    late = next((row for row in records if arrival_ms(row) >= aim.until_ms), None)
    if late is not None and not aim.is_tip:
        if track.kept.first is None or late.sequence_number != track.kept.first.sequence_number:
            track.find(before(late.sequence_number), at=late)
        return True
    if _take_over(track, front):
        return True
    if front.last is not None and front.last is not front.first:
        track.find(before(front.last.sequence_number), at=front.last)
    return False


def _is_resolved(track: Track, kept: Stretch, aim: Aim, *, is_fresh: bool) -> bool:
    """Whether the kept records already determine the batch's end."""
    if aim.is_tip:
        return is_fresh and _take_over(track, kept)
    head_ms = track.head_ms
    if head_ms is not None and head_ms >= aim.until_ms:
        return True
    late = next((row for row in kept.rows or () if arrival_ms(row) >= aim.until_ms), None)
    if late is not None:
        track.find(before(late.sequence_number), at=late)
        return True
    is_dropped = kept.last is not None and arrival_ms(kept.last) >= aim.until_ms
    return is_fresh and not is_dropped and _take_over(track, kept)


def _take_over(track: Track, stretch: Stretch) -> bool:
    """If the stretch has ended or reached the tip, its end is the bound."""
    if stretch.is_ended:
        track.find(SHARD_END)
    elif stretch.at_tip and stretch.last is not None:
        track.find(after(stretch.last.sequence_number), tip_ms=stretch.tip_ms)
    return _is_over(stretch)


def _take_end(track: Track, kept: Stretch) -> None:
    if kept.is_ended and kept.first is None:
        track.find(SHARD_END)


def _is_over(stretch: Stretch) -> bool:
    return stretch.is_ended or stretch.at_tip


def _read(track: Track, stretch: Stretch, limit: int) -> _Reading:
    answer, asked_ms = yield Want(stretch, limit)
    if isinstance(answer, Refused):
        return None
    before_ms = stretch.tip_ms
    is_sought = stretch.base.place is Place.TIMESTAMP and stretch is not track.kept
    sought_ms = stretch.base.timestamp_ms if is_sought and stretch.last is None else None
    records = stretch.absorb(answer, asked_ms)
    if len(answer.page.records) >= limit:
        # A full page has not looked further: the shard may have ended right there.
        stretch.tip_ms = None
    seen_s = None
    if stretch.at_tip and before_ms is not None:
        # All records since the shard was last seen empty: their own span does not contain pauses.
        seen_s = max(0.0, (asked_ms - before_ms) / 1000)
    elif sought_ms is not None and len(records) > 1:
        # A time falls between two bursts of records more often than into one: the time before the
        # first record counts as well.
        seen_s = max(0.0, (arrival_ms(records[-1]) - sought_ms) / 1000)
    track.density = density_of(records, seen_s) or track.density
    track.lag_ms = answer.page.millis_behind_latest
    return records
