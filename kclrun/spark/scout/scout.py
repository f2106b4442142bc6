"""The whole of the driver's decisions: from a batch's start to its end, for all shards together.

    begin(start) ─► asks(now) ─► take(answer) … until may_offer(now) ─► offer(now)

Rules: one look at all shards per tick, behind the tip one after the other; the vector is offered
with what is known, except that shards aligned on a time in catch-up wait for each other, for as
long as a batch should take [A3, A8]. Pure: `now` is local seconds, `chance` in [0, 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kclrun.errors import DataLoss
from kclrun.spark.offsets import Offset
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, Place, Position
from kclrun.spark.ranges import Hint
from kclrun.spark.scout.aiming import Aiming
from kclrun.spark.scout.asks import (
    Answer,
    AskListing,
    AskPage,
    Listed,
    NotListed,
    Paged,
    Refused,
    Slowed,
)
from kclrun.spark.scout.budget import CALLS_PER_SECOND_MAX, ReadBudget, Tick
from kclrun.spark.scout.handover import hints_for
from kclrun.spark.scout.lines import Lines
from kclrun.spark.scout.offering import offer
from kclrun.spark.scout.running import Moment, Running
from kclrun.spark.scout.service_time import ServiceTime
from kclrun.spark.scout.stretch import Stretch
from kclrun.spark.scout.track import Track
from kclrun.spark.scout.walk import Aim
from kclrun.spark.settings import SourceSettings

__all__ = ["Scout"]

# What is read before a bound is known is kept for this much at least, so that times inside a look
# ahead can be told apart.
_ROWS_BYTES_MIN: Final = 256 * 1024
# A walk of three calls takes a tenth of a second; slower shards join the next batch.
_GRACE_S: Final = 0.25
# Watermarks have a delay of seconds at the least, for arrival times jitter by as much.
_APART_MAX_MS: Final = 2_000


class Scout:
    """Holds what is known of all shards between batches. One thread at a time."""

    def __init__(self, settings: SourceSettings, wall_ahead_s: float, now: float) -> None:
        self.service = ServiceTime(wall_ahead_s)
        self.lines = Lines(settings.shard_list_interval_s)
        self.losses: list[str] = []
        self.running: dict[str, Running] = {}
        self.tick_s = settings.poll_interval_s
        self._settings = settings
        self._wall_ahead_s = wall_ahead_s
        self._budgets: dict[str, ReadBudget] = {}
        self._tick = Tick(settings.poll_interval_s)
        self._tick_at = self._next_tick_at = now
        self._aiming = Aiming(settings)
        self._aim: Aim | None = None
        self._aim_at = now
        self._start: Offset | None = None
        self._is_first = self._takes_all = False
        self._offered: tuple[Offset, float, bool] | None = None
        self._hints: Mapping[str, Hint] = {}
        self._until: tuple[int, int, float] | None = None
        self._is_listing = False

    def adopt(self, shard_id: str, position: Position, token: str, now: float) -> None:
        """Begin with an iterator that stands at a position: LATEST, made before all else."""
        track = self._add(shard_id, position, now).track
        track.kept = Stretch(position, track.rows_bytes_max, token, now)

    def end_at_now(self, now: float) -> None:
        """AvailableNow: read what is there now, and no more [A9]."""
        ahead_ms = self.service.surely_ahead_ms(now)
        self._until = (ahead_ms, self.service.surely_past_ms(now), now)
        for running in self.running.values():
            running.stop()
        self.lines.list_now()
        self._next_tick_at = now

    def begin(self, start: Offset, now: float, *, is_first: bool, takes_all: bool = False) -> None:
        """The next batch begins at `start`; what was known of other starts is dropped.

        Raises: DataLoss where all children of an ended shard have expired.
        """
        if self._offered is not None and start == self._offered[0]:
            _, offered_at, was_behind = self._offered
            if was_behind:
                self._aiming.window.took(now - offered_at)
        self._offered = None
        if start is not self._start or takes_all:
            self._aim = None
        if takes_all:
            self._next_tick_at = now
        self._start, self._is_first, self._takes_all = start, is_first, takes_all
        self._aiming.reach(start.aligned_ms)
        self.lines.watch(start.shards)
        self._roll(start, now)

    def asks(self, now: float) -> list[AskPage | AskListing]:
        """What to ask now, all at once if possible; each is answered by one `take`."""
        asked: list[AskPage | AskListing] = []
        if not self._is_listing and self.lines.next_listing_at() <= now:
            self._is_listing = True
            asked.append(AskListing())
        if now >= self._next_tick_at:
            self._begin_tick(now)
        asked.extend(ask for each in self.running.values() if (ask := each.ask(now)) is not None)
        return asked

    def take(self, ask: AskPage | AskListing, answer: Answer, now: float, chance: float) -> None:
        """Take in one answer. Raises: DataLoss, and a ServiceError that cannot be waited out."""
        if isinstance(ask, AskListing) or isinstance(answer, Listed | NotListed):
            self._take_listing(answer, now)
            return
        asked_ms = 0
        if isinstance(answer, Paged):
            self.service.hear(answer.page.served_at, answer.sent_at, answer.received_at)
            self.lines.heard_of(answer.page.children)
            asked_ms = self.service.surely_past_ms(answer.sent_at)
        elif isinstance(answer, Slowed):
            self._tick.throttled()
        elif isinstance(answer, Refused):
            # Times are the only thing in a read that can be wrong: ours was ahead of the service's.
            if ask.read.opening is None or ask.read.opening.timestamp is None:
                raise answer.error
            self.service.was_ahead()
        running = self.running.get(ask.shard_id)
        if running is not None:
            running.take(ask.turn, answer, Moment(now, asked_ms, chance), self._settings)

    def may_offer(self, now: float) -> bool:
        """Whether the tick is over, as far as the batch waits for it."""
        if self._aim is None:
            return self._until is not None and self.is_exhausted()
        walking = [each for each in self.running.values() if each.is_walking]
        if not walking:
            return True
        if self._takes_all:
            return False
        if self._is_together(self._aim):
            return not self._is_awaited(now)
        return all(each.is_held(now) for each in walking) or now >= self._tick_at + _GRACE_S

    def offer(self, now: float) -> Offset:
        """The end of the batch; `start` itself without news."""
        assert self._start is not None
        aim = self._aim
        if aim is not None and not aim.only_heads:
            self._aiming.reach(aim.until_ms)
        end = offer(
            self._start,
            {each.track.shard_id: each.track for each in self.running.values()},
            self.lines.graph,
            self.lines.gone(),
            aligned_ms=self._aiming.aligned_ms,
            is_first=self._is_first,
        )
        if end is not self._start:
            self._offered = (end, now, aim is not None and not aim.is_tip)
            self._hand_over(end, now)
        if aim is not None and (not aim.is_tip or self._is_stepping(aim)):
            pause_s = len(self.running) / CALLS_PER_SECOND_MAX
            self._next_tick_at = min(self._next_tick_at, max(now, self._tick_at + pause_s))
        return end

    def _is_stepping(self, aim: Aim) -> bool:
        """Whether a shard at the tip goes on page by page, and has more."""
        tracks = (each.track for each in self.running.values())
        return any(each.is_misled(aim.until_ms) and each.is_short_of_tip for each in tracks)

    def next_at(self, now: float) -> float:
        """When there is something to ask or to offer again, if nothing is answered until then."""
        times = [each.wakes_at(now) for each in self.running.values() if each.is_walking]
        if not self._is_listing:
            times.append(self.lines.next_listing_at())
        if self._tick_at + _GRACE_S > now:
            times.append(self._tick_at + _GRACE_S)
        return min([self._next_tick_at, *times])

    def hints(self, start: Offset, end: Offset) -> Mapping[str, Hint]:
        """Short cuts for the batch (start, end], if it was the last one offered [A4]."""
        is_same = self._offered is not None and self._offered[0] == end
        return self._hints if is_same and self._start == start else {}

    @property
    def must_go_on(self) -> bool:
        """Whether only what was there, and not time, ends the search."""
        return self._takes_all or self._until is not None

    def is_exhausted(self) -> bool:
        """Whether an answer without news is the last word: all that was there is in `start`."""
        walking = any(each.is_walking for each in self.running.values())
        if self._until is None:
            return self._takes_all and not walking and self._aim is not None
        is_listed = self.lines.listed_since(self._until[2]) and not self.lines.waits_for_children()
        return is_listed and all(self._is_done(each.track) for each in self.running.values())

    def _begin_tick(self, now: float) -> None:
        self.tick_s = self._tick.next_s(len(self.running))
        self._tick_at, self._next_tick_at = now, now + self.tick_s
        aim = self._aim if self._aim is not None and self._is_awaited(now) else self._next_aim(now)
        if aim != self._aim:
            self._aim, self._aim_at = aim, now
        past_ms = self.service.surely_past_ms(now)
        is_together = self._is_together(aim)
        for each in self.running.values():
            position = each.track.position
            is_early = position.place is Place.TIMESTAMP and position.timestamp_ms > past_ms
            # Together there is one answer to one time: those that have it wait for the rest.
            is_answered = is_together and each.aim == aim
            if not (is_early or is_answered or self._is_done(each.track)):
                each.begin(aim)

    def _next_aim(self, now: float) -> Aim:
        tracks = [each.track for each in self.running.values()]
        if self._takes_all:
            return self._aiming.tip(tracks, self.service, now, takes_all=True)
        waits = self.lines.waits_for_children()
        heads = self._aiming.heads(tracks, self.service)
        return heads or self._aiming.next(tracks, self.service, now, waits=waits)

    def _is_together(self, aim: Aim) -> bool:
        """Whether the shards wait for each other: one ahead of the others by more than a moment
        takes the watermark along."""
        if aim.only_heads or not self._settings.aligns_shards:
            return aim.only_heads
        return not aim.is_tip or aim.until_ms - self._aiming.aligned_ms > _APART_MAX_MS

    def _is_awaited(self, now: float) -> bool:
        """Whether some shards still look for what the others have found, and may."""
        if self._aim is None or not self._is_together(self._aim):
            return False
        is_walking = any(each.is_walking for each in self.running.values())
        return is_walking and now < self._aim_at + self._settings.target_batch_s

    def _roll(self, start: Offset, now: float) -> None:
        wanted = {each: where for each, where in start.shards.items() if where != SHARD_END}
        fails = self._settings.fails_on_data_loss
        for shard_id in self.lines.entering(fails_on_data_loss=fails):
            wanted[shard_id] = self._entrance(start, shard_id)
        for shard_id in [each for each in self.running if each not in wanted]:
            self.running.pop(shard_id).stop()
            self._budgets.pop(shard_id, None)
        for shard_id, position in wanted.items():
            running = self.running.get(shard_id)
            if running is None:
                self._add(shard_id, position, now)
            elif running.track.position != position:
                running.stop()
                running.track.move(position)

    def _entrance(self, start: Offset, shard_id: str) -> Position:
        """A child begins at its first record; where the query began at a time and its parents had
        nothing after that, at the same time."""
        shard = self.lines.graph[shard_id]
        began = [start.began.get(each) for each in shard.parents if each in start.shards]
        times = [each for each in began if each is not None and each.place is Place.TIMESTAMP]
        return max(times) if times and len(times) == len(began) else TRIM_HORIZON

    def _add(self, shard_id: str, position: Position, now: float) -> Running:
        rows_bytes_max = max(_ROWS_BYTES_MIN, self._settings.inline_bytes_max)
        rate = self._settings.reads_per_second_max
        budget = self._budgets.setdefault(shard_id, ReadBudget(rate, now))
        is_counted = self._settings.records_per_trigger_max is not None
        track = Track(shard_id, position, rows_bytes_max, is_counted=is_counted)
        running = Running(track, budget)
        self.running[shard_id] = running
        return running

    def _take_listing(self, answer: Answer, now: float) -> None:
        self._is_listing = False
        if isinstance(answer, Listed):
            self.lines.listed(answer.shards, answer.sent_at)
            if self._start is not None:
                self._roll(self._start, now)
        else:
            self.lines.not_listed(now)
        for running in list(self.running.values()):
            self._judge_gone(running)

    def _judge_gone(self, running: Running) -> None:
        """A shard that the service knows no more, and that a later listing does not have."""
        shard_id = running.track.shard_id
        if running.gone is None or not self.lines.listed_since(running.gone.sent_at):
            return
        if self.lines.lists(shard_id):
            running.gone = None
            return
        text = (
            f"{shard_id} is gone, with records after {running.track.position} that were not read:"
            " its retention ended first\nTo go on without them: failOnDataLoss=false, or a new"
            " checkpoint"
        )
        if self._settings.fails_on_data_loss:
            raise DataLoss(text)
        if text not in self.losses:
            self.losses.append(text)
        running.track.lose()

    def _is_done(self, track: Track) -> bool:
        """AvailableNow: the shard has ended, begins later than the target, or its tip was seen."""
        if self._until is None:
            return False
        ahead_ms, past_ms, _ = self._until
        tip_ms, finding = track.tip_at_bound_ms, track.finding
        arrived_ms = track.head_ms if finding is None else finding.arrived_ms
        is_later = arrived_ms is not None and arrived_ms >= ahead_ms
        if track.bound == SHARD_END or is_later:
            return True
        # The tip of a closed shard is not its end: its children may hold what was there.
        is_at_tip = tip_ms is not None and tip_ms >= past_ms
        return is_at_tip and not self.lines.is_closed(track.shard_id)

    def _hand_over(self, end: Offset, now: float) -> None:
        tracks = [each.track for each in self.running.values()]
        allowed = self._settings.inline_bytes_max
        self._hints = hints_for(tracks, end, allowed, now, self._wall_ahead_s)
        for running in self.running.values():
            hint = self._hints.get(running.track.shard_id)
            if hint is not None and hint.rows is None:
                running.budget.spend(now)
                running.budget.waste(running.track.wasted_bytes, now)

    def report(self) -> dict[str, Any]:
        """The state of all shards as plain JSON values."""
        shards = {each.track.shard_id: each.report() for each in self.running.values()}
        lags = [shard["lagMs"] for shard in shards.values() if shard["lagMs"] is not None]
        return {
            "shards": shards,
            "throttles": sum(each.throttles for each in self.running.values()),
            "tickMs": round(self.tick_s * 1000),
            "lagMsMax": max(lags, default=None),
            "losses": list(self.losses),
        }
