"""`kclrun dead-letters`: what was given up: shown, put back into its stream, or dropped."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigGroup, config_options, load_configuration
from kclrun.cli.user_code import dead_letter_folder
from kclrun.config.schema import Settings, stream_name
from kclrun.errors import SettingsError
from kclrun.model.record import PutEntry
from kclrun.model.stream import spelled_out
from kclrun.model.text import harmless
from kclrun.sinks.dead_letters import Kept, LetterFolder

# Of an error, in a table: the whole is in `show`.
_ERROR_CHARACTERS_MAX: Final = 60


@click.group(name="dead-letters", cls=ConfigGroup)
def dead_letters() -> None:
    """Show, put back and drop the records that were given up.

    \b
    kclrun dead-letters list --config app.yaml
    kclrun dead-letters show POSITION --config app.yaml
    kclrun dead-letters redrive --to stream --config app.yaml --yes
    kclrun dead-letters drop --error ValueError --config app.yaml --yes
    """


def _filters(command: click.decorators.FC) -> click.decorators.FC:
    """The options that choose letters; all of them must fit."""
    for option in (
        click.option("--shard", metavar="SHARD", help="Only those of this shard."),
        click.option("--key", metavar="KEY", help="Only those with this partition key."),
        click.option("--error", metavar="TEXT", help="Only those whose error contains this."),
        click.option(
            "--since", type=click.DateTime(), help="Only those given up at this time or later, UTC."
        ),
    ):
        command = option(command)
    return command


@dead_letters.command(name="list")
@config_options
@_filters
def list_letters(config: Path | None, overrides: tuple[str, ...], **filters: Any) -> int:
    """One line for each letter: where it was, when it was given up, and why."""
    _, kept = _chosen(config, overrides, filters)
    for each in kept:
        letter = each.letter
        given_up = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.given_up_at))
        error = harmless(letter.error)[:_ERROR_CHARACTERS_MAX]
        click.echo(f"{given_up}  {letter.stream}  {letter.shard_id}  {letter.position}  {error}")
    click.echo(f"{len(kept)} dead letters", err=True)
    return exit_codes.DRAINED


@dead_letters.command()
@click.argument("position", metavar="POSITION")
@config_options
def show(position: str, config: Path | None, overrides: tuple[str, ...]) -> int:
    """Everything about one letter, its payload included.

    POSITION is as `list` prints it. A payload that is not text is shown as base64.
    """
    _, kept = _chosen(config, overrides, {})
    found = [each for each in kept if each.letter.position == position]
    if not found:
        raise SettingsError(
            f"there is no dead letter at {position}\nShow them:  kclrun dead-letters list"
        )
    for each in found:
        letter = each.letter
        click.echo(f"stream         {letter.stream}, {letter.shard_id}")
        click.echo(f"position       {letter.position}")
        click.echo(f"partition key  {harmless(letter.partition_key)}")
        click.echo(f"error          {harmless(letter.error)}, after {letter.calls} calls")
        click.echo(f"raised at      {harmless(letter.raised_at)}")
        click.echo(f"payload        {_payload(letter.data)}")
        click.echo(f"file           {each.path}")
        for line in letter.traceback.splitlines():
            click.echo(f"  {harmless(line)}")
    return exit_codes.DRAINED


@dead_letters.command()
@config_options
@_filters
@click.option(
    "--to", type=click.Choice(["stream"]), required=True, help="stream: put them back into it."
)
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
def redrive(
    config: Path | None, overrides: tuple[str, ...], *, to: str, yes: bool, **filters: Any
) -> int:
    """Put letters back into their streams, as new records with the same keys.

    The order of each key is kept. A letter is removed once its record is in the stream, so what is
    interrupted can be run again; what was under way at that moment is then put twice.
    """
    from kclrun.aws.put_records import batches, send_all
    from kclrun.cli.world import Aws

    settings, kept = _chosen(config, overrides, filters)
    assert to == "stream", "the only place there is"
    for stream, of_stream in _by_stream(settings, kept):
        click.echo(f"{'Putting' if yes else 'Would put'} {len(of_stream)} records into {stream}")
        if not yes:
            continue
        client, waiting = Aws(settings).kinesis_client, list(of_stream)
        entries = (
            PutEntry(each.letter.data, each.letter.partition_key, each.letter.explicit_hash_key)
            for each in of_stream
        )
        for batch in batches(entries, one_a_key=True):
            send_all(client, stream, batch)
            for each in waiting[: len(batch)]:
                each.path.unlink(missing_ok=True)
            del waiting[: len(batch)]
    return _end(kept, yes=yes)


@dead_letters.command()
@config_options
@_filters
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
def drop(config: Path | None, overrides: tuple[str, ...], *, yes: bool, **filters: Any) -> int:
    """Remove letters for good: their records are lost."""
    _, kept = _chosen(config, overrides, filters)
    click.echo(f"{'Dropping' if yes else 'Would drop'} {len(kept)} dead letters")
    if yes:
        for each in kept:
            each.path.unlink(missing_ok=True)
    return _end(kept, yes=yes)


def _end(kept: Sequence[Kept], *, yes: bool) -> int:
    if kept and not yes:
        click.echo("Do it with --yes.")
    return exit_codes.DRAINED


def _chosen(
    config: Path | None, overrides: tuple[str, ...], filters: dict[str, Any]
) -> tuple[Settings, list[Kept]]:
    """The letters that all filters fit, in the order of their shards.

    Raises: SettingsError without a folder of letters, or for a file that is not a letter.
    """
    settings = load_configuration(config, overrides).settings
    folder = dead_letter_folder(settings)
    if folder is None:
        raise SettingsError(
            "on_error.dead_letter.path: is missing; this application keeps no dead letters"
        )
    return settings, [each for each in LetterFolder(folder).kept() if _fits(each, filters)]


def _fits(kept: Kept, filters: dict[str, Any]) -> bool:
    letter = kept.letter
    shard, key, error = filters.get("shard"), filters.get("key"), filters.get("error")
    since = filters.get("since")
    return (
        (shard is None or spelled_out(shard) == letter.shard_id)
        and (key is None or letter.partition_key == key)
        and (error is None or error in letter.error)
        and (since is None or letter.given_up_at >= since.replace(tzinfo=UTC).timestamp())
    )


def _by_stream(settings: Settings, kept: Sequence[Kept]) -> Iterator[tuple[str, list[Kept]]]:
    """The letters of each stream of the application. Raises: SettingsError for another stream."""
    found: dict[str, list[Kept]] = {}
    for each in kept:
        found.setdefault(each.letter.stream, []).append(each)
    if others := found.keys() - {stream_name(source.name) for source in settings.sources}:
        raise SettingsError(
            f"letters of {', '.join(sorted(others))}: not a stream of this application"
        )
    yield from found.items()


def _payload(data: bytes) -> str:
    try:
        return harmless(data.decode())
    except UnicodeDecodeError:
        return f"base64 {base64.b64encode(data).decode()}"
