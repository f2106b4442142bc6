"""The reports of a batch's tasks to the driver, and the driver's log line about them. Pure.

The driver logs a line when flow control first slows a batch down, and another one when it no longer
does. While every shard accepts its records, the driver logs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.producing.flow_control import ProducerMetrics


class _Put(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of puts. `pause_max_s` and `recovery_max_s` are the largest since the workers
    began: their flow control lives on from batch to batch."""

    rows: int
    records: int
    bytes: int
    requests: int
    full_requests: int
    refused_records: int
    failed_requests: int
    pause_max_s: float
    recovery_max_s: float


class TaskReport(_Put, frozen=True, kw_only=True):
    """One task: its puts, and the shards that flow control slowed, at the end of the task.

    `slowed` is by shard id: the batch size in records and the pause in seconds.
    """

    slowed: dict[str, tuple[int, float]] = {}


class BatchReport(_Put, frozen=True, kw_only=True):
    """All tasks of a batch that finished.

    `batch_records` is the smallest batch size and `pause_s` the longest pause of any shard at the
    end of any task.
    """

    tasks: int
    batch_records: int
    pause_s: float
    slowed_shards: int

    @property
    def was_slowed(self) -> bool:
        """Whether a record was refused, or a shard still gets less than it could take."""
        return self.refused_records > 0 or self.slowed_shards > 0

    @property
    def full_batch_share(self) -> float:
        """The share of requests at full batch; 1 where there were none."""
        return self.full_requests / self.requests if self.requests else 1.0


def task_report(rows: int, metrics: ProducerMetrics) -> TaskReport:
    """A task's part of the report."""
    return TaskReport(
        rows=rows,
        records=metrics.records,
        bytes=metrics.bytes,
        requests=metrics.requests,
        full_requests=metrics.full_requests,
        refused_records=metrics.refused_records,
        failed_requests=metrics.failed_requests,
        pause_max_s=metrics.pause_max_s,
        recovery_max_s=metrics.recovery_max_s,
        slowed={
            shard_id: (shard.batch_records, round(shard.pause_s, 3))
            for shard_id, shard in metrics.shards.items()
            if shard.pause_s > 0
        },
    )


def batch_report(tasks: Iterable[TaskReport]) -> BatchReport:
    """The report of a batch from the reports of its tasks."""
    done = tuple(tasks)
    slowed = [(shard_id, *flow) for task in done for shard_id, flow in task.slowed.items()]
    return BatchReport(
        tasks=len(done),
        rows=sum(task.rows for task in done),
        records=sum(task.records for task in done),
        bytes=sum(task.bytes for task in done),
        requests=sum(task.requests for task in done),
        full_requests=sum(task.full_requests for task in done),
        refused_records=sum(task.refused_records for task in done),
        failed_requests=sum(task.failed_requests for task in done),
        pause_max_s=max((task.pause_max_s for task in done), default=0.0),
        recovery_max_s=max((task.recovery_max_s for task in done), default=0.0),
        batch_records=min((records for _, records, _ in slowed), default=PUT_RECORDS_MAX),
        pause_s=max((pause_s for _, _, pause_s in slowed), default=0.0),
        slowed_shards=len({shard_id for shard_id, _, _ in slowed}),
    )


def slowdown_line(what: str, report: BatchReport, *, was_slow: bool) -> str | None:
    """The line to log after a batch; None while nothing changes.

    `what` names the stream and the batch; `was_slow` is whether the batch before was slowed.
    """
    if report.was_slowed and not was_slow:
        return (
            f"{what}: slowed down by throttling: {report.refused_records} refused records were"
            f" sent again, {report.full_batch_share:.0%} of {report.requests} requests were at full"
            f" batch, the largest pause so far is {report.pause_max_s:.3g} s; {_at_the_end(report)}"
        )
    if was_slow and not report.was_slowed:
        return (
            f"{what}: at full speed again; the largest pause was {report.pause_max_s:.3g} s, the"
            f" longest recovery {report.recovery_max_s:.3g} s"
        )
    return None


def _at_the_end(report: BatchReport) -> str:
    if report.slowed_shards == 0:
        return "at its end no shard is slowed any more"
    return (
        f"at its end {report.slowed_shards} shards are slowed, down to batch size"
        f" {report.batch_records} records and pause {report.pause_s:.3g} s"
    )
