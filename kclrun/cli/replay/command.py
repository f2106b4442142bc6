"""`kclrun replay`: runs the processor over a time range, with leases and outputs of its own.

The fleet's own run does the work: manager, lease processes, checkpoints. This module shows the
plan, keeps a replay from what belongs to another one, reports its end, and compares rows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigCommand,
    Configuration,
    config_options,
    ends_with_plan,
    json_option,
    keys_option,
    stream_option,
    yes_option,
)
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_report
from kclrun.cli.tables import most_on_terminal
from kclrun.cli.times import GivenTime, TimeType, time_option
from kclrun.config.changes import refuse_changes
from kclrun.config.outputs import named_outputs
from kclrun.config.rules import EMBEDDED
from kclrun.errors import NotFound, SettingsError
from kclrun.files.durable import publish_file
from kclrun.model.lease import replay_tables
from kclrun.model.reading import Replay
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import WallTime
from kclrun.observe.sample import RunReport
from kclrun.operating import replay as plan
from kclrun.operating.comparing import ComparedRow, Comparison, Difference, differences
from kclrun.operating.replay import ReplayOptions

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.config.schema import Settings
    from kclrun.model.lease import Lease

# Of the differences on the terminal; a file has all of them.
_SHOWN_MAX: Final = 20
_VALUE_CHARACTERS_MAX: Final = 60
# In the folder of a replay: the lease table that its rows belong to, and the report of its run.
_MARK: Final = ".kclrun-replay"
_REPORT: Final = "report.json"


class ReplayFiles(msgspec.Struct, frozen=True):
    """One replay: the command line, the settings that it runs with, its folder."""

    asked: ReplayOptions
    configuration: Configuration
    folder: Path
    replay: Replay

    @property
    def settings(self) -> Settings:
        return self.configuration.settings


@click.command(cls=ConfigCommand)
@config_options
@time_option(
    "--from",
    "begin",
    kind=TimeType(TRIM_HORIZON),
    metavar="TRIM_HORIZON|TIME",
    help_text="Where it begins: the oldest record, or the first arrival time.",
)
@time_option("--to", "end", help_text="Where it ends: records of this time are left out.")
@keys_option
@stream_option
@click.option("--as", "label", default="", metavar="NAME", help="A name besides the range.")
@click.option(
    "--folder", metavar="DIR", type=click.Path(path_type=Path), help="For rows; else replay-NAME."
)
@click.option(
    "--outputs",
    type=click.Choice(["redirected", "same"]),
    default="redirected",
    show_default=True,
    help="redirected: JSON lines in --folder. same: those of the settings, with --yes.",
)
@click.option(
    "--compare",
    multiple=True,
    metavar="MODULE:CLASS",
    help="Show how its rows differ from the processor's; twice: of these two.",
)
@click.option("--list", "lists", is_flag=True, help="Show the replays that there are.")
@json_option("One JSON array, with --list.")
@click.option("--remove", metavar="NAME", help="Delete the leases of a replay, with --yes.")
@yes_option
def replay(config: ConfigChoice, *, yes: bool, as_json: bool, **said: Any) -> int:
    """Run the processor over the records of a time range, beside the fleet; ends by itself.

    The same command goes on with a replay that was interrupted.

    \b
    kclrun replay --from 2026-03-01T06:00:00Z --to 2026-03-01T07:00:00Z
    kclrun replay --from … --to … --key customer-7
    kclrun replay --from … --to … --compare orders:NewOrders
    kclrun replay --list
    kclrun replay --remove NAME --yes
    """
    if as_json and not said["lists"]:
        raise click.UsageError("--json goes with --list.")
    runs = not said["lists"] and said["remove"] is None
    configuration = config.load() if runs else config.load_for()
    if said["stream"] is not None:
        narrowed = configuration.settings.of_stream(said["stream"])
        configuration = msgspec.structs.replace(configuration, settings=narrowed)
    refuse_changes(
        configuration.settings, "replay", "that of a DynamoDB table cannot be read from a time"
    )
    if configuration.settings.aws.endpoint == EMBEDDED:
        raise SettingsError(
            "aws.endpoint: embedded begins with an empty stream: there is nothing to replay\n"
            "Use one that stays:  kclrun local --config app.yaml"
        )
    if said["lists"]:
        return _list(configuration.settings, as_json=as_json)
    if said["remove"] is not None:
        return _remove(configuration.settings, said["remove"], is_confirmed=yes)
    asked = _asked(said)
    folder = (said["folder"] or Path(f"replay-{asked.name}")).absolute()
    if said["compare"]:
        return _compare(configuration, asked, said["compare"], folder)
    files = files_of(configuration, asked, folder)
    is_plan = asked.has_same_outputs and not yes
    for line in plan.plan_lines(configuration.settings, files.settings, asked):
        echo(line, err=not is_plan)
    begin, end = said["begin"], said["end"]
    if begin.is_relative or end.is_relative:  # the same command would mean another range later
        echo(f"  To go on with it later:  --from {begin.text} --to {end.text}", err=not is_plan)
    if is_plan and ends_with_plan(is_confirmed=False):
        return exit_codes.DRAINED
    return _run(files)


def _asked(said: dict[str, Any]) -> ReplayOptions:
    """Raises: click.UsageError, SettingsError."""
    begin: GivenTime | None = said["begin"]
    end: GivenTime | None = said["end"]
    if begin is None or end is None:
        raise click.UsageError("Which time range? Name it with --from TIME and --to TIME.")
    if said["compare"] and said["outputs"] == "same":
        raise click.UsageError("--compare keeps rows in files of its own: leave --outputs out.")
    if len(said["compare"]) > 2:
        raise click.UsageError("--compare names one processor, or two.")
    start, until_at = begin.start, end.at
    assert start is not None, "it takes no other form"
    assert until_at is not None, "without a sentinel it is an instant"
    if start.at is not None and start.at >= until_at:
        raise click.UsageError("--from is not before --to: the range is empty.")
    if said["label"]:
        plan.refuse_label(said["label"])
    plan.refuse_keys(said["keys"])
    return ReplayOptions(
        start=start,
        until_at=until_at,
        keys=tuple(dict.fromkeys(said["keys"])),
        label=said["label"],
        has_same_outputs=said["outputs"] == "same",
    )


def files_of(configuration: Configuration, asked: ReplayOptions, folder: Path) -> ReplayFiles:
    settings = plan.settings_of_replay(configuration.settings, asked, str(folder))
    # What a halted lease is resumed with must name its table, not that of the fleet.
    overrides = (*configuration.overrides, f"leases.table={settings.table}")
    replayed = msgspec.structs.replace(configuration, settings=settings, overrides=overrides)
    return ReplayFiles(asked, replayed, folder, plan.replay_of(configuration.settings, asked))


def _run(files: ReplayFiles) -> int:
    """Run it to its end, and tell how it went; the exit code."""
    from kclrun.cli.services import Aws, open_streams, refuse_expired

    aws = Aws(files.settings)
    for stream in open_streams(aws).values():
        refuse_expired(stream.summary, files.asked.start.at, WallTime(time.time()), "--from")
    leases = leases_of(files, aws)
    if leases and all(lease.is_ended for lease in leases):
        echo(
            "This replay is complete already: its rows are there. To run it anew, remove its"
            f" folder, and its leases with  kclrun replay --remove {files.asked.name} --yes",
            err=True,
        )
        return exit_codes.DRAINED
    code, report = run_on(files, aws, leases or ())
    return _print_end(files, aws, code, report)


def leases_of(files: ReplayFiles, aws: Aws) -> tuple[Lease, ...] | None:
    """The leases that the replay has from an earlier run, None if there was none; its folder is
    its own from here on. Raises: SettingsError if that is another one's."""
    from kclrun.aws.table_setup import inspect_table, require_usable
    from kclrun.cli.leases.views import scan_leases

    report = inspect_table(aws.control.dynamodb_reads(), aws.settings.table)
    if report is not None:
        require_usable(report)
    leases = None if report is None else scan_leases(aws)
    _claim_folder(files, is_new=leases is None)
    return leases


def run_on(files: ReplayFiles, aws: Aws, leases: Iterable[Lease]) -> tuple[int, RunReport]:
    """Run it until it is caught up or stopped; the exit code and the report."""
    from kclrun.cli.leases.pause import resume_shards
    from kclrun.cli.run.application import run_replay

    # The code that gave up may be repaired by now.
    if halted := [lease.key for lease in leases if lease.halt is not None]:
        resume_shards(aws, halted)
    path = files.folder / _REPORT
    code = run_replay(files.configuration, path, files.replay)
    return code, msgspec.json.decode(path.read_bytes(), type=RunReport)


def _claim_folder(files: ReplayFiles, *, is_new: bool) -> None:
    """Let the folder belong to this replay. Raises: SettingsError if it has rows of another one:
    they would be taken for rows of this one, or be cut off."""
    folder, mark = files.folder, files.folder / _MARK
    try:
        mine = mark.exists() and mark.read_bytes() == files.settings.table.encode()
        found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        rows = found - {_MARK, _REPORT} if mine else found
        if is_new and mine and (files.asked.processor or files.asked.stops is not None):
            # The rows of a comparison and the state of a rebuild are made again; no other process
            # writes there.
            shutil.rmtree(folder)
        elif rows and (is_new or not mine):
            raise SettingsError(
                f"--folder: {folder} has files already, which are not of this replay\n"
                "Remove them, or name another folder"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish_file(mark, files.settings.table.encode())
    except OSError as error:
        raise SettingsError(f"--folder: {folder}: {error.strerror}") from None


def _print_end(files: ReplayFiles, aws: Aws, code: int, report: RunReport) -> int:
    from kclrun.cli.leases.views import scan_leases

    open_leases = [lease for lease in scan_leases(aws) if not lease.is_ended]
    totals = report.totals
    passed = f", {totals.passed_over or 0:,} of other keys passed over" if files.asked.keys else ""
    given_up = (totals.dead_letters or 0) + (totals.skipped or 0)
    echo(
        f"{totals.records:,} records of {totals.shards} shards in {report.seconds:.1f} s{passed};"
        f" {given_up} given up, {totals.restarts} restarts.",
        err=True,
    )
    if open_leases:
        echo(
            f"The replay is not complete: {len(open_leases)} shards are left."
            " The same command goes on with it.",
            err=True,
        )
        return code or exit_codes.CUT_SHORT
    if files.asked.processor is not None:
        return code  # a comparison removes them itself
    echo(
        "The replay is complete. Its leases are removed with"
        f"  kclrun replay --remove {files.asked.name} --yes",
        err=True,
    )
    return code


def _compare(
    configuration: Configuration, asked: ReplayOptions, named: Sequence[str], folder: Path
) -> int:
    """Replay each of two versions, and compare their rows; 1 if they differ."""
    from kclrun.cli.user_code import require_user_code

    settings = configuration.settings
    if settings.streams:
        raise SettingsError("--compare: the application has several streams: name one (--stream)")
    if settings.output is None and not settings.outputs:
        raise SettingsError("--compare: the processor has no output, so there are no rows")
    first = settings.processor if len(named) == 1 else named[0]
    sides = {}
    for side, processor in (("A", first), ("B", named[-1])):
        each = msgspec.structs.replace(asked, processor=processor, side=side)
        sides[side] = files_of(configuration, each, folder / side)
    for side, files in sides.items():
        echo(f"{side}: {files.settings.processor}", err=True)
    echo("  A call gets one record, so that each row is known by its record.", err=True)
    for files in sides.values():  # a version that cannot be loaded is refused before hours are read
        require_user_code(files.configuration, [name for name, _ in named_outputs(settings)])
    for files in sides.values():
        code = _run(files)
        if code != exit_codes.DRAINED:
            return code
    counts = Comparison()
    found = compare(sides["A"].folder, sides["B"].folder, counts)
    _show(found, counts, folder / "differences.jsonl")
    for files in sides.values():  # the next comparison may be of edited code: it begins anew
        delete_leases(files.settings, files.settings.table)
    return exit_codes.DRAINED if counts.is_same else exit_codes.UNMET


def _show(found: Iterator[Difference], counts: Comparison, path: Path) -> None:
    most = most_on_terminal(_SHOWN_MAX)
    with path.open("wb") as file:
        for number, difference in enumerate(found):
            file.write(msgspec.json.encode(difference) + b"\n")
            if most is None or number < most:
                echo(_line(difference))
    differing = counts.only_a + counts.only_b + counts.changed
    if most is not None and differing > most:
        echo(f"… and {differing - most} more")
    echo(
        f"{counts.equal:,} rows are equal, {counts.changed:,} changed, {counts.only_a:,} only in A,"
        f" {counts.only_b:,} only in B." + (f" All differences: {path}" if differing else "")
    )


def _line(difference: Difference) -> str:
    row = f"{difference.to}[{difference.ordinal}]"
    head = f"{difference.shard} {difference.at} {row} {difference.kind}"
    a, b = difference.a, difference.b
    if a is None or b is None:
        return f"{head}: {_short(a or b)}"
    fields = (
        f"{name}: {_short(a.get(name))} → {_short(b.get(name))}" for name in difference.changed
    )
    return f"{head}: {', '.join(fields)}"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    most = most_on_terminal(_VALUE_CHARACTERS_MAX)
    return text if most is None or len(text) <= most else f"{text[:most]}…"


def _list(settings: Settings, *, as_json: bool) -> int:
    from kclrun.cli.leases.views import scan_leases
    from kclrun.cli.services import Aws

    found: list[ReplayState] = []
    for table in _tables(settings):
        of_table = msgspec.structs.replace(settings.leases, table=table)
        try:
            rows = scan_leases(Aws(msgspec.structs.replace(settings, leases=of_table)))
        except NotFound:  # another operator has just removed it
            continue
        ended = sum(row.is_ended for row in rows)
        found.append(
            ReplayState(
                name=table.removeprefix(replay_tables(settings.application)),
                table=table,
                is_complete=bool(rows) and ended == len(rows),
                ended=ended,
                shards=len(rows),
            )
        )
    print_report(found, _print_list, as_json=as_json)
    return exit_codes.DRAINED


class ReplayState(msgspec.Struct, frozen=True):
    """A replay by its lease table: how many of its shards have ended."""

    name: str
    table: str
    is_complete: bool
    ended: int
    shards: int


def _print_list(found: Sequence[ReplayState]) -> None:
    for replay in found:
        state = "complete" if replay.is_complete else "not complete"
        echo(f"{replay.name}  {state}: {replay.ended} of {replay.shards} shards have ended")
    if not found:
        echo("There are no replays.")


def _tables(settings: Settings) -> list[str]:
    from kclrun.aws.table_setup import list_tables
    from kclrun.cli.services import Aws

    return list_tables(Aws(settings).control.dynamodb_reads(), replay_tables(settings.application))


def _remove(settings: Settings, name: str, *, is_confirmed: bool) -> int:
    table = replay_tables(settings.application) + name
    if table not in _tables(settings):
        raise NotFound(f"there is no replay {name}\nShow them:  kclrun replay --list")
    if not is_confirmed:
        echo(f"Would delete lease table {table}. Its rows in files stay.")
    if ends_with_plan(is_confirmed=is_confirmed):
        return exit_codes.DRAINED
    delete_leases(settings, table)
    echo(f"Deleted lease table {table}. Its rows in files stay.")
    return exit_codes.DRAINED


def delete_leases(settings: Settings, table: str) -> None:
    """Remove the lease table of a replay."""
    from kclrun.aws.table_setup import delete_table
    from kclrun.cli.services import Aws
    from kclrun.manager.locks import state_folder

    assert replay_tables("") in table, "no other table is ever deleted"
    delete_table(Aws(settings).control.dynamodb_writes(), table)
    with contextlib.suppress(OSError):  # of this machine, once no manager has a lock file there
        state_folder(table, os.environ).rmdir()


_SUFFIX: Final = ".jsonl"


def compare(a: Path, b: Path, counts: Comparison) -> Iterator[Difference]:
    """The differences of the files of two folders, shard by shard; `counts` is complete once all
    were taken. Raises: OSError, msgspec.DecodeError for a file that is not one of ours."""
    for shard in sorted(_shards(a) | _shards(b)):
        yield from differences(shard, _rows(a, shard), _rows(b, shard), counts)


def _shards(folder: Path) -> set[str]:
    return {path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")}


def _rows(folder: Path, shard: str) -> Iterator[ComparedRow]:
    path = folder / f"{shard}{_SUFFIX}"
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            yield msgspec.json.decode(line, type=ComparedRow)
