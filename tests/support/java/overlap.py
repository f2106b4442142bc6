"""I4 beside Java workers: the part that still holds, and the bound of overlaps where it cannot."""

from typing import Any, Final, Protocol

import msgspec

from kclrun.model.lease import OFFERED, OWNER_PREFIX, Lease, LeaseKey, OwnerId
from kclrun.protocol.writes import Claim, Take
from kclrun.simulation.observer import Reader
from kclrun.simulation.stories import RuleBroken
from tests.support.storms.coverage import StormOracles

# Two clocks are at most this far apart (README, I4).
_RATES_APART: Final = 0.01
# A round of the worker's loop (`shardConsumerDispatchPollIntervalMillis`), and a tenth of a second
# for the legs of a network without losses between the answer's way and ours.
_JAVA_NOTICES_S: Final = 1.0 + 0.1
_ROUNDING_S: Final = 1e-6


class JavaReader(Reader, Protocol):
    """A consumer of a Java worker. `answered_late_s`: of its last increment; `woke_s`: the time
    when its machine last continued after standing still."""

    @property
    def answered_late_s(self) -> float: ...

    @property
    def woke_s(self) -> float: ...


class Overlaps(msgspec.Struct):
    """For the figures: takes of leases that the other kind renewed, and the longest time after
    which a batch was begun beside a reader of the other kind."""

    java_steals: int = 0
    forced_takes: int = 0
    java_beside_kclrun_s: float = 0.0
    kclrun_beside_java_s: float = 0.0


class MixedOracles(StormOracles):
    """The oracles of a fleet that may have Java members.

    A Java worker has no fence, and no owner in its conditions, so "one reader" cannot hold in full.
    These rules hold and are watched here, with F the failover and 1 % between any two clocks:

    - Java takes a lease that a kclrun owner gave away, or left unrenewed for F: no kclrun process
      may begin a batch any more. This is I4 in full; no part of it depends on Java.
    - Java takes a lease that a kclrun owner renews (a steal): the owner's process may begin batches
      for F at most. Its last renewal was applied before the steal, hence sent before it, and the
      fence is F from the sending. It renews every F/3, so it finds out after F/3 and a write where
      the network is sound.
    - Two kclrun processes never overlap, with or without a Java worker between them.
    - kclrun takes a Java worker's row by expiry: the counter has stood still for F.
    - kclrun takes it by force: no process that began after the take begins a batch within F of it
      [P18]: by then the Java worker's last renewal is F old.
    - After either, the Java worker reads on until its own clock calls the lease expired and its
      loop looks. That is F after the last increment, which it counts from the answer
      (`answered_late_s` after the write may have applied), and a round of its loop. With the
      clocks' 1 % that is `answered_late_s` + 0.01 F + 1 s after kclrun began; from its waking if it
      stood still.

    All other rules hold as everywhere, for every reader: no record is passed over; positions move
    forward; parents come first.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.overlaps = Overlaps()
        self._java: dict[LeaseKey, set[JavaReader]] = {}
        self._java_next: dict[JavaReader, int] = {}
        # kclrun's processes: from when, and until when, they may begin batches.
        self._opened_s: dict[Reader, float] = {}
        self._until_s: dict[LeaseKey, dict[Reader, float]] = {}
        # When each of them claimed, by its name: it may open long after, once its outputs begin.
        self._claimed_s: dict[str, float] = {}
        # For each row: when its counter moved, and when it last changed sides.
        self._moved_s: dict[LeaseKey, float] = {}
        self._stolen_s: dict[LeaseKey, float] = {}
        self._forced_s: dict[LeaseKey, float] = {}
        self._deleted_s: dict[LeaseKey, float] = {}

    # The table.

    def row_written(
        self, sender: str, change: Any, before: Lease | None, after: Lease | None
    ) -> None:
        super().row_written(sender, change, before, after)
        if after is None:
            return
        if isinstance(change, Claim):
            self._claimed_s[sender] = self._now()
        if before is not None and before.owner != after.owner:
            still_s = self._now() - self._moved_s.get(after.key, 0.0)
            if _is_java(after.owner):
                self._java_took(after.key, before.owner, still_s)
            elif _is_java(before.owner):
                self._taken_from_java(after.key, change, still_s)
        if before is None or before.counter != after.counter:
            self._moved_s[after.key] = self._now()

    def row_deleted_from_outside(self, row: Lease) -> None:
        """Its reader may go on and write the row again; nothing is promised about two readers."""
        super().row_deleted_from_outside(row)
        self._deleted_s[row.key] = self._now()

    def _java_took(self, key: LeaseKey, owner: OwnerId | None, still_s: float) -> None:
        is_renewed = owner not in {None, OFFERED} and still_s < self._failover_at_least_s
        if is_renewed:
            if not _is_java(owner):
                self._stolen_s[key] = self._now()
                self.overlaps.java_steals += 1
            return
        for reader, until_s in self._until_s.get(key, {}).items():
            is_bound = not self._lost_its_row(reader)
            if is_bound and until_s > self._now() + _ROUNDING_S:
                words = f"{reader.who} may read on, and its row was free for a Java worker to take"
                raise RuleBroken("I4", key, words)

    def _taken_from_java(self, key: LeaseKey, change: Any, still_s: float) -> None:
        if isinstance(change, Take) and change.forced:
            self._forced_s[key] = self._now()
            self.overlaps.forced_takes += 1
        elif still_s < self._failover_at_least_s:
            words = f"taken from a Java worker {still_s:.3f} s after its counter moved"
            raise RuleBroken("I4", key, words)

    # kclrun's lease processes.

    def delivery_allowed(self, reader: Reader, until_s: float) -> None:
        super().delivery_allowed(reader, until_s)
        if until_s <= self._now():
            return
        if reader not in self._opened_s:
            self._opened_s[reader] = self._now()
            self._require_alone(reader)
            self._require_waited(reader)
        self._until_s.setdefault(reader.key, {})[reader] = until_s
        if self._was_stolen_from(reader) and not self._was_deleted_since_stolen(reader.key):
            past_s = until_s - self._stolen_s[reader.key]
            if past_s > self._policy.failover_s:
                words = f"{reader.who} may read for {past_s:.3f} s after a Java worker's take"
                raise RuleBroken("I4", reader.key, words)

    def delivery_stopped(self, reader: Reader) -> None:
        super().delivery_stopped(reader)
        self._until_s.get(reader.key, {}).pop(reader, None)

    def batch_begun(self, reader: Reader, first: int, last: int) -> None:
        super().batch_begun(reader, first, last)
        if not self._was_stolen_from(reader):
            return
        self.shards.of(reader.key).excuse(reader, "a Java worker stole its lease")
        if self._java.get(reader.key):
            beside_s = self._now() - self._stolen_s[reader.key]
            self.overlaps.kclrun_beside_java_s = max(self.overlaps.kclrun_beside_java_s, beside_s)

    def _require_open(self, reader: Reader) -> None:
        """While it does not know of the steal, its records come again anyway."""
        if not self._was_stolen_from(reader):
            super()._require_open(reader)

    def _require_alone(self, reader: Reader) -> None:
        """Raises: RuleBroken while another process may read, even if a Java worker came between."""
        if reader.key not in self._stolen_s:
            return
        for other, until_s in self._until_s.get(reader.key, {}).items():
            is_bound = not self._lost_its_row(other)
            if is_bound and until_s > self._now() + _ROUNDING_S:
                words = f"{reader.who} reads, and {other.who} may still"
                raise RuleBroken("I4", reader.key, f"{words}: a Java worker had it in between")

    def _require_waited(self, reader: Reader) -> None:
        forced_s = self._forced_s.get(reader.key)
        if forced_s is None:
            return
        waited_s = self._now() - forced_s
        if waited_s < self._failover_at_least_s:
            words = f"{reader.who} began {waited_s:.3f} s after the row was taken by force"
            raise RuleBroken("P18", reader.key, words)

    def _was_stolen_from(self, reader: Reader) -> bool:
        """Whether a Java worker took the row since this process claimed it."""
        stolen_s = self._stolen_s.get(reader.key)
        had_since_s = self._claimed_s.get(reader.who, self._opened_s[reader])
        return stolen_s is not None and had_since_s <= stolen_s

    def _was_deleted_since_stolen(self, key: LeaseKey) -> bool:
        """Whether the steal is gone with the row: the last kclrun owner does not know of it and
        writes the row again within its fence, and the Java worker loses the lease."""
        return self._deleted_s.get(key, -1.0) >= self._stolen_s[key]

    def _lost_its_row(self, reader: Reader) -> bool:
        """Whether the row was deleted from outside while this process was allowed to read."""
        deleted_s = self._deleted_s.get(reader.key)
        return deleted_s is not None and self._opened_s[reader] <= deleted_s

    # Java's consumers.

    def java_reads(self, reader: JavaReader) -> None:
        """The reader will begin batches, until `java_stopped`."""
        self.process_noted(reader, "reads")
        self._java.setdefault(reader.key, set()).add(reader)
        self.gaps.begins(reader.key, reader, self._now())

    def java_stopped(self, reader: JavaReader) -> None:
        """Its shard is over, its lease is lost, or its machine has failed."""
        self.process_noted(reader, "stops")
        self._java.get(reader.key, set()).discard(reader)
        self._java_next.pop(reader, None)
        self.gaps.ends(reader.key, reader, self._now())

    def java_batch_begun(self, reader: JavaReader, first: int, last: int) -> None:
        """As `batch_begun`, for a reader without a fence: its records may always come again, also
        after the shard's end."""
        key, shard = reader.key, self.shards.of(reader.key)
        self.gaps.begins(key, reader, self._now())
        for other, until_s in self._until_s.get(key, {}).items():
            if self._now() < until_s - _ROUNDING_S:
                self._beside(reader, other)
        if not shard.has_begun:
            self._causality.require_parents_ended(reader)
        self._require_order(reader, first)
        self._java_next[reader] = last + 1
        shard.goes_on(reader, first)
        arrived = self._stream.records.arrived(key, self._now())
        shard.excuse_all("a Java worker reads it")
        self.tally.duplicates += shard.begun(reader, first, last, arrived=arrived)
        shard.uncapped.add(reader)
        shard.excuse(reader, "a Java worker read it")
        self.tally.records += last - first + 1
        self.tally.batches += 1

    def _require_order(self, reader: JavaReader, first: int) -> None:
        """From the row's position on, without a gap, whichever other readers there are by now."""
        following = self._java_next.get(reader)
        if following is None:
            following = min(first, self.shards.of(reader.key).checkpointed + 1)
        if first != following:
            words = f"{reader.who} was given record {first} where {following} follows"
            raise RuleBroken("I6", reader.key, words)

    def _beside(self, reader: JavaReader, other: Reader) -> None:
        """Java begins a batch while a kclrun process may: a steal's overlap, or Java's delay."""
        if self._was_stolen_from(other) or self._lost_its_row(other):
            return
        beside_s = self._now() - max(self._opened_s[other], reader.woke_s)
        self.overlaps.java_beside_kclrun_s = max(self.overlaps.java_beside_kclrun_s, beside_s)
        bound_s = _JAVA_NOTICES_S + _RATES_APART * self._policy.failover_s + reader.answered_late_s
        if beside_s > bound_s:
            words = f"{reader.who} reads {beside_s:.3f} s beside {other.who}, bound {bound_s:.3f} s"
            raise RuleBroken("I4J", reader.key, words)

    @property
    def _failover_at_least_s(self) -> float:
        """The shortest failover by any clock of the fleet, in the world's time."""
        return self._policy.failover_s * (1 - _RATES_APART)


def _is_java(owner: OwnerId | None) -> bool:
    return owner is not None and not owner.startswith(OWNER_PREFIX)
