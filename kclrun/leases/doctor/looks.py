"""What the doctor sees: two looks at the whole table, some time apart, and who was alive.

Rule: nothing is found that a single look shows; a scan is no snapshot, and what is being mended
by the managers themselves is gone by the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from kclrun.leases.listing import Listing
from kclrun.leases.observation import Observation, is_nobody
from kclrun.leases.table_view import TableView
from kclrun.model.lease import ASK_STALE_AFTER_S, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.stream_key import StreamKey, stream_of
from kclrun.model.time import Instant, WallTime

__all__ = ["Circumstances", "Look", "Pair", "StreamFacts", "watch_s"]


class Look(msgspec.Struct, frozen=True):
    """One whole scan, and after it one complete listing of every stream of the application.

    `broken` are the keys of rows that cannot be read, and why; `foreign` counts the rows of
    another `entityType`.
    """

    leases: tuple[Lease, ...]
    listings: Mapping[StreamKey, Listing]
    broken: Mapping[str, str] = {}
    foreign: int = 0


class StreamFacts(msgspec.Struct, frozen=True):
    """Where shards of a stream without a lease begin, and for how long it keeps records."""

    start: ExtendedSequenceNumber = TRIM_HORIZON
    start_text: str = TRIM_HORIZON.sequence_number
    retention_s: float = 86_400.0


class Circumstances(msgspec.Struct, frozen=True):
    """What holds beside the rows. `me` is the owner id that mends are made under; `watched_s` the
    time between the looks, at least `failover_s`; `now` the wall-clock time of the second."""

    me: OwnerId
    failover_s: float
    watched_s: float
    now: WallTime
    streams: Mapping[StreamKey, StreamFacts]


class Pair:
    """Two looks side by side. `alive` are the owners that wrote a row between them [P9]."""

    def __init__(self, first: Look, second: Look, circumstances: Circumstances) -> None:
        self.first, self.second = first, second
        self.circumstances = circumstances
        observation = Observation(circumstances.failover_s)
        self._first_view = _view(first, observation, circumstances.me, 0.0)
        self.view = _view(second, observation, circumstances.me, circumstances.watched_s)
        self.alive = self._alive()
        streams = set(circumstances.streams)
        for view in (self._first_view, self.view):
            streams.update(map(stream_of, (*view.rows, *view.broken)))
        self._earlier = self._first_view.by_stream(streams)
        self._now = self.view.by_stream(streams)

    def views_of(self, stream: StreamKey) -> tuple[TableView, TableView]:
        """The rows of one stream of the application, at the first and at the second look."""
        return self._earlier[stream], self._now[stream]

    def rows_of(self, keys: Iterable[str]) -> Iterator[Lease]:
        """Those of the second look that can be read."""
        found = (self.view.rows.get(LeaseKey(key)) for key in keys)
        return (lease for lease in found if lease is not None)

    def before(self, key: LeaseKey) -> Lease | None:
        """The row at the first look."""
        return self._first_view.rows.get(key)

    def stood_still(self, lease: Lease) -> bool:
        """Whether owner and counter were the same at both looks."""
        before = self.before(lease.key)
        return before is not None and (before.owner, before.counter) == (lease.owner, lease.counter)

    def _alive(self) -> frozenset[OwnerId]:
        moved = {
            lease.owner
            for lease in self.second.leases
            if lease.owner is not None and not is_nobody(lease.owner) and not self._is_old(lease)
        }
        return frozenset(moved)

    def _is_old(self, lease: Lease) -> bool:
        return self.stood_still(lease) and (lease.is_ended or lease.key in self.view.expired)


def watch_s(leases: tuple[Lease, ...], failover_s: float) -> float:
    """How long the looks must be apart: the longest failover; with an ask on a row as long as an
    ask may stand there, and a failover more, in which its owner would have dropped it [P16]."""
    longest_s = max([failover_s, *(lease.failover_s or 0.0 for lease in leases)])
    if any(lease.handoff is not None for lease in leases):
        return longest_s + ASK_STALE_AFTER_S
    return longest_s


def _view(look: Look, observation: Observation, me: OwnerId, at_s: float) -> TableView:
    at = Instant(at_s)
    observation.update(look.leases, at)
    return TableView(look.leases, tuple(look.broken), observation, me=me, gone=frozenset(), now=at)
