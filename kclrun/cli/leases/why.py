"""`kclrun why`: the story of a shard in sentences, from what managers recorded, and its row.

`operating/story.py` has the sentences. This module gathers the entries: of this machine, of folders
that were copied from others, and from S3.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_report
from kclrun.cli.tables import most_on_terminal
from kclrun.cli.times import GivenTime, time_option
from kclrun.errors import NotFound, ServiceError
from kclrun.manager.locks import state_folder
from kclrun.manager.story import FOLDER
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.shard import Shard
from kclrun.model.stream import display_name, qualified_shards, shard_id_of, spelled_out
from kclrun.model.time import WallTime
from kclrun.observe.story import ReadStory, read_story
from kclrun.operating.finished import FinishedShards, ended_in_stories
from kclrun.operating.story import Sentence, Story, finished_words, present, story_of

if TYPE_CHECKING:
    from kclrun.cli.services import Aws

_LINES_MAX: Final = 40


@click.command(cls=ConfigCommand)
@click.argument("shard", metavar="SHARD")
@config_options
@time_option("--at", help_text="As it was then.")
@click.option(
    "--story",
    "folders",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A story folder that was copied from another machine; may be repeated.",
)
@click.option(
    "--all",
    "shows_all",
    is_flag=True,
    help=f"Not only the last {_LINES_MAX} lines; so it is in a pipe.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: all lines, times in s.")
def why(
    shard: str,
    config: ConfigChoice,
    *,
    at: GivenTime | None,
    folders: tuple[Path, ...],
    shows_all: bool,
    as_json: bool,
) -> int:
    """Explain a shard: its owners so far, its troubles, and why it stands still.

    It reads what the managers of this machine recorded, and what all recorded with observe.story
    in S3. Times are those of the clock of each machine. A shard that was read to its end, and whose
    row is deleted since, is explained, too.

    \b
    kclrun why 2
    kclrun why 2 --at 2026-03-01T06:00:00Z
    kclrun why 2 --story copied/host-1 --story copied/host-2
    """
    from kclrun.cli.services import fleet_aws

    aws = fleet_aws(config, "observe")
    until = None if at is None else at.at
    found = gathered(aws, folders)
    key, standing = _standing(aws, shard, found)
    story = story_of(key, found.entries.values(), until)
    explained = ShardExplanation(
        shard=key,
        until=until,
        sentences=story.sentences,
        state=story.state,
        now=() if until is not None else tuple(standing.sentences(story)),
        is_finished=None if until is not None else standing.is_finished,
    )
    print_report(explained, partial(_show, shows_all=shows_all), as_json=as_json)
    if not story.sentences:
        echo("No transition of this shard is recorded where this command looked.", err=True)
    if found.damaged or found.unread:
        echo(
            f"{found.damaged} damaged entries and {found.unread} unreadable files were passed over",
            err=True,
        )
    return exit_codes.DRAINED


class ShardExplanation(msgspec.Struct, frozen=True):
    """A shard, explained: times in seconds since 1970, as in the entries. `state` is that of the
    end of the story; `now`, the present state of the row, is empty with --at."""

    shard: LeaseKey
    until: WallTime | None
    sentences: Sequence[Sentence]
    state: str
    now: tuple[str, ...]
    is_finished: bool | None


class _Standing(msgspec.Struct, frozen=True):
    """How a shard stands now: by its row, if it has one, else by what else is known of it."""

    lease: Lease | None = None
    is_finished: bool | None = None
    words: str = ""

    def sentences(self, story: Story) -> Iterator[str]:
        if self.lease is not None:
            yield from present(self.lease, story)
        else:
            yield f"Now: {self.words}"


def _standing(aws: Aws, shard: str, found: ReadStory) -> tuple[LeaseKey, _Standing]:
    """The key of a shard and how it stands now.

    Raises: NotFound if neither the table, the stream nor a story knows it; click.UsageError for a
    shard of several streams; a ServiceError leaf of the table.
    """
    from kclrun.cli.leases.rows import lease_of
    from kclrun.cli.leases.views import scan_table

    try:
        lease = lease_of(aws, shard)
    except NotFound:
        rows: dict[str, Lease] = {row.key: row for row in scan_table(aws).leases}
        return _without_row(aws, shard, rows, found)
    return lease.key, _Standing(lease, lease.is_ended)


def _without_row(
    aws: Aws, shard: str, rows: Mapping[str, Lease], found: ReadStory
) -> tuple[LeaseKey, _Standing]:
    """As `_standing`, for a shard without a row: it is unknown only if nothing names it."""
    shards, problem = _listed(aws)
    entries = found.entries.values()
    judge = FinishedShards(rows, shards, ended_in_stories(entries))
    named = spelled_out(shard)
    recorded = {entry.shard for entry in entries}
    keys = sorted(key for key in {*shards, *recorded} if named in _names_of(key))
    if len(keys) > 1:
        raise click.UsageError(
            f"Several streams have a shard {named}: name {' or '.join(map(display_name, keys))}."
        )
    key = keys[0] if keys else named
    if key not in recorded and not judge.is_named(key):
        table = aws.settings.table
        where = f"neither table {table} nor stream {aws.settings.stream_names} has shard {named}"
        raise NotFound(
            f"{where}, and no story names it{problem}\nThose with a lease:  kclrun leases"
        )
    is_finished = judge.is_finished(key)
    if is_finished:
        words = f"{finished_words(judge.children(key))} Its row was deleted since."
    elif key not in shards:
        words = (
            "neither the table nor the stream has the shard any more; whether it was read to its"
            f" end is not known{problem}."
        )
    elif is_finished is None:
        words = (
            "it has no row in the lease table, and shards after it have one: it was read to its"
            " end, or it is from before the start of the application. Nothing here shows which."
        )
    else:
        words = "it has no lease: no manager has made one yet."
    return LeaseKey(key), _Standing(None, is_finished, words)


def _names_of(key: str) -> tuple[str, str, str]:
    return key, display_name(key), shard_id_of(key)


def _listed(aws: Aws) -> tuple[dict[str, Shard], str]:
    """The shards that the streams list; and why that is not known, if it is not."""
    from kclrun.cli.services import open_streams

    try:
        return {
            shard.shard_id: shard
            for key, stream in open_streams(aws).items()
            for shard in qualified_shards(key, stream.admin.list_shards())
        }, ""
    except ServiceError as error:
        return {}, f" (the stream cannot be listed: {error})"


def gathered(
    aws: Aws, folders: tuple[Path, ...] = (), elsewhere: Iterable[bytes] | None = None
) -> ReadStory:
    """What this machine recorded, with these folders and, unless `elsewhere` is given in its place,
    all of S3.

    Raises: a ServiceError leaf if S3 does not answer.
    """
    own = state_folder(aws.settings.application, os.environ) / FOLDER
    found = read_story((own, *folders))
    if elsewhere is None:
        objects = aws.story
        elsewhere = objects.read() if objects is not None else ()
    for content in elsewhere:
        found.take(content)
    return found


def _show(explained: ShardExplanation, *, shows_all: bool) -> None:
    echo(display_name(explained.shard))
    most = None if shows_all else most_on_terminal(_LINES_MAX)
    shown = explained.sentences if most is None else explained.sentences[-most:]
    if len(shown) < len(explained.sentences):
        echo(f"… {len(explained.sentences) - len(shown)} lines before these: --all shows them")
    day = ""
    for sentence in shown:
        if day != (day := _day(sentence.at)):
            echo(day)
        echo(f"{_clock(sentence.at)}  {sentence.text}")
    if explained.until is not None:
        echo(f"At {_day(explained.until)} {_clock(explained.until)} {explained.state}.")
    for line in explained.now:
        echo(line)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] + "Z"
