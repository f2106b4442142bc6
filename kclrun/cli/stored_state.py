"""The keyed state of shards as an operator reads it: the version that a row of the lease table
names, and its content. `kclrun state` shows it, and a rebuild makes the wrong ones again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from kclrun.cli.one_by_one import OneByOne
from kclrun.config.state import state_place
from kclrun.destinations import open_versions
from kclrun.errors import SettingsError
from kclrun.model.output import Cursor
from kclrun.model.state import OF_PARENTS, is_own_version, version_folder
from kclrun.model.stream import shard_id_of, stream_of
from kclrun.state.chain import Entries, read_chain
from kclrun.state.timers import is_reserved, timer_of

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.model.lease import Lease
    from kclrun.ports import VersionStore


class StoredState(msgspec.Struct, frozen=True):
    """The state of one shard: the version that its row names, and its content; or the reason why it
    is `wrong`."""

    shard: str
    checkpoint: str
    version: str = ""
    keys: int = 0
    timers: int = 0
    size_bytes: int = 0
    versions: int = 0
    wrong: str = ""


def with_stores(aws: Aws, rows: Iterable[Lease]) -> Iterator[tuple[Lease, VersionStore]]:
    """Those of the rows that are of the application's streams, each with the store of its
    versions. Raises: SettingsError without `state`."""
    from kclrun.cli.services import open_streams

    settings = aws.settings
    place = state_place(settings)
    if place is None:
        raise SettingsError("there is no `state` in the settings")
    if settings.engine == "spark":
        raise SettingsError(
            "this is for the state that a lease table names; on Spark the offsets of the query do"
        )
    opened = open_streams(aws, on_missing=OneByOne("state").missing)
    names = {key: stream.summary.name for key, stream in opened.items()}
    stores: dict[str, VersionStore] = {}
    for row in rows:
        name = names.get(stream_of(row.key))
        if name is None:
            continue
        if name not in stores:
            folder = version_folder(settings.application, name)
            stores[name] = open_versions(place, folder, aws.kinesis, aws.credentials.current)
        yield row, stores[name]


def read_state(row: Lease, store: VersionStore) -> tuple[StoredState, Entries]:
    """What the row's version holds, read whole: nothing if it is wrong. Raises: SinkError while the
    store is away."""
    kept = StoredState(row.key, str(row.checkpoint), row.state_version or "")
    shard = shard_id_of(row.key)
    if not is_own_version(row.state_version):
        is_first = row.checkpoint.is_sentinel and not row.is_ended
        begins = "its parents' state" if row.state_version == OF_PARENTS else "no state"
        wrong = f"begins with {begins}" if is_first else "names no version"
        return msgspec.structs.replace(kept, wrong="" if is_first else wrong, version=begins), {}
    if row.is_moved_past_outputs:
        wrong = f"the checkpoint {row.checkpoint} is not that of its version"
        return msgspec.structs.replace(kept, wrong=wrong), {}
    assert row.state_version is not None
    try:
        entries, chain, cursor = read_chain(
            row.state_version, shard, lambda name: store.read(shard, name)
        )
    except SettingsError as error:
        return msgspec.structs.replace(kept, wrong=str(error)), {}
    if Cursor.parse(cursor) > Cursor.of(row.checkpoint):
        wrong = f"the version is of {cursor}, beyond the checkpoint {row.checkpoint}"
        return msgspec.structs.replace(kept, wrong=wrong), {}
    kept = msgspec.structs.replace(
        kept,
        keys=sum(not all(map(is_reserved, of)) for of in entries.values()),
        timers=sum(
            timer_of(key, *item) is not None for key, of in entries.items() for item in of.items()
        ),
        size_bytes=chain.snapshot_bytes + chain.delta_bytes,
        versions=len(chain.names),
    )
    return kept, entries
