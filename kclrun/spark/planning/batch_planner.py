"""All decisions of the driver: from a batch's start to its end, for all shards together. Pure.

    begin(start) ─► asks(now) ─► take(answer) … until may_offer(now) ─► offer(now)

`now` is local seconds, `chance` in [0, 1).
"""

# The planner
# -----------
#
# Spark asks where the batch that begins at `start` ends, and stores the answer in its own log
# before a task reads a record. After a crash it reads (start, end] again. So the planner decides an
# end that means the same records whenever they are read: for each shard, the position of a record
# that the service returned, or the end of the shard. No other state is stored.
#
# What it decides:
#
# - Which shards a batch has: those of `start` that are not at their end, and the children that may
#   enter (`shard_listing.py`, `lineage.py`).
# - What all of them look for next, the target (`batch_target.py`): once, while nothing is known,
#   the first record after each position; a time, while the query is behind; otherwise the tip.
# - Which page of a shard is read next, and which bound it shows (`bound_search.py`).
# - When to ask. A tick looks at all shards once. Each shard has a budget of calls, and the tick is
#   longer with many shards and after throttles (`read_budget.py`).
# - When the end is offered (`may_offer`), and what it says besides the bounds (`offers.py`).
#
# The states of a shard (`shard_search.py`):
#
#     at rest     no search is under way; its bound is the best that was found, or its position
#     searching   it wants a page, and waits for its budget
#     in flight   it wants a page, and a request is under way
#     not found   the service does not know the shard: a listing is judged before it is asked again
#     lost        it is proven that the shard was trimmed (`protocol/trimming.py`), and
#                 failOnDataLoss is off: its range is empty, and ends at the end of the shard
#
# A tick begins a search for each shard that is at rest, but for three kinds: its position is a time
# in the future; AvailableNow is done with it; or it has its bound for the target, and waits for the
# other shards. An answer moves the search on. An answer to an older request is ignored.
#
# The end is offered once no shard is searched. A shard whose search goes on takes part with its
# best bound so far, and the offer waits for it only so long:
#
# - While the query is behind, or has just come to the tip, the shards end at one time together
#   (alignShards): the rows of a shard that is ahead would advance the watermark past the rows of
#   the others. They wait for each other for `targetBatchDuration`, and so they do for the first
#   record of each.
# - Otherwise until all searches wait for their budget, or for a quarter of a second after the tick.
# - A batch that takes all records (`everything`) waits for every search.
#
# What holds always:
#
# - A bound that was found is at a record that the service returned, or at the end of a closed
#   shard. A time only finds records.
# - A bound does not lie before the position at which its range begins.
# - Where `start` does not name the beginning of a range exactly (a time, TRIM_HORIZON, a child),
#   and in the first batch of a query, the end names it (`Offset.began`). So the rows of a batch are
#   a function of (start, end).
# - Without news the answer is `start` itself, and Spark makes no batch, except the first one of a
#   query. Once an hour an end with the same bounds notes that the shards at their tip held nothing
#   more.
# - A child enters when each of its parents that is listed or in `start` is at its end in `start`,
#   and when no other shard of `start` shares keys with it, except its own ended ancestors. So the
#   rows of a parent are in an earlier batch. Where Spark asks only once for everything, they are in
#   the same batch, and the end says which shard is read first (`Offset.parents`).
# - An ended shard leaves the offset only when other shards in it have all its keys.
# - The time up to which all shards were read together (`aligned_ms`) never falls.
# - A shard has at most one request whose answer counts.
# - A hint to the executors changes no row.
#
# What may be lost: all that is known here, because it is only in memory. A driver that starts again
# plans from Spark's offset alone, and reads pages again. An end that is not in Spark's log is
# decided anew, maybe elsewhere; no task has read it.
#
# What may be repeated: the reading of a batch. It has the same rows as long as the stream retains
# them.
#
# Records that expire before they are read: if a shard was trimmed before it was read to its end, or
# all shards over some keys, the planner raises DataLoss. With failOnDataLoss=false it goes on with
# the shards that are listed, and its report names each shard that was trimmed. A loss inside a
# range is reported by the task that reads it; `RangeCursor` names the one kind that is not seen.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.errors import DataLoss
from kclrun.model.shard import Shard
from kclrun.spark.offsets import Hint, Offset
from kclrun.spark.options import SourceSettings
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.batch_target import TargetSearch
from kclrun.spark.planning.bound_search import BatchTarget
from kclrun.spark.planning.offers import hints_for, offer
from kclrun.spark.planning.read_budget import CALLS_PER_SECOND_MAX, Tick
from kclrun.spark.planning.service_time import ServiceTime
from kclrun.spark.planning.shard_listing import ShardListing
from kclrun.spark.planning.shard_search import AnswerTimes, ShardSearch
from kclrun.spark.planning.shard_searches import AvailableNow, PushedNews, ShardSearches
from kclrun.spark.positions import Position, PositionKind
from kclrun.spark.stream_set import parted

# Twenty shards of 130 bytes: a progress event of a thousand shards stays below 20 kB with them.
REPORTED_MAX: Final = 20
_LOSSES_REPORTED_MAX: Final = 5

# A search of three calls takes a tenth of a second; slower shards join the next batch.
_GRACE_S: Final = 0.25
# Watermarks have a delay of at least seconds, because arrival times jitter by as much.
_APART_MAX_MS: Final = 2_000


class OfferedBatch(msgspec.Struct, frozen=True):
    """The last end that was offered, when, and whether the query was behind the tip then."""

    end: Offset
    at: float
    was_behind: bool


class BatchPlanner:
    """Holds the known facts of all shards between batches. One thread at a time.

    `wall_ahead_s` is the host's wall clock minus the local clock; set it again after a step.

    Each tick looks at all shards once; behind the tip, one look follows the other. The vector of
    bounds is offered with the facts known by then. Only shards that are aligned on a time in
    catch-up wait for each other, for as long as a batch should take [A3, A8].
    """

    def __init__(self, settings: SourceSettings, wall_ahead_s: float, now: float) -> None:
        self.service = ServiceTime(wall_ahead_s)
        self.listing = ShardListing(settings.shard_list_interval_s)
        self.losses: list[str] = []
        self.searches = ShardSearches(settings)
        self.tick_s = settings.poll_interval_s
        self._settings = settings
        self.wall_ahead_s = wall_ahead_s
        self._tick = Tick(settings.poll_interval_s)
        self._tick_at = self._next_tick_at = now
        self._aiming = TargetSearch(settings)
        self._target: BatchTarget | None = None
        self._target_at = now
        self._start: Offset | None = None
        self._is_first = self._takes_all = False
        self._offered: OfferedBatch | None = None
        self._hints: Mapping[str, Hint] = {}
        self._until: AvailableNow | None = None
        self._is_listing = False
        self._news = PushedNews()

    def adopt(self, shard_id: str, position: Position, token: str, now: float) -> None:
        """Begin with an iterator at a position: LATEST, made before all else. For the query's first
        batch only: a query with a checkpoint began before the iterator was made."""
        if self._start is not None:
            return
        cursor = self.searches.add(shard_id, position, now).cursor
        cursor.kept = shard_cursor.PageRun(position, cursor.rows_bytes_max, token, now)

    def end_at_now(self, now: float) -> None:
        """AvailableNow: read the records that exist now, and no more [A9]."""
        self._until = AvailableNow(
            self.service.surely_ahead_ms(now), self.service.surely_past_ms(now), now
        )
        for search in self.searches.values():
            search.stop()
        self.listing.list_now()
        self._next_tick_at = now

    def end_nowhere(self) -> None:
        """Ends AvailableNow: later records count as new again."""
        self._until = None

    def begin(self, start: Offset, now: float, *, is_first: bool, takes_all: bool = False) -> None:
        """The next batch begins at `start`; facts about other starts are dropped.

        Raises: DataLoss where all children of an ended shard have expired.
        """
        offered = self._offered
        if offered is not None and start == offered.end and offered.was_behind:
            self._aiming.window.took(now - offered.at)
        self._offered = None
        if start != self._start or takes_all:
            self._target = None
        if takes_all:
            self._next_tick_at = now
        if self._start is None and not is_first:
            self.searches.clear()
        self._start, self._is_first, self._takes_all = start, is_first, takes_all
        self._aiming.reach(start.aligned_ms)
        self.listing.watch(start.shards)
        self.searches.follow(start, self.listing, now)

    def asks(self, now: float) -> list[shard_cursor.AskPage | shard_cursor.AskListing]:
        """The requests to send now, all at once if possible; each is answered by one `take`."""
        asked: list[shard_cursor.AskPage | shard_cursor.AskListing] = []
        if not self._is_listing and self.listing.next_listing_at() <= now:
            self._is_listing = True
            asked.append(shard_cursor.AskListing())
        if now >= self._next_tick_at:
            self._begin_tick(now)
        elif self._news:
            self._look_at_news(now)
        asked.extend(
            ask for search in self.searches.values() if (ask := search.ask(now)) is not None
        )
        return asked

    def came(self, shard_ids: Collection[str]) -> None:
        """Records of these shards were pushed: the next look at them is due now."""
        self._news.add(shard_ids)

    def take(
        self,
        ask: shard_cursor.AskPage | shard_cursor.AskListing,
        answer: shard_cursor.Answer,
        now: float,
        chance: float,
    ) -> None:
        """Take in one answer. Raises: DataLoss, and a ServiceError that cannot be waited out."""
        if isinstance(ask, shard_cursor.AskListing) or isinstance(
            answer, shard_cursor.Listed | shard_cursor.NotListed
        ):
            self._take_listing(answer, now)
            return
        asked_ms = 0
        if isinstance(answer, shard_cursor.Paged):
            self.listing.add_children(answer.page.children)
            asked_ms = self._asked_ms(answer)
        elif isinstance(answer, shard_cursor.Slowed):
            self._tick.throttled()
        elif isinstance(answer, shard_cursor.Refused):
            # Only a time can be wrong in a read: ours was ahead of the service's clock.
            if ask.read.opening is None or ask.read.opening.timestamp is None:
                raise answer.error
            self.service.was_ahead()
        search = self.searches.get(ask.shard_id)
        if search is not None:
            search.take(ask.turn, answer, AnswerTimes(now, asked_ms, chance), self._settings)
            if search.gone is not None:
                self.listing.list_soon()

    def may_offer(self, now: float) -> bool:
        """Whether the batch need not wait for further answers of this tick."""
        if self._target is None:
            return self._until is not None and self.is_exhausted()
        searching = self.searches.under_way()
        if not searching:
            return True
        if self._takes_all:
            return False
        if self._is_together(self._target):
            return not self._is_awaited(now)
        return all(search.is_held(now) for search in searching) or now >= self._tick_at + _GRACE_S

    def offer(self, now: float) -> Offset:
        """The end of the batch; `start` itself if no shard has new records."""
        assert self._start is not None
        target = self._target
        if target is not None and not target.only_heads:
            self._aiming.reach(target.until_ms)
        end = offer(
            self._start,
            {search.cursor.shard_id: search.cursor for search in self.searches.values()},
            self.listing.graph,
            self.listing.gone(),
            aligned_ms=self._aiming.aligned_ms,
            is_first=self._is_first,
        )
        if end is not self._start:
            was_behind = target is not None and not target.is_tip
            self._offered = OfferedBatch(end, now, was_behind)
            self._hand_over(end, now)
        if target is not None and (not target.is_tip or self._is_stepping(target)):
            pause_s = len(self.searches) / CALLS_PER_SECOND_MAX
            self._next_tick_at = min(self._next_tick_at, max(now, self._tick_at + pause_s))
        return end

    def _is_stepping(self, target: BatchTarget) -> bool:
        """Whether a shard at the tip is read page by page, and has more pages."""
        cursors = (search.cursor for search in self.searches.values())
        return any(
            cursor.is_misled(target.until_ms) and cursor.is_short_of_tip for cursor in cursors
        )

    def next_at(self, now: float) -> float:
        """The time of the next request or offer, if no answer comes until then."""
        times = [search.wakes_at(now) for search in self.searches.under_way()]
        if not self._is_listing:
            times.append(self.listing.next_listing_at())
        if self._tick_at + _GRACE_S > now:
            times.append(self._tick_at + _GRACE_S)
        if self._news.of(self.searches):
            times.append(now)
        return min([self._next_tick_at, *times])

    def hints(self, start: Offset, end: Offset) -> Mapping[str, Hint]:
        """Short cuts for the batch (start, end], if it was the last one offered [A4]."""
        is_same = self._offered is not None and self._offered.end == end
        return self._hints if is_same and self._start == start else {}

    @property
    def must_go_on(self) -> bool:
        """Whether a batch waits until all existing records are found, however long it takes."""
        return self._takes_all or self._until is not None

    def is_exhausted(self) -> bool:
        """Whether an answer without new records is final: `start` covers all existing records."""
        if self._until is None:
            is_idle = not self.searches.under_way()
            return self._takes_all and is_idle and self._target is not None
        until, listing = self._until, self.listing
        is_listed = listing.listed_since(until.asked_at) and not listing.waits_for_children()
        cursors = (search.cursor for search in self.searches.values())
        return is_listed and all(until.is_done(cursor, listing) for cursor in cursors)

    def _begin_tick(self, now: float) -> None:
        self.tick_s = self._tick.next_s(len(self.searches))
        self._tick_at, self._next_tick_at = now, now + self.tick_s
        self._news.ticked()
        target = (
            self._target
            if self._target is not None and self._is_awaited(now)
            else self._next_target(now)
        )
        if target != self._target:
            self._target, self._target_at = target, now
        past_ms = self.service.surely_past_ms(now)
        is_together = self._is_together(target)
        self._news.remove(self._news.of(self.searches))
        for search in self.searches.values():
            position = search.cursor.position
            is_early = position.kind is PositionKind.TIMESTAMP and position.timestamp_ms > past_ms
            # All shards together need a bound for one time: a shard that has its bound waits.
            is_answered = is_together and search.target == target
            is_done = self._until is not None and self._until.is_done(search.cursor, self.listing)
            if not (is_early or is_answered or is_done):
                search.begin(target)

    def _look_at_news(self, now: float) -> None:
        """Look at shards whose records were pushed, between two ticks. Behind the tip, or where
        shards wait for each other, the next tick begins now instead."""
        shards = self._news.of(self.searches)
        if not shards:
            return
        target = self._next_target(now)
        if not target.is_tip or self._is_together(target):
            self._begin_tick(now)
            return
        self._target, self._target_at, self._tick_at = target, now, now
        self._news.remove(shards)
        for shard_id in shards:
            self.searches[shard_id].begin(target)

    def _asked_ms(self, answer: shard_cursor.Paged) -> int:
        """A time that the service's clock had reached when it made the page."""
        page = answer.page
        if page.is_pushed:
            # Its events were made after the subscription was requested; `served_at` is that time.
            assert page.served_at is not None, "the reader of subscriptions gives it"
            return int(page.served_at * 1000)
        self.service.add_sample(page.served_at, answer.sent_at, answer.received_at)
        return self.service.surely_past_ms(answer.sent_at)

    def _next_target(self, now: float) -> BatchTarget:
        cursors = [search.cursor for search in self.searches.values()]
        if self._takes_all:
            return self._aiming.tip(cursors, self.service, now, takes_all=True)
        waits = self.listing.waits_for_children()
        heads = self._aiming.heads(cursors, self.service)
        return heads or self._aiming.next(cursors, self.service, now, waits=waits)

    def _is_together(self, target: BatchTarget) -> bool:
        """Whether the shards wait for each other: the rows of a shard that is ahead would advance
        the watermark past the rows of the others."""
        if target.only_heads or not self._settings.aligns_shards:
            return target.only_heads
        return not target.is_tip or target.until_ms - self._aiming.aligned_ms > _APART_MAX_MS

    def _is_awaited(self, now: float) -> bool:
        """Whether some shards are still searched while the others wait for them, and have time."""
        if self._target is None or not self._is_together(self._target):
            return False
        is_searching = bool(self.searches.under_way())
        return is_searching and now < self._target_at + self._settings.target_batch_s

    def _take_listing(self, answer: shard_cursor.Answer, now: float) -> None:
        self._is_listing = False
        if isinstance(answer, shard_cursor.Listed):
            self.listing.listed(answer.shards, answer.sent_at)
            if self._start is not None:
                self.searches.follow(self._start, self.listing, now)
        else:
            self.listing.not_listed(now)
        if isinstance(answer, shard_cursor.Listed):
            for search in list(self.searches.values()):
                self._judge_gone(search, answer.shards, now)

    def _judge_gone(self, search: ShardSearch, listed: Collection[Shard], now: float) -> None:
        """Note the loss of a shard that is proven to be trimmed. Raises: DataLoss, unless that is
        allowed."""
        shard_id, gone = search.cursor.shard_id, search.gone
        if gone is None or search.cursor.is_lost or not self.listing.listed_since(gone.sent_at):
            return
        if not search.is_trimmed(self.listing.graph.get(shard_id), listed, now):
            return
        text = lost_shard(shard_id, search.cursor.position)
        if self._settings.fails_on_data_loss:
            raise DataLoss(
                f"{text}\nTo go on without them: failOnDataLoss=false, or a new checkpoint"
            )
        if text not in self.losses:
            self.losses.append(text)
        search.cursor.lose()

    def _hand_over(self, end: Offset, now: float) -> None:
        cursors = [search.cursor for search in self.searches.values()]
        allowed = self._settings.inline_bytes_max
        self._hints = hints_for(cursors, end, allowed, now, self.wall_ahead_s)
        for search in self.searches.values():
            hint = self._hints.get(search.cursor.shard_id)
            if hint is not None and hint.rows is None:
                search.budget.spend(now)
                search.budget.waste(search.cursor.wasted_bytes, now)

    def report(self) -> dict[str, Any]:
        """Totals over all shards, and the worst of them, as plain JSON values: Spark keeps the last
        hundred reports, and its event log all of them."""
        searches = sorted(self.searches.values(), key=_severity)
        by_stream = {
            stream: _totals(
                [search for search in searches if parted(search.cursor.shard_id)[0] == stream]
            )
            for stream in self._settings.address.several
        }
        return {
            "stream": self._settings.address.name,
            "shards": {
                search.cursor.shard_id: search.report() for search in searches[:REPORTED_MAX]
            },
            **_totals(searches),
            **({"streams": by_stream} if by_stream else {}),
            "tickMs": round(self.tick_s * 1000),
            "losses": self.losses[-_LOSSES_REPORTED_MAX:],
            "lossesTotal": len(self.losses),
        }


def _totals(searches: Sequence[ShardSearch]) -> dict[str, Any]:
    cursors = [search.cursor for search in searches]
    lags = [cursor.lag_ms for cursor in cursors if cursor.lag_ms is not None]
    densities = [cursor.density for cursor in cursors if cursor.density is not None]
    return {
        "shardsTotal": len(cursors),
        "shardsAtTip": sum(cursor.tip_at_bound_ms is not None for cursor in cursors),
        "recordsPerSecond": round(sum(density.records_per_second for density in densities), 3),
        "bytesPerSecond": round(sum(density.bytes_per_second for density in densities), 1),
        "throttles": sum(search.throttles for search in searches),
        "lagMsMax": max(lags, default=None),
    }


def _severity(search: ShardSearch) -> tuple[int, int, str]:
    """The order of the report: furthest behind first, then most throttled."""
    return (-(search.cursor.lag_ms or 0), -search.throttles, search.cursor.shard_id)


def lost_shard(shard_id: str, position: Position) -> str:
    """The text about a shard that was trimmed and was read up to `position`. Whether the shard had
    records after that position is not known."""
    return (
        f"{shard_id} is gone: its retention ended before it was read to its end. It was read up to"
        f" {position}; records after that, if it had any, were not read and are lost"
    )
