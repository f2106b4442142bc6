"""Checks which reader got which records of each shard, and why a record was given twice.

I1: no record is passed over, and none comes that the shard never held. I6: in order, without a gap,
in one incarnation; the next begins at the row's position or below its successor. I7, I8: a record
comes again only from a reader that ended uncleanly, and then at most as many as may be
uncheckpointed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kclrun.model.lease import Lease, LeaseKey
from kclrun.simulation.observer import Reader
from kclrun.simulation.record import ShardProgress
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import RuleBroken
from tests.support.oracles.row_history import RowLives

# The time from a read of the parents' rows to a first batch: the answer is awaited, then the claim
# comes within a failover [P4], and the batch before the fence [P7].
_LOOK_S: Final = 2.0


class Causality:
    """`lives` knows which rows have ended, also those that were deleted since."""

    def __init__(
        self,
        stream: ShardStream,
        row_of: Callable[[LeaseKey], Lease | None],
        lives: RowLives,
        *,
        now: Callable[[], float],
        failover_s: float,
    ) -> None:
        self._stream = stream
        self._row_of = row_of
        self._lives = lives
        self._now = now
        self._under_way_max_s = 2 * failover_s + _LOOK_S

    def require_open(self, reader: Reader) -> None:
        """Check any batch. Raises: RuleBroken once the shard's own end is written."""
        if reader.key in self._lives.ended:
            raise RuleBroken("I3", reader.key, f"{reader.who} reads it after its shard end")

    def require_parents_ended(self, reader: Reader) -> None:
        """A shard's first batch. Raises: RuleBroken for a parent that may have records unread."""
        for parent in self._stream.parents_of(reader.key):
            row = self._row_of(LeaseKey(parent))
            is_over = self._lives.may_be_absent(parent) if row is None else row.is_ended
            if not is_over and not self._was_over_just_now(parent):
                raise RuleBroken("I3", reader.key, f"read before its parent {parent} ended")

    def _was_over_just_now(self, parent: str) -> bool:
        """The row of an ended shard was deleted from outside, and a manager created it again: a
        process that had read the row before that may go on to its first batch."""
        came_s = self._lives.came_again_s.get(parent, -math.inf)
        return self._now() - came_s <= self._under_way_max_s


# The last few readers whose delivery was stopped: an overlap has two or three readers.
_READERS_MAX: Final = 16


class _Given(msgspec.Struct):
    """Records `first` to `last` were given to `reader` last, and no checkpoint covers them."""

    first: int
    last: int
    reader: Reader


class Letters:
    """I13: no checkpoint passes a record that was neither processed nor kept as a letter.

    These are the records that make each call raise, every `poison_every`-th one of a shard, and
    those that a reader leaves out.
    """

    def __init__(self, poison_every: int) -> None:
        self._every = poison_every
        self._settled: dict[str, set[int]] = {}
        self._wanted: dict[str, set[int]] = {}
        self._passed: dict[str, int] = {}

    def wanted(self, key: str, numbers: Iterable[int]) -> None:
        """A reader leaves these out."""
        self._wanted.setdefault(key, set()).update(numbers)

    def kept(self, key: str, number: int) -> None:
        """Its letter is durable."""
        self._settled.setdefault(key, set()).add(number)

    def processed(self, key: str, first: int, last: int) -> None:
        """A call returned with these records: they were repaired, or left out by another reader."""
        wanted = self._wanted.get(key, ())
        done = {*self._poison(first, last), *(each for each in wanted if first <= each <= last)}
        self._settled.setdefault(key, set()).update(done)

    def require_all(self, key: str, number: int) -> None:
        """A checkpoint covers the first `number` records. Raises: RuleBroken."""
        settled, wanted = self._settled.setdefault(key, set()), self._wanted.setdefault(key, set())
        passed = self._passed.get(key, 0)
        due = {*self._poison(passed + 1, number), *(each for each in wanted if each <= number)}
        if missing := due - settled:
            raise RuleBroken("I13", key, f"record {min(missing)} failed, and has no letter")
        self._passed[key] = max(passed, number)
        self._settled[key] = {each for each in settled if each > number}
        self._wanted[key] = wanted - due

    def _poison(self, first: int, last: int) -> range:
        return range(-(-first // self._every) * self._every, last + 1, self._every)


class ShardDeliveries(ShardProgress):
    """The deliveries of one shard. `repeats_max` bounds the repeats of one unclean transfer.

    An excuse belongs to one reader, and ends once a checkpoint covers that reader's records.
    """

    def __init__(self, key: str, repeats_max: int) -> None:
        super().__init__()
        self.key = key
        self.checkpointed = 0
        self.has_begun = False
        # The row's position when it was last claimed; None where a Java member has it.
        self.claimed: int | None = None
        # Up to here the outputs of its last reader had the rows as it began [K12].
        self.adopted = 0
        self._repeats_max = repeats_max
        self._is_torn = False
        # The readers when the row was created anew: they read on beside its owners, to their
        # fences.
        self._left_behind: set[Reader] = set()
        self._ranges: list[_Given] = []
        self._next: dict[Reader, int] = {}
        self._excuses: dict[Reader, str] = {}
        # The Java KCL has no cap: it checkpoints when its processor does.
        self.uncapped: set[Reader] = set()
        self._repeated: dict[tuple[Reader, Reader], int] = {}

    def begun(self, reader: Reader, first: int, last: int, *, arrived: int) -> int:
        """A batch is given to user code. Returns: how many of its records come again.

        Raises: RuleBroken for I1, I6, I7 and I8.
        """
        self.has_begun = True
        if last > arrived:
            raise RuleBroken("I1", self.key, f"record {last} came, and {arrived} were ever put")
        self._require_order(reader, first)
        self._next[reader] = last + 1
        self._latest = reader
        given = self._ranges
        if not given or first > given[-1].last:
            self._append(reader, first, last)
            return 0
        repeated = self._require_excuses(reader, first, last)
        self._replace(reader, first, last)
        return repeated

    def is_new(self, reader: Reader) -> bool:
        """Whether the reader has not got a record yet."""
        return reader not in self._next

    def goes_on(self, reader: Reader, first: int) -> None:
        """A reader without a fence is known to go on there, whatever position the row has now."""
        self._next[reader] = first

    def left_out_before(self, reader: Reader, number: int) -> range:
        """The reader goes on with record `number`. Returns: those that it leaves out, without those
        that a checkpoint inside a call covers that then raised."""
        following = max(self._next.get(reader, number), self.checkpointed + 1)
        left_out = range(following, number)
        if left_out:
            self._next[reader] = number
            self.done(number - 1)
        return left_out

    def raised(self, reader: Reader, first: int) -> None:
        """User code raised: its records from `first` on count as never given."""
        if reader in self._next:
            self._next[reader] = first
        kept = []
        for each in self._ranges:
            if each.reader is reader and each.last >= first:
                if each.first >= first:
                    continue
                each.last = first - 1
            kept.append(each)
        self._ranges = kept

    def excuse(self, reader: Reader, why: str) -> None:
        """The reader ended uncleanly: its records without a checkpoint may come again."""
        if any(each.reader is reader for each in self._ranges):
            self._excuses.setdefault(reader, why)

    def excuse_all(self, why: str) -> None:
        """The lease was taken from its owner, or its row was deleted."""
        for each in self._ranges:
            self._excuses.setdefault(each.reader, why)

    def row_deleted(self) -> None:
        """The row was deleted from outside. Its position may be lost, and all records may come
        again, to two readers at once, until a checkpoint covers all records that were given."""
        self._is_torn = True
        self._repeats_max = max(self._repeats_max, self.processed)

    def begins_again(self) -> None:
        """The row was created anew, at its first record."""
        self.row_deleted()
        self._left_behind.update(self._next)
        self.is_over = False

    def saved_late(self, number: int) -> None:
        """A former owner moved the row to `number`; the new owner may still be below that."""
        self.checkpointed = max(self.checkpointed, number)

    def covered(self, number: int) -> None:
        """A checkpoint of the owner covers the records up to `number`."""
        self.checkpointed = max(self.checkpointed, number)
        given = self._ranges
        while given and given[0].last <= number:
            del given[0]
        if given:
            given[0].first = max(given[0].first, number + 1)
        elif self._excuses or self._is_torn or len(self._next) > _READERS_MAX:
            self._is_torn = False
            self._excuses.clear()
            self._repeated.clear()
            self._forget_readers()

    def _forget_readers(self) -> None:
        """Keep only the last few readers: after an outside deletion of the row, two may read at the
        same time."""
        kept = [*self._next][-_READERS_MAX:]
        self._next = {
            each: n for each, n in self._next.items() if each is self._latest or each in kept
        }
        self._left_behind.intersection_update(self._next)

    def _require_order(self, reader: Reader, first: int) -> None:
        following = self._next.get(reader)
        if following is None:
            self._require_start(reader, first)
        elif first != following and not following < first <= self.checkpointed + 1:
            # Above it: a manual checkpoint, in a call that raised, covers the records in between.
            words = f"{reader.who} was given record {first} where {following} follows"
            raise RuleBroken("I6", self.key, words)
        if first > self.processed + 1:
            words = f"records {self.processed + 1} to {first - 1} left out"
            raise RuleBroken("I1", self.key, words)

    def _require_start(self, reader: Reader, first: int) -> None:
        """Its first batch begins right behind the position that its claim found."""
        if first > max(self.checkpointed, self.adopted) + 1:
            words = f"{reader.who} begins at record {first}, past checkpoint {self.checkpointed}"
            raise RuleBroken("I6", self.key, words)
        if self.claimed is not None and first != max(self.claimed, self.adopted) + 1:
            words = f"{reader.who} begins at record {first}, and claimed at {self.claimed}"
            raise RuleBroken("I6", self.key, words)

    def _require_excuses(self, reader: Reader, first: int, last: int) -> int:
        """Check the excuse of each reader that was given some of these records before."""
        total = 0
        for each in self._ranges:
            repeated = min(last, each.last) - max(first, each.first) + 1
            if repeated <= 0:
                continue
            former = each.reader
            if self._is_torn or reader in self._left_behind:
                self._excuses.setdefault(former, "its row was deleted from outside")
            if former not in self._excuses:
                words = f"{repeated} records again, and nothing unclean happened to {former.who}"
                raise RuleBroken("I8", self.key, words)
            count = self._repeated[former, reader] = (
                self._repeated.get((former, reader), 0) + repeated
            )
            if count > self._repeats_max and former not in self.uncapped:
                words = (
                    f"{count} records of {former.who} again, for {self._excuses[former]}: at most"
                    f" {self._repeats_max} may be uncheckpointed"
                )
                raise RuleBroken("I7", self.key, words)
            total += repeated
        return total

    def _append(self, reader: Reader, first: int, last: int) -> None:
        given = self._ranges
        if given and given[-1].reader is reader and given[-1].last == first - 1:
            given[-1].last = last
        else:
            given.append(_Given(first, last, reader))

    def _replace(self, reader: Reader, first: int, last: int) -> None:
        """The records belong to this reader now, whichever reader had them before."""
        kept = [
            _Given(each.first, min(each.last, first - 1), each.reader)
            for each in self._ranges
            if each.first < first
        ]
        rest = [
            _Given(max(each.first, last + 1), each.last, each.reader)
            for each in self._ranges
            if each.last > last
        ]
        self._ranges = kept
        self._append(reader, first, last)
        self._ranges += rest
