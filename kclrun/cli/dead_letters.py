"""`kclrun dead-letters`: records that were given up are shown, redriven, or dropped."""

from __future__ import annotations

import base64
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigGroup,
    Configuration,
    config_options,
    load_configuration,
)
from kclrun.cli.user_code import dead_letter_folder, output_folder, own_module
from kclrun.codec.row_lines import encode_row
from kclrun.config.outputs import output_places
from kclrun.config.schema import Settings, StreamSettings, stream_name
from kclrun.errors import SettingsError
from kclrun.loading import GLUE, import_paths
from kclrun.manager.launcher import lease_environment
from kclrun.model.letter import KeptLetter, Letter
from kclrun.model.record import PutEntry
from kclrun.model.stream import ONLY_STREAM, spelled_out
from kclrun.model.text import harmless
from kclrun.ports import LetterStore
from kclrun.sinks.dead_letters import LetterFolder
from kclrun.sinks.durable_files import publish_file
from kclrun.testing import redriving
from kclrun.testing.redriving import RedriveJob, Redriven, RegistryAccess

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
    with _letters(config, overrides, filters) as chosen:
        kept = chosen.kept
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
    with _letters(config, overrides, {}) as chosen:
        found = [each for each in chosen.kept if each.letter.position == position]
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
        click.echo(f"kept in        {each.where}")
        for line in letter.traceback.splitlines():
            click.echo(f"  {harmless(line)}")
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
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
def redrive(
    config: Path | None, overrides: tuple[str, ...], *, to: str, yes: bool, **filters: Any
) -> int:
    """Process letters again, or put them back into their streams.

    The order of each key is kept. A letter is removed once it is processed and its rows are on the
    disk, or once its record is in the stream: what is interrupted can be run again, and what was
    under way at that moment is then processed, or put, twice.
    """
    with _letters(config, overrides, filters) as chosen:
        left = 0
        for source, letters in _by_stream(chosen):
            name = stream_name(source.name)
            plan = f"{len(letters)} letters of {name}"
            if not yes:
                verb = f"put {plan} back" if to == "stream" else f"process {plan}"
                click.echo(f"Would {verb}")
            elif to == "stream":
                _put_back(chosen, source.name, letters)
                click.echo(f"Put {plan} back")
            else:
                failed = _process(chosen, source, letters)
                click.echo(f"Processed {len(letters) - failed} of {plan}")
                left += failed
        if chosen.kept and not yes:
            click.echo("Do it with --yes.")
    return exit_codes.HALTED if left else exit_codes.DRAINED


@dead_letters.command()
@config_options
@_filters
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
def drop(config: Path | None, overrides: tuple[str, ...], *, yes: bool, **filters: Any) -> int:
    """Remove letters for good: their records are lost."""
    with _letters(config, overrides, filters) as chosen:
        click.echo(f"{'Dropping' if yes else 'Would drop'} {len(chosen.kept)} dead letters")
        if yes:
            chosen.store.remove(chosen.kept)
        elif chosen.kept:
            click.echo("Do it with --yes.")
    return exit_codes.DRAINED


def letter_store(settings: Settings) -> LetterStore:
    """The place of the application's letters. Raises: SettingsError if it keeps none."""
    folder = dead_letter_folder(settings)
    if folder is not None:
        return LetterFolder(folder)
    from kclrun.cli.world import Aws

    if settings.on_error.then != "dead-letter":
        raise SettingsError(
            "on_error.dead_letter: is missing; this application keeps no dead letters"
        )
    return Aws(settings).letters


class _Chosen(msgspec.Struct, frozen=True):
    """The letters that all filters fit, shard by shard in the order of their records."""

    configuration: Configuration
    store: LetterStore
    kept: Sequence[KeptLetter]


@contextmanager
def _letters(
    config: Path | None, overrides: tuple[str, ...], filters: Mapping[str, Any]
) -> Iterator[_Chosen]:
    """Raises: SettingsError without a place of letters, or if it holds anything else."""
    configuration = load_configuration(config, overrides)
    store = letter_store(configuration.settings)
    try:
        kept = [each for each in store.kept() if _fits(each.letter, filters)]
        yield _Chosen(configuration, store, kept)
    finally:
        store.close()


def _fits(letter: Letter, filters: Mapping[str, Any]) -> bool:
    shard, key, error = filters.get("shard"), filters.get("key"), filters.get("error")
    since = filters.get("since")
    return (
        (shard is None or spelled_out(shard) == letter.shard_id)
        and (key is None or letter.partition_key == key)
        and (error is None or error in letter.error)
        and (since is None or letter.given_up_at >= since.replace(tzinfo=UTC).timestamp())
    )


def _by_stream(chosen: _Chosen) -> Iterator[tuple[StreamSettings, list[KeptLetter]]]:
    """The letters of each stream of the application. Raises: SettingsError for another stream."""
    sources = {stream_name(each.name): each for each in chosen.configuration.settings.sources}
    found: dict[str, list[KeptLetter]] = {}
    for each in chosen.kept:
        found.setdefault(each.letter.stream, []).append(each)
    if others := found.keys() - sources.keys():
        raise SettingsError(
            f"letters of {', '.join(sorted(others))}: not a stream of this application"
        )
    for name, letters in found.items():
        yield sources[name], letters


def _put_back(chosen: _Chosen, stream: str, letters: Sequence[KeptLetter]) -> None:
    from kclrun.aws.put_records import batches, send_all
    from kclrun.cli.world import Aws

    client, waiting = Aws(chosen.configuration.settings).kinesis_client, list(letters)
    entries = (
        PutEntry(each.letter.data, each.letter.partition_key, each.letter.explicit_hash_key)
        for each in letters
    )
    for batch in batches(entries, one_a_key=True):
        send_all(client, stream, batch)
        chosen.store.remove(waiting[: len(batch)])
        del waiting[: len(batch)]


def _process(chosen: _Chosen, source: StreamSettings, letters: Sequence[KeptLetter]) -> int:
    """Run the processor over them, shard by shard, in a process of its own. Returns how many of
    them are still letters."""
    settings = chosen.configuration.settings
    if source.processor is None:
        raise SettingsError(f"processor: is missing for {source.name}; add --to stream")
    places = output_places(settings, ONLY_STREAM) if settings.engine == "fleet" else ()
    elsewhere = [place.name for place in places if not place.grows]
    if elsewhere:
        raise SettingsError(
            f"rows go to {', '.join(elsewhere)}, which only a lease may write to: add --to stream,"
            " and the fleet processes the records again"
        )
    if settings.state is not None:
        raise SettingsError(
            "the processor's state is changed by its lease alone: add --to stream, and the fleet"
            " processes the records again"
        )
    paths = import_paths(settings.path, chosen.configuration.folder)
    job = RedriveJob(
        processor=source.processor,
        import_paths=tuple(str(path) for path in paths),
        application=settings.application,
        stream=stream_name(source.name),
        options=source.options,
        retries=settings.on_error.retries,
        batch_max=settings.fetch.batch_max,
        uncheckpointed_max=settings.checkpoint.uncheckpointed_max,
        decode=source.decode,
        schema=settings.output.schema if settings.output is not None else None,
        registry=_registry(settings) if source.decode == GLUE else None,
    )
    rows = _RedrivenRows(output_folder(settings))
    left = 0
    with _user_process(lease_environment(os.environ, settings.environment.only)) as (ask, answers):
        ask(msgspec.json.encode(job))
        for shard, of_shard in itertools.groupby(letters, lambda each: each.letter.shard_id):
            kept = list(of_shard)
            ask(msgspec.json.encode([each.letter for each in kept]))
            answer = _answer(answers.readline())
            if refusal := rows.refusal(answer):
                answer = Redriven(error=refusal)
            if answer.error:
                click.echo(f"{shard}: {answer.error}", err=True)
            rows.keep(shard, answer)
            chosen.store.remove([kept[index] for index in answer.done])
            left += len(kept) - len(answer.done)
    return left


def _registry(settings: Settings) -> RegistryAccess:
    from kclrun.cli.world import Aws

    aws = Aws(settings)
    return RegistryAccess(
        aws.kinesis.region, settings.aws.url_of("glue"), aws.credentials.current()
    )


@contextmanager
def _user_process(
    environment: Mapping[str, str],
) -> Iterator[tuple[Callable[[bytes], None], BinaryIO]]:
    """The process of user code: a function that sends it a line, and the stream of its answers."""
    with subprocess.Popen(  # noqa: S603 - our own module
        own_module(redriving.__name__),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None, "a pipe"
        assert answers is not None, "a pipe"

        def ask(line: bytes) -> None:
            with suppress(BrokenPipeError):  # the missing answer tells it
                asked.write(line + b"\n")
                asked.flush()

        try:
            yield ask, cast("BinaryIO", answers)
        finally:
            with suppress(BrokenPipeError):
                asked.close()


def _answer(line: bytes) -> Redriven:
    if not line.endswith(b"\n"):
        return Redriven(error="the process of the processor ended; its letters stay")
    return msgspec.json.decode(line, type=Redriven)


class _RedrivenRows:
    """The rows that a redrive emits: files of the output folder, one for each shard, on the disk
    before the letters are removed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._began = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())

    def refusal(self, answer: Redriven) -> str:
        """Why the rows cannot be kept; empty if they can."""
        if answer.rows and self._folder is None:
            return "context.emit() needs a place for the rows: set output.path"
        return ""

    def keep(self, shard: str, answer: Redriven) -> None:
        """Durable when this returns. Raises: SettingsError."""
        if not answer.rows or self._folder is None:
            return
        path = self._folder / f"redriven-{self._began}-{shard}.jsonl"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish_file(path, b"".join(encode_row(row) for row in answer.rows))
        except OSError as error:
            raise SettingsError(f"cannot write {path}: {error.strerror}") from None


def _payload(data: bytes) -> str:
    try:
        return harmless(data.decode())
    except UnicodeDecodeError:
        return f"base64 {base64.b64encode(data).decode()}"
