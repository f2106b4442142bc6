"""How long shards with something to read were read by nobody.

A shard is readable from its creation, a child from its parents' last record on, and over with its
own. It is read while a process may begin batches of it and its host is not frozen. May not know:
leases, owners.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["Gap", "ReadingGaps"]


class Gap(msgspec.Struct, frozen=True):
    """One such time of one shard."""

    key: str
    began_s: float
    length_s: float


class ReadingGaps:
    """Told what begins and ends; keeps every gap that ended."""

    def __init__(self) -> None:
        self.ended: list[Gap] = []
        self._unread_since: dict[str, float] = {}
        self._readers: dict[str, object] = {}
        self._were_read: set[str] = set()
        self._blocked: set[str] = set()
        self._over: set[str] = set()

    def readable(self, key: str, now: float) -> None:
        """There is something to read from now on."""
        was_blocked = key in self._blocked
        self._blocked.discard(key)
        if was_blocked and key not in self._readers and key in self._unread_since:
            self._unread_since[key] = now
        elif key not in self._were_read:
            self._unread_since.setdefault(key, now)

    def unreadable(self, key: str) -> None:
        """Nobody may read it for now: a parent is read once more, and it is `readable` then."""
        self._blocked.add(key)

    def begins(self, key: str, reader: object, now: float) -> None:
        """`reader` may begin batches; said again at each renewal."""
        if self._readers.get(key) is reader or key in self._over:
            return
        self._readers[key] = reader
        since = self._unread_since.pop(key, None)
        if since is not None:
            self.ended.append(Gap(key, since, now - since))
        self._were_read.add(key)

    def ends(self, key: str, reader: object, now: float) -> None:
        """`reader` may not, or cannot, any more. Of another reader than the last: nothing new."""
        if self._readers.get(key) is reader:
            del self._readers[key]
            self._unread_since[key] = now

    def over(self, key: str) -> None:
        """Its last record is processed: nothing is left to read, whatever opens after that (a
        renewal's answer may be on its way)."""
        self._over.add(key)
        self._readers.pop(key, None)
        self._unread_since.pop(key, None)
        self._were_read.add(key)

    def unread(self) -> dict[str, float]:
        """The shards that nobody reads now, and since when."""
        unread = self._unread_since.items()
        return {key: since for key, since in unread if key not in self._blocked}

    def since(self, began_s: float, *, until_s: float = float("inf")) -> Iterable[Gap]:
        """The gaps that began in a time."""
        return (gap for gap in self.ended if began_s <= gap.began_s < until_s)
