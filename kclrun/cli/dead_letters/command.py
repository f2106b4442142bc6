"""`kclrun dead-letters`: records that were given up are shown, redriven, or dropped."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigGroup,
    Configuration,
    config_options,
    ends_with_plan,
    keys_option,
    shards_option,
    yes_option,
)
from kclrun.cli.dead_letters.redrive import Leases, carry_out, leases_now, redrives_of
from kclrun.cli.messages import echo
from kclrun.cli.times import TimeType, time_option
from kclrun.cli.user_code import dead_letter_folder
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.letter import LETTERS_MAX, KeptLetter, Letter
from kclrun.model.stream import spelled_out
from kclrun.model.text import escaped, harmless
from kclrun.ports import LetterStore
from kclrun.sinks.dead_letters import LetterFolder

# Of an error, in a table: the whole is in `show`.
_ERROR_CHARACTERS_MAX: Final = 60


@click.group(name="dead-letters", cls=ConfigGroup)
def dead_letters() -> None:
    """Show, process again and drop the records that were given up.

    \b
    kclrun dead-letters list --config app.yaml
    kclrun dead-letters show POSITION --config app.yaml
    kclrun dead-letters redrive --config app.yaml --yes
    kclrun dead-letters drop --error ValueError --config app.yaml --yes
    """


_SINCE: Final = TimeType(older=re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}"))


def _filters(command: click.decorators.FC) -> click.decorators.FC:
    """The options that choose letters; all of them must fit."""
    for option in (
        shards_option,
        keys_option,
        click.option("--error", metavar="TEXT", help="Only those whose error contains this."),
        time_option("--since", kind=_SINCE, help_text="Only those given up then or later."),
    ):
        command = option(command)
    return command


_uncommitted = click.option(
    "--uncommitted",
    is_flag=True,
    help="Those that do not count: their owner was lost before its checkpoint, and the next one"
    " processed the record, or has a letter of it.",
)


@dead_letters.command(name="list")
@config_options
@_filters
@_uncommitted
def list_letters(config: ConfigChoice, **filters: Any) -> int:
    """One line for each letter: where it was, when it was given up, and why."""
    with _letters(config, filters) as chosen:
        kept = chosen.kept
    for each in kept:
        letter = each.letter
        given_up = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.given_up_at))
        error = escaped(letter.error)[:_ERROR_CHARACTERS_MAX]
        echo(f"{given_up}  {letter.stream}  {letter.shard_id}  {letter.position}  {error}")
    folder = dead_letter_folder(chosen.configuration.settings)
    is_missing = folder is not None and not folder.exists()
    missing = f": the folder {folder} does not exist" if is_missing else ""
    echo(f"{len(kept)} dead letters{missing}", err=True)
    _print_left_out(chosen)
    _print_more(chosen)
    return exit_codes.DRAINED


@dead_letters.command()
@click.argument("position", metavar="POSITION")
@config_options
def show(position: str, config: ConfigChoice) -> int:
    """Everything about one letter, its payload included.

    POSITION is as `list` prints it. A payload that is not text is shown as base64.
    """
    with _letters(config, {"position": position}) as chosen:
        found = (*chosen.kept, *chosen.left_out)
    if not found:
        raise SettingsError(
            f"there is no dead letter at {position}\nShow them:  kclrun dead-letters list"
        )
    for each in found:
        letter = each.letter
        echo(f"stream         {letter.stream}, {letter.shard_id}")
        echo(f"position       {letter.position}")
        echo(f"partition key  {escaped(letter.partition_key)}")
        echo(f"error          {escaped(letter.error)}, after {letter.calls} calls")
        echo(f"raised at      {escaped(letter.raised_at)}")
        echo(f"payload        {payload_text(letter.data)}")
        echo(f"kept in        {each.where}")
        if each.is_uncommitted:
            echo("uncommitted    it does not count: the next owner judged its record again")
        for line in letter.traceback.splitlines():
            echo(f"  {line}")
    return exit_codes.DRAINED


@dead_letters.command()
@config_options
@_filters
@click.option(
    "--to",
    type=click.Choice(["processor", "stream"]),
    default="processor",
    show_default=True,
    help="processor: process them here and now; stream: put them back as new records.",
)
@yes_option
def redrive(config: ConfigChoice, *, to: str, yes: bool, **filters: Any) -> int:
    """Process letters again, or put them back into their streams.

    The order of each key is kept. A letter is removed once it is processed and its rows are in all
    outputs, or once its record is in the stream. An interrupted run can be repeated: SQL, S3 and
    rolled files have each row once, other outputs have what was under way at that moment twice.
    A letter waits until the checkpoint of its shard has passed it, and is left out if its owner was
    lost before its checkpoint and the next one judged the record again.
    """
    with _letters(config, filters, reads_leases=yes, processes=True) as chosen:
        left = 0
        for each in redrives_of(chosen.configuration, chosen.kept, to):
            if not yes:
                echo(each.words)
                continue
            done = carry_out(chosen.configuration, chosen.store, each, chosen.leases)
            echo(done.words)
            left += done.left
        _print_left_out(chosen)
        _print_more(chosen)
        ends_with_plan(is_confirmed=yes, has_changes=bool(chosen.kept))
    return exit_codes.HALTED if left else exit_codes.DRAINED


@dead_letters.command()
@config_options
@_filters
@_uncommitted
@yes_option
def drop(config: ConfigChoice, *, yes: bool, **filters: Any) -> int:
    """Remove letters for good: their records are lost."""
    with _letters(config, filters) as chosen:
        echo(f"{'Dropping' if yes else 'Would drop'} {len(chosen.kept)} dead letters")
        _print_more(chosen)
        if not ends_with_plan(is_confirmed=yes, has_changes=bool(chosen.kept)):
            chosen.store.remove(chosen.kept)
    return exit_codes.DRAINED


def letter_store(settings: Settings, *, read_max: int | None = None) -> LetterStore:
    """The place of the application's letters. A stream with more than `read_max` bytes of them is
    not read. Raises: SettingsError if it keeps none."""
    folder = dead_letter_folder(settings)
    if folder is not None:
        return LetterFolder(folder)
    from kclrun.cli.services import Aws

    if settings.on_error.then != "dead-letter":
        raise SettingsError(
            "on_error.dead_letter: is missing; this application keeps no dead letters"
        )
    return Aws(settings).letters(read_max=read_max)


class _Chosen(msgspec.Struct, frozen=True):
    """The letters that all filters fit, shard by shard in the order of their records: as many as
    are taken at once, and whether these are all."""

    configuration: Configuration
    store: LetterStore
    kept: Sequence[KeptLetter]
    left_out: Sequence[KeptLetter]
    leases: Leases
    are_all: bool


@contextmanager
def _letters(
    config: ConfigChoice,
    filters: Mapping[str, Any],
    *,
    reads_leases: bool = False,
    processes: bool = False,
) -> Iterator[_Chosen]:
    """Raises: SettingsError without a place of letters, or if it holds anything else;
    click.UsageError for a filter that would choose all."""
    if filters.get("error") == "":
        # As of a variable that is not set: `drop` would drop every letter.
        raise click.UsageError("--error is empty, which is a part of every error.")
    configuration = config.load() if processes else config.load_for("on_error")
    store = letter_store(configuration.settings)
    wants_uncommitted = filters.get("uncommitted", False)
    try:
        leases = leases_now(configuration.settings) if reads_leases else {}
        kept: list[KeptLetter] = []
        left_out: list[KeptLetter] = []
        are_all = True
        for each in store.kept():
            if not _fits(each.letter, filters):
                continue
            these = kept if each.is_uncommitted == wants_uncommitted else left_out
            if len(these) < LETTERS_MAX:
                these.append(each)
            elif these is kept:
                are_all = False
                break
        yield _Chosen(configuration, store, kept, left_out, leases, are_all)
    finally:
        store.close()


def _print_left_out(chosen: _Chosen) -> None:
    """Print how many letters do not count, and that a queue may hide which ones."""
    if count := sum(each.is_uncommitted for each in chosen.left_out):
        echo(
            f"{count} more do not count: their owner was lost before its checkpoint, and the next"
            " one judged their records again (list --uncommitted, drop --uncommitted)",
            err=True,
        )
    if chosen.kept and chosen.configuration.settings.on_error.dead_letter.sqs is not None:
        echo(
            "A queue may hide some messages for a while: these letters may include one whose"
            " record another owner has processed",
            err=True,
        )


def _print_more(chosen: _Chosen) -> None:
    if not chosen.are_all:
        echo(
            f"There are more: {LETTERS_MAX:,} letters are taken at once. Run it again once these"
            " are removed, or choose with --shard, --key, --error or --since",
            err=True,
        )


def _fits(letter: Letter, filters: Mapping[str, Any]) -> bool:
    shards, keys, error = filters.get("shards"), filters.get("keys"), filters.get("error")
    since, position = filters.get("since"), filters.get("position")
    return (
        (position is None or letter.position == position)
        and (not shards or letter.shard_id in map(spelled_out, shards))
        and (not keys or letter.partition_key in keys)
        and (error is None or error in letter.error)
        and (since is None or letter.given_up_at >= since.at)
    )


def payload_text(data: bytes) -> str:
    """The payload on one or several lines; one that is not text as base64."""
    try:
        return harmless(data.decode())
    except UnicodeDecodeError:
        return f"base64 {base64.b64encode(data).decode()}"
