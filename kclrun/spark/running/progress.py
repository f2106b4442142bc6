"""Reads one committed micro-batch from Spark's progress, and adds up the batches of a run. Pure.

Positions are those of the source's own offsets; rows by shard come from the metric that `query.py`
lets Spark observe; lag comes from the source's report. A missing value is None, never zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kclrun.errors import OffsetRefused
from kclrun.model.time import Instant
from kclrun.observe.sample import LeaseSample, ManagerSample, RunReport, ShardReport, Totals
from kclrun.spark.offsets import Offset, decode_offset
from kclrun.spark.positions import SHARD_END, Position

# The notice before the first batch, which takes an idle machine some 10 s after the start of the
# JVM: Spark starts Python workers for it.
FIRST_BATCH: Final = "Spark is starting: its first batch may take half a minute"

# Rates are shown over this time at most: as on the fleet, the last few seconds.
_RATE_OVER_S: Final = 5.0


class RunCounts:
    """The counts of a run, added up from its batches: for the final report and the live view.

    Instants are arguments. A batch counts once, when it is committed; a replay after a crash
    belongs to another run. The batches themselves are kept for the time of a rate only.
    """

    def __init__(self, began: Instant) -> None:
        self._began = began
        self._shards: dict[str, ShardReport] = {}
        self._bounds: Mapping[str, Position] = {}
        self._lags: dict[str, int] = {}
        self._recent: deque[tuple[Instant, BatchDone]] = deque()
        self.records = 0
        self.batches = self.dead_letters = self.skipped = self.late = 0
        self._bytes: int | None = 0
        self._seconds = 0.0

    def add(self, batch: BatchDone, now: Instant) -> tuple[str, ...]:
        """Count one committed batch. Returns: the shards that it read to their end."""
        self.records += batch.records
        self.batches += 1
        self.dead_letters += batch.dead_letters
        self.skipped += batch.skipped
        self.late += batch.late
        self._seconds += batch.seconds
        self._bytes = _sum(self._bytes, batch.bytes)
        self._recent.append((now, batch))
        self._forget_before(now - _RATE_OVER_S)
        ended = []
        for shard_id, part in batch.shards.items():
            self._shards[shard_id] = _added(self._shards.get(shard_id), part)
            if part.end == SHARD_END:
                ended.append(shard_id)
                self._lags.pop(shard_id, None)
        self._bounds = batch.bounds
        return tuple(sorted(ended))

    def lagged(self, lags: Mapping[str, int]) -> None:
        """Note how far shards are behind, as the source reported it."""
        self._lags = {
            shard_id: lag_ms
            for shard_id, lag_ms in lags.items()
            if self._bounds.get(shard_id) != SHARD_END
        }

    def report(
        self, *, application: str, stream: str, owner: str, exit_reason: str, seconds: float
    ) -> RunReport:
        """The run's report."""
        shards = {
            shard_id: msgspec.structs.replace(shard, lag_ms=self._lags.get(shard_id))
            for shard_id, shard in sorted(self._shards.items())
        }
        totals = Totals(
            shards=len(shards),
            ended=sum(shard.is_ended for shard in shards.values()),
            records=self.records,
            bytes=self._bytes,
            batches=self.batches,
            processing_seconds=round(self._seconds, 3),
            restarts=0,
            dead_letters=self.dead_letters,
            skipped=self.skipped,
        )
        return RunReport(
            application=application,
            stream=stream,
            owner=owner,
            exit_reason=exit_reason,
            seconds=round(seconds, 3),
            totals=totals,
            shards=shards,
        )

    def sample(
        self, *, application: str, stream: str, owner: str, is_draining: bool, now: Instant
    ) -> ManagerSample:
        """The run at this moment: a line for each shard that has not ended."""
        self._forget_before(now - _RATE_OVER_S)
        ended = {shard_id for shard_id, shard in self._shards.items() if shard.is_ended}
        views = tuple(
            self._view(shard_id, now)
            for shard_id in sorted({*self._shards, *self._bounds} - ended)
            if self._bounds.get(shard_id) != SHARD_END
        )
        shown = sum(view.records_total for view in views)
        return ManagerSample(
            application=application,
            stream=stream,
            owner=owner,
            uptime_s=now - self._began,
            leases=views,
            ended_total=len(ended),
            records_departed=max(0, self.records - shown),
            given_up_total=self.dead_letters + self.skipped,
            is_draining=is_draining,
            has_leases=False,
            doing="" if self.batches else FIRST_BATCH,
        )

    def _forget_before(self, instant: float) -> None:
        while self._recent and self._recent[0][0] < instant:
            self._recent.popleft()

    def _view(self, shard_id: str, now: Instant) -> LeaseSample:
        shard = self._shards.get(shard_id, ShardReport())
        parts = [batch.shards.get(shard_id) for _, batch in self._recent]
        records = sum(part.records or 0 for part in parts if part is not None)
        over_s = min(_RATE_OVER_S, max(now - self._began, 0.001))
        return LeaseSample(
            shard=shard_id,
            state="running",
            records_total=shard.records or 0,
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


# The name of the observed metric. A pipeline may use other names for its own metrics.
OBSERVED: Final = "kclrun"


class ShardBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's part of a batch; `records` None where this Spark cannot count by shard.

    Only a processor's tasks report `bytes` and `processing_s`, the time in user code.
    """

    begin: Position
    end: Position
    records: int | None = None
    bytes: int | None = None
    processing_s: float = 0.0


class BatchDone(msgspec.Struct, frozen=True, kw_only=True):
    """One committed batch. `shards` are the shards that it moved forward.

    `bytes` None where they were not counted; the last two count records that a processor's tasks
    gave up; `seconds` is the time of the whole trigger; `bounds` are all positions after it.
    """

    batch_id: int
    records: int
    bytes: int | None
    seconds: float
    shards: Mapping[str, ShardBatch]
    bounds: Mapping[str, Position]
    dead_letters: int = 0
    skipped: int = 0
    late: int = 0


def read_progress(progress: Mapping[str, Any]) -> BatchDone | None:
    """The batch of one progress (Spark's JSON, decoded); None for an idle trigger."""
    durations = progress.get("durationMs", {})
    if "addBatch" not in durations:
        return None
    observed = progress.get("observedMetrics", {}).get(OBSERVED, {})
    by_shard = _by_shard(observed)
    shards: dict[str, ShardBatch] = {}
    bounds: dict[str, Position] = {}
    for source in progress.get("sources", ()):
        end = _offset(source.get("endOffset"))
        if end is None:
            continue
        bounds |= end.shards
        shards |= _shards(_offset(source.get("startOffset")), end, by_shard)
    return BatchDone(
        batch_id=progress["batchId"],
        # A sum over no rows is null.
        records=(observed.get("records") or 0) if observed else progress.get("numInputRows", 0),
        bytes=(observed.get("bytes") or 0) if observed else None,
        seconds=durations.get("triggerExecution", 0) / 1000,
        shards=shards,
        bounds=bounds,
        dead_letters=observed.get("deadLetters") or 0,
        skipped=observed.get("skipped") or 0,
        late=sum(
            of.get("numRowsDroppedByWatermark", 0) for of in progress.get("stateOperators", ())
        ),
    )


def read_lags(progress: Mapping[str, Any]) -> Mapping[str, int]:
    """Milliseconds behind the tip by shard, from the source's last report."""
    lags: dict[str, int] = {}
    for source in progress.get("sources", ()):
        reported = read_report(source.get("latestOffset")) or {}
        for shard_id, shard in reported.get("shards", {}).items():
            lag_ms = shard.get("lagMs") if isinstance(shard, dict) else None
            if isinstance(lag_ms, int | float):
                lags[shard_id] = round(lag_ms)
    return lags


def read_report(reported: object) -> Mapping[str, Any] | None:
    """The source's report, which Spark passes as JSON or decoded; None for another source, and
    where this PySpark passes no report."""
    if isinstance(reported, str):
        try:
            reported = msgspec.json.decode(reported)
        except msgspec.DecodeError:
            return None
    if isinstance(reported, dict) and isinstance(reported.get("shards"), dict):
        return reported
    return None


def _offset(value: object) -> Offset | None:
    """Our offset; None for another source's offset, or without an offset."""
    try:
        return decode_offset(value)
    except OffsetRefused:
        return None


class ShardCount(NamedTuple):
    """The counts of one shard in one batch."""

    records: int | None = None
    bytes: int | None = None
    processing_s: float = 0.0

    def plus(self, other: ShardCount) -> ShardCount:
        return ShardCount(
            (self.records or 0) + (other.records or 0),
            other.bytes if self.bytes is None else self.bytes + (other.bytes or 0),
            self.processing_s + other.processing_s,
        )


def _shards(
    start: Offset | None, end: Offset, by_shard: Mapping[str, ShardCount] | None
) -> dict[str, ShardBatch]:
    former = start.shards if start is not None else {}
    moved = {}
    for shard_id, bound in end.shards.items():
        begin = end.began.get(shard_id, former.get(shard_id))
        if begin is None or begin == bound:
            continue
        counted = by_shard.get(shard_id, ShardCount(0)) if by_shard is not None else ShardCount()
        moved[shard_id] = ShardBatch(
            begin=begin,
            end=bound,
            records=counted.records,
            bytes=counted.bytes,
            processing_s=counted.processing_s,
        )
    return moved


def _by_shard(observed: Mapping[str, Any]) -> Mapping[str, ShardCount] | None:
    """The counts by shard. A processor that is released within a batch reports its shard again."""
    counted = observed.get("by_shard")
    if not isinstance(counted, list):
        return None
    counts: dict[str, ShardCount] = {}
    for entry in counted:
        counts[entry["item"]] = counts.get(entry["item"], ShardCount(0)).plus(
            ShardCount(entry["count"], entry.get("bytes"), entry.get("processingS") or 0.0)
        )
    return counts
