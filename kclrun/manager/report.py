"""What this manager's lease processes did, per shard and in all, for `--report`.

Rule: a status slot counts from the start of its incarnation, so a dead incarnation is added to the
past when its death is proven, and the living one counts on top: nothing is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from kclrun.ipc.board import LeaseStatus
from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.report import Report, ShardReport, Totals

__all__ = ["ReportWriter"]


class _Past(msgspec.Struct):
    """What dead incarnations of a shard's process left."""

    report: ShardReport = ShardReport()
    incarnations: int = 0


_EMPTY: Final = ShardReport()


class ReportWriter:
    """Adds up; `shard` is the picture at any time, `report` the whole at the end."""

    def __init__(self) -> None:
        self._past: dict[LeaseKey, _Past] = {}
        self._departed: set[LeaseKey] = set()

    def started(self, key: LeaseKey) -> None:
        self._past.setdefault(key, _Past()).incarnations += 1

    def ended(self, key: LeaseKey) -> None:
        past = self._past.setdefault(key, _Past())
        past.report = msgspec.structs.replace(past.report, is_ended=True)

    def departed(self, key: LeaseKey, status: LeaseStatus | None) -> None:
        """The last status of a process proven dead; None if it never published one."""
        past = self._past.setdefault(key, _Past())
        past.report = _with(past.report, status)
        self._departed.add(key)

    def take_departed(self) -> frozenset[LeaseKey]:
        """The shards whose process was proven dead since the last call."""
        departed = frozenset(self._departed)
        self._departed.clear()
        return departed

    def restarts(self, key: LeaseKey) -> int:
        past = self._past.get(key)
        return max(0, past.incarnations - 1) if past is not None else 0

    def shard(self, key: LeaseKey, living: LeaseStatus | None) -> ShardReport:
        """The shard so far, its living process included."""
        past = self._past.get(key)
        report = _with(past.report if past is not None else _EMPTY, living)
        return msgspec.structs.replace(report, restarts=self.restarts(key))

    @property
    def records_total(self) -> int:
        """What dead incarnations processed; of all, once no process lives."""
        return sum(past.report.records or 0 for past in self._past.values())

    def records_besides(self, shown: Container[str]) -> int:
        """What dead incarnations of all shards but these processed."""
        return sum(past.report.records or 0 for key, past in self._past.items() if key not in shown)

    @property
    def ended_total(self) -> int:
        return sum(past.report.is_ended for past in self._past.values())

    def report(
        self, *, application: str, stream: str, owner: str, exit_reason: str, seconds: float
    ) -> Report:
        """The run's report once every process is proven dead."""
        shards = {str(key): self.shard(key, None) for key in sorted(self._past)}
        return Report(
            application=application,
            stream=stream,
            owner=owner,
            exit_reason=exit_reason,
            seconds=round(seconds, 3),
            totals=_totals(shards),
            shards=shards,
        )


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
    )


def _shown(position: ExtendedSequenceNumber | None) -> str | None:
    return str(position) if position is not None else None


def _totals(shards: Mapping[str, ShardReport]) -> Totals:
    every = shards.values()
    return Totals(
        shards=len(shards),
        ended=sum(shard.is_ended for shard in every),
        records=sum(shard.records or 0 for shard in every),
        bytes=sum(shard.bytes or 0 for shard in every),
        batches=sum(shard.batches for shard in every),
        processing_seconds=round(sum(shard.processing_seconds for shard in every), 6),
        restarts=sum(shard.restarts for shard in every),
    )
