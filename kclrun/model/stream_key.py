"""Which stream a lease belongs to: the KCL's key of a stream, and lease keys made with it.

An application of one stream has bare shard ids for lease keys. One of several has
`<account>:<stream>:<creation, epoch seconds>:<shard id>`, the KCL's multi-stream form: a stream
that was deleted and made again is another one. In memory every shard id of such an application is
qualified like its lease key, parents and children too, so that two streams' shards are never taken
for each other; the table holds bare ids there, as the KCL writes them (`aws/rows.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NewType

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import WallTime

__all__ = [
    "ONLY_STREAM",
    "StreamKey",
    "called",
    "qualified",
    "qualified_child",
    "qualified_shards",
    "shard_id_of",
    "stream_key",
    "stream_name_of",
    "stream_of",
]

StreamKey = NewType("StreamKey", str)

# The stream of an application that has one: its lease keys are bare shard ids.
ONLY_STREAM: Final = StreamKey("")

# The stream part as `StreamIdentifier` of the KCL has it, then the shard.
_QUALIFIED: Final = re.compile(r"(?P<stream>[0-9]+:(?P<name>[^:]+):[0-9]+):(?P<shard>[^:]+)")
_ARN: Final = re.compile(r"arn:[^:]+:kinesis:[^:]*:(?P<account>[0-9]+):stream/(?P<name>[^:/]+)")


def stream_key(arn: str, created_at: WallTime) -> StreamKey:
    """The key of a stream among several, from its summary; whole seconds, as the KCL has them.

    Raises: SettingsError for an ARN that no Kinesis stream has.
    """
    parts = _ARN.fullmatch(arn)
    if parts is None:
        raise SettingsError(f"{arn!r} is no ARN of a stream: leases cannot be named by it")
    return StreamKey(f"{parts['account']}:{parts['name']}:{int(created_at)}")


def stream_of(key: str) -> StreamKey:
    """The stream part of a lease key; ONLY_STREAM for a bare one, whatever it says."""
    if ":" not in key:  # nearly always, and a scan asks for each of its rows
        return ONLY_STREAM
    parts = _QUALIFIED.fullmatch(key)
    return ONLY_STREAM if parts is None else StreamKey(parts["stream"])


def shard_id_of(key: str) -> str:
    """The bare shard id of a lease key; a bare one is its own."""
    parts = _QUALIFIED.fullmatch(key)
    return key if parts is None else parts["shard"]


def stream_name_of(stream: StreamKey) -> str:
    """The stream's name, for people; empty for ONLY_STREAM."""
    return stream.split(":")[1] if stream else ""


def called(key: str) -> str:
    """A lease key as people say it: `orders:shardId-…` among several streams, else the shard."""
    parts = _QUALIFIED.fullmatch(key)
    return key if parts is None else f"{parts['name']}:{parts['shard']}"


def qualified(stream: StreamKey, shard_id: str) -> str:
    """The lease key of a shard of this stream."""
    return f"{stream}:{shard_id}" if stream else shard_id


def qualified_shards(stream: StreamKey, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """A listing with the ids of shards and parents qualified."""
    if not stream:
        return tuple(shards)
    return tuple(
        msgspec.structs.replace(
            shard,
            shard_id=qualified(stream, shard.shard_id),
            parent_shard_id=_qualified_or_none(stream, shard.parent_shard_id),
            adjacent_parent_shard_id=_qualified_or_none(stream, shard.adjacent_parent_shard_id),
        )
        for shard in shards
    )


def qualified_child(stream: StreamKey, child: ChildShard) -> ChildShard:
    """A child as GetRecords names it, with its id and its parents' qualified."""
    parents = tuple(qualified(stream, parent) for parent in child.parents)
    return ChildShard(qualified(stream, child.shard_id), parents, child.hash_range)


def _qualified_or_none(stream: StreamKey, shard_id: str | None) -> str | None:
    return None if shard_id is None else qualified(stream, shard_id)
