"""`kclrun files`: finds faults of the files of rows in folders. Changes nothing."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigGroup, config_options, json_option
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_report
from kclrun.config.outputs import named_outputs
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from kclrun.outputs.roll_chains import ADVICE, RollFile, count_rolls, findings_of
from kclrun.outputs.rolled_files import rolls_below


@click.group(name="files", cls=ConfigGroup)
def files() -> None:
    """Check the files that an output with `path` and `roll` wrote.

    \b
    kclrun files verify --config app.yaml
    kclrun files verify /mnt/a/flights /mnt/b/flights
    """


@files.command()
@click.argument(
    "folders",
    metavar="[FOLDER]...",
    nargs=-1,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@config_options
@json_option("One JSON object: the counts, and every fault with its advice.")
def verify(folders: Sequence[Path], config: ConfigChoice, *, as_json: bool) -> int:
    """Find files that are there twice, missing, without record, or unfinished; change nothing.

    It looks at everything below each FOLDER, or below the folders of the configuration, and gives
    advice for each fault. The rolls of a shard are compared across all folders: name those of all
    machines, also as copies with their hidden files. Ends with 0 if nothing is wrong, else with 1.
    Objects in S3 are each created once under their names, so there is nothing to compare.
    """
    if folders and config != ConfigChoice():
        raise click.UsageError("Name folders or a configuration, not both.")
    now = WallTime(time.time())
    shards: defaultdict[str, list[RollFile]] = defaultdict(list)
    named = {folder.resolve() for folder in folders or _rolled(config)}
    for folder in sorted(path for path in named if named.isdisjoint(path.parents)):
        for shard, found in rolls_below(folder, now):
            shards[shard] += found
    verified = _verified(shards.values())
    print_report(verified, _print_faults, as_json=as_json)
    return exit_codes.UNMET if verified.faults else exit_codes.DRAINED


class Fault(msgspec.Struct, frozen=True):
    """A file that is wrong, and what to do about it."""

    kind: str
    path: str
    words: str
    advice: str


class Verified(msgspec.Struct, frozen=True):
    """The files that were looked at, and every fault."""

    rolls: int
    shards: int
    faults: tuple[Fault, ...]


def _verified(shards: Collection[Sequence[RollFile]]) -> Verified:
    faults = tuple(
        Fault(finding.kind, str(finding.path), finding.words, ADVICE[finding.kind])
        for rolls in shards
        for finding in findings_of(rolls)
    )
    return Verified(sum(map(count_rolls, shards)), len(shards), faults)


def _print_faults(verified: Verified) -> None:
    counts: Counter[str] = Counter()
    for fault in verified.faults:
        if not counts[fault.kind]:
            echo(f"{fault.kind}: {fault.advice}")
        counts[fault.kind] += 1
        echo(f"  {fault.path}: {fault.words}")
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    echo(f"{verified.rolls} files of {verified.shards} shards: {found or 'nothing is wrong'}")


def _rolled(config: ConfigChoice) -> list[Path]:
    """The folders of the outputs with rolled files. Raises: SettingsError if there is none."""
    settings = config.load_for("output", "outputs").settings
    outputs = [output for _, output in named_outputs(settings)]
    found = [
        Path(output.path)
        for output in outputs
        if output.path is not None and output.roll is not None
    ]
    if settings.engine == "spark" or not found:
        raise SettingsError(
            "there is no output with `path` and `roll`: only its files are verified\n"
            "Objects in S3 are created once under their names, and files that grow are one a shard"
        )
    return found
