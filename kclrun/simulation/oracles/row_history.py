"""I2 and I5 on every row as it is written: positions and counters forward, and no stale write.

What a write says it saw is compared with the row that stood there, and who sent it with who may:
after the claim of one incarnation no other lease process writes as the owner. May not know: the
table's conditions; they are what is checked here, by their effects.
"""

from __future__ import annotations

from typing import Any, Final

from kclrun.model.changes import (
    Ask,
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    End,
    HaltLease,
    HandOver,
    LateCheckpoint,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from kclrun.model.lease import Lease
from kclrun.simulation.oracles.reader import owner_of
from kclrun.simulation.story import RuleBroken

__all__ = ["RowHistory", "is_passed_on"]

_OWNERS_WRITES: Final = frozenset(
    {Claim, Renew, Checkpoint, NameChildren, End, Release, Offer, HaltLease}
)
# These leave the owner and the counter as they are.
_NOBODYS_WRITES: Final = frozenset({Ask, LateCheckpoint, ResumeLease})
_CREATIONS: Final = frozenset({CreateLease, CreateChildren})
_OURS: Final = (
    _OWNERS_WRITES | _NOBODYS_WRITES | _CREATIONS | {Take, HandOver, DeleteEnded, DeleteTrimmed}
)


def is_passed_on(sender: str, change: Any) -> bool:
    """Whether a manager offers a silent owner's row in its name, as it stands, to anybody."""
    is_whole = isinstance(change, Offer) and change.position == change.last
    return is_whole and change.offered_to is None and owner_of(sender) != change.owner


class RowHistory:
    """Told of every row that a write changed, with who sent the write."""

    def __init__(self) -> None:
        self._writers: dict[str, str] = {}

    def written(self, sender: str, change: Any, before: Lease | None, after: Lease | None) -> None:
        """Raises: RuleBroken for I2 and I5."""
        if before is None or after is None:
            self._came_or_went(change, before, after)
            return
        if after.checkpoint != before.checkpoint and after.checkpoint < before.checkpoint:
            raise RuleBroken(
                "I2", after.key, f"back from {before.checkpoint} to {after.checkpoint}"
            )
        kind = type(change)
        if kind in _OWNERS_WRITES:
            self._require_seen(change, before, after, change.owner)
            self._require_writer(sender, change, after.key)
        elif kind is Take:
            self._require_seen(change, before, after, change.seen_owner)
            self._writers[after.key] = sender
        elif kind in _NOBODYS_WRITES:
            if (after.owner, after.counter) != (before.owner, before.counter):
                raise RuleBroken("I5", after.key, "owner or counter moved by nobody's write")
        elif kind not in _OURS and _is_stale(before, after):
            words = f"counter {before.counter} became {after.counter}"
            raise RuleBroken("I5", after.key, words)
        elif kind not in _OURS:
            self._writers.pop(after.key, None)

    def _came_or_went(self, change: Any, before: Lease | None, after: Lease | None) -> None:
        if before is not None and after is None:
            self._writers.pop(before.key, None)
            if type(change) is DeleteTrimmed and (before.owner, before.counter) != (
                change.seen_owner,
                change.seen_counter,
            ):
                raise RuleBroken("I5", before.key, "deleted though it had moved since it was seen")
        elif after is not None and after.is_ended:
            raise RuleBroken("I2", after.key, "was created as ended")

    def _require_seen(self, change: Any, before: Lease, after: Lease, owner: str | None) -> None:
        """The write named the owner and the counter that stood there, and moved it by one."""
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
        if is_manager or type(change) is Claim:
            self._writers[key] = sender
        elif self._writers.get(key, sender) != sender:
            words = f"{sender} wrote a {type(change).__name__} after {self._writers[key]} had"
            raise RuleBroken("I5", key, words)


def _is_stale(before: Lease, after: Lease) -> bool:
    """Of a write of somebody else: only what is neither owner nor position leaves the counter."""
    is_moved = (after.owner, after.checkpoint) != (before.owner, before.checkpoint)
    return after.counter < before.counter or (is_moved and after.counter == before.counter)
