"""`kclrun simulate`: shows the behaviour of a fleet, by its own decision code, in virtual time.

It uses neither AWS nor a settings file. The code of the managers and of the lease processes runs
over a simulated table and stream, and the guarantees I1 to I8 and I11 are checked.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import FiniteRange, RenamedOption
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_report
from kclrun.cli.times import DURATION
from kclrun.config.units import Duration

if TYPE_CHECKING:
    from kclrun.leases.policy import Balance
    from kclrun.simulation.what_if import Figures, WhatIf

_LETTERS: Final = 26
_WORKERS_MAX: Final = 2_000


_SHORTEST_S: Final = 30.0
_LONGEST_S: Final = 86_400.0


@click.command()
@click.option(
    "--workers", type=click.IntRange(1, _WORKERS_MAX), help="How many managers.  [default: 3]"
)
@click.option("--shards", type=click.IntRange(1, 10_000), default=12, show_default=True)
@click.option(
    "--groups",
    type=click.IntRange(1, _LETTERS),
    help="Zones or clusters, called a, b, c …; workers are dealt out to them in turn."
    "  [default: 1]",
)
@click.option(
    "--group-sizes",
    metavar="N,N,…",
    help="Workers of each group, where they differ; instead of --workers and --groups.",
)
@click.option("--lose-group", metavar="GROUP", help="Lose all hosts of a group at once, for good.")
@click.option(
    "--deploy",
    type=click.Choice(["rolling"]),
    help="Drain each worker and start a new one in its place, one after the other.",
)
@click.option("--reshard", type=click.Choice(["double", "halve"]), help="UpdateShardCount.")
@click.option(
    "--for",
    "lasting",
    type=DURATION,
    default="10m",
    show_default=True,
    help="Virtual time in all, shared evenly by the start and each event.",
)
@click.option("--minutes", type=FiniteRange(0.5, 24 * 60), hidden=True)  # the older --for
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed, another run.")
@click.option(
    "--records-per-second",
    "records_per_s",
    cls=RenamedOption,
    older="--records",
    type=FiniteRange(min=0),
    help="Of the whole stream.  [default: 10 for each shard]",
)
@click.option(
    "--record-bytes",
    type=click.IntRange(1, 10_000_000),
    default=200,
    show_default=True,
    help="Mean size of a record.",
)
@click.option(
    "--skew",
    type=FiniteRange(0, 3),
    default=0.0,
    show_default=True,
    help="How unequal the keys are: Zipf's exponent over 1,000 keys; 0: every shard gets the same.",
)
@click.option(
    "--balance",
    type=click.Choice(["load", "counts"]),
    default="load",
    show_default=True,
    help="As `leases.balance`.",
)
@click.option("--failover", type=DURATION, default="10s", show_default=True)
@click.option(
    "--idle",
    type=DURATION,
    default="5s",
    show_default=True,
    help="The pause between reads of a shard, as `fetch.idle` (there 1s: more work here).",
)
@click.option(
    "--leases-max",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="As `leases.max`: how many shards one worker takes at most.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object, with how it went over time."
)
def simulate(  # noqa: PLR0913 - the options of the verb
    *,
    as_json: bool,
    lose_group: str | None,
    group_sizes: str | None,
    groups: int | None,
    workers: int | None,
    shards: int,
    records_per_s: float | None,
    failover: Duration,
    idle: Duration,
    lasting: Duration,
    minutes: float | None,
    leases_max: int,
    balance: Balance,
    **others: object,
) -> int:
    """Show what a fleet does when it starts, loses hosts, is deployed, or the stream is resharded.

    Runs the very code that decides in a real fleet, in virtual time: seconds for minutes. The
    same seed gives the same run. Ends with 70 and the whole story if a promise breaks.

    \b
    kclrun simulate --workers 40 --shards 600 --groups 3 --lose-group a
    kclrun simulate --workers 12 --shards 96 --deploy rolling --reshard double --json
    kclrun simulate --group-sizes 8,4,4 --shards 75 --lose-group a
    kclrun simulate --workers 8 --shards 64 --skew 1 --record-bytes 50000 --for 30m
    """
    from kclrun.simulation.what_if import WhatIf, run_what_if
    from kclrun.simulation.world import FleetSettings

    sizes = _group_sizes(group_sizes, groups, workers)
    _refuse_impossible(lose_group, sizes)
    asked = msgspec.convert(
        {
            **others,
            "group_sizes": sizes,
            "shards": shards,
            "lose_group": lose_group,
            "minutes": _minutes(lasting) if minutes is None else minutes,
            "records_per_s": 10.0 * shards if records_per_s is None else records_per_s,
            "settings": FleetSettings(
                failover_s=float(failover),
                poll_s=float(idle),
                leases_max=leases_max,
                balance=balance,
            ),
        },
        WhatIf,
    )
    figures = run_what_if(asked, _replay(asked))
    print_report(figures, _print, as_json=as_json, in_json=partial(_print_in_json, asked))
    return exit_codes.DRAINED


def _group_sizes(sizes: str | None, groups: int | None, workers: int | None) -> tuple[int, ...]:
    """The number of workers of each group, from either form of the options."""
    if sizes is None:
        workers, groups = workers or 3, groups or 1
        if groups > workers:
            raise click.UsageError(f"--groups {groups} needs at least as many workers")
        return tuple(len(range(group, workers, groups)) for group in range(groups))
    if groups is not None or workers is not None:
        raise click.UsageError(
            "--group-sizes has the number of workers and of groups; leave"
            " --workers and --groups out"
        )
    counts = tuple(int(size) if size.strip().isdecimal() else 0 for size in sizes.split(","))
    if not all(counts) or len(counts) > _LETTERS or sum(counts) > _WORKERS_MAX:
        raise click.UsageError(
            f"--group-sizes {sizes}: whole numbers from 1 on with commas between, at most"
            f" {_LETTERS} of them and {_WORKERS_MAX} workers in all, such as 8,4,4"
        )
    return counts


def _minutes(lasting: Duration) -> float:
    """Raises: click.UsageError for a time in which nothing happens, or that takes hours to run."""
    if not _SHORTEST_S <= lasting <= _LONGEST_S:
        raise click.UsageError(f"--for {lasting.text}: expected 30s to 1d")
    return lasting / 60


def _refuse_impossible(lost: str | None, sizes: tuple[int, ...]) -> None:
    from kclrun.simulation.what_if import group_names

    names = group_names(len(sizes))
    if lost is not None and lost not in names:
        raise click.UsageError(f"--lose-group {lost}: the groups are {', '.join(names)}")
    if lost is not None and len(sizes) == 1:
        raise click.UsageError("--lose-group needs a second group: no worker would be left")


def _replay(asked: WhatIf) -> str:
    """The command line that repeats the run."""
    settings, sizes, workers = asked.settings, asked.group_sizes, asked.workers
    is_even = sizes == _group_sizes(None, len(sizes), workers)
    options: dict[str, object] = {
        "seed": asked.seed,
        "workers": workers if is_even else None,
        "groups": len(sizes) if is_even else None,
        "group-sizes": None if is_even else ",".join(map(str, sizes)),
        "shards": asked.shards,
        "for": Duration(asked.minutes * 60).text,
        "records-per-second": f"{asked.records_per_s:g}",
        "record-bytes": asked.record_bytes,
        "skew": f"{asked.skew:g}",
        "balance": settings.balance,
        "failover": f"{settings.failover_s:g}s",
        "idle": f"{settings.poll_s:g}s",
        "leases-max": settings.leases_max,
        "lose-group": asked.lose_group,
        "deploy": asked.deploy,
        "reshard": asked.reshard,
    }
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["kclrun simulate", *words])


def _print_in_json(asked: WhatIf, figures: Figures) -> None:
    """On one line."""
    echo(json.dumps({"asked": msgspec.to_builtins(asked), **msgspec.to_builtins(figures)}))


def _print(figures: Figures) -> None:
    from kclrun.cli.tables import print_table

    titles = (
        "what", "balanced after", "gaps", "p50", "p99", "max", "moves", "repeated", "WCU/s", "RCU/s"
    )  # fmt: skip
    ends = [phase.began_s for phase in figures.phases[1:]] + [figures.virtual_s]
    rows = [
        (
            phase.name,
            "not yet" if phase.balanced_after_s is None else f"{phase.balanced_after_s:.1f}s",
            str(phase.gaps),
            *(
                "-" if gap is None else f"{gap:.2f}s"
                for gap in (phase.gap_p50_s, phase.gap_p99_s, phase.gap_max_s)
            ),
            str(phase.moves),
            str(phase.duplicates),
            f"{phase.write_units / (end - phase.began_s):.1f}",
            f"{phase.read_units / (end - phase.began_s):.1f}",
        )
        for phase, end in zip(figures.phases, ends, strict=True)
    ]
    print_table(titles, rows)
    echo()
    echo(
        f"{figures.shards} shards, {figures.workers} workers: {figures.shards_per_owner_min} to"
        f" {figures.shards_per_owner_max} each (even: {figures.shards_per_owner_even:g});"
        f" {figures.records} records, {figures.duplicates} repeated; I1 to I8 and I11 held for"
        f" {figures.virtual_s / 60:g} minutes"
    )
    _print_loads(figures)


def _print_loads(figures: Figures) -> None:
    before, series = figures.load_by_counts, figures.series
    if before is not None:
        echo(
            f"the largest load of a worker: {before:.2f} of the mean with even counts,"
            f" {series.load_greatest[-1]:.2f} at the end; even counts allow"
            f" {series.load_least[-1]:.2f}"
        )
