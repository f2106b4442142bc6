"""What is watched, and the promises it must keep.

Sees the world from outside: rows as they are written, gates as they open, batches as they begin.
Asks no core what it thinks. Rules by their ids in the README: I1 no record passed over, I2
positions forward, I2b never past what was processed, I3 parents first, I4 one reader, I5 counters
forward, I8 no duplicate without an unclean end, L1 nothing left unread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from kclrun.model.changes import LeaseChange, Take
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import Applied, Outcome
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.gaps import ReadingGaps
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.story import RuleBroken, Stories

__all__ = ["Oracles", "Reader", "Tally"]

# Two clocks compared through world time round differently.
_ROUNDING_S: Final = 1e-6


class Reader(Protocol):
    """One incarnation of a lease process, as far as it is watched. `who` names its owner."""

    key: LeaseKey
    who: str


class Tally(msgspec.Struct):
    """Counts for the figures. `moves`: takes of leases that somebody had before."""

    records: int = 0
    duplicates: int = 0
    batches: int = 0
    takes: int = 0
    moves: int = 0


class _Ledger(msgspec.Struct):
    """One shard: records up to `processed` were processed; `unclean` ends may repeat some."""

    delivered: int = 0
    processed: int = 0
    is_over: bool = False
    unclean: bool = False


class Oracles:
    """`row_of` reads a row as it is, behind the network's back."""

    def __init__(
        self,
        stream: ShardStream,
        stories: Stories,
        *,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
    ) -> None:
        self.tally = Tally()
        self.gaps = ReadingGaps()
        self._stream = stream
        self._stories = stories
        self._now = now
        self._row_of = row_of
        self._ledgers: dict[str, _Ledger] = {}
        self._permits: dict[str, dict[Reader, float]] = {}

    # The table.

    def row_written(self, change: LeaseChange, before: Lease | None, after: Lease | None) -> None:
        """As `table.RowWatcher`."""
        row = after if after is not None else before
        assert row is not None, "a write that applied changed a row"
        self._stories.note(row.key, self._now(), "table", "applied", change)
        if isinstance(change, Take):
            self.tally.takes += 1
            self.tally.moves += before is not None and before.owner not in {None, change.owner}
        if after is None:
            return
        if before is not None and after.checkpoint < before.checkpoint:
            raise RuleBroken("I2", row.key, f"back from {before.checkpoint} to {after.checkpoint}")
        if before is not None and after.counter < before.counter:
            raise RuleBroken("I5", row.key, f"counter {before.counter} became {after.counter}")
        self._check_position(after)

    def write_answered(self, sender: str, change: LeaseChange, outcome: Outcome) -> None:
        """As `table.RowWatcher`. What applied is told when it applies."""
        if not isinstance(outcome, Applied):
            key = getattr(change, "key", "")
            self._stories.note(key, self._now(), sender, type(outcome).__name__, change)

    def _check_position(self, row: Lease) -> None:
        ledger = self._ledger(row.key)
        if self._stream.number_of(row.key, row.checkpoint) > ledger.processed:
            raise RuleBroken(
                "I2b", row.key, f"{row.checkpoint} is past the {ledger.processed} processed records"
            )
        if row.is_ended and not ledger.is_over:
            raise RuleBroken("I1", row.key, "ended before its last record was processed")

    # Lease processes.

    def process_noted(self, reader: Reader, what: str, detail: object = "") -> None:
        """For the story only."""
        self._stories.note(reader.key, self._now(), reader.who, what, detail)

    def gate_opened(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. Told late, of a fence that has passed: nothing opens."""
        if until_s <= self._now():
            return
        self._refuse_second(reader)
        self._permits.setdefault(reader.key, {})[reader] = until_s
        self.gaps.begins(reader.key, reader, self._now())

    def gate_shut(self, reader: Reader) -> None:
        self._permits.get(reader.key, {}).pop(reader, None)
        self.gaps.ends(reader.key, reader, self._now())

    def frozen(self, reader: Reader) -> None:
        """It stands still; its permission does not end by that."""
        self._ledger(reader.key).unclean = True
        self.gaps.ends(reader.key, reader, self._now())

    def ended_uncleanly(self, reader: Reader) -> None:
        """Killed, or lost: what it processed and did not checkpoint comes again."""
        self._ledger(reader.key).unclean = True
        self.gate_shut(reader)

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        """Records `first` to `last` are given to user code."""
        now, key = self._now(), reader.key
        until_s = self._permits.get(key, {}).get(reader, float("-inf"))
        if now > until_s + _ROUNDING_S:
            raise RuleBroken(
                "I4", key, f"{reader.who} began a batch {now - until_s:.3f} s too late"
            )
        self._refuse_second(reader)
        ledger = self._ledger(key)
        if ledger.delivered == 0:
            self._require_parents_ended(reader)
        if first > ledger.processed + 1:
            raise RuleBroken("I1", key, f"records {ledger.processed + 1} to {first - 1} left out")
        repeated = max(0, min(last, ledger.delivered) - first + 1)
        if repeated and not ledger.unclean:
            raise RuleBroken("I8", key, f"{repeated} records again, and nothing unclean happened")
        ledger.delivered = max(ledger.delivered, last)
        self.tally.duplicates += repeated
        self.tally.records += last - first + 1
        self.tally.batches += 1

    def batch_processed(self, reader: Reader, last: int) -> None:
        ledger = self._ledger(reader.key)
        ledger.processed = max(ledger.processed, last)

    def shard_exhausted(self, reader: Reader) -> None:
        """Its last record is processed: its children may be read, once their rows say so."""
        key = reader.key
        ledger = self._ledger(key)
        if ledger.processed < (self._stream.total(key) or 0):
            raise RuleBroken("I1", key, "exhausted before its last record was processed")
        ledger.is_over = True
        self.gaps.over(key)
        for child in self._stream.children_of(key):
            if all(self._ledger(parent).is_over for parent in child.parents):
                self.gaps.readable(child.shard_id, self._now())

    # The end.

    def require_all_read(self, patience_s: float) -> None:
        """L1: what arrived before the last `patience_s` is processed, on every shard."""
        then = self._now() - patience_s
        for log in self._stream.shards():
            key, processed = log.shard_id, self._ledger(log.shard_id).processed
            unread = self._stream.arrived(key, then) - processed
            if unread > 0:
                raise RuleBroken("L1", key, f"{unread} records unread for {patience_s:g} s")
            is_ended = self._ledger(key).is_over
            if log.closed_at is not None and not is_ended and then > log.closed_at - WORLD_BEGAN_AT:
                raise RuleBroken("L1", key, f"closed and not ended for {patience_s:g} s")

    def _refuse_second(self, reader: Reader) -> None:
        now = self._now()
        for other, until_s in self._permits.get(reader.key, {}).items():
            if other is not reader and now < until_s - _ROUNDING_S:
                words = f"{reader.who} reads while {other.who} may for {until_s - now:.3f} s more"
                raise RuleBroken("I4", reader.key, words)

    def _require_parents_ended(self, reader: Reader) -> None:
        for parent in self._stream.parents_of(reader.key):
            row = self._row_of(LeaseKey(parent))
            if row is not None and not row.is_ended:
                raise RuleBroken("I3", reader.key, f"read before its parent {parent} ended")

    def _ledger(self, key: str) -> _Ledger:
        ledger = self._ledgers.get(key)
        if ledger is None:
            ledger = self._ledgers[key] = _Ledger()
        return ledger
