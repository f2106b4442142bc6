"""`kclrun why`: the story of a shard in sentences, from what managers recorded, and its row.

`leases/story.py` has the sentences. This module gathers the entries: of this machine, of folders
that were copied from others, and from S3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options
from kclrun.cli.messages import echo
from kclrun.cli.times import GivenTime, time_option
from kclrun.leases.story import Story, present, story_of
from kclrun.manager.locks import state_folder
from kclrun.manager.story import FOLDER
from kclrun.model.lease import LeaseKey
from kclrun.model.stream import called
from kclrun.model.time import WallTime
from kclrun.observe.story import ReadStory, read_story

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
@click.option("--all", "shows_all", is_flag=True, help=f"Not only the last {_LINES_MAX} lines.")
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
    in S3. Times are those of the clock of each machine.

    \b
    kclrun why 2
    kclrun why 2 --at 2026-03-01T06:00:00Z
    kclrun why 2 --story copied/host-1 --story copied/host-2
    """
    from kclrun.cli.leases.rows import lease_of
    from kclrun.cli.services import fleet_aws

    aws = fleet_aws(config, "observe")
    until = None if at is None else at.at
    lease = lease_of(aws, shard)
    found = gathered(aws, folders)
    story = story_of(lease.key, found.entries.values(), until)
    now = () if until is not None else tuple(present(lease, story))
    if as_json:
        echo(json.dumps(_plain(lease.key, story, until, now), indent=2))
    else:
        echo(called(lease.key))
        _show(story, shows_all=shows_all)
        if until is not None:
            now = (f"At {_day(until)} {_clock(until)} {story.state}.",)
        for line in now:
            echo(line)
    if not story.sentences:
        echo("No transition of this shard is recorded where this command looked.", err=True)
    if found.damaged or found.unread:
        echo(
            f"{found.damaged} damaged entries and {found.unread} unreadable files were passed over",
            err=True,
        )
    return exit_codes.DRAINED


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


def _plain(
    key: LeaseKey, story: Story, until: WallTime | None, now: tuple[str, ...]
) -> dict[str, object]:
    """For JSON: times in seconds since 1970, as in the entries. `state` is that of the end of the
    story; `now`, the present state of the row, is empty with --at."""
    return {
        "shard": key,
        "until": until,
        "sentences": [{"at": each.at, "text": each.text} for each in story.sentences],
        "state": story.state,
        "now": now,
    }


def _show(story: Story, *, shows_all: bool) -> None:
    shown = story.sentences if shows_all else story.sentences[-_LINES_MAX:]
    if len(shown) < len(story.sentences):
        echo(f"… {len(story.sentences) - len(shown)} lines before these: --all shows them")
    day = ""
    for each in shown:
        if day != (day := _day(each.at)):
            echo(day)
        echo(f"{_clock(each.at)}  {each.text}")


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] + "Z"
