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
    json_option,
    keys_option,
    shards_option,
    yes_option,
)
from kclrun.cli.dead_letters.redrive import (
    Leases,
    Redrive,
    carry_out,
    leases_now,
    redrives_of,
)
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_json, print_report
from kclrun.cli.tables import print_table, terminal_width
from kclrun.cli.times import TimeType, time_option
from kclrun.cli.user_code import dead_letter_folder
from kclrun.config.schema import Settings
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    KclrunError,
    NotFound,
    SettingsError,
)
from kclrun.model.letter import LETTERS_MAX, KeptLetter, Letter
from kclrun.model.stream import short_name, spelled_out
from kclrun.model.text import escaped, sanitize
from kclrun.operating.summaries import names_position, on_one_line, shortened
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.ports import LetterStore

# The candidates for a short position that a message names.
_CANDIDATES_MAX: Final = 8
# The entries that are not letters, of which a message has a line each.
_UNUSABLE_MAX: Final = 20
# The most that the payloads of one call have together: they are in memory.
TAKEN_BYTES_MAX: Final = 256 * 2**20
_LIST_TITLES: Final = ("given up", "stream", "shard", "position", "error")


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
    """The options that choose dead letters; all of them must fit."""
    for option in (
        shards_option,
        click.option(
            "--position",
            metavar="POSITION",
            help="Only the one at this position, in full or in short as `list` prints it.",
        ),
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
    " processed the record, or has a dead letter of it.",
)


@dead_letters.command(name="list")
@config_options
@_filters
@_uncommitted
@json_option("One JSON array: every field but the payload.")
@click.option("--payload", "with_payload", is_flag=True, help="With --json: the payload as base64.")
def list_letters(config: ConfigChoice, *, as_json: bool, with_payload: bool, **filters: Any) -> int:
    """One line for each dead letter: where it was, when it was given up, and why.

    On a terminal positions and errors are as long as the width allows; in a pipe they are whole.
    """
    if with_payload and not as_json:
        raise click.UsageError("--payload goes with --json.")
    with _letters(config, filters, keeps_payloads=with_payload) as chosen:
        listed = chosen.kept
    print_report(
        listed,
        lambda listed: _print_list([kept.letter for kept in listed]),
        as_json=as_json,
        in_json=lambda listed: print_json(
            [_plain(kept, with_payload=with_payload) for kept in listed]
        ),
    )
    folder = dead_letter_folder(chosen.configuration.settings)
    is_missing = folder is not None and not folder.exists()
    missing = f": the folder {folder} does not exist" if is_missing else ""
    count = "1 dead letter" if len(listed) == 1 else f"{len(listed)} dead letters"
    echo(f"{count}{missing}", err=True)
    _print_left_out(chosen)
    _print_more(chosen)
    return _print_unusable(chosen)


def _print_list(letters: Sequence[Letter]) -> None:
    """A table on a terminal; elsewhere a line for each dead letter, which programs may cut."""
    width = terminal_width()
    rows = [
        (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.given_up_at)),
            letter.stream,
            letter.shard_id,
            letter.position,
            letter.error,
        )
        for letter in letters
    ]
    if width is None:
        for row in rows:
            echo("  ".join(map(escaped, row)))
    elif rows:
        on_terminal = {"shard": short_name, "position": shortened, "error": on_one_line}
        print_table(_LIST_TITLES, rows, on_terminal=on_terminal)


def _plain(kept: KeptLetter, *, with_payload: bool) -> dict[str, Any]:
    """A dead letter for JSON, with its place; times in seconds since 1970."""
    plain: dict[str, Any] = {
        name: getattr(kept.letter, name)
        for name in kept.letter.__struct_fields__
        if name != "data" or with_payload
    }
    if with_payload:
        plain["data"] = base64.b64encode(kept.letter.data).decode()
    return plain | {
        "position": kept.letter.position,
        "kept_in": kept.where,
        "is_uncommitted": kept.is_uncommitted,
    }


@dead_letters.command()
@click.argument("position", metavar="POSITION")
@config_options
def show(position: str, config: ConfigChoice) -> int:
    """Everything about one dead letter, its payload included.

    POSITION is as `list` prints it, in full or in short (49680…506658, three dots do as well), or
    its beginning or its end. A payload that is not text is shown as base64.
    """
    with _letters(config, {"position": position}) as chosen:
        found = (*chosen.kept, *chosen.left_out)
    _print_unusable(chosen)
    if not found:
        raise _no_letter_at(position)
    for kept in found:
        letter = kept.letter
        echo(f"stream         {letter.stream}, {letter.shard_id}")
        echo(f"position       {letter.position}")
        echo(f"partition key  {escaped(letter.partition_key)}")
        echo(f"error          {escaped(letter.error)}, after {letter.calls} calls")
        echo(f"raised at      {escaped(letter.raised_at)}")
        echo(f"payload        {payload_text(letter.data)}")
        echo(f"kept in        {kept.where}")
        if kept.is_uncommitted:
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
    """Process dead letters again, or put them back into their streams.

    The order of each key is kept. A dead letter is removed once it is processed and its rows are in
    all outputs, or once its record is in the stream. An interrupted run can be repeated: SQL, S3
    and rolled files have each row once, other outputs have the rows under way at that moment twice.
    A dead letter waits until the checkpoint of its shard has passed it. It is left out if its owner
    was lost before its checkpoint and the next one judged the record again.
    """
    with _letters(config, filters, reads_leases=yes, processes=True) as chosen:
        redrives = redrives_of(chosen.configuration, chosen.kept, to)
        # Those of streams that are not the application's stay.
        left = len(chosen.kept) - sum(len(redrive.letters) for redrive in redrives)
        if yes:
            left += _carried_out(chosen, redrives)
        for redrive in () if yes else redrives:
            echo(redrive.words)
        _print_left_out(chosen)
        _print_more(chosen)
        ends_with_plan(is_confirmed=yes, has_changes=bool(chosen.kept))
    return exit_codes.HALTED if left else _print_unusable(chosen)


def _carried_out(chosen: _Chosen, redrives: Sequence[Redrive]) -> int:
    """Redrive stream by stream; returns how many are left. What is wrong with one stream does not
    stop the others. Raises: KclrunError, the first, at the end."""
    left = 0
    failures: list[KclrunError] = []
    for redrive in redrives:
        try:
            done = carry_out(chosen.configuration, chosen.store, redrive, chosen.leases)
        except (SettingsError, NotFound, InvalidRequest, AccessDenied) as error:
            failures.append(error)
            continue
        echo(done.words)
        left += done.left
    for failure in failures[1:]:
        echo(str(failure), err=True)
    if failures:
        _print_unusable(chosen)
        raise failures[0]
    return left


@dead_letters.command()
@config_options
@_filters
@_uncommitted
@yes_option
def drop(config: ConfigChoice, *, yes: bool, **filters: Any) -> int:
    """Remove dead letters for good: their records are lost."""
    with _letters(config, filters, keeps_payloads=False) as chosen:
        count = "1 dead letter" if len(chosen.kept) == 1 else f"{len(chosen.kept)} dead letters"
        echo(f"{'Dropping' if yes else 'Would drop'} {count}")
        _print_more(chosen)
        if not ends_with_plan(is_confirmed=yes, has_changes=bool(chosen.kept)):
            chosen.store.remove(chosen.kept)
    return _print_unusable(chosen)


def letter_store(settings: Settings, *, read_max: int | None = None) -> LetterStore:
    """The place of the application's dead letters. A stream with more than `read_max` bytes of them
    is not read. Raises: SettingsError if it keeps none."""
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
    """The dead letters that all filters fit, shard by shard in the order of their records: as many
    as are taken at once, and whether these are all. `unusable` are sentences about entries beside
    them that are not letters."""

    configuration: Configuration
    store: LetterStore
    kept: Sequence[KeptLetter]
    left_out: Sequence[KeptLetter]
    leases: Leases
    are_all: bool
    unusable: Sequence[str]


@contextmanager
def _letters(
    config: ConfigChoice,
    filters: Mapping[str, Any],
    *,
    reads_leases: bool = False,
    processes: bool = False,
    keeps_payloads: bool = True,
) -> Iterator[_Chosen]:
    """Raises: SettingsError without a place of dead letters; click.UsageError for a filter that
    would choose all."""
    if filters.get("error") == "":
        # As of a variable that is not set: `drop` would drop every letter.
        raise click.UsageError("--error is empty, which is a part of every error.")
    if filters.get("position") == "":
        raise click.UsageError("The position is empty, which is a short form of every position.")
    configuration = config.load() if processes else config.load_for("on_error")
    store = letter_store(configuration.settings)
    wants_uncommitted = filters.get("uncommitted", False)
    try:
        leases = leases_now(configuration.settings) if reads_leases else {}
        taken = _Taken(keeps_payloads=keeps_payloads)
        unusable: list[str] = []
        for found in store.kept(unusable.append):
            if not _fits(found.letter, filters):
                continue
            if found.is_uncommitted == wants_uncommitted:
                taken.take(found)
            else:
                taken.leave_out(found)
            if taken.is_full:
                break
        these, others = _at_one_position(filters.get("position"), taken.kept, taken.left_out)
        are_all = not taken.is_full
        yield _Chosen(configuration, store, these, others, leases, are_all, unusable)
    finally:
        store.close()


class _Taken:
    """The letters of one call, at most `LETTERS_MAX` of a kind and `TAKEN_BYTES_MAX` of payloads.
    `is_full` once there was one more."""

    def __init__(self, *, keeps_payloads: bool) -> None:
        self._keeps_payloads = keeps_payloads
        self._bytes = 0
        self.kept: list[KeptLetter] = []
        self.left_out: list[KeptLetter] = []
        self.is_full = False

    def take(self, found: KeptLetter) -> None:
        size = len(found.letter.data) if self._keeps_payloads else 0
        is_too_large = bool(self.kept) and self._bytes + size > TAKEN_BYTES_MAX
        if len(self.kept) >= LETTERS_MAX or is_too_large:
            self.is_full = True
            return
        self._bytes += size
        self.kept.append(found if self._keeps_payloads else _without_payload(found))

    def leave_out(self, found: KeptLetter) -> None:
        """Without its payload, unless a letter is to be shown whole."""
        if len(self.left_out) < LETTERS_MAX:
            self.left_out.append(found if self._keeps_payloads else _without_payload(found))


def _without_payload(kept: KeptLetter) -> KeptLetter:
    letter = msgspec.structs.replace(kept.letter, data=b"")
    return msgspec.structs.replace(kept, letter=letter)


def _no_letter_at(position: str) -> SettingsError:
    return SettingsError(
        f"there is no dead letter at {position}\nShow them:  kclrun dead-letters list"
    )


def _at_one_position(
    named: str | None, kept: Sequence[KeptLetter], left_out: Sequence[KeptLetter]
) -> tuple[Sequence[KeptLetter], Sequence[KeptLetter]]:
    """These dead letters, if they are of one record, or those whose whole position is named.

    Raises: click.UsageError with the candidates for a short form of several positions.
    """
    if named is None:
        return kept, left_out
    letters = {found.letter.order: found.letter for found in (*kept, *left_out)}
    if any(letter.position == named for letter in letters.values()):
        exact, others = (
            [found for found in these if found.letter.position == named]
            for these in (kept, left_out)
        )
        return exact, others
    if len(letters) <= 1:
        return kept, left_out
    found = [letters[place] for place in sorted(letters)]
    lines = [f"{letter.position}  {letter.shard_id}" for letter in found[:_CANDIDATES_MAX]]
    more = [f"… {len(found)} in all"] if len(found) > _CANDIDATES_MAX else []
    raise click.UsageError("\n  ".join([f"{named} is short for several positions:", *lines, *more]))


def _print_left_out(chosen: _Chosen) -> None:
    """Print how many dead letters do not count, and that a queue may hide which ones."""
    if count := sum(found.is_uncommitted for found in chosen.left_out):
        echo(
            f"{count} more do not count: their owner was lost before its checkpoint, and the next"
            " one judged their records again (list --uncommitted, drop --uncommitted)",
            err=True,
        )
    if chosen.kept and chosen.configuration.settings.on_error.dead_letter.sqs is not None:
        echo(
            "A queue may hide some messages for a while: these dead letters may include one whose"
            " record another owner has processed",
            err=True,
        )


def _print_more(chosen: _Chosen) -> None:
    if not chosen.are_all:
        echo(
            f"There are more: {LETTERS_MAX:,} dead letters, or {TAKEN_BYTES_MAX // 2**20} MiB of"
            " payloads, are taken at once. Run it again once these are removed, or choose with"
            " --shard, --key, --error or --since",
            err=True,
        )


def _print_unusable(chosen: _Chosen) -> int:
    """Name what lies among the dead letters and is not one; returns the exit code of the verb."""
    if not chosen.unusable:
        return exit_codes.DRAINED
    count = len(chosen.unusable)
    entries = "An entry" if count == 1 else f"{count} entries"
    echo(f"{entries} among the dead letters cannot be used; all others were taken:", err=True)
    for sentence in chosen.unusable[:_UNUSABLE_MAX]:
        echo(f"  {sentence}", err=True)
    if count > _UNUSABLE_MAX:
        echo(f"  … and {count - _UNUSABLE_MAX} more", err=True)
    return exit_codes.HALTED


def _fits(letter: Letter, filters: Mapping[str, Any]) -> bool:
    shards, keys, error = filters.get("shards"), filters.get("keys"), filters.get("error")
    since, position = filters.get("since"), filters.get("position")
    return (
        (position is None or names_position(position, letter.position))
        and (not shards or letter.shard_id in map(spelled_out, shards))
        and (not keys or letter.partition_key in keys)
        and (error is None or error in letter.error)
        and (since is None or letter.given_up_at >= since.at)
    )


def payload_text(data: bytes) -> str:
    """The payload on one or several lines; one that is not text as base64."""
    try:
        return sanitize(data.decode())
    except UnicodeDecodeError:
        return f"base64 {base64.b64encode(data).decode()}"
