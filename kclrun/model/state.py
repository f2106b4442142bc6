"""Where the keyed state of an application is kept, as the settings say it, resolved."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.output import refuse_bad_name
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.wire import WireCredentials, WireEndpoint

# Instead of a name, on the row of a child whose parents had keyed state: it begins with theirs
# [K16]. No version has this name.
OF_PARENTS: Final = "parents"


def is_own_version(state_version: str | None) -> bool:
    """Whether a row names a version of its own shard, which rests on no other shard's."""
    return state_version is not None and state_version != OF_PARENTS


def version_folder(application: str, stream: str) -> str:
    """Where the versions of a stream are below the place of the store. Names of versions are unique
    for ever, so that a later stream of this name needs no other folder. Raises: SettingsError for a
    name that is not one of AWS."""
    for name in (application, stream):
        refuse_bad_name(name)
    return f"{application}/{stream}"


class Watermarks(msgspec.Struct, frozen=True):
    """How the watermark of a shard follows its records, in seconds: `lateness_s` behind the latest,
    in steps of `every_s`. After `idle_s` without records it follows the clock of the service; never
    with None."""

    lateness_s: float = 10.0
    every_s: float = 1.0
    idle_s: float | None = None


class StateDestination(msgspec.Struct, frozen=True, kw_only=True):
    """The store of the versions: exactly one of `path`, `s3` and `dynamodb` is set.

    `s3` is an URL `s3://bucket/prefix`, `dynamodb` the name of a table. Above `max_bytes` of keys,
    names and values the lease halts. Versions that nothing names are deleted when they are older
    than `retain_s`. `endpoint_url` replaces the address of the service. `local` is a folder of this
    machine for a copy of the state, of which some `memory_bytes` are in memory then. `watermarks`
    are those of the timers in the state. With `has_outbox` the versions hold the rows of their
    commits.
    `may_begin_empty`: rows without a version are of a time without state.
    """

    path: str | None = None
    s3: str | None = None
    dynamodb: str | None = None
    max_bytes: int = 2**30
    retain_s: float = 86400.0
    endpoint_url: str | None = None
    local: str | None = None
    memory_bytes: int = 256 * 2**20
    watermarks: Watermarks = Watermarks()
    has_outbox: bool = False
    may_begin_empty: bool = False


class PrefetchJob(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a shard that the row names now, and where it is: `folder` is that of the
    application's stream below the place."""

    place: StateDestination
    folder: str
    shard_id: str
    checkpoint: ExtendedSequenceNumber
    version: str
    kinesis: WireEndpoint
    credentials: WireCredentials
