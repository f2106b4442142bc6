"""The observer of `kclrun simulate`: counts, gaps, the story of each lease, and unread shards.

It checks one promise, that every record is read in the end (L1). The others are asserted by the
cores themselves, and checked from outside by the observer of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kclrun.model.lease import Lease, LeaseKey
from kclrun.protocol.writes import Applied, Outcome, Take
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.observer import Coverage, ManagerRequests, Reader, Tally, WatchPolicy
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import ReadingGaps, RuleBroken, Stories


class ShardProgress:
    """How far one shard was read. Records are numbered from one."""

    def __init__(self) -> None:
        self.processed = 0
        self.is_over = False
        self._given = 0
        self._latest: Reader | None = None

    def begun(self, reader: Reader, first: int, last: int) -> int:
        """A batch is given to user code. Returns: how many of its records come again."""
        repeated = max(0, min(last, self._given) - first + 1)
        self._given = max(self._given, last)
        self._latest = reader
        return repeated

    def raised(self, reader: Reader, first: int) -> None:
        """User code raised: its records from `first` on count as never given."""
        if reader is self._latest:
            self._given = min(self._given, first - 1)

    def done(self, last: int) -> None:
        """User code returned for everything up to `last`, or vouches for it."""
        self.processed = max(self.processed, last)


class ReadShards:
    """How far each shard was read, and which are over: then their children are readable."""

    def __init__(
        self,
        stream: ShardStream,
        gaps: ReadingGaps,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        make: Callable[[str], ShardProgress],
    ) -> None:
        self._stream = stream
        self._gaps = gaps
        self._now = now
        self._row_of = row_of
        self._make = make
        self._shards: dict[str, ShardProgress] = {}

    def of(self, key: str) -> ShardProgress:
        """The progress of one shard, as `make` made it."""
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = self._make(key)
        return shard

    def is_over(self, key: str) -> bool:
        """Whether a shard was read to its end, or was trimmed and has no row."""
        was_trimmed = self._stream.is_expired(key) and self._row_of(LeaseKey(key)) is None
        return was_trimmed or self.of(key).is_over

    def end(self, key: str) -> None:
        """A shard was read to its end."""
        self.of(key).is_over = True
        self._gaps.over(key)
        self._pass_on(key)

    def trim(self, key: str) -> None:
        """A trimmed shard: it has no records to read any more, and its children may be read."""
        self.of(key).done(self._stream.records.total(key) or 0)
        self.end(key)

    def _pass_on(self, key: str) -> None:
        """A shard is over: its children become readable. A child that was trimmed without a row
        passes this on to its own children."""
        for child in self._stream.children_of(key):
            if not all(map(self.is_over, child.parents)):
                continue
            if self.is_over(child.shard_id):
                self._pass_on(child.shard_id)
            else:
                self._gaps.readable(child.shard_id, self._now())


class FleetRecord:
    """An `Observer`. `row_of` reads a row as it is, without the simulated network."""

    def __init__(
        self,
        stream: ShardStream,
        stories: Stories,
        *,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        policy: WatchPolicy,
    ) -> None:
        self.tally = Tally()
        self.gaps = ReadingGaps()
        self.coverage = Coverage()
        self.cost = ManagerRequests()
        self._policy = policy
        self._stream = stream
        self._stories = stories
        self._now = now
        self.shards = ReadShards(stream, self.gaps, now, row_of, self._new_shard)

    # The table.

    def row_written(
        self,
        sender: str,
        change: Any,
        before: Lease | None,
        after: Lease | None,
    ) -> None:
        row = after if after is not None else before
        assert row is not None, "a write that applied changed a row"
        self._stories.note(row.key, self._now(), "table", "applied", change)
        if after is None:
            if self._stream.is_expired(row.key):
                self.shards.trim(row.key)
        elif before is not None and isinstance(change, Take) and after.owner != before.owner:
            self.tally.takes += 1
            self.tally.moves += 0 if before.owner is None else 1

    def row_deleted_from_outside(self, row: Lease) -> None:
        self._stories.note(row.key, self._now(), "from outside", "deleted the row")

    def write_answered(self, sender: str, change: Any, outcome: Outcome) -> None:
        """Writes that apply are reported by `row_written`."""
        if not isinstance(outcome, Applied):
            key = getattr(change, "key", "")
            self._stories.note(key, self._now(), sender, type(outcome).__name__, change)

    def write_refused_in_silence(self, change: Any) -> None:
        pass

    # Lease processes.

    def process_noted(self, reader: Reader, what: str, detail: object = "") -> None:
        self._stories.note(reader.key, self._now(), reader.who, what, detail)

    def delivery_allowed(self, reader: Reader, until_s: float) -> None:
        if until_s > self._now():
            self.gaps.begins(reader.key, reader, self._now())

    def delivery_stopped(self, reader: Reader) -> None:
        self.gaps.ends(reader.key, reader, self._now())

    def frozen(self, reader: Reader) -> None:
        self.gaps.ends(reader.key, reader, self._now())

    def ended_uncleanly(self, reader: Reader, why: str = "its end without an exit") -> None:
        self.delivery_stopped(reader)

    def ended_in_order(self, reader: Reader) -> None:
        self.delivery_stopped(reader)

    # Batches and user code.

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        repeated = self.shards.of(reader.key).begun(reader, first, last)
        self.tally.count_batch(last - first + 1, repeated)

    def batch_processed(self, reader: Reader, first: int, last: int) -> None:
        self.shards.of(reader.key).done(last)

    def batch_vouched_for(self, reader: Reader, first: int, last: int) -> None:
        pass

    def batch_raised(self, reader: Reader, first: int) -> None:
        self.shards.of(reader.key).raised(reader, first)

    def left_out_before(self, reader: Reader, number: int) -> None:
        self.shards.of(reader.key).done(number - 1)

    def gave_up(self, reader: Reader, number: int) -> None:
        self.shards.of(reader.key).done(number)

    def vouched_for(self, reader: Reader, last: int) -> None:
        self.shards.of(reader.key).done(last)

    def shard_exhausted(self, reader: Reader) -> None:
        self.shards.end(reader.key)

    def shard_expired(self, reader: Reader) -> None:
        self.shards.trim(reader.key)

    # The end.

    def require_all_read(self, patience_s: float) -> None:
        then = self._now() - patience_s
        for log in self._stream.shards():
            key, processed = log.shard_id, self.shards.of(log.shard_id).processed
            if self._stream.is_expired(key) and self.shards.is_over(key):
                continue
            unread = self._stream.records.arrived(key, then) - processed
            if unread > 0:
                raise RuleBroken("L1", key, f"{unread} records unread for {patience_s:g} s")
            is_ended = self.shards.is_over(key)
            if log.closed_at is not None and not is_ended and then > log.closed_at - WORLD_BEGAN_AT:
                raise RuleBroken("L1", key, f"closed and not ended for {patience_s:g} s")

    def _new_shard(self, _key: str) -> ShardProgress:
        return ShardProgress()
