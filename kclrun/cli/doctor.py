"""`kclrun doctor`: what is wrong with the lease table, how one knows, and with `--yes` the mends.

Looks twice, a failover apart, before it says a word. Without `--yes` it only reads; with it, all
rows are backed up first, each mend is a conditional write, and the table is looked at again.
Rule: a row whose owner is alive is never touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import config_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kclrun.cli.doctor_looks import Examination
    from kclrun.cli.doctor_mending import Mended
    from kclrun.cli.world import Aws

__all__ = ["doctor"]


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: findings, mends, the rest.")
@click.option("--yes", is_flag=True, help="Mend what can be mended; without, only show the plan.")
@click.option(
    "--accept",
    "accepted",
    multiple=True,
    metavar="KIND",
    help="With --yes: also mend findings of a kind whose mend is a decision (they say so).",
)
@click.option(
    "--backup",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --yes: where all rows go first (default: TABLE-TIME.jsonl, here).",
)
def doctor(
    config: Path,
    overrides: tuple[str, ...],
    accepted: tuple[str, ...],
    backup: Path | None,
    *,
    as_json: bool,
    yes: bool,
) -> int:
    """Find what is wrong with the lease table, and mend what can be mended safely.

    It takes one failover (40 s if a lease is being asked for): a single look proves nothing.
    Exit code 0: healthy; 1: there are findings, which --yes mends or which only you can decide.
    A mend that repeats records, gives some up or deletes rows is made only with --accept KIND.

    \b
    kclrun doctor --config app.yaml                   look, explain, change nothing
    kclrun doctor --config app.yaml --yes             back up all rows, mend, look again
    """
    from kclrun.cli.doctor_looks import examine
    from kclrun.cli.doctor_mending import to_mend
    from kclrun.cli.fleet_aws import fleet_aws

    _refuse_unknown(accepted)
    if accepted and not yes:
        raise click.UsageError("--accept goes with --yes: without it nothing is changed.")
    if backup is not None and not yes:
        raise click.UsageError("--backup goes with --yes: without it nothing is changed.")
    if backup is not None and backup.exists():
        raise click.UsageError(f"--backup {backup} is there already; it is not overwritten.")
    aws = fleet_aws(config, overrides)
    examined = examine(aws)
    if not yes or not to_mend(examined.findings, accepted):
        return _told(examined, as_json=as_json)
    return _mended(aws, examined, accepted, backup, as_json=as_json)


def _refuse_unknown(accepted: Sequence[str]) -> None:
    from kclrun.leases.doctor.findings import Kind

    kinds = [kind.value for kind in Kind if kind.needs_consent]
    for name in accepted:
        if name not in kinds:
            raise click.UsageError(
                f"--accept {name}: expected a kind whose mend is a decision: {', '.join(kinds)}"
            )


def _told(examined: Examination, *, as_json: bool) -> int:
    from kclrun.cli.doctor_lines import print_findings, print_json

    if as_json:
        print_json(examined)
    else:
        print_findings(examined)
        if any(finding.mend for finding in examined.findings):
            click.echo("Nothing was changed. To back up all rows and mend, add --yes")
    return _code(examined)


def _mended(
    aws: Aws,
    examined: Examination,
    accepted: Sequence[str],
    backup: Path | None,
    *,
    as_json: bool,
) -> int:
    from kclrun.cli.doctor_backup import backup_name, write_backup
    from kclrun.cli.doctor_lines import print_findings, print_json, print_mended
    from kclrun.cli.doctor_looks import examine, refuse_native
    from kclrun.cli.doctor_mending import mend_all, to_mend

    refuse_native(aws)
    if not as_json:
        print_findings(examined)
    place = backup or Path(backup_name(aws.settings.table, examined.seen_at))
    write_backup(place, examined.items)
    click.echo(f"{len(examined.items)} rows backed up to {place}", err=as_json)
    mended: Sequence[Mended] = mend_all(aws.table, to_mend(examined.findings, accepted))
    if not as_json:
        print_mended(mended)
        click.echo("Looking again.")
    after = examine(aws)
    if as_json:
        print_json(examined, mended=mended, backup=place, after=after)
    else:
        print_findings(after)
    return _code(after)


def _code(examined: Examination) -> int:
    from kclrun.leases.doctor.diagnosis import is_healthy

    return exit_codes.DRAINED if is_healthy(examined.findings) else exit_codes.UNMET
