"""Gets every event of a simulated fleet and passes it to the rules of the promises.

Each rule has a module of its own. A broken promise raises RuleBroken at once, in the same event.
The module does not know cores or commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.protocol.writes import Applied, Claim, LateCheckpoint, Outcome
from kclrun.simulation.observer import Reader, WatchPolicy
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import RuleBroken, Stories
from tests.support.oracles.cost import CostWatch
from tests.support.oracles.deliveries import Causality, Letters, ShardDeliveries
from tests.support.oracles.permissions import PauseWatch, Permissions
from tests.support.oracles.row_history import RowHistory, RowLives, is_passed_on

_DEFAULT: Final = WatchPolicy()
_NOT_CHECKPOINTED: Final = "user code that did not checkpoint"


class Oracles(FleetRecord):
    """The record of a fleet that raises RuleBroken for each promise that does not hold."""

    def __init__(
        self,
        stream: ShardStream,
        stories: Stories,
        *,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        policy: WatchPolicy = _DEFAULT,
    ) -> None:
        super().__init__(stream, stories, now=now, row_of=row_of, policy=policy)
        self._row_of = row_of
        self.cost = CostWatch(policy)
        self._letters = Letters(policy.poison_every) if policy.poison_every else None
        self._permissions = Permissions(now)
        self._pauses = PauseWatch(policy.failover_s)
        self._history = RowHistory()
        self._lives = RowLives(stream, now, row_of, self.shards.is_over)
        self._causality = Causality(
            stream, row_of, self._lives, now=now, failover_s=policy.failover_s
        )

    # The table.

    def row_written(
        self, sender: str, change: Any, before: Lease | None, after: Lease | None
    ) -> None:
        super().row_written(sender, change, before, after)
        row = after if after is not None else before
        self._history.written(sender, change, before, after)
        self.cost.written(change, row.key, self._now())
        self._require_one_stream(sender, before, after)
        if after is not None:
            self._pauses.written(after, self._now())
        if before is None:
            self._row_created(change, row)
        elif after is None:
            self._lives.deleted(change, before)
        else:
            self._row_changed(sender, change, before, after)
        self.coverage.written(sender, change, before, after)

    def row_deleted_from_outside(self, row: Lease) -> None:
        """After it only one promise holds: all is read in the end."""
        super().row_deleted_from_outside(row)
        self.coverage.seen("row_deleted_from_outside")
        self._permissions.row_deleted(row.key)
        self._lives.vanished(row.key)
        self.shards.of(row.key).row_deleted()

    def write_answered(self, sender: str, change: Any, outcome: Outcome) -> None:
        super().write_answered(sender, change, outcome)
        if not isinstance(outcome, Applied):
            self.coverage.answered(change, outcome)
            self.cost.answered(change)

    def write_refused_in_silence(self, change: Any) -> None:
        self.coverage.refused_in_silence(change)

    def _require_one_stream(self, sender: str, before: Lease | None, after: Lease | None) -> None:
        """P13: raises RuleBroken for a sender that knows that the stream was created again, and
        still writes into the rows of the former one."""
        if not self._stream.is_made_again or after is None:
            return
        was_old = before is None or before.stream_created_at != after.stream_created_at
        if was_old and after.stream_created_at == self._stream.created_at:
            raise RuleBroken("P13", after.key, f"{sender} makes it a row of the new stream")

    def _row_created(self, change: Any, row: Lease) -> None:
        if self._lives.created(change, row):
            self.shards.of(row.key).begins_again()
            for child in self._stream.children_of(row.key):
                self.gaps.unreadable(child.shard_id)
        if row.owner is not None:
            self._permissions.row_settled(row.key, row.owner)
            self.shards.of(row.key).saved_late(self._number_of(row))

    def _row_changed(self, sender: str, change: Any, before: Lease, after: Lease) -> None:
        if after.owner != before.owner:
            self._owner_changed(sender, change, before, after)
        is_moved = after.checkpoint != before.checkpoint
        if isinstance(change, Claim):
            self.shards.of(after.key).claimed = self._number_of(after)
            self.shards.of(after.key).adopted = 0
        if is_moved:
            self._moved(change, after)

    def _owner_changed(self, sender: str, change: Any, before: Lease, after: Lease) -> None:
        shard = self.shards.of(after.key)
        shard.claimed = None
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
        """The row has a new position."""
        shard = self.shards.of(after.key)
        number = self._number_of(after)
        if after.is_ended and not shard.is_over:
            raise RuleBroken("I1", after.key, "ended before its last record was processed")
        self._lives.moved(after)
        if isinstance(change, LateCheckpoint):
            shard.saved_late(number)
        else:
            shard.covered(number)
        if self._letters is not None:
            self._letters.require_all(after.key, number)

    def _number_of(self, row: Lease) -> int:
        """The number of records that its position covers. Raises: RuleBroken past the last
        processed record."""
        number = self._stream.records.number_of(row.key, row.checkpoint)
        processed = self.shards.of(row.key).processed
        if number > processed:
            words = f"{row.checkpoint} is past the {processed} processed records"
            raise RuleBroken("I2b", row.key, words)
        return number

    # Lease processes.

    def delivery_allowed(self, reader: Reader, until_s: float) -> None:
        if until_s > self._now():
            self._permissions.opened(reader, until_s)
        super().delivery_allowed(reader, until_s)

    def delivery_stopped(self, reader: Reader) -> None:
        self._permissions.shut(reader)
        super().delivery_stopped(reader)

    def ended_uncleanly(self, reader: Reader, why: str = "its end without an exit") -> None:
        self.shards.of(reader.key).excuse(reader, why)
        super().ended_uncleanly(reader, why)

    def ended_in_order(self, reader: Reader) -> None:
        """It had time to checkpoint; with manual checkpoints, user code had."""
        if self._policy.is_manual:
            self.shards.of(reader.key).excuse(reader, _NOT_CHECKPOINTED)
        super().ended_in_order(reader)

    def outputs_adopted(self, reader: Reader, number: int) -> None:
        """Its outputs have the rows up to this record already: it begins behind it [K12]."""
        self.shards.of(reader.key).adopted = number

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        self._permissions.begins(reader)
        if self.shards.of(reader.key).is_new(reader):
            self._permissions.require_waited(reader, self._row_of(reader.key))
        self._check_batch(reader, first, last)

    def _check_batch(self, reader: Reader, first: int, last: int) -> None:
        """Check the rules that hold for every reader, with a fence or without."""
        key, shard = reader.key, self.shards.of(reader.key)
        self._require_open(reader)
        self._pauses.require_not_paused(reader, self._row_of(LeaseKey(key)), self._now())
        if not shard.has_begun:
            self._causality.require_parents_ended(reader)
        arrived = self._stream.records.arrived(key, self._now())
        self.cost.delivered(key, last - first + 1)
        repeated = shard.begun(reader, first, last, arrived=arrived)
        if repeated:
            self.coverage.seen("repeated_after_an_unclean_end")
        self.tally.count_batch(last - first + 1, repeated)

    def _require_open(self, reader: Reader) -> None:
        """I3: raises RuleBroken if its shard has ended."""
        self._causality.require_open(reader)

    def batch_processed(self, reader: Reader, first: int, last: int) -> None:
        super().batch_processed(reader, first, last)
        if self._letters is not None:
            self._letters.processed(reader.key, first, last)

    def batch_vouched_for(self, reader: Reader, first: int, last: int) -> None:
        if self._letters is not None:
            self._letters.processed(reader.key, first, last)

    def left_out_before(self, reader: Reader, number: int) -> None:
        given_up = self.shards.of(reader.key).left_out_before(reader, number)
        if self._letters is not None:
            self._letters.wanted(reader.key, given_up)

    def gave_up(self, reader: Reader, number: int) -> None:
        assert self._letters is not None, "only poison is given up"
        self._letters.kept(reader.key, number)
        super().gave_up(reader, number)
        self.coverage.seen("record_given_up")

    def vouched_for(self, reader: Reader, last: int) -> None:
        super().vouched_for(reader, last)
        self.cost.asked_to_checkpoint(reader.key)

    def shard_exhausted(self, reader: Reader) -> None:
        if self.shards.of(reader.key).processed < (self._stream.records.total(reader.key) or 0):
            raise RuleBroken("I1", reader.key, "exhausted before its last record was processed")
        super().shard_exhausted(reader)

    def shard_expired(self, reader: Reader) -> None:
        """P13. Raises: RuleBroken where the service still has it."""
        if not self._stream.is_expired(reader.key):
            raise RuleBroken(
                "P13", reader.key, f"{reader.who} reports that it expired, and it has not"
            )
        self.coverage.seen("held_shard_expired")
        super().shard_expired(reader)

    def lacks_a_parents_row(self, key: str) -> bool:
        """Whether the row of one of its parents was deleted from outside and not written again."""
        return any(map(self._lives.is_vanished, self._stream.parents_of(key)))

    def _new_shard(self, _key: str) -> ShardDeliveries:
        return ShardDeliveries(_key, self._policy.uncheckpointed_max)
