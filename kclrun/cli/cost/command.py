"""`kclrun cost`: the bill of a month, in lines; with `--set`, what a setting changes.

The traffic is that of the command line, or of the stream and the lease table; formulas give the
amounts that AWS bills, and `prices.json` has the prices. It changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, FiniteRange, config_options
from kclrun.cli.messages import echo
from kclrun.cli.tables import print_table
from kclrun.config.changes import is_of_changes
from kclrun.config.data_files import package_data
from kclrun.config.outputs import output_places
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings
from kclrun.config.state import checkpoint_every, state_place
from kclrun.consuming.policy import FLOOR_S
from kclrun.leases.balancing import find_every_s
from kclrun.leases.policy import FREQUENT_SCANNERS_MAX, ManagerPolicy
from kclrun.model.lease import Lease, OwnerId
from kclrun.model.output import OutputPlace
from kclrun.model.stream import ONLY_STREAM
from kclrun.observe.metrics import METRICS
from kclrun.protocol.fence import renew_interval_s
from kclrun.spark.keyed.query_state import SHARDS_LOOKED_AT

_MACHINES: Final = 3  # without --machines, and without a fleet to count: one in each of three zones
Capacity = Literal["provisioned", "on-demand"]


class Price(msgspec.Struct, frozen=True):
    """So much for so many."""

    price: float
    per: int


class PriceList(msgspec.Struct, frozen=True):
    """The prices of a region on a day, by their names in the formulas."""

    region: str
    as_of: str
    currency: str
    source: str
    prices: Mapping[str, Price]

    def of(self, line: Line) -> float:
        price = self.prices[line.price]
        return line.amount * price.price / price.per


def price_list() -> PriceList:
    """That of this version of kclrun."""
    return package_data("kclrun.cli.cost", "prices.json", PriceList)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic, by the options of the command line."""

    shards: int | None
    records_per_second: float | None
    record_bytes: int
    machines: int | None
    capacity: Capacity


# Sections with services of AWS that are paid for.
_USED: Final = ("output", "outputs", "state", "checkpoint", "spark", "observe")


@click.command(cls=ConfigCommand)
@config_options
@click.option("--shards", type=click.IntRange(min=1), help="Plan for so many; asks no AWS.")
@click.option("--records-per-second", type=FiniteRange(min=0), help="Of the whole stream.")
@click.option(
    "--record-bytes",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Mean size of a record.",
)
@click.option("--machines", type=click.IntRange(min=1), help="Machines of the fleet.")
@click.option(
    "--capacity",
    type=click.Choice(["provisioned", "on-demand"]),
    default="provisioned",
    show_default=True,
    help="The mode of the stream.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the traffic and the lines.")
def cost(config: ConfigChoice, *, as_json: bool, **given: Any) -> int:
    """Estimate what the application costs a month, and what a setting changes.

    \b
    kclrun cost --config app.yaml                             by the traffic of the last minutes
    kclrun cost --config app.yaml --shards 20 --records-per-second 5000      without AWS
    kclrun cost --config app.yaml --set fetch.mode=fan-out    the difference that it makes
    """
    before = ConfigChoice(config.named).load_for(*_USED).settings
    after = config.load_for(*_USED).settings if config.overrides else None
    asked = Asked(**given)
    if asked.shards is not None:
        traffic = _planned(asked)
    elif before.aws.endpoint == EMBEDDED:
        raise click.UsageError("aws.endpoint: embedded costs nothing; plan with --shards N")
    else:
        traffic = _measured(before, asked)
    plans = [plan_of(each) for each in (before, after) if each is not None]
    if as_json:
        echo(json.dumps(_as_json(plans, traffic), indent=2))
    else:
        _show(plans, traffic)
    return exit_codes.DRAINED


def plan_of(settings: Settings) -> Plan:
    """What the formulas need of the settings."""
    is_of_query = settings.engine == "spark"
    every = settings.spark.trigger if is_of_query else checkpoint_every(settings)
    # checkpoint: manual is up to the processor; each batch is the most.
    every_s = 0.0 if isinstance(every, str) else float(every)
    state, cloudwatch = state_place(settings), settings.observe.cloudwatch
    return Plan(
        is_of_query=is_of_query,
        failover_s=float(settings.leases.failover),
        checkpoint_every_s=math.inf if every == "available-now" else every_s,
        idle_s=float(max(settings.fetch.idle, settings.fetch.every)),
        fans_out=settings.fetch.mode == "fan-out",
        is_of_changes=is_of_changes(settings),
        outputs=() if is_of_query else output_places(settings, ONLY_STREAM),
        keeps_state_in_s3=state is not None and state.s3 is not None,
        keeps_state_in_items=state is not None and state.dynamodb is not None,
        metrics=None if is_of_query or cloudwatch is None else cloudwatch.via,
        metrics_by_shard=cloudwatch is not None and cloudwatch.detail == "shard",
    )


def _planned(asked: Asked) -> Traffic:
    assert asked.shards is not None, "asked before"
    return Traffic(
        shards=asked.shards,
        machines=asked.machines or _MACHINES,
        records_per_s=asked.records_per_second or 0.0,
        record_bytes=asked.record_bytes,
        capacity=asked.capacity,
    )


def _measured(settings: Settings, asked: Asked) -> Traffic:
    """By the streams as they are described, and by the rows of the lease table: each has the bytes
    a second of its lease. Raises: UsageError where the number of records is not known; as
    `open_streams` and `scan_leases`."""
    from kclrun.aws.rows import encode_row
    from kclrun.cli.leases.views import scan_leases
    from kclrun.cli.services import Aws, open_streams

    is_of_query = settings.engine == "spark"
    if is_of_query and asked.records_per_second is None:
        raise click.UsageError("engine: spark has no lease table: give --records-per-second")
    aws = Aws(settings)
    summaries = [each.summary for each in open_streams(aws).values()]
    leases = () if is_of_query else scan_leases(aws)
    sizes = [_item_bytes(encode_row(each)) for each in leases]
    records_per_s = asked.records_per_second
    if records_per_s is None:
        records_per_s = bytes_per_s(leases) / asked.record_bytes
    return Traffic(
        shards=sum(each.open_shards for each in summaries),
        machines=asked.machines or len({each.owner for each in leases if each.owner}) or _MACHINES,
        records_per_s=records_per_s,
        record_bytes=asked.record_bytes,
        retention_hours=max(each.retention_hours for each in summaries),
        capacity=asked.capacity,
        row_bytes=sum(sizes) / len(sizes) if sizes else ROW_BYTES,
    )


def bytes_per_s(leases: Sequence[Lease]) -> float:
    """What the leases that are still read get, as their owners last measured it."""
    loads = [each.load for each in leases if not each.is_ended and each.load is not None]
    return sum(load.kbps for load in loads) * _KB


def _item_bytes(item: Mapping[str, Any]) -> int:
    """As DynamoDB counts: names and values in UTF-8; close enough for numbers and lists."""
    return sum(
        len(name.encode()) + sum(len(str(value).encode()) for value in typed.values())
        for name, typed in item.items()
    )


def _as_json(plans: Sequence[Plan], traffic: Traffic) -> dict[str, Any]:
    prices = price_list()
    keys = ("before", "after") if len(plans) > 1 else ("lines",)
    bills = {
        key: [
            msgspec.structs.asdict(line) | {"cost": round(prices.of(line), 4)}
            for line in bill(plan, traffic)
        ]
        for key, plan in zip(keys, plans, strict=True)
    }
    return {
        "region": prices.region,
        "as_of": prices.as_of,
        "currency": prices.currency,
        "traffic": msgspec.structs.asdict(traffic),
        **bills,
    }


def _show(plans: Sequence[Plan], traffic: Traffic) -> None:
    prices = price_list()
    machines = "1 machine, " if traffic.machines == 1 else f"{traffic.machines} machines, "
    if all(plan.is_of_query for plan in plans):
        machines = ""
    echo(
        f"{traffic.shards} shards, {traffic.capacity}, {traffic.records_per_s:,.0f} records/s of"
        f" {traffic.record_bytes:,.0f} B, {machines}retention"
        f" {traffic.retention_hours} h\n"
        f"List prices of {prices.region}, {prices.as_of}, {prices.currency} a month of 730 h\n"
    )
    costs = [
        {(line.service, line.what): (line, prices.of(line)) for line in bill(plan, traffic)}
        for plan in plans
    ]
    names = list(dict.fromkeys(name for each in costs for name in each))
    rows = [_row(name, [each.get(name) for each in costs]) for name in names]
    ours = [sum(cost for line, cost in each.values() if not line.is_of_producers) for each in costs]
    rows.append(("total", "without what producers pay", "", *_amounts(ours)))
    titles = ("with it", "change") if len(plans) > 1 else ()
    print_table(("service", "for", "amount", "cost", *titles), rows)
    if left_out := sorted({name for plan in plans for name in not_counted(plan)}):
        echo(f"\nNot counted: {', '.join(left_out)} (outputs)")
    of_queries = sorted({what for plan in plans for what in not_counted_of_query(plan)})
    others = ["machines, network, storage of rows and objects, alarms", *of_queries]
    echo(f"\nNot counted: {', '.join(others)}")


def _row(
    name: tuple[str, str], found: Sequence[tuple[Line, float] | None]
) -> tuple[str, str, str, *tuple[str, ...]]:
    line = next(each[0] for each in reversed(found) if each is not None)
    paid = f"{name[1]} (of producers)" if line.is_of_producers else name[1]
    costs = [0.0 if each is None else each[1] for each in found]
    return (name[0], paid, f"{line.amount:,.0f}", *_amounts(costs))


def _amounts(costs: Sequence[float]) -> tuple[str, ...]:
    shown = tuple(f"{cost:,.2f}" for cost in costs)
    return (*shown, f"{costs[1] - costs[0]:+,.2f}") if len(costs) > 1 else shown


# How much of what AWS bills an application uses a month. Each formula names its source: the
# protocol for what kclrun sends, the pricing page of the service for how it is counted.

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
    """What the formulas need of the settings. `checkpoint_every_s` is 0 for a checkpoint after each
    batch. Of a query of Spark it is the time between batches, infinite where others start the
    runs."""

    failover_s: float
    checkpoint_every_s: float
    idle_s: float
    fans_out: bool
    is_of_query: bool = False
    is_of_changes: bool = False
    outputs: tuple[OutputPlace, ...] = ()
    keeps_state_in_s3: bool = False
    keeps_state_in_items: bool = False
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
    """The lines of the bill, without those of no amount."""
    lines = [
        *_stream(plan, traffic),
        *(() if plan.is_of_query else _lease_table(plan, traffic)),
        *_outputs(plan, traffic),
        *_state(plan, traffic),
        *_metrics(plan, traffic),
    ]
    return tuple(line for line in lines if line.amount)


def not_counted(plan: Plan) -> list[str]:
    """Outputs whose bill depends on numbers that the settings do not have."""
    kinds = ("sql", "kinesis", "sqs", "sns", "firehose")
    named = {kind for place in plan.outputs for kind in kinds if getattr(place, kind) is not None}
    return sorted(named)


def not_counted_of_query(plan: Plan) -> Iterator[str]:
    """The writes of Spark itself, and the runs with `available-now`, whose number is not in the
    settings."""
    if plan.is_of_query:
        yield "what Spark writes (its checkpoint, the query's output)"
        if plan.keeps_state_in_s3 and math.isinf(plan.checkpoint_every_s):
            yield "state of runs with spark.trigger: available-now"


def _stream(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: the pricing pages of Kinesis Data Streams and of DynamoDB Streams."""
    if plan.is_of_changes:
        # A page with records is followed by another after the floor of 200 ms at the earliest (the
        # lag is in whole seconds, so it may count as behind), an empty one by `fetch.idle`: no more
        # than a page for each record besides those of an idle shard.
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
    """Source: the requests of K8 and K10. Rows are taken to be as many and as large as the
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


def _state(plan: Plan, traffic: Traffic) -> Iterator[Line]:
    """Source: the requests of K14 and K21."""
    if not traffic.records_per_s:
        return
    every_s = plan.checkpoint_every_s or plan.idle_s
    if plan.keeps_state_in_s3:
        # On Spark the name of a version is claimed by an object of its own; and after each batch
        # old ones are looked for: a listing of the shards, and one of each shard looked at.
        puts = traffic.shards
        if plan.is_of_query:
            puts = 2 * traffic.shards + 1 + min(SHARDS_LOOKED_AT, traffic.shards)
        yield Line("S3", "versions of the state", "s3-put", puts / every_s * SECONDS)
    if plan.keeps_state_in_items:
        # A version has the changes of its commit: taken to be as many bytes as its records, once in
        # a delta, and once more in the snapshot that is due when the deltas exceed the one before.
        changed = traffic.bytes_per_s * every_s / traffic.shards
        units = 2 * math.ceil(changed / _WRITE_UNIT_BYTES)
        amount = traffic.shards / every_s * units * SECONDS
        yield Line("DynamoDB", "versions of the state", "write-unit", amount)


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
