"""Whether the shards that other owners read are read to their tips: for `--until caught-up`.

The table shows how far such a shard was processed, and only the stream shows whether that is all.
So each is read on from the checkpoint of its row: no record above it, and the tip reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.errors import KclrunError
from kclrun.lease.policy import first_start
from kclrun.leases.caught_up import CaughtUp
from kclrun.manager.loop import IoPool
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.reading import PageCursor
from kclrun.model.sequence import LATEST, ExtendedSequenceNumber
from kclrun.model.stream import StreamKey, shard_id_of, stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.ports import ShardReader, next_page

# The record of the checkpoint, which may be an aggregate with later user records, and the next one.
_RECORDS_A_CALL: Final = 2
# Pages may be empty before the tip. The next look goes on where this one stopped.
_PAGES_MAX: Final = 5
# The application needs its part of the five reads a second.
_LOOK_EVERY_S: Final = 2.0
# A look stands until the next is over. After that it says nothing about now.
_STANDS_FOR_S: Final = 5.0


def why_not_caught_up(
    caught_up: CaughtUp, now: Instant, are_read: Callable[[Sequence[Lease]], bool]
) -> tuple[str, ...]:
    """Why the fleet is not caught up, but for the shards that this machine reads. `are_read`:
    whether these leases of other owners are read to their tips; asked if nothing else remains."""
    reasons = caught_up.blockers(now)
    elsewhere = () if reasons else caught_up.read_elsewhere()
    if are_read(elsewhere):
        return reasons
    owners = ", ".join(sorted({str(row.owner) for row in elsewhere}))
    return (f"not known to be read to the tip yet: {len(elsewhere)} shards of {owners}",)


class TipsElsewhere:
    """Looks at the shards of other owners, on a thread of the pool. Used in the loop's thread.

    `readers` by stream; a shard without a reader is never known to be read. `start_at_of` is the
    instant of a stream's `start:`. `broke` gets an error that is not of a service.
    """

    def __init__(
        self,
        readers: Mapping[StreamKey, ShardReader | None],
        start_at_of: Callable[[StreamKey], WallTime | None],
        *,
        pool: IoPool,
        now: Callable[[], Instant],
        broke: Callable[[Exception], None],
    ) -> None:
        self._readers = readers
        self._start_at_of = start_at_of
        self._pool = pool
        self._now = now
        self._broke = broke
        self._cursors: dict[LeaseKey, tuple[ExtendedSequenceNumber, PageCursor]] = {}
        self._is_looking = False
        self._looked_instant = Instant(float("-inf"))
        self._read: frozenset[tuple[LeaseKey, ExtendedSequenceNumber]] = frozenset()

    def are_read(self, leases: Sequence[Lease]) -> bool:
        """Whether the last look found each of these read to its tip, at this checkpoint. Begins
        another look when it is due."""
        if not leases:
            return True
        since_s = self._now() - self._looked_instant
        if not self._is_looking and since_s >= _LOOK_EVERY_S:
            self._is_looking = True
            self._pool.run(lambda: self._look(leases), self._looked, self._failed)
        stands = since_s < _STANDS_FOR_S
        return stands and self._read.issuperset((row.key, row.checkpoint) for row in leases)

    def _look(self, leases: Sequence[Lease]) -> frozenset[tuple[LeaseKey, ExtendedSequenceNumber]]:
        """Those that are read to the tip. One that is not ends the look: it is not over anyway."""
        read = set[tuple[LeaseKey, ExtendedSequenceNumber]]()
        for lease in leases:
            if not self._is_read(lease):
                break
            read.add((lease.key, lease.checkpoint))
        return frozenset(read)

    def _is_read(self, lease: Lease) -> bool:
        stream = stream_of(lease.key)
        reader = self._readers.get(stream)
        is_unknown = lease.checkpoint == LATEST and lease.latest_pinned_at is None
        if reader is None or is_unknown:
            return False
        try:
            return self._is_at_tip(lease, reader, self._start_at_of(stream))
        except KclrunError:
            return False

    def _is_at_tip(self, lease: Lease, reader: ShardReader, start_at: WallTime | None) -> bool:
        """Raises: a ServiceError leaf, RecordError; SettingsError for an unknown instant."""
        position = lease.checkpoint
        kept = self._cursors.pop(lease.key, None)
        if kept is None or kept[0] != position:
            # `first_start` uses the present time for an unpinned LATEST only.
            kept = position, PageCursor(first_start(lease, start_at, WallTime(0.0)))
        for _ in range(_PAGES_MAX):
            page = next_page(reader, shard_id_of(lease.key), kept[1], _RECORDS_A_CALL)
            # A closed shard is not at its tip: its lease ends, and its children are read.
            is_closed = page.next_iterator is None
            if is_closed or drop_until(open_aggregates(page.records), position):
                return False
            self._cursors[lease.key] = kept
            if page.is_empty_tip:
                return True
        return False

    def _looked(self, read: frozenset[tuple[LeaseKey, ExtendedSequenceNumber]]) -> None:
        self._is_looking = False
        self._looked_instant = self._now()
        self._read = read

    def _failed(self, error: Exception) -> None:
        if isinstance(error, KclrunError):
            self._looked(frozenset())
        else:
            self._broke(error)
