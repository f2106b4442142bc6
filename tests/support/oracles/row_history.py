"""I2 and I5 on every written row: positions and counters move forward, and no write is stale.

The values that a write names as seen are compared with the former row, and its sender with the
permitted one: after the claim of one incarnation no other lease process writes as the owner. The
module does not use the table's conditions, because it checks their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.protocol import writes
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import RuleBroken
from tests.support.oracles.permissions import owner_of

# I11: a row comes when its shard may be read, and is deleted when no process can miss it.
#
# Judged from the history of the rows against the graph of the shards. A row is created once: with
# the first sync, when one of its parents was read to its end, or again by its owner where it
# vanished. It is deleted when it has ended, its children have begun and its parents' rows are
# deleted, or when the service has forgotten its shard.
_NOT_BEGUN: Final = frozenset({TRIM_HORIZON.sequence_number, AT_TIMESTAMP.sequence_number})


class RowLives:
    """`row_of` reads a row as it is; `is_read_out` returns whether a shard was read to its end."""

    def __init__(
        self,
        stream: ShardStream,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        is_read_out: Callable[[str], bool],
    ) -> None:
        self.ended: set[str] = set()
        self.cleaned_up: set[str] = set()
        # For ended shards: when their row came again after an outside deletion.
        self.came_again_s: dict[str, float] = {}
        self._stream = stream
        self._now = now
        self._row_of = row_of
        self._is_read_out = is_read_out
        self._begun: set[str] = set()
        self._vanished: set[str] = set()
        self._may_come_again: set[str] = set()

    def moved(self, after: Lease) -> None:
        """Its position is another than before."""
        if after.checkpoint.sequence_number not in _NOT_BEGUN:
            self._begun.add(after.key)
        if after.is_ended:
            self.ended.add(after.key)

    def vanished(self, key: str) -> None:
        """The row was deleted from outside, against the protocol. Where no row of its line is left,
        reading begins at the oldest shard again [P10], and goes on through all its descendants."""
        self._vanished.add(key)
        ancestors = self._reach(key, self._stream.parents_of)
        self._may_come_again |= ancestors

    def is_vanished(self, key: str) -> bool:
        """Whether its row was deleted from outside, and no owner has written it again."""
        return key in self._vanished

    def may_be_absent(self, key: str) -> bool:
        """Whether a shard without a row need not be read any more. It was cleaned up, or is older
        than all kept records, or its row was deleted from outside, which is not the fleet's
        fault."""
        is_gone = key in self.cleaned_up or self.is_vanished(key)
        return is_gone or not self._stream.holds(key, self._now())

    def created(self, change: Any, row: Lease) -> bool:
        """Returns: whether its shard is read again from its beginning, after an outside deletion.

        Raises: RuleBroken for a row that must not exist.
        """
        key = row.key
        is_again = key in self._may_come_again
        if is_again:
            self._may_come_again |= self._reach(key, self._children_of)
            self.cleaned_up.discard(key)
            if key in self.ended:
                self.came_again_s[key] = self._now()
            self.ended.discard(key)
        elif key in self.cleaned_up:
            raise RuleBroken("I11", key, "was created again after it was cleaned up")
        elif key in self._begun:
            raise RuleBroken("I11", key, "was created a second time")
        if not self._stream.is_known(key):
            raise RuleBroken("I11", key, "is the row of no shard")
        if row.parents != frozenset(self._stream.parents_of(key)):
            raise RuleBroken("I11", key, f"has the parents {sorted(row.parents)}")
        if row.owner is not None:
            self._require_vanished(key)
            return False
        if row.checkpoint.sequence_number not in _NOT_BEGUN:
            raise RuleBroken("I11", key, f"was created at {row.checkpoint}: records are left out")
        is_early = not any(
            self._is_read_out(parent) or self._stream.is_expired(parent) for parent in row.parents
        )
        if isinstance(change, writes.CreateChildren) and is_early:
            raise RuleBroken("I11", key, "was created before a parent was read to its end")
        return is_again

    def deleted(self, change: Any, row: Lease) -> None:
        """Raises: RuleBroken for a row that a process can miss."""
        match change:
            case writes.DeleteEnded():
                self._require_over(row)
            case writes.DeleteTrimmed():
                if self._stream.holds(row.key, self._now()):
                    raise RuleBroken("I11", row.key, "was deleted as trimmed and is not")
        self.cleaned_up.add(row.key)

    def _children_of(self, key: str) -> tuple[str, ...]:
        return tuple(child.shard_id for child in self._stream.children_of(key))

    def _reach(self, key: str, following: Callable[[str], Iterable[str]]) -> set[str]:
        """All shards that can be reached from this one, including itself."""
        reached, waiting = {key}, [key]
        while waiting:
            new = set(following(waiting.pop())) - reached
            reached |= new
            waiting += new
        return reached

    def _require_vanished(self, key: str) -> None:
        if key not in self._vanished:
            raise RuleBroken("I11", key, "was written again, and was never deleted from outside")
        self._vanished.discard(key)

    def _require_over(self, row: Lease) -> None:
        if not row.is_ended:
            raise RuleBroken("I11", row.key, f"was deleted at {row.checkpoint}")
        children = self._children_of(row.key)
        waiting = [child for child in children if child not in self._begun]
        if waiting or not children:
            raise RuleBroken("I11", row.key, f"was deleted before {waiting or 'a child'} had begun")
        staying = [parent for parent in row.parents if self._row_of(LeaseKey(parent)) is not None]
        if staying:
            raise RuleBroken("I11", row.key, f"was deleted before its parent {staying[0]}")


_OWNERS_WRITES: Final = frozenset(
    {
        writes.Claim,
        writes.Renew,
        writes.Checkpoint,
        writes.NameChildren,
        writes.End,
        writes.Release,
        writes.Offer,
        writes.HaltLease,
    }
)
# These leave the owner and the counter as they are.
_OWNERLESS_WRITES: Final = frozenset(
    {
        writes.Ask,
        writes.Withdraw,
        writes.LateCheckpoint,
        writes.ResumeLease,
        writes.ChangePause,
        writes.NoteLetters,
    }
)
_CREATIONS: Final = frozenset({writes.CreateLease, writes.CreateChildren})
_OURS: Final = (
    _OWNERS_WRITES
    | _OWNERLESS_WRITES
    | _CREATIONS
    | {writes.Take, writes.Decline, writes.HandOver, writes.DeleteEnded, writes.DeleteTrimmed}
)


def is_passed_on(sender: str, change: Any) -> bool:
    """Whether a manager offers a silent owner's row in its name, unchanged, to any owner."""
    is_whole = isinstance(change, writes.Offer) and change.position == change.last
    return is_whole and change.offered_to is None and owner_of(sender) != change.owner


class RowHistory:
    """Gets every row that a write changed, with the sender of the write."""

    def __init__(self) -> None:
        self._writers: dict[str, str] = {}

    def written(self, sender: str, change: Any, before: Lease | None, after: Lease | None) -> None:
        """Raises: RuleBroken for I2 and I5."""
        if before is None or after is None:
            self._came_or_went(change, before, after)
            return
        if after.checkpoint < before.checkpoint:
            raise RuleBroken(
                "I2", after.key, f"back from {before.checkpoint} to {after.checkpoint}"
            )
        kind = type(change)
        if kind in _OWNERS_WRITES:
            self._require_seen(change, before, after, change.owner)
            self._require_writer(sender, change, after.key)
        elif kind is writes.Take:
            self._require_seen(change, before, after, change.seen_owner)
            self._writers[after.key] = sender
        elif kind is writes.Decline:
            self._require_seen(change, before, after, OFFERED)
            if before.offered_to != owner_of(sender) or after.owner != OFFERED:
                raise RuleBroken("I5", after.key, f"{sender} declined what was not its own to take")
        elif kind in _OWNERLESS_WRITES:
            if (after.owner, after.counter) != (before.owner, before.counter):
                words = "owner or counter changed by a write that must keep them"
                raise RuleBroken("I5", after.key, words)
        elif kind not in _OURS and _is_stale(before, after):
            words = f"counter {before.counter} became {after.counter}"
            raise RuleBroken("I5", after.key, words)
        elif kind not in _OURS:
            self._writers.pop(after.key, None)

    def _came_or_went(self, change: Any, before: Lease | None, after: Lease | None) -> None:
        if after is None:
            assert before is not None, "a write that applied changed a row"
            self._writers.pop(before.key, None)
            if type(change) is writes.DeleteTrimmed and (before.owner, before.counter) != (
                change.seen_owner,
                change.seen_counter,
            ):
                raise RuleBroken("I5", before.key, "deleted though it had moved since it was seen")
        elif after.is_ended:
            raise RuleBroken("I2", after.key, "was created as ended")

    def _require_seen(self, change: Any, before: Lease, after: Lease, owner: str | None) -> None:
        """The write named the row's owner and counter, and raised the counter by one."""
        if before.owner != owner:
            words = f"{type(change).__name__} for {owner} applied to a row of {before.owner}"
            raise RuleBroken("I5", after.key, words)
        if before.counter != change.seen_counter or after.counter != before.counter + 1:
            words = (
                f"{type(change).__name__} saw counter {change.seen_counter}, {before.counter} stood"
                f" there and became {after.counter}"
            )
            raise RuleBroken("I5", after.key, words)

    def _require_writer(self, sender: str, change: Any, key: str) -> None:
        """Since a claim, or a write of the manager, no other lease process writes."""
        if change.owner != owner_of(sender) and not is_passed_on(sender, change):
            raise RuleBroken("I5", key, f"{sender} wrote in the name of {change.owner}")
        is_manager = "/" not in sender
        if is_manager or type(change) is writes.Claim:
            self._writers[key] = sender
        elif self._writers.get(key, sender) != sender:
            words = f"{sender} wrote a {type(change).__name__} after {self._writers[key]} had"
            raise RuleBroken("I5", key, words)


def _is_stale(before: Lease, after: Lease) -> bool:
    """For other writers than the owner: a change of owner or position must raise the counter."""
    is_moved = (after.owner, after.checkpoint) != (before.owner, before.checkpoint)
    return after.counter < before.counter or (is_moved and after.counter == before.counter)
