"""The counts of a manager's lease processes, over their restarts, for `--report`, live tables and
metrics.

It does not know the processes: it is given their status.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import UNSET

from kclrun.manager.world import RunNames
from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.sample import RunReport, ShardReport, Totals
from kclrun.protocol.status import LeaseStatus


class _Past(msgspec.Struct):
    """The counts of the exited incarnations of a shard's lease process."""

    report: ShardReport = ShardReport()
    incarnations: int = 0


# The report names so many shards, the last ones. A DynamoDB stream makes six new shards a day for
# each of its partitions, and a manager may run for months.
_NAMED_MAX: Final = 10_000


class ReportWriter:
    """Counts the work of this manager's lease processes, per shard and in all, for `--report`.

    `shard` is the count at any time; `report` is the whole at the end. A status slot counts from
    the start of its incarnation. So the counts of an incarnation are added to the past when its
    exit is proven, and the counts of the living one are added on top: nothing is lost and nothing
    is counted twice.
    """

    def __init__(self) -> None:
        self._past: dict[LeaseKey, _Past] = {}
        self._living: set[LeaseKey] = set()
        self._departed: set[LeaseKey] = set()
        self._all = ShardReport()  # of all exited incarnations
        self._shards_total = self._restarts_total = self._ended_total = 0

    def started(self, key: LeaseKey) -> None:
        past = self._past_of(key)
        past.incarnations += 1
        if past.incarnations > 1:
            self._restarts_total += 1
        self._living.add(key)

    def ended(self, key: LeaseKey) -> None:
        past = self._past_of(key)
        if not past.report.is_ended:
            self._ended_total += 1
        past.report = msgspec.structs.replace(past.report, is_ended=True)

    def departed(self, key: LeaseKey, status: LeaseStatus | None) -> None:
        """Add the last status of a process that has exited; None if it never published one."""
        past = self._past_of(key)
        past.report, self._all = _with(past.report, status), _with(self._all, status)
        self._living.discard(key)
        self._departed.add(key)

    def take_departed(self) -> frozenset[LeaseKey]:
        """The shards whose process exited since the last call."""
        departed = frozenset(self._departed)
        self._departed.clear()
        return departed

    def shard(self, key: LeaseKey, living: LeaseStatus | None) -> ShardReport:
        """The counts of the shard so far, with those of its living process."""
        past = self._past.get(key, _Past())
        restarts = max(0, past.incarnations - 1)
        return msgspec.structs.replace(_with(past.report, living), restarts=restarts)

    @property
    def records_total(self) -> int:
        """Records that exited processes processed; all records, once no process lives."""
        return self._all.records or 0

    def besides(self, shown: Iterable[LeaseKey]) -> tuple[int, int]:
        """Of exited processes of all other shards: records processed, and records given up."""
        own = [self._past[key].report for key in shown if key in self._past]
        records = self.records_total - sum(report.records or 0 for report in own)
        return records, _given_up(self._all) - sum(map(_given_up, own))

    @property
    def ended_total(self) -> int:
        return self._ended_total

    def report(self, names: RunNames, *, exit_reason: str, seconds: float) -> RunReport:
        """The run's report, once every process has exited. Shards that are not named count in the
        totals."""
        return RunReport(
            application=names.application,
            stream=names.stream,
            owner=names.owner,
            exit_reason=exit_reason,
            seconds=round(seconds, 3),
            totals=Totals(
                shards=self._shards_total,
                ended=self._ended_total,
                records=self.records_total,
                bytes=self._all.bytes or 0,
                batches=self._all.batches,
                processing_seconds=self._all.processing_seconds,
                restarts=self._restarts_total,
                retries=self._all.retries or 0,
                dead_letters=self._all.dead_letters or 0,
                skipped=self._all.skipped or 0,
                passed_over=self._all.passed_over,
            ),
            shards={str(key): self.shard(key, None) for key in sorted(self._past)},
        )

    def _past_of(self, key: LeaseKey) -> _Past:
        past = self._past.get(key)
        if past is None:
            self._shards_total += 1
            past = self._past[key] = _Past()
            if len(self._past) > _NAMED_MAX:
                self._forget_oldest()
        return past

    def _forget_oldest(self) -> None:
        """Name the shard no more that came first, of those without a process."""
        oldest = next((key for key in self._past if key not in self._living), None)
        if oldest is not None:
            del self._past[oldest]
            self._departed.discard(oldest)


def _given_up(report: ShardReport) -> int:
    return (report.dead_letters or 0) + (report.skipped or 0)


def _with(past: ShardReport, living: LeaseStatus | None) -> ShardReport:
    if living is None:
        return past
    return msgspec.structs.replace(
        past,
        records=(past.records or 0) + living.records_total,
        bytes=(past.bytes or 0) + living.bytes_total,
        batches=past.batches + living.batches_total,
        processing_seconds=round(past.processing_seconds + living.processing_s_total, 6),
        first_position=past.first_position or _shown(living.first_delivered),
        last_position=_shown(living.processed) or past.last_position,
        checkpoint=_shown(living.checkpointed) or past.checkpoint,
        retries=(past.retries or 0) + living.retries_total,
        dead_letters=(past.dead_letters or 0) + living.dead_letters_total,
        skipped=(past.skipped or 0) + living.skipped_total,
        passed_over=((past.passed_over or 0) + living.passed_over_total) or UNSET,
    )


def _shown(position: ExtendedSequenceNumber | None) -> str | None:
    return str(position) if position is not None else None
