"""A run added up from its batches: the report at the end, and the picture at any time.

Pure: instants are arguments. Rule: a batch counts once, when it is committed; what a replay does
again after a crash is another run's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from kclrun.model.time import Instant
from kclrun.observe.report import Report, ShardReport, Totals
from kclrun.observe.snapshot import LeaseView, Snapshot
from kclrun.spark.positions import SHARD_END, Position
from kclrun.spark.running.progress import BatchDone, ShardBatch

__all__ = ["RunCounts"]

# Rates are shown over this time, at most: as on the fleet, the last few seconds.
_RATE_OVER_S: Final = 5.0


class RunCounts:
    """What was committed so far."""

    def __init__(self, began: Instant) -> None:
        self._began = began
        self._shards: dict[str, ShardReport] = {}
        self._bounds: Mapping[str, Position] = {}
        self._lags: dict[str, int] = {}
        self._recent: deque[tuple[Instant, BatchDone]] = deque()
        self.records = 0
        self.batches = 0
        self._bytes: int | None = 0
        self._seconds = 0.0

    def add(self, batch: BatchDone, now: Instant) -> tuple[str, ...]:
        """Count one committed batch. Returns: the shards it brought to their end."""
        self.records += batch.records
        self.batches += 1
        self._seconds += batch.seconds
        self._bytes = _sum(self._bytes, batch.bytes)
        self._recent.append((now, batch))
        ended = []
        for shard_id, part in batch.shards.items():
            self._shards[shard_id] = _added(self._shards.get(shard_id), part)
            if part.end == SHARD_END:
                ended.append(shard_id)
                self._lags.pop(shard_id, None)
        self._bounds = batch.bounds
        return tuple(sorted(ended))

    def lagged(self, lags: Mapping[str, int]) -> None:
        """What the source said of how far shards are behind."""
        self._lags = {
            shard_id: lag_ms
            for shard_id, lag_ms in lags.items()
            if self._bounds.get(shard_id) != SHARD_END
        }

    def report(
        self, *, application: str, stream: str, owner: str, exit_reason: str, seconds: float
    ) -> Report:
        """The run's report."""
        shards = {
            shard_id: msgspec.structs.replace(told, lag_ms=self._lags.get(shard_id))
            for shard_id, told in sorted(self._shards.items())
        }
        totals = Totals(
            shards=len(shards),
            ended=sum(shard.is_ended for shard in shards.values()),
            records=self.records,
            bytes=self._bytes,
            batches=self.batches,
            processing_seconds=round(self._seconds, 3),
            restarts=0,
        )
        return Report(
            application=application,
            stream=stream,
            owner=owner,
            exit_reason=exit_reason,
            seconds=round(seconds, 3),
            totals=totals,
            shards=shards,
        )

    def snapshot(
        self, *, application: str, stream: str, owner: str, is_draining: bool, now: Instant
    ) -> Snapshot:
        """The run at this moment: a line for each shard that has not ended."""
        while self._recent and self._recent[0][0] < now - _RATE_OVER_S:
            self._recent.popleft()
        ended = {shard_id for shard_id, told in self._shards.items() if told.is_ended}
        views = tuple(
            self._view(shard_id, now)
            for shard_id in sorted({*self._shards, *self._bounds} - ended)
            if self._bounds.get(shard_id) != SHARD_END
        )
        shown = sum(view.records_total for view in views)
        return Snapshot(
            application=application,
            stream=stream,
            owner=owner,
            uptime_s=now - self._began,
            leases=views,
            ended_total=len(ended),
            records_departed=max(0, self.records - shown),
            is_draining=is_draining,
            has_leases=False,
        )

    def _view(self, shard_id: str, now: Instant) -> LeaseView:
        told = self._shards.get(shard_id, ShardReport())
        parts = [batch.shards.get(shard_id) for _, batch in self._recent]
        records = sum(part.records or 0 for part in parts if part is not None)
        over_s = min(_RATE_OVER_S, max(now - self._began, 0.001))
        return LeaseView(
            shard=shard_id,
            state="running",
            records_total=told.records or 0,
            records_per_s=records / over_s,
            lag_ms=self._lags.get(shard_id),
        )


def _added(past: ShardReport | None, part: ShardBatch) -> ShardReport:
    if past is None:
        past = ShardReport(first_position=str(part.begin))
    return msgspec.structs.replace(
        past,
        records=_sum(past.records, part.records),
        bytes=_sum(past.bytes, part.bytes),
        processing_seconds=round(past.processing_seconds + part.processing_s, 6),
        batches=past.batches + 1,
        last_position=str(part.end),
        checkpoint=str(part.end),
        is_ended=part.end == SHARD_END,
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
