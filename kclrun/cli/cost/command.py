"""`kclrun cost`: the bill of a month, in lines; with `--set`, what a setting changes.

`formulas.py` has the amounts, `prices.json` the prices. This module finds the traffic: of the
command line, or of the stream and the lease table. It changes nothing.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigCommand, config_options, load_configuration
from kclrun.cli.cost.formulas import ROW_BYTES, Line, Plan, Traffic, bill, not_counted
from kclrun.cli.leases.views import print_table
from kclrun.config.changes import is_of_changes
from kclrun.config.outputs import output_places
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings
from kclrun.config.state import checkpoint_every, state_place
from kclrun.errors import SettingsError
from kclrun.model.lease import Lease
from kclrun.model.stream import ONLY_STREAM

# Without --machines, and without a fleet to count: one in each of three zones.
_MACHINES: Final = 3
_RECORD_BYTES: Final = 1000
_KIB: Final = 1024
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
    text = importlib.resources.files("kclrun.cli.cost").joinpath("prices.json").read_bytes()
    return msgspec.json.decode(text, type=PriceList)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic as the command line says it."""

    shards: int | None
    records_per_second: float | None
    record_bytes: int
    machines: int | None
    capacity: Capacity


@click.command(cls=ConfigCommand)
@config_options
@click.option("--shards", type=click.IntRange(min=1), help="Plan for so many; asks no AWS.")
@click.option("--records-per-second", type=click.FloatRange(min=0), help="Of the whole stream.")
@click.option(
    "--record-bytes",
    type=click.IntRange(min=1),
    default=_RECORD_BYTES,
    show_default=True,
    help="Mean size of a record, as it is put.",
)
@click.option("--machines", type=click.IntRange(min=1), help="Machines of the fleet.")
@click.option(
    "--capacity",
    type=click.Choice(["provisioned", "on-demand"]),
    default="provisioned",
    show_default=True,
    help="The mode of the stream.",
)
@click.option("--json", "as_json", is_flag=True, help="The lines as JSON.")
def cost(config: Path | None, overrides: tuple[str, ...], *, as_json: bool, **given: Any) -> int:
    """Estimate what the application costs a month, and what a setting changes.

    \b
    kclrun cost app.yaml                                       by the traffic of the last minutes
    kclrun cost app.yaml --shards 20 --records-per-second 5000 without AWS
    kclrun cost app.yaml --set fetch.mode=fan-out              the difference that it makes
    """
    before = load_configuration(config, ()).settings
    if before.engine == "spark":
        raise SettingsError("kclrun cost knows the bill of a fleet; engine: spark has another one")
    after = load_configuration(config, overrides).settings if overrides else None
    asked = Asked(**given)
    if asked.shards is not None:
        traffic = _planned(asked)
    elif before.aws.endpoint == EMBEDDED:
        raise click.UsageError("aws.endpoint: embedded costs nothing; plan with --shards N")
    else:
        traffic = _measured(before, asked)
    plans = [plan_of(each) for each in (before, after) if each is not None]
    if as_json:
        click.echo(json.dumps(_as_json(plans, traffic), indent=2))
    else:
        _show(plans, traffic)
    return exit_codes.DRAINED


def plan_of(settings: Settings) -> Plan:
    """What the formulas need of the settings."""
    every = checkpoint_every(settings)
    # checkpoint: manual is up to the processor; each batch is the most.
    every_s = 0.0 if isinstance(every, str) else every
    state, cloudwatch = state_place(settings), settings.observe.cloudwatch
    return Plan(
        failover_s=float(settings.leases.failover),
        checkpoint_every_s=every_s,
        idle_s=float(settings.fetch.idle),
        fans_out=settings.fetch.mode == "fan-out",
        is_of_changes=is_of_changes(settings),
        outputs=output_places(settings, ONLY_STREAM),
        keeps_state_in_s3=state is not None and state.s3 is not None,
        metrics=cloudwatch.via if cloudwatch is not None else None,
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
    a second of its lease. Raises: as `open_streams` and `scan_leases`."""
    from kclrun.aws.rows import encode_row
    from kclrun.cli.leases.views import scan_leases
    from kclrun.cli.services import Aws, open_streams

    aws = Aws(settings)
    summaries = [each.summary for each in open_streams(aws).values()]
    leases = scan_leases(aws)
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
    return sum(load.kbps for load in loads) * _KIB


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
    click.echo(
        f"{traffic.shards} shards, {traffic.capacity}, {traffic.records_per_s:,.0f} records/s of"
        f" {traffic.record_bytes:,.0f} B, {traffic.machines} machines, retention"
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
        click.echo(f"\nNot counted: {', '.join(left_out)} (outputs)")
    click.echo("\nNot counted: machines, network, storage of rows and objects, alarms")


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
