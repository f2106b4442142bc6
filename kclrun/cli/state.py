"""`kclrun state`: shows, checks, exports and rebuilds the keyed state, whose versions are named by
the lease table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigGroup,
    config_options,
    json_option,
    shards_option,
    stream_option,
    yes_option,
)
from kclrun.cli.messages import echo
from kclrun.cli.reports import json_line, print_json_lines, print_report
from kclrun.cli.stored_state import StoredState, read_state, with_stores
from kclrun.cli.times import GivenTime, TimeType, time_option
from kclrun.errors import SettingsError
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import display_name, shard_id_of
from kclrun.state.timers import is_reserved

if TYPE_CHECKING:
    from kclrun.model.lease import Lease
    from kclrun.ports import VersionStore


@click.group(cls=ConfigGroup)
def state() -> None:
    """Show, check, export and rebuild what the processors remember.

    \b
    kclrun state show --config app.yaml
    kclrun state verify --config app.yaml
    kclrun state export --config app.yaml --output state.jsonl
    kclrun state rebuild --config app.yaml
    """


@state.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document a shard.")
def show(config: ConfigChoice, *, as_json: bool) -> int:
    """Show each shard's version, its keys, pending timers and bytes, and its chain's length.

    Every version is read: the stored bytes are those of the chain.
    """
    found, code = _leases(config)
    states = (read_state(row, store)[0] for row, store in found)
    print_report(states, _print_states, as_json=as_json, in_json=print_json_lines)
    return code


def _print_states(found: Iterable[StoredState]) -> None:
    for kept in found:
        if kept.wrong:
            echo(f"{kept.shard:<24} {kept.wrong}")
        else:
            echo(
                f"{kept.shard:<24} {kept.version:<28} {kept.keys:>9} keys {kept.timers:>7} timers"
                f" {kept.size_bytes:>11} B in {kept.versions} versions"
            )


@state.command()
@config_options
@json_option("One JSON document a shard; `wrong` is empty where nothing is.")
def verify(config: ConfigChoice, *, as_json: bool) -> int:
    """Read and check every version that a lease would begin with.

    Exit code 1 if one is missing or damaged, a row names none for its checkpoint, or cannot be
    read.
    """
    leases, unread = _leases(config)
    found = [read_state(row, store)[0] for row, store in leases]
    print_report(found, _print_wrong, as_json=as_json, in_json=print_json_lines)
    return exit_codes.UNMET if any(kept.wrong for kept in found) else unread


def _print_wrong(found: Sequence[StoredState]) -> None:
    wrong = [kept for kept in found if kept.wrong]
    for kept in wrong:
        echo(f"{kept.shard}: {kept.wrong}", err=True)
    echo(f"{len(found) - len(wrong)} of {len(found)} shards have their state")


@state.command()
@config_options
@shards_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file, which must not exist, for its owner to read. Without it, to stdout.",
)
def export(config: ConfigChoice, shards: tuple[str, ...], output: Path | None) -> int:
    """Write the values of every key, one JSON document a line, as the checkpoints have them.

    Each document has the shard, its checkpoint, the key and its values by name; bytes are base64.
    The values were made of records: protect them as you protect the records. Exit code 1 if a
    version is missing or damaged, or a row names none for its checkpoint or cannot be read; the
    other shards are written.

    \b
    kclrun state export --config app.yaml | jq -r .key
    kclrun state export --config app.yaml --shard shardId-000000000003 --output state.jsonl
    """
    leases, unread = _leases(config)
    chosen = [
        (row, store)
        for row, store in leases
        if not shards or {row.key, shard_id_of(row.key), display_name(row.key)} & set(shards)
    ]
    if shards and not chosen:
        raise SettingsError(f"--shard: no lease of {', '.join(shards)}")
    is_whole = True
    with _to(output) as write:
        for row, store in chosen:
            kept, entries = read_state(row, store)
            if kept.wrong:
                is_whole = False
                echo(f"{kept.shard}: {kept.wrong}", err=True)
            for key, values in entries.items():
                own = {name: value for name, value in values.items() if not is_reserved(name)}
                if own:
                    write(_line(kept, key, own))
    return unread if is_whole else exit_codes.UNMET


@state.command()
@config_options
@shards_option
@click.option(
    "--all", "is_all", is_flag=True, help="Every shard, also those that have their state."
)
@time_option(
    "--from",
    "begin",
    kind=TimeType(TRIM_HORIZON),
    metavar="TRIM_HORIZON|TIME",
    help_text="Where the replay begins: the state lacks what earlier records left.",
)
@stream_option
@click.option(
    "--folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="For the state while it is made; else rebuild-NAME.",
)
@yes_option
def rebuild(
    config: ConfigChoice,
    *,
    shards: tuple[str, ...],
    is_all: bool,
    begin: GivenTime | None,
    stream: str | None,
    folder: Path | None,
    yes: bool,
) -> int:
    """Make lost state again: the processor gets the records up to the checkpoints once more.

    For the shards whose version is missing or damaged, or whose row names none. It is a replay with
    leases of its own; rows of the processor go nowhere. The fleet must be stopped, and the stream
    must hold all records since the application began, unless --from names another beginning. The
    same command goes on with a rebuild that was interrupted.

    \b
    kclrun state rebuild --config app.yaml                          show what would happen
    kclrun state rebuild --config app.yaml --yes
    kclrun state rebuild --config app.yaml --shard shardId-000000000003 --from TRIM_HORIZON --yes
    """
    from kclrun.cli.replay.rebuild import RebuildOptions, rebuild_state

    configuration = config.load()
    start = None if begin is None else begin.start
    options = RebuildOptions(
        shards=shards, is_all=is_all, begin=start, stream=stream, folder=folder
    )
    return rebuild_state(configuration, options, is_confirmed=yes)


@contextmanager
def _to(output: Path | None) -> Iterator[Callable[[bytes], object]]:
    """A file that is not whole is removed. Raises: SettingsError if the file is there, or cannot be
    made."""
    if output is None:
        yield sys.stdout.buffer.write
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise SettingsError(
            f"--output: {output} is there already\nNothing was written; name another file"
        ) from None
    except OSError as error:
        raise SettingsError(f"--output: {output} cannot be made: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file.write
    except BaseException:
        output.unlink(missing_ok=True)
        raise


def _line(kept: StoredState, key: str, values: Mapping[str, bytes]) -> bytes:
    decoded = {name: msgspec.msgpack.decode(value) for name, value in values.items()}
    of = {"shard": kept.shard, "checkpoint": kept.checkpoint, "key": key, "values": decoded}
    # Of what msgpack has, JSON lacks an extension type of the user's own: its text.
    return f"{json_line(of, enc_hook=str)}\n".encode()


def _leases(config: ConfigChoice) -> tuple[Iterator[tuple[Lease, VersionStore]], int]:
    """The leases, each with the store of its versions; and the exit code: 1 if rows cannot be read,
    which are named."""
    from kclrun.cli.leases.rows import print_failures
    from kclrun.cli.leases.views import scan_table, unreadable_rows
    from kclrun.cli.services import Aws

    aws = Aws(config.load_for("state").settings)
    scanned = scan_table(aws)
    unread = print_failures(unreadable_rows(scanned))
    leases = with_stores(aws, sorted(scanned.leases, key=lambda row: row.key))
    return leases, exit_codes.UNMET if unread else exit_codes.DRAINED
