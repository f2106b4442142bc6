"""`kclrun simulate`: what a fleet would do, by the code that decides it, in virtual time.

Touches nothing: no AWS, no settings file. Runs the managers' and the lease processes' own
decisions over a simulated table and stream, and watches the guarantees I1 to I5 and I8.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.duration_option import DURATION
from kclrun.config.units import Duration

if TYPE_CHECKING:
    from kclrun.simulation.what_if import Figures, WhatIf

__all__ = ["simulate"]

_LETTERS: Final = 26


@click.command()
@click.option("--workers", type=click.IntRange(1, 2_000), default=3, show_default=True)
@click.option("--shards", type=click.IntRange(1, 10_000), default=12, show_default=True)
@click.option(
    "--groups",
    type=click.IntRange(1, _LETTERS),
    default=1,
    show_default=True,
    help="Zones or clusters, called a, b, c …; workers are dealt out to them in turn.",
)
@click.option("--lose-group", metavar="GROUP", help="Lose all hosts of a group at once, for good.")
@click.option(
    "--deploy",
    type=click.Choice(["rolling"]),
    help="Drain each worker and start a new one in its place, one after the other.",
)
@click.option("--reshard", type=click.Choice(["double", "halve"]), help="UpdateShardCount.")
@click.option(
    "--minutes",
    type=click.FloatRange(0.5, 24 * 60),
    default=10.0,
    show_default=True,
    help="Virtual time in all, shared evenly by the start and what befalls the fleet.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Another seed, another run.")
@click.option(
    "--records",
    "records_per_s",
    type=click.FloatRange(min=0),
    help="Records a second of the whole stream; default: 10 for each shard.",
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def simulate(
    *,
    as_json: bool,
    lose_group: str | None,
    groups: int,
    workers: int,
    shards: int,
    records_per_s: float | None,
    failover: Duration,
    idle: Duration,
    leases_max: int,
    **others: object,
) -> int:
    """Show what a fleet does when it starts, loses hosts, is deployed, or the stream is resharded.

    Runs the very code that decides in a real fleet, in virtual time: seconds for minutes. The
    same seed gives the same run. Ends with 70 and the whole story if a promise breaks.

    \b
    kclrun simulate --workers 40 --shards 600 --groups 3 --lose-group a
    kclrun simulate --workers 12 --shards 96 --deploy rolling --reshard double --json
    """
    import msgspec

    from kclrun.simulation.what_if import WhatIf, group_names, run_what_if
    from kclrun.simulation.world import FleetSettings

    _refuse_impossible(lose_group, groups, group_names(groups), workers)
    asked = msgspec.convert(
        {
            **others,
            "workers": workers,
            "shards": shards,
            "groups": groups,
            "lose_group": lose_group,
            "records_per_s": 10.0 * shards if records_per_s is None else records_per_s,
            "settings": FleetSettings(
                failover_s=float(failover), poll_s=float(idle), leases_max=leases_max
            ),
        },
        WhatIf,
    )
    figures = run_what_if(asked, _replay(asked))
    if as_json:
        click.echo(
            json.dumps(
                {"asked": msgspec.to_builtins(asked), **msgspec.to_builtins(figures)}, indent=2
            )
        )
    else:
        _print(figures)
    return exit_codes.DRAINED


def _refuse_impossible(lost: str | None, groups: int, names: tuple[str, ...], workers: int) -> None:
    if groups > workers:
        raise click.UsageError(f"--groups {groups} needs at least as many workers")
    if lost is not None and lost not in names:
        raise click.UsageError(f"--lose-group {lost}: the groups are {', '.join(names)}")
    if lost is not None and groups == 1:
        raise click.UsageError("--lose-group needs a second group: nobody would be left")


def _replay(asked: WhatIf) -> str:
    """The command line that runs the same again."""
    settings = asked.settings
    words = [
        f"kclrun simulate --seed {asked.seed} --workers {asked.workers} --shards {asked.shards}",
        f"--groups {asked.groups} --minutes {asked.minutes:g} --records {asked.records_per_s:g}",
        f"--failover {settings.failover_s:g}s --idle {settings.poll_s:g}s",
        f"--leases-max {settings.leases_max}",
    ]
    events = {"lose-group": asked.lose_group, "deploy": asked.deploy, "reshard": asked.reshard}
    words += [f"--{name} {value}" for name, value in events.items() if value is not None]
    return " ".join(words)


def _print(figures: Figures) -> None:
    from kclrun.cli.lease_views import print_table

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
    click.echo()
    click.echo(
        f"{figures.shards} shards, {figures.workers} workers: {figures.shards_per_owner_min} to"
        f" {figures.shards_per_owner_max} each (even: {figures.shards_per_owner_even:g});"
        f" {figures.records} records, {figures.duplicates} repeated; I1 to I5 and I8 held for"
        f" {figures.virtual_s / 60:g} minutes"
    )
