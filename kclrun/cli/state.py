"""`kclrun state`: the versions of the keyed state that the lease table names, shown and checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigGroup, config_options, load_configuration
from kclrun.config.state import state_place
from kclrun.errors import SettingsError
from kclrun.model.output import Cursor
from kclrun.model.state import OF_PARENTS, is_own_version, version_folder
from kclrun.model.stream import shard_id_of, stream_of
from kclrun.state.chain import read_chain
from kclrun.worker.opening import open_versions

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.model.lease import Lease
    from kclrun.ports import VersionStore


class Kept(msgspec.Struct, frozen=True):
    """The state of one shard: the version that its row names, and its content; or the reason why it
    is `wrong`."""

    shard: str
    checkpoint: str
    version: str = ""
    keys: int = 0
    size_bytes: int = 0
    versions: int = 0
    wrong: str = ""


@click.group(cls=ConfigGroup)
def state() -> None:
    """Show and check what the processors remember.

    \b
    kclrun state show --config app.yaml
    kclrun state verify --config app.yaml
    """


@state.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document a shard.")
def show(config: Path | None, overrides: tuple[str, ...], *, as_json: bool) -> int:
    """Show each shard's version, its bytes and keys, and how many versions it rests on.

    Every version is read: the stored bytes are those of the chain.
    """
    for kept in _kept(config, overrides):
        if as_json:
            click.echo(msgspec.json.encode(kept).decode())
        elif kept.wrong:
            click.echo(f"{kept.shard:<24} {kept.wrong}")
        else:
            click.echo(
                f"{kept.shard:<24} {kept.version:<28} {kept.keys:>9} keys {kept.size_bytes:>11} B"
                f" in {kept.versions} versions"
            )
    return exit_codes.DRAINED


@state.command()
@config_options
def verify(config: Path | None, overrides: tuple[str, ...]) -> int:
    """Read and check every version that a lease would begin with.

    Exit code 1 if one is missing or damaged, or a row names none for its checkpoint.
    """
    found = list(_kept(config, overrides))
    wrong = [each for each in found if each.wrong]
    for each in wrong:
        click.echo(f"{each.shard}: {each.wrong}", err=True)
    click.echo(f"{len(found) - len(wrong)} of {len(found)} shards have their state")
    return exit_codes.UNMET if wrong else exit_codes.DRAINED


def _kept(config: Path | None, overrides: tuple[str, ...]) -> Iterator[Kept]:
    from kclrun.cli.services import Aws, open_streams

    settings = load_configuration(config, overrides).settings
    place = state_place(settings)
    if place is None:
        raise SettingsError("there is no `state` in the settings")
    aws = Aws(settings)
    names = {key: stream.summary.name for key, stream in open_streams(aws).items()}
    stores: dict[str, VersionStore] = {}
    for row in _rows(aws):
        name = names.get(stream_of(row.key))
        if name is None:
            continue
        if name not in stores:
            folder = version_folder(settings.application, name)
            stores[name] = open_versions(place, folder, aws.kinesis, aws.credentials.current)
        yield _read(row, stores[name])


def _rows(aws: Aws) -> list[Lease]:
    rows = [lease for page in aws.table.scan() for lease in page.leases]
    return sorted(rows, key=lambda row: row.key)


def _read(row: Lease, store: VersionStore) -> Kept:
    """What the row's version holds, read whole. Raises: SinkError while the store is away."""
    kept = Kept(row.key, str(row.checkpoint), row.state_version or "")
    shard = shard_id_of(row.key)
    if not is_own_version(row.state_version):
        is_first = row.checkpoint.is_sentinel and not row.is_ended
        begins = "its parents' state" if row.state_version == OF_PARENTS else "no state"
        wrong = f"begins with {begins}" if is_first else "names no version"
        return msgspec.structs.replace(kept, wrong="" if is_first else wrong, version=begins)
    if row.is_moved_past_outputs:
        return msgspec.structs.replace(
            kept, wrong=f"the checkpoint {row.checkpoint} is not that of its version"
        )
    assert row.state_version is not None
    try:
        entries, chain, cursor = read_chain(
            row.state_version, shard, lambda name: store.read(shard, name)
        )
    except SettingsError as error:
        return msgspec.structs.replace(kept, wrong=str(error))
    wrong = ""
    if Cursor.parse(cursor) > Cursor(row.checkpoint):
        wrong = f"the version is of {cursor}, beyond the checkpoint {row.checkpoint}"
    return msgspec.structs.replace(
        kept,
        keys=len(entries),
        size_bytes=chain.snapshot_bytes + chain.delta_bytes,
        versions=len(chain.names),
        wrong=wrong,
    )
