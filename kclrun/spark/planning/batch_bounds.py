"""Finds both ends of a batch read (`spark.read`): every shard of the start and all its descendants.

Each shard has a search as in a stream, to its own end. A read is planned once every end is the
position of a record or the end of a shard, or the shard was seen to be empty. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from kclrun.errors import DataLoss, SettingsError
from kclrun.model.shard import ShardGraph
from kclrun.spark.lineage import ancestors_of, descendants_of, relatives_of
from kclrun.spark.offsets import Offset
from kclrun.spark.options import SourceSettings, Start, StartKind
from kclrun.spark.planning import shard_cursor
from kclrun.spark.planning.batch_target import TIP_MARGIN_MS
from kclrun.spark.planning.bound_search import BatchTarget
from kclrun.spark.planning.read_budget import ReadBudget
from kclrun.spark.planning.service_time import ServiceTime
from kclrun.spark.planning.shard_search import AnswerTimes, ShardSearch
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, Position, PositionKind

_PAGE_BYTES: Final = 512 * 1024
_ROWS_BYTES: Final = 256 * 1024
# While a shard is not found.
_LISTINGS_APART_S: Final = 1.0


class OffsetSearch(Protocol):
    """The interface for the shell: requests to send, answers to take, the time of the next
    request."""

    def asks(self, now: float) -> list[shard_cursor.AskPage | shard_cursor.AskListing]: ...

    def take(
        self,
        ask: shard_cursor.AskPage | shard_cursor.AskListing,
        answer: shard_cursor.Answer,
        now: float,
        chance: float,
    ) -> None: ...

    def next_at(self, now: float) -> float: ...


class RangeBounds:
    """Raises in the constructor: SettingsError for an end that does not fit the stream."""

    def __init__(
        self,
        settings: SourceSettings,
        start: Offset,
        graph: ShardGraph,
        service: ServiceTime,
        now: float,
    ) -> None:
        self._settings = settings
        self._start = start
        self._service = service
        if settings.end.streams and settings.end.streams != start.streams:
            raise SettingsError(
                "endingOffsets: this is the offset of another stream, or of one that was deleted"
                " and made again since"
            )
        below = dict.fromkeys(sorted(descendants_of(graph, start.shards)), TRIM_HORIZON)
        self._begins: Mapping[str, Position] = {**below, **start.shards}
        self._ends: dict[str, Position] = {}
        self._searches: dict[str, ShardSearch] = {}
        # The service's clock has not passed this time, so existing records arrived before it.
        self._ahead_ms = service.surely_ahead_ms(now)
        self._until: dict[str, int | None] = {}
        self._graph = graph
        self._is_listing = False
        self._list_at = now
        for shard_id, position in self._begins.items():
            end = _end_of(settings.end, shard_id, graph, self._begins)
            if position == SHARD_END:
                self._ends[shard_id] = position
            elif isinstance(end, Position):
                self._ends[shard_id] = max(position, end)
            else:
                budget = ReadBudget(settings.reads_per_second_max, now)
                self._searches[shard_id] = ShardSearch(
                    shard_cursor.ShardCursor(shard_id, position, _ROWS_BYTES), budget
                )
                self._until[shard_id] = end

    @property
    def is_over(self) -> bool:
        """Whether all ends are known."""
        return all(self._is_done(search) for search in self._searches.values())

    def asks(self, now: float) -> list[shard_cursor.AskPage | shard_cursor.AskListing]:
        """The requests to send now."""
        for search in self._searches.values():
            target = self._target(search, now)
            if target is not None and not self._is_done(search):
                search.begin(target)
        asked = (search.ask(now) for search in self._searches.values())
        asks: list[shard_cursor.AskPage | shard_cursor.AskListing] = [
            ask for ask in asked if ask is not None
        ]
        if self._missing() and not self._is_listing and now >= self._list_at:
            self._is_listing = True
            asks.append(shard_cursor.AskListing())
        return asks

    def _missing(self) -> list[ShardSearch]:
        """The shards that the service does not find, and that are not known to be trimmed."""
        searches = self._searches.values()
        return [
            search for search in searches if search.gone is not None and not search.cursor.is_lost
        ]

    def _take_listing(self, answer: shard_cursor.Answer, now: float) -> None:
        """Raises: DataLoss for a shard that is proven to be trimmed, unless that is allowed."""
        self._is_listing = False
        self._list_at = now + _LISTINGS_APART_S
        if not isinstance(answer, shard_cursor.Listed):
            return
        for search in self._missing():
            shard_id = search.cursor.shard_id
            if not search.is_trimmed(self._graph.get(shard_id), answer.shards, now):
                continue
            if self._settings.fails_on_data_loss:
                raise DataLoss(f"{shard_id} expired while the batch was planned: read again")
            search.cursor.lose()

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
            self._service.add_sample(answer.page.served_at, answer.sent_at, answer.received_at)
            asked_ms = self._service.surely_past_ms(answer.sent_at)
        elif isinstance(answer, shard_cursor.Refused):
            if ask.read.opening is None or ask.read.opening.timestamp is None:
                raise answer.error
            self._service.was_ahead()
        search = self._searches[ask.shard_id]
        search.take(ask.turn, answer, AnswerTimes(now, asked_ms, chance), self._settings)

    def next_at(self, now: float) -> float:
        """The time of the next request, if no answer comes until then."""
        waiting = [search for search in self._searches.values() if not self._is_done(search)]
        searches = [search.wakes_at(now) for search in waiting if search.is_searching]
        if self._missing() and not self._is_listing:
            searches.append(max(now, self._list_at))
        is_early = any(not search.is_searching for search in waiting)
        return min([*searches, now + 0.05]) if is_early else min(searches, default=now)

    def offsets(self) -> tuple[Offset, Offset]:
        """Start and end; the end contains the beginning of every shard."""
        cursors = {shard_id: search.cursor for shard_id, search in self._searches.items()}
        ends = {**self._ends, **{shard_id: cursor.bound for shard_id, cursor in cursors.items()}}
        began = {
            shard_id: cursors[shard_id].began() if shard_id in cursors else self._begins[shard_id]
            for shard_id in ends
        }
        start = self._start
        end = Offset(streams=start.streams, shards=ends, began=began)
        return start, end

    def _target(self, search: ShardSearch, now: float) -> BatchTarget | None:
        """The tip first; at a shard too busy to show it, the first record after the planning."""
        until_ms = self._until[search.cursor.shard_id]
        past_ms = self._service.surely_past_ms(now) - TIP_MARGIN_MS
        if until_ms is not None and until_ms <= past_ms:
            return BatchTarget(until_ms, _PAGE_BYTES)
        if search.target is None:
            return BatchTarget(past_ms, _PAGE_BYTES, is_tip=True)
        return BatchTarget(self._ahead_ms, _PAGE_BYTES) if self._ahead_ms <= past_ms else None

    def _is_done(self, search: ShardSearch) -> bool:
        cursor = search.cursor
        if search.is_searching or search.target is None:
            return cursor.is_lost
        is_exact = not search.target.is_tip
        return is_exact or cursor.bound == SHARD_END or cursor.tip_at_bound_ms is not None


def _end_of(
    end: Start, shard_id: str, graph: ShardGraph, begins: Mapping[str, Position]
) -> Position | int | None:
    """A position, a time in milliseconds, or None for the records that exist now."""
    match end.kind:
        case StartKind.TIMESTAMP:
            return end.timestamp_ms
        case StartKind.POSITIONS:
            # A query's own offset does not know of shards that entered since.
            rest = begins[shard_id] if end.streams else end.positions.get("*")
            return _named_end(end.positions, shard_id, graph, begins, rest)
        case StartKind.EARLIEST:
            raise SettingsError("endingOffsets: a read cannot end at the earliest record")
        case StartKind.LEASES:
            raise SettingsError("endingOffsets: a read cannot end at the checkpoints of leases")
        case StartKind.LATEST:
            shard = graph.get(shard_id)
            return SHARD_END if shard is not None and not shard.is_open else None


def _named_end(
    positions: Mapping[str, Position],
    shard_id: str,
    graph: ShardGraph,
    begins: Mapping[str, Position],
    rest: Position | None,
) -> Position | int | None:
    position = positions.get(shard_id)
    if position is None:
        if any(shard_id in ancestors_of(graph, named) for named in positions):
            return SHARD_END
        if shard_id in relatives_of(graph, [named for named in positions if named in graph]):
            return begins[shard_id]
        position = rest
    if position is None:
        raise SettingsError(
            f'endingOffsets: where does {shard_id} end? Name it, or all others as "*"'
        )
    return position.timestamp_ms if position.kind is PositionKind.TIMESTAMP else position
