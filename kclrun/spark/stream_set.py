"""Several streams read as one: their shards side by side, each under its stream's name.

It knows the ports, and does not know offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from kclrun.errors import InvariantViolation, NotFound
from kclrun.model.reading import FetchedPage
from kclrun.model.record import StartPoint
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard, ShardGraph
from kclrun.model.stream import StreamKey, qualified, qualified_child, qualified_shards
from kclrun.ports import (
    ShardFilter,
    ShardReader,
    ShardSubscriber,
    StreamAdmin,
    StreamSummary,
    Subscription,
)

T = TypeVar("T")

Streams = Mapping[str, StreamSummary]

_KEYS_A_STREAM: Final = HASH_KEY_MAX + 1
_SEPARATOR: Final = ":"


def parted(name: str) -> tuple[str, str]:
    """The stream and the shard's own id; an empty stream where a source reads one stream."""
    stream, _, shard_id = name.rpartition(_SEPARATOR)
    return stream, shard_id


def shard_name(stream: str, shard_id: str) -> str:
    """A shard's name among several streams; its id where the stream is empty."""
    return qualified(StreamKey(stream), shard_id)


def of_streams_in(graph: ShardGraph, by_shard: Mapping[str, T]) -> dict[str, T]:
    """The entries for shards of the streams in a listing, and for `"*"`."""
    streams = {parted(shard.shard_id)[0] for shard in graph.unordered()}
    return {
        shard: value
        for shard, value in by_shard.items()
        if shard == "*" or parted(shard)[0] in streams
    }


def summaries_of(admin: StreamAdmin) -> Streams:
    """The summary of each stream by name; of one stream under an empty name. Raises: ServiceError
    leaves."""
    return {name: one.summary() for name, one in admins_of(admin).items()}


def admins_of(admin: StreamAdmin) -> Mapping[str, StreamAdmin]:
    """The admin of each stream by name; of one stream under an empty name."""
    return admin.by_name if isinstance(admin, StreamsAdmin) else {"": admin}


def summary_of(admin: StreamAdmin, name: str) -> StreamSummary:
    """The summary of this shard's stream. Raises: ServiceError leaves."""
    if isinstance(admin, StreamsAdmin):
        return admin.by_name[parted(name)[0]].summary()
    return admin.summary()


class StreamsReader:
    """Implements `ShardReader` over several streams, by their names.

    A shard is called `orders:shardId-000000000002` here, in offsets and in ranges. The streams
    follow each other in one space of hash keys: the first has the keys from 0 on, the next those
    from 2**128 on. So one planner plans for all of them, and its promises for one stream hold for
    all together: one time in catch-up, one limit of a trigger, parents before children.

    The reasons for this design:

    * With a planner for each stream, the streams would be read to different times, and rows of one
      would fall behind the watermark that rows of another have moved. Limits would be per stream.
    * With numbers instead of names in offsets, the same list in another order would be another
      checkpoint.
    * A stream's place among the hash keys depends on the names of all streams: no offset has it.
    * A listing is of all streams or an error: the shards of a stream that is left out would look
      expired.
    * An iterator belongs to one stream and does not name it: its token has the stream's name.
    * Sequence numbers of two streams are never compared: positions are compared within a shard
      only.
    """

    def __init__(self, by_name: Mapping[str, ShardReader]) -> None:
        self._by_name = by_name
        self._first_keys = first_keys(by_name)

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """An iterator that names its stream."""
        stream, bare = parted(shard_id)
        return f"{stream}{_SEPARATOR}{self._reader(stream).iterator(bare, start)}"

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """One page, with its children under this reader's names."""
        stream, _, token = iterator.partition(_SEPARATOR)
        page = self._reader(stream).fetch(token, limit)
        following = page.next_iterator
        return msgspec.structs.replace(
            page,
            next_iterator=None if following is None else f"{stream}{_SEPARATOR}{following}",
            children=_children(stream, page, self._first_keys[stream]),
        )

    def _reader(self, stream: str) -> ShardReader:
        if stream not in self._by_name:
            raise InvariantViolation(f"none of the source's streams is called {stream!r}")
        return self._by_name[stream]


class StreamsSubscriber:
    """Implements `ShardSubscriber` over several streams, by their names."""

    def __init__(self, by_name: Mapping[str, ShardSubscriber]) -> None:
        self._by_name = by_name
        self._first_keys = first_keys(by_name)

    def subscribe(self, shard_id: str, start: StartPoint) -> Subscription:
        """A subscription to the shard of its stream."""
        stream, bare = parted(shard_id)
        subscription = self._by_name[stream].subscribe(bare, start)
        return _StreamSubscription(subscription, stream, self._first_keys[stream])


class _StreamSubscription:
    """One stream's subscription; children have their names and keys among several streams."""

    def __init__(self, subscription: Subscription, stream: str, first_key: int) -> None:
        self._subscription = subscription
        self._stream = stream
        self._first_key = first_key
        self.close = subscription.close

    @property
    def is_over(self) -> bool:
        return self._subscription.is_over

    def next_page(self, timeout_s: float) -> FetchedPage | None:
        page = self._subscription.next_page(timeout_s)
        if page is None or not page.children:
            return page
        children = _children(self._stream, page, self._first_key)
        return msgspec.structs.replace(page, children=children)


def _children(stream: str, page: FetchedPage, first_key: int) -> tuple[ChildShard, ...]:
    placed = (
        msgspec.structs.replace(child, hash_range=moved(child.hash_range, first_key))
        for child in page.children
    )
    return tuple(qualified_child(StreamKey(stream), child) for child in placed)


class StreamsAdmin:
    """Implements `StreamAdmin` over several streams, by their names."""

    def __init__(self, by_name: Mapping[str, StreamAdmin]) -> None:
        self.by_name = by_name
        self._first_keys = first_keys(by_name)

    def summary(self) -> StreamSummary:
        """Not available for several streams: see `summaries_of`."""
        raise InvariantViolation("several streams have no summary in common")

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """Complete listings of all streams, or the error of the first that fails."""
        return tuple(
            shard for name in sorted(self.by_name) for shard in self._listed(name, shard_filter)
        )

    def _listed(self, name: str, shard_filter: ShardFilter | None) -> tuple[Shard, ...]:
        try:
            listed = self.by_name[name].list_shards(shard_filter)
        except NotFound as error:
            raise error.reworded(
                f"the stream {name} is gone, or cannot be listed: {error}"
            ) from None
        first = self._first_keys[name]
        placed = (
            msgspec.structs.replace(shard, hash_range=moved(shard.hash_range, first))
            for shard in listed
        )
        return qualified_shards(StreamKey(name), placed)


def first_keys(names: Iterable[str]) -> Mapping[str, int]:
    """The first hash key of each stream among the keys of all."""
    return {name: place * _KEYS_A_STREAM for place, name in enumerate(sorted(names))}


def moved(keys: HashRange, by: int) -> HashRange:
    """A stream's hash range among the keys of all; `by` is the stream's first key."""
    return HashRange(keys.start + by, keys.end + by)
