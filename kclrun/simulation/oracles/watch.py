"""Told everything that happens in a simulated fleet; holds it against the promises.

Each rule has a module of its own; here is who is told what. May not know: cores, commands. Rule:
what breaks a promise raises RuleBroken at once, in the very event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.model.changes import Claim, LateCheckpoint, Take
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.model.outcomes import Applied, Outcome
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.gaps import ReadingGaps
from kclrun.simulation.oracles.causality import Causality
from kclrun.simulation.oracles.cost import CostWatch
from kclrun.simulation.oracles.deliveries import ShardDeliveries
from kclrun.simulation.oracles.permissions import Permissions
from kclrun.simulation.oracles.policy import WatchPolicy
from kclrun.simulation.oracles.reader import Reader
from kclrun.simulation.oracles.row_history import RowHistory, is_passed_on
from kclrun.simulation.oracles.row_lives import RowLives
from kclrun.simulation.process_sightings import ProcessSightings
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.sightings import RowSightings
from kclrun.simulation.situations import Situations
from kclrun.simulation.story import RuleBroken, Stories

__all__ = ["Oracles", "Tally"]


_DEFAULT: Final = WatchPolicy()
_NOT_CHECKPOINTED: Final = "user code that did not checkpoint"


class Tally(msgspec.Struct):
    """Counts for the figures. `moves`: takes of leases that somebody had before."""

    records: int = 0
    duplicates: int = 0
    batches: int = 0
    takes: int = 0
    moves: int = 0


class Oracles:
    """`row_of` reads a row as it is, behind the network's back."""

    def __init__(
        self,
        stream: ShardStream,
        stories: Stories,
        *,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        policy: WatchPolicy = _DEFAULT,
    ) -> None:
        self.tally = Tally()
        self.gaps = ReadingGaps()
        self.situations = Situations()
        self.cost = CostWatch(policy)
        self.processes = ProcessSightings(self.situations)
        self._policy = policy
        self._stream = stream
        self._stories = stories
        self._now = now
        self._row_of = row_of
        self._shards: dict[str, ShardDeliveries] = {}
        self._permissions = Permissions(now)
        self._history = RowHistory()
        self._lives = RowLives(stream, now, row_of, lambda key: self._shard(key).is_over)
        self._causality = Causality(
            stream, row_of, self._lives, now=now, failover_s=policy.failover_s
        )
        self._sightings = RowSightings(self.situations, stream, now)

    # The table.

    def row_written(
        self, sender: str, change: Any, before: Lease | None, after: Lease | None
    ) -> None:
        """As `table.RowWatcher`."""
        row = after if after is not None else before
        assert row is not None, "a write that applied changed a row"
        self._stories.note(row.key, self._now(), "table", "applied", change)
        self._history.written(sender, change, before, after)
        self.cost.written(change, row.key, self._now())
        if before is None:
            self._row_created(change, row)
        elif after is None:
            self._lives.deleted(change, before)
        else:
            self._row_changed(sender, change, before, after)
        self._sightings.written(sender, change, before, after)

    def row_deleted_by_somebody(self, row: Lease) -> None:
        """Out of the world: no manager's doing, and no promise but that all is read in the end."""
        self._stories.note(row.key, self._now(), "somebody", "deleted the row")
        self.situations.seen("row_deleted_by_somebody")
        self._permissions.row_deleted(row.key)
        self._lives.vanished(row.key)
        self._shard(row.key).row_deleted()

    def write_answered(self, sender: str, change: Any, outcome: Outcome) -> None:
        """As `table.RowWatcher`. What applied is told when it applies."""
        if not isinstance(outcome, Applied):
            key = getattr(change, "key", "")
            self._stories.note(key, self._now(), sender, type(outcome).__name__, change)
            self._sightings.answered(change, outcome)
            self.cost.answered(change)

    def write_refused_in_silence(self, change: Any) -> None:
        """As `table.RowWatcher`."""
        self._sightings.refused_in_silence(change)

    def _row_created(self, change: Any, row: Lease) -> None:
        if self._lives.created(change, row):
            self._shard(row.key).begins_again()
            for child in self._stream.children_of(row.key):
                self.gaps.unreadable(child.shard_id)
        if row.owner is not None:
            self._permissions.row_settled(row.key, row.owner)
            self._shard(row.key).saved_late(self._number_of(row))

    def _row_changed(self, sender: str, change: Any, before: Lease, after: Lease) -> None:
        if after.owner != before.owner:
            self._owner_changed(sender, change, before, after)
        is_moved = after.checkpoint != before.checkpoint
        if isinstance(change, Claim):
            self._shard(after.key).claimed = self._number_of(after)
        if is_moved:
            self._moved(change, after)

    def _owner_changed(self, sender: str, change: Any, before: Lease, after: Lease) -> None:
        shard = self._shard(after.key)
        shard.claimed = None
        if isinstance(change, Take):
            self.tally.takes += 1
            self.tally.moves += before.owner is not None
        is_given = after.owner in {None, OFFERED} and not is_passed_on(sender, change)
        if is_given:
            if self._policy.is_manual:
                shard.excuse_all(_NOT_CHECKPOINTED)
            self._permissions.row_settled(after.key, before.owner)
            return
        if before.owner not in {None, OFFERED}:
            shard.excuse_all(f"the silence of {before.owner}")
        self._permissions.row_taken(after)

    def _moved(self, change: Any, after: Lease) -> None:
        """A position that is new on the row."""
        shard = self._shard(after.key)
        number = self._number_of(after)
        if after.is_ended and not shard.is_over:
            raise RuleBroken("I1", after.key, "ended before its last record was processed")
        self._lives.moved(after)
        if isinstance(change, LateCheckpoint):
            shard.saved_late(number)
        else:
            shard.covered(number)

    def _number_of(self, row: Lease) -> int:
        """How many records its position covers. Raises: RuleBroken past what was processed."""
        number = self._stream.number_of(row.key, row.checkpoint)
        processed = self._shard(row.key).processed
        if number > processed:
            words = f"{row.checkpoint} is past the {processed} processed records"
            raise RuleBroken("I2b", row.key, words)
        return number

    # Lease processes.

    def process_noted(self, reader: Reader, what: str, detail: object = "") -> None:
        """For the story only."""
        self._stories.note(reader.key, self._now(), reader.who, what, detail)

    def gate_opened(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. Told late, of a fence that has passed: nothing opens."""
        if until_s <= self._now():
            return
        self._permissions.opened(reader, until_s)
        self.gaps.begins(reader.key, reader, self._now())

    def gate_shut(self, reader: Reader) -> None:
        self._permissions.shut(reader)
        self.gaps.ends(reader.key, reader, self._now())

    def frozen(self, reader: Reader) -> None:
        """It stands still; its permission does not end by that."""
        self.gaps.ends(reader.key, reader, self._now())

    def ended_uncleanly(self, reader: Reader, why: str = "its end without a word") -> None:
        """Killed, or lost: what it was given and did not checkpoint comes again."""
        self._shard(reader.key).excuse(reader, why)
        self.gate_shut(reader)

    def ended_in_order(self, reader: Reader) -> None:
        """It exited by itself, and had time to checkpoint: with manual checkpoints, user code."""
        if self._policy.is_manual:
            self._shard(reader.key).excuse(reader, _NOT_CHECKPOINTED)
        self.gate_shut(reader)

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        """Records `first` to `last` are given to user code."""
        self._permissions.begins(reader)
        if self._shard(reader.key).is_new(reader):
            self._permissions.require_waited(reader, self._row_of(reader.key))
        self._count_batch(reader, first, last)

    def _count_batch(self, reader: Reader, first: int, last: int) -> None:
        """What holds whoever reads, with a fence or without."""
        key, shard = reader.key, self._shard(reader.key)
        self._require_open(reader)
        if not shard.has_begun:
            self._causality.require_parents_ended(reader)
        arrived = self._stream.arrived(key, self._now())
        self.cost.delivered(key, last - first + 1)
        repeated = shard.begun(reader, first, last, arrived=arrived)
        if repeated:
            self.situations.seen("repeated_after_an_unclean_end")
        self.tally.duplicates += repeated
        self.tally.records += last - first + 1
        self.tally.batches += 1

    def _require_open(self, reader: Reader) -> None:
        """I3: raises RuleBroken if its shard has ended."""
        self._causality.require_open(reader)

    def batch_processed(self, reader: Reader, last: int) -> None:
        self._shard(reader.key).done(last)

    def batch_raised(self, reader: Reader, first: int) -> None:
        """User code raised: from record `first` on it holds nothing."""
        self._shard(reader.key).raised(reader, first)

    def vouched_for(self, reader: Reader, last: int) -> None:
        """User code asks for a checkpoint: it says that everything up to `last` is done."""
        self._shard(reader.key).done(last)
        self.cost.asked_to_checkpoint(reader.key)

    def shard_exhausted(self, reader: Reader) -> None:
        """Its last record is processed: its children may be read, once their rows say so."""
        key = reader.key
        shard = self._shard(key)
        if shard.processed < (self._stream.total(key) or 0):
            raise RuleBroken("I1", key, "exhausted before its last record was processed")
        shard.is_over = True
        self.gaps.over(key)
        for child in self._stream.children_of(key):
            if all(self._shard(parent).is_over for parent in child.parents):
                self.gaps.readable(child.shard_id, self._now())

    # The end.

    def is_over(self, key: str) -> bool:
        """Whether a shard was read to its end."""
        return self._shard(key).is_over

    def lacks_a_parents_row(self, key: str) -> bool:
        """Whether somebody deleted the row of one of its parents, and nobody wrote it again."""
        return any(map(self._lives.is_vanished, self._stream.parents_of(key)))

    def require_all_read(self, patience_s: float) -> None:
        """L1: what arrived before the last `patience_s` is processed, on every shard."""
        then = self._now() - patience_s
        for log in self._stream.shards():
            key, processed = log.shard_id, self._shard(log.shard_id).processed
            unread = self._stream.arrived(key, then) - processed
            if unread > 0:
                raise RuleBroken("L1", key, f"{unread} records unread for {patience_s:g} s")
            is_ended = self._shard(key).is_over
            if log.closed_at is not None and not is_ended and then > log.closed_at - WORLD_BEGAN_AT:
                raise RuleBroken("L1", key, f"closed and not ended for {patience_s:g} s")

    def _shard(self, key: str) -> ShardDeliveries:
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = ShardDeliveries(key, self._policy.uncheckpointed_max)
        return shard
