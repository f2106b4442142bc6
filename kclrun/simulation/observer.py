"""What a simulated fleet reports to its observer, event by event.

The observer sees the fleet from outside: rows as they are written, permissions as they are given,
batches as they begin. `record.py` has the one of `kclrun simulate`; tests bring one that checks
every promise. The module does not know rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kclrun.lease.commands import ExitCause
from kclrun.model.lease import Lease, LeaseKey
from kclrun.protocol.reports import Report
from kclrun.protocol.writes import Outcome
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import ReadingGaps, Stories
from kclrun.simulation.table import RowWatcher


class WatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet's settings. `is_manual`: checkpoints only when user code asks, so that records
    without a checkpoint may come again."""

    failover_s: float = 10.0
    checkpoint_every_s: float = 10.0
    uncheckpointed_max: int = 100_000
    is_manual: bool = False
    poison_every: int = 0


class Reader(Protocol):
    """One incarnation of a lease process, or of a Java consumer. `who` begins with the name of its
    host; a lease process adds a slash and its number."""

    key: LeaseKey
    who: str


class Tally(msgspec.Struct):
    """Counts for the figures. `moves`: takes of leases that had an owner before."""

    records: int = 0
    duplicates: int = 0
    batches: int = 0
    takes: int = 0
    moves: int = 0

    def count_batch(self, records: int, repeated: int) -> None:
        self.duplicates += repeated
        self.records += records
        self.batches += 1


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


class ManagerRequests:
    """Gets the requests of managers that cost money, at the first attempt of each. It keeps none:
    a test that bounds them sets a subclass that counts."""

    def scanned(self, manager: str, now: float) -> None:
        """The manager scans the table."""

    def listed(self, manager: str, now: float) -> None:
        """The manager lists the shards."""

    def queried(self, manager: str, now: float) -> None:
        """The manager queries the index for offers."""

    def proven_gone(self) -> None:
        """A manager has proof that a former owner is gone."""


class Observer(RowWatcher, Protocol):
    """Gets every event of a simulated fleet. It may raise RuleBroken, which ends the run."""

    tally: Tally
    gaps: ReadingGaps
    coverage: Coverage
    cost: ManagerRequests

    # Lease processes.

    def process_noted(self, reader: Reader, what: str, detail: object = "") -> None:
        """An event for the story only."""
        ...

    def delivery_allowed(self, reader: Reader, until_s: float) -> None:
        """It may begin batches until then. A report after the fence has passed opens nothing."""
        ...

    def delivery_stopped(self, reader: Reader) -> None:
        """It may begin no batch any more."""
        ...

    def frozen(self, reader: Reader) -> None:
        """It stands still; its permission does not end with that."""
        ...

    def ended_uncleanly(self, reader: Reader, why: str = "its end without an exit") -> None:
        """Killed, or lost: its records without a checkpoint come again."""
        ...

    def ended_in_order(self, reader: Reader) -> None:
        """It exited by itself, and it had time to checkpoint."""
        ...

    # Batches and user code.

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        """Records `first` to `last` are given to user code."""
        ...

    def batch_processed(self, reader: Reader, first: int, last: int) -> None:
        """User code returned for these records."""
        ...

    def batch_vouched_for(self, reader: Reader, first: int, last: int) -> None:
        """User code is about to checkpoint these records of its batch, which it has processed."""
        ...

    def batch_raised(self, reader: Reader, first: int) -> None:
        """User code raised: from record `first` on its records count as never given."""
        ...

    def left_out_before(self, reader: Reader, number: int) -> None:
        """The reader goes on with record `number` of its batch: it has given up those before it
        that no call returned for."""
        ...

    def gave_up(self, reader: Reader, number: int) -> None:
        """A record was given up, and its letter is durable."""
        ...

    def vouched_for(self, reader: Reader, last: int) -> None:
        """User code asks for a checkpoint: it states that everything up to `last` is done."""
        ...

    def shard_exhausted(self, reader: Reader) -> None:
        """Its last record is processed: its children may be read, once their rows exist."""
        ...

    def shard_expired(self, reader: Reader) -> None:
        """P13: its owner reports that it was trimmed, and that its unread records are lost."""
        ...

    # The end.

    def require_all_read(self, patience_s: float) -> None:
        """L1: raises RuleBroken unless all records from before the last `patience_s` are
        processed, on every shard."""
        ...


class ObserverKind(Protocol):
    """Makes the observer of a fleet. `row_of` reads a row as it is, without the simulated
    network."""

    def __call__(
        self,
        stream: ShardStream,
        stories: Stories,
        *,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        policy: WatchPolicy,
    ) -> Observer: ...
