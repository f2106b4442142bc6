"""Gets every event of a simulated fleet and passes it to the rules of the promises.

Each rule has a module of its own. A broken promise raises RuleBroken at once, in the same event.
The module does not know cores or commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.consuming.commands import ExitCause
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.protocol.reports import Report
from kclrun.protocol.writes import Applied, Claim, LateCheckpoint, Outcome, Take
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.oracles.cost import CostWatch
from kclrun.simulation.oracles.deliveries import Causality, Letters, ShardDeliveries
from kclrun.simulation.oracles.permissions import PauseWatch, Permissions, Reader, WatchPolicy
from kclrun.simulation.oracles.row_history import RowHistory, RowLives, is_passed_on
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import ReadingGaps, RuleBroken, Stories

_DEFAULT: Final = WatchPolicy()
_NOT_CHECKPOINTED: Final = "user code that did not checkpoint"


class Tally(msgspec.Struct):
    """Counts for the figures. `moves`: takes of leases that had an owner before."""

    records: int = 0
    duplicates: int = 0
    batches: int = 0
    takes: int = 0
    moves: int = 0


class Coverage:
    """Gets the named situations of a run, and the events that show one. It keeps none: a test
    that demands that its storms reach each situation sets a subclass that counts."""

    def seen(self, situation: str) -> None:
        """This situation occurred."""

    def written(self, sender: str, change: Any, before: Lease | None, after: Lease | None) -> None:
        """A write applied and changed a row."""

    def answered(self, change: Any, outcome: Outcome) -> None:
        """The sender's answer: the write did not apply, or its outcome is unknown."""

    def refused_in_silence(self, change: Any) -> None:
        """A write arrived after its sender had stopped waiting, and its condition failed."""

    def started(self, owner: str, key: str) -> None:
        """A process was forked for a lease of this owner."""

    def killed(
        self, owner: str, key: str, *, has_claimed: bool, is_writing: bool, in_user_code: bool
    ) -> None:
        """A process was killed by a signal, or with its machine."""

    def exited(self, cause: ExitCause, *, is_orphan: bool) -> None:
        """A process exited by itself."""

    def reported(self, report: Report) -> None:
        """A process sent a report to its manager."""


class Oracles:
    """`row_of` reads a row as it is, without the simulated network."""

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
        self.coverage = Coverage()
        self.cost = CostWatch(policy)
        self._policy = policy
        self._stream = stream
        self._stories = stories
        self._now = now
        self._row_of = row_of
        self._shards: dict[str, ShardDeliveries] = {}
        self._letters = Letters(policy.poison_every) if policy.poison_every else None
        self._permissions = Permissions(now)
        self._pauses = PauseWatch(policy.failover_s)
        self._history = RowHistory()
        self._lives = RowLives(stream, now, row_of, self.is_over)
        self._causality = Causality(
            stream, row_of, self._lives, now=now, failover_s=policy.failover_s
        )

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
        self._require_one_stream(sender, before, after)
        if after is not None:
            self._pauses.written(after, self._now())
        if before is None:
            self._row_created(change, row)
        elif after is None:
            self._lives.deleted(change, before)
            if self._stream.is_expired(before.key):
                self._forget(before.key)
        else:
            self._row_changed(sender, change, before, after)
        self.coverage.written(sender, change, before, after)

    def row_deleted_from_outside(self, row: Lease) -> None:
        """A deletion from outside, by no manager. After it only one promise holds: all is read in
        the end."""
        self._stories.note(row.key, self._now(), "from outside", "deleted the row")
        self.coverage.seen("row_deleted_from_outside")
        self._permissions.row_deleted(row.key)
        self._lives.vanished(row.key)
        self._shard(row.key).row_deleted()

    def write_answered(self, sender: str, change: Any, outcome: Outcome) -> None:
        """As `table.RowWatcher`. Writes that apply are reported by `row_written`."""
        if not isinstance(outcome, Applied):
            key = getattr(change, "key", "")
            self._stories.note(key, self._now(), sender, type(outcome).__name__, change)
            self.coverage.answered(change, outcome)
            self.cost.answered(change)

    def write_refused_in_silence(self, change: Any) -> None:
        """As `table.RowWatcher`."""
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
            self._shard(after.key).adopted = 0
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
        """The row has a new position."""
        shard = self._shard(after.key)
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
        number = self._stream.number_of(row.key, row.checkpoint)
        processed = self._shard(row.key).processed
        if number > processed:
            words = f"{row.checkpoint} is past the {processed} processed records"
            raise RuleBroken("I2b", row.key, words)
        return number

    # Lease processes.

    def process_noted(self, reader: Reader, what: str, detail: object = "") -> None:
        """Note an event for the story only."""
        self._stories.note(reader.key, self._now(), reader.who, what, detail)

    def delivery_allowed(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. A report after the fence has passed opens nothing."""
        if until_s <= self._now():
            return
        self._permissions.opened(reader, until_s)
        self.gaps.begins(reader.key, reader, self._now())

    def delivery_stopped(self, reader: Reader) -> None:
        self._permissions.shut(reader)
        self.gaps.ends(reader.key, reader, self._now())

    def frozen(self, reader: Reader) -> None:
        """It stands still; its permission does not end with that."""
        self.gaps.ends(reader.key, reader, self._now())

    def ended_uncleanly(self, reader: Reader, why: str = "its end without an exit") -> None:
        """Killed, or lost: its records without a checkpoint come again."""
        self._shard(reader.key).excuse(reader, why)
        self.delivery_stopped(reader)

    def ended_in_order(self, reader: Reader) -> None:
        """It exited by itself, and it had time to checkpoint; with manual ones, user code had."""
        if self._policy.is_manual:
            self._shard(reader.key).excuse(reader, _NOT_CHECKPOINTED)
        self.delivery_stopped(reader)

    def outputs_adopted(self, reader: Reader, number: int) -> None:
        """Its outputs have the rows up to this record already: it begins behind it [K12]."""
        self._shard(reader.key).adopted = number

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        """Records `first` to `last` are given to user code."""
        self._permissions.begins(reader)
        if self._shard(reader.key).is_new(reader):
            self._permissions.require_waited(reader, self._row_of(reader.key))
        self._count_batch(reader, first, last)

    def _count_batch(self, reader: Reader, first: int, last: int) -> None:
        """Check the rules that hold for every reader, with a fence or without."""
        key, shard = reader.key, self._shard(reader.key)
        self._require_open(reader)
        self._pauses.require_not_paused(reader, self._row_of(LeaseKey(key)), self._now())
        if not shard.has_begun:
            self._causality.require_parents_ended(reader)
        arrived = self._stream.arrived(key, self._now())
        self.cost.delivered(key, last - first + 1)
        repeated = shard.begun(reader, first, last, arrived=arrived)
        if repeated:
            self.coverage.seen("repeated_after_an_unclean_end")
        self.tally.duplicates += repeated
        self.tally.records += last - first + 1
        self.tally.batches += 1

    def _require_open(self, reader: Reader) -> None:
        """I3: raises RuleBroken if its shard has ended."""
        self._causality.require_open(reader)

    def batch_processed(self, reader: Reader, first: int, last: int) -> None:
        """User code returned for these records."""
        self._shard(reader.key).done(last)
        if self._letters is not None:
            self._letters.processed(reader.key, first, last)

    def batch_vouched_for(self, reader: Reader, first: int, last: int) -> None:
        """User code is about to checkpoint these records of its batch, which it has processed."""
        if self._letters is not None:
            self._letters.processed(reader.key, first, last)

    def left_out_before(self, reader: Reader, number: int) -> None:
        """The reader goes on with record `number` of its batch: it has given up those before it
        that no call returned for."""
        given_up = self._shard(reader.key).left_out_before(reader, number)
        if self._letters is not None:
            self._letters.wanted(reader.key, given_up)

    def gave_up(self, reader: Reader, number: int) -> None:
        """A record was given up, and its letter is durable."""
        assert self._letters is not None, "only poison is given up"
        self._letters.kept(reader.key, number)
        self._shard(reader.key).done(number)
        self.coverage.seen("record_given_up")

    def batch_raised(self, reader: Reader, first: int) -> None:
        """User code raised: from record `first` on its records count as never given."""
        self._shard(reader.key).raised(reader, first)

    def vouched_for(self, reader: Reader, last: int) -> None:
        """User code asks for a checkpoint: it states that everything up to `last` is done."""
        self._shard(reader.key).done(last)
        self.cost.asked_to_checkpoint(reader.key)

    def shard_exhausted(self, reader: Reader) -> None:
        """Its last record is processed: its children may be read, once their rows exist."""
        key = reader.key
        shard = self._shard(key)
        if shard.processed < (self._stream.total(key) or 0):
            raise RuleBroken("I1", key, "exhausted before its last record was processed")
        shard.is_over = True
        self.gaps.over(key)
        self._pass_on(key)

    def shard_expired(self, reader: Reader) -> None:
        """P13: its owner reports that it was trimmed, and that its unread records are lost. Raises:
        RuleBroken where the service still has it."""
        if not self._stream.is_expired(reader.key):
            raise RuleBroken(
                "P13", reader.key, f"{reader.who} reports that it expired, and it has not"
            )
        self.coverage.seen("held_shard_expired")
        self._forget(reader.key)

    def _forget(self, key: str) -> None:
        """A trimmed shard: it has no records to read any more, and its children may be read."""
        shard = self._shard(key)
        shard.done(self._stream.total(key) or 0)
        shard.is_over = True
        self.gaps.over(key)
        self._pass_on(key)

    def _pass_on(self, key: str) -> None:
        """A shard is over: its children become readable. A child that was trimmed without a row
        passes this on to its own children."""
        for child in self._stream.children_of(key):
            if not all(map(self.is_over, child.parents)):
                continue
            if self.is_over(child.shard_id):
                self._pass_on(child.shard_id)
            else:
                self.gaps.readable(child.shard_id, self._now())

    # The end.

    def is_over(self, key: str) -> bool:
        """Whether a shard was read to its end, or was trimmed and has no row."""
        was_trimmed = self._stream.is_expired(key) and self._row_of(LeaseKey(key)) is None
        return was_trimmed or self._shard(key).is_over

    def lacks_a_parents_row(self, key: str) -> bool:
        """Whether the row of one of its parents was deleted from outside and not written again."""
        return any(map(self._lives.is_vanished, self._stream.parents_of(key)))

    def require_all_read(self, patience_s: float) -> None:
        """L1: all records from before the last `patience_s` are processed, on every shard."""
        then = self._now() - patience_s
        for log in self._stream.shards():
            key, processed = log.shard_id, self._shard(log.shard_id).processed
            if self._stream.is_expired(key) and self.is_over(key):
                continue
            unread = self._stream.arrived(key, then) - processed
            if unread > 0:
                raise RuleBroken("L1", key, f"{unread} records unread for {patience_s:g} s")
            is_ended = self.is_over(key)
            if log.closed_at is not None and not is_ended and then > log.closed_at - WORLD_BEGAN_AT:
                raise RuleBroken("L1", key, f"closed and not ended for {patience_s:g} s")

    def _shard(self, key: str) -> ShardDeliveries:
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = ShardDeliveries(key, self._policy.uncheckpointed_max)
        return shard
