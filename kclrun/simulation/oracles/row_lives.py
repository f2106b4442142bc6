"""I11: a row comes when its shard may be read, and goes when nobody can miss it.

Judged from the history of the rows against the graph of the shards. A row is created once: with
the first sync, when one of its parents was read to its end, or again by its owner where it
vanished. It is deleted when it has ended, its children have begun and its parents' rows are gone,
or when the service has forgotten its shard. May not know: who reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kclrun.model.changes import CreateChildren, CreateLease, DeleteEnded, DeleteTrimmed
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.story import RuleBroken

__all__ = ["RowLives"]

_NOT_BEGUN: Final = frozenset({TRIM_HORIZON.sequence_number, AT_TIMESTAMP.sequence_number})


class RowLives:
    """`row_of` reads a row as it is; `is_read_out` says that a shard was read to its end."""

    def __init__(
        self,
        stream: ShardStream,
        now: Callable[[], float],
        row_of: Callable[[LeaseKey], Lease | None],
        is_read_out: Callable[[str], bool],
    ) -> None:
        self.ended: set[str] = set()
        self.cleaned_up: set[str] = set()
        # Of shards that had ended: when their row came again, for somebody had deleted it.
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
        """Somebody deleted it, who had no business to. Where no row of its line is left, reading
        begins at the oldest shard again [P10], and goes on through all that came of it."""
        self._vanished.add(key)
        ancestors = self._reach(key, self._stream.parents_of)
        self._may_come_again |= ancestors

    def is_vanished(self, key: str) -> bool:
        """Whether somebody deleted its row, and no owner has written it again."""
        return key in self._vanished

    def may_be_absent(self, key: str) -> bool:
        """Whether a shard without a row is nobody's to read any more: it was cleaned up, or is
        older than all that is kept; or somebody deleted its row, and who did it answers for it."""
        is_gone = key in self.cleaned_up or self.is_vanished(key)
        return is_gone or not self._stream.holds(key, self._now())

    def created(self, change: Any, row: Lease) -> bool:
        """Says whether its shard is read again from its beginning, because somebody deleted a row.

        Raises: RuleBroken for a row that must not be there.
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
        if isinstance(change, CreateLease) and row.owner is not None:
            self._require_vanished(key)
            return False
        if row.checkpoint.sequence_number not in _NOT_BEGUN:
            raise RuleBroken("I11", key, f"was created at {row.checkpoint}: records are left out")
        is_early = not any(self._is_read_out(parent) for parent in row.parents)
        if isinstance(change, CreateChildren) and is_early:
            raise RuleBroken("I11", key, "was created before a parent was read to its end")
        return is_again

    def deleted(self, change: Any, row: Lease) -> None:
        """Raises: RuleBroken for a row that somebody can miss."""
        match change:
            case DeleteEnded():
                self._require_over(row)
            case DeleteTrimmed():
                if self._stream.holds(row.key, self._now()):
                    raise RuleBroken("I11", row.key, "was deleted as trimmed and is not")
        self.cleaned_up.add(row.key)

    def _children_of(self, key: str) -> tuple[str, ...]:
        return tuple(child.shard_id for child in self._stream.children_of(key))

    def _reach(self, key: str, following: Callable[[str], Iterable[str]]) -> set[str]:
        """All shards that one gets to from this one, itself among them."""
        reached, waiting = {key}, [key]
        while waiting:
            new = set(following(waiting.pop())) - reached
            reached |= new
            waiting += new
        return reached

    def _require_vanished(self, key: str) -> None:
        if key not in self._vanished:
            raise RuleBroken("I11", key, "was written again, and nobody had deleted it")
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
