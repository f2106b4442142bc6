"""How much of what AWS bills an application uses a month. Pure.

Each formula names its source: the protocol's rule for what kclrun sends, the service's pricing page
for how it is counted. It does not know prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from kclrun.consuming.policy import FLOOR_S
from kclrun.leases.balancing import find_every_s
from kclrun.leases.policy import FREQUENT_SCANNERS_MAX, ManagerPolicy
from kclrun.model.lease import OwnerId
from kclrun.model.output import OutputPlace
from kclrun.observe.metrics import METRICS
from kclrun.protocol.fence import renew_interval_s

# The pricing pages count a month as 730 hours.
HOURS: Final = 730
SECONDS: Final = HOURS * 3600
GB: Final = 10**9
# PUT payload units of a provisioned stream; a stream on demand counts whole KB of each record.
_PUT_UNIT_BYTES: Final = 25 * 1024
_KB: Final = 1024
# DynamoDB: a write unit is 1 KB of an item, a read unit 4 KB of a consistent read, of a whole page.
_WRITE_UNIT_BYTES: Final = 1024
_READ_UNIT_BYTES: Final = 4096
# A query of the index that finds nothing: half a unit, for it is never consistent.
_QUERY_UNITS: Final = 0.5
# A row with its load and the position of one output.
ROW_BYTES: Final = 500.0
_DAY_H: Final = 24
_WEEK_H: Final = 7 * 24
# A line of the embedded metric format (`observe/emf.py`), with the overhead that logs bill.
_EMF_LINE_BYTES: Final = 350
_PUBLISHED_EVERY_S: Final = 60
_SETS_BY_SHARD: Final = sum(kind.is_by_shard for kind in METRICS.values())


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The stream, and the fleet that reads it. `row_bytes` is the mean size of a lease's row."""

    shards: int
    machines: int
    records_per_s: float
    record_bytes: float
    retention_hours: int = 24
    capacity: Literal["provisioned", "on-demand"] = "provisioned"
    row_bytes: float = ROW_BYTES

    @property
    def bytes_per_s(self) -> float:
        return self.records_per_s * self.record_bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings say. `checkpoint_every_s` is 0 for a checkpoint after each batch."""

    failover_s: float
    checkpoint_every_s: float
    idle_s: float
    fans_out: bool
    is_of_changes: bool = False
    outputs: tuple[OutputPlace, ...] = ()
    keeps_state_in_s3: bool = False
    metrics: Literal["api", "log"] | None = None
    metrics_by_shard: bool = False


class Line(msgspec.Struct, frozen=True):
    """A line of the bill. `price` is a name in the list of prices; `amount` is counted by it."""

    service: str
    what: str
    price: str
    amount: float
    is_of_producers: bool = False


def bill(plan: Plan, traffic: Traffic) -> tuple[Line, ...]:
    """Every line, also those of nothing."""
    lines = [
        *_stream(plan, traffic),
        *_lease_table(plan, traffic),
        *_outputs(plan, traffic),
        *_metrics(plan, traffic),
    ]
    return tuple(line for line in lines if line.amount)


def not_counted(plan: Plan) -> list[str]:
    """Outputs whose bills depend on what this does not know."""
    kinds = ("sql", "kinesis", "sqs", "sns", "firehose")
    named = {kind for place in plan.outputs for kind in kinds if getattr(place, kind) is not None}
    return sorted(named)


def _stream(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: the pricing pages of Kinesis Data Streams and of DynamoDB Streams."""
    if plan.is_of_changes:
        # A page with records is followed by another after the floor of 200 ms, an empty one by
        # `fetch.idle`: no more than a page for each record besides those of an idle shard.
        by_record = traffic.records_per_s / max(traffic.shards, 1)
        pages_per_s = min(1 / FLOOR_S, 1 / plan.idle_s + by_record)
        amount = traffic.shards * pages_per_s * SECONDS
        yield Line("DynamoDB Streams", "reads", "change-read-unit", amount)
        return
    service, shard_hours = "Kinesis", traffic.shards * HOURS
    read_gb = traffic.bytes_per_s * SECONDS / GB
    if traffic.capacity == "on-demand":
        rounded = math.ceil(traffic.record_bytes / _KB) * _KB
        written_gb = traffic.records_per_s * rounded * SECONDS / GB
        yield Line(service, "stream", "on-demand-stream-hour", HOURS)
        yield Line(service, "data in", "on-demand-gb-in", written_gb, is_of_producers=True)
        out = "on-demand-gb-fan-out" if plan.fans_out else "on-demand-gb-out"
        yield Line(service, "data out", out, written_gb)
        return
    units = traffic.records_per_s * math.ceil(traffic.record_bytes / _PUT_UNIT_BYTES) * SECONDS
    yield Line(service, "shards", "shard-hour", shard_hours)
    yield Line(service, "PUT payload units", "put-unit", units, is_of_producers=True)
    if traffic.retention_hours > _DAY_H:
        yield Line(service, "retention above 24 h", "shard-hour-beyond-24h", shard_hours)
    if traffic.retention_hours > _WEEK_H:
        kept_s = (traffic.retention_hours - _WEEK_H) * 3600
        stored_gb = traffic.bytes_per_s * kept_s / GB
        yield Line(service, "retention above 7 days", "stored-gb-beyond-7d", stored_gb)
    if plan.fans_out:
        yield Line(service, "fan-out, consumer", "consumer-shard-hour", shard_hours)
        yield Line(service, "fan-out, data", "fan-out-gb", read_gb)


def writes_per_s(plan: Plan, *, is_read: bool) -> float:
    """Writes of one lease's row. A checkpoint renews too, so the next renewal is a whole interval
    after it [P9]; `_permit_since` in `consuming/lease_writer.py`."""
    renewal_s = renew_interval_s(plan.failover_s)
    every_s = plan.checkpoint_every_s or plan.idle_s
    if not is_read:
        return 1 / renewal_s
    return (math.ceil(every_s / renewal_s)) / every_s


def _lease_table(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: DynamoDB's read and write units, at the pace of P9 and P17. Takes and moves are few
    in a fleet at rest, and are left out."""
    units = math.ceil(traffic.row_bytes / _WRITE_UNIT_BYTES)
    writes = traffic.shards * writes_per_s(plan, is_read=traffic.records_per_s > 0)
    yield Line("DynamoDB", "renewals, checkpoints", "write-unit", writes * units * SECONDS)
    table_units = math.ceil(traffic.shards * traffic.row_bytes / _READ_UNIT_BYTES)
    yield Line("DynamoDB", "scans", "read-unit", _scan_units_per_s(plan, traffic, table_units))
    queries = traffic.machines / find_every_s(traffic.machines)
    yield Line("DynamoDB", "queries for offers", "read-unit", queries * _QUERY_UNITS * SECONDS)


def _scan_units_per_s(plan: Plan, traffic: Traffic, table_units: int) -> float:
    policy = ManagerPolicy(me=OwnerId(""), failover_s=plan.failover_s)
    often = min(traffic.machines, FREQUENT_SCANNERS_MAX)
    seldom = traffic.machines - often
    units = often * table_units / policy.scan_every_s
    # Those may be eventually consistent, for half the units.
    units += seldom * table_units / 2 / policy.seldom_scan_every_s(traffic.machines)
    return units * SECONDS


def _outputs(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: the requests of K8, K10 and K14. Rows are taken to be as many and as large as the
    records."""
    for place in plan.outputs:
        if place.s3 is not None:
            by_size = traffic.bytes_per_s / place.roll_bytes if place.roll_bytes else 0.0
            by_age = traffic.shards / place.roll_s if place.roll_s else 0.0
            is_any = traffic.records_per_s > 0
            yield Line(
                "S3", f"{place.name}: objects", "s3-put", max(by_size, by_age) * SECONDS * is_any
            )
        if place.dynamodb is not None:
            units = math.ceil(traffic.record_bytes / _WRITE_UNIT_BYTES)
            amount = traffic.records_per_s * units * SECONDS
            yield Line("DynamoDB", f"{place.name}: items", "write-unit", amount)
    if plan.keeps_state_in_s3 and traffic.records_per_s:
        every_s = plan.checkpoint_every_s or plan.idle_s
        yield Line("S3", "versions of the state", "s3-put", traffic.shards / every_s * SECONDS)


def _metrics(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: CloudWatch's pricing page: each metric with its dimensions, each request."""
    if plan.metrics is None:
        return
    by_shard = _SETS_BY_SHARD * traffic.shards * plan.metrics_by_shard
    yield Line("CloudWatch", "metrics", "metric-month", len(METRICS) + by_shard)
    sent = traffic.machines * SECONDS / _PUBLISHED_EVERY_S
    if plan.metrics == "api":
        yield Line("CloudWatch", "requests", "metric-request", sent)
    else:
        lines = sent * len(METRICS) + by_shard * SECONDS / _PUBLISHED_EVERY_S
        yield Line("CloudWatch", "lines of the log", "log-gb", lines * _EMF_LINE_BYTES / GB)
