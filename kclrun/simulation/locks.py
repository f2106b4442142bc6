"""The lock files of one machine, one a manager start [P3].

As the kernel's `flock` on the files of `manager/locks.py`: a nonce's lock is held shared by its
manager and by each of its lease processes, or by a later manager alone, who keeps it. May not know:
rows. Rule: the kernel lets go of what a dead process held, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from kclrun.model.lease import OwnerId

__all__ = ["NonceLocks"]


class NonceLocks:
    """`holder` is whoever lives, or lived: any object, known by its identity."""

    def __init__(self) -> None:
        self._shared: dict[OwnerId, list[object]] = {}
        self._seized: dict[OwnerId, object] = {}

    def make(self, owner: OwnerId, holder: object) -> None:
        """A manager starts: the file of its nonce, held shared."""
        self._shared[owner] = [holder]

    def share(self, owner: OwnerId, holder: object) -> bool:
        """A lease process holds the lock of its manager's nonce; False where it cannot."""
        if owner in self._seized or owner not in self._shared:
            return False
        self._shared[owner].append(holder)
        return True

    def seize_former(self, own: OwnerId, holder: object) -> frozenset[OwnerId]:
        """Lock every other nonce that nobody holds: the owners newly proven gone."""
        gained = frozenset(
            owner
            for owner, holders in self._shared.items()
            if owner != own and not holders and owner not in self._seized
        )
        self._seized.update(dict.fromkeys(sorted(gained), holder))
        return gained

    def seized_by(self, holder: object) -> frozenset[OwnerId]:
        return frozenset(owner for owner, by in self._seized.items() if by is holder)

    def are_others(self, own: OwnerId) -> bool:
        """Whether there is a nonce that is left to seize."""
        return any(owner != own and owner not in self._seized for owner in self._shared)

    def forget(self, owners: Iterable[OwnerId]) -> None:
        """Remove the files of former owners that no row names any more."""
        for owner in owners:
            self._shared.pop(owner, None)
            self._seized.pop(owner, None)

    def let_go(self, holder: object) -> None:
        """It is dead."""
        for holders in self._shared.values():
            if holder in holders:
                holders.remove(holder)
        for owner in [owner for owner, by in self._seized.items() if by is holder]:
            del self._seized[owner]

    def retire(self, owner: OwnerId, holder: object, *, is_named: bool) -> None:
        """At the end of a manager: the file goes if nobody else holds it and no row names it."""
        self.let_go(holder)
        if not is_named and not self._shared.get(owner):
            self._shared.pop(owner, None)
