"""The record of a fleet's run: the gaps in which a shard was not read, and each lease's events.

A broken promise is an error that contains the events of its lease. The module does not know the
promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kclrun.local.sequence_numbers import parse
from kclrun.model.sequence import ExtendedSequenceNumber


# The times in which no process read a shard although it had something to read.
#
# A shard is readable from its creation on, a child from its parents' last record on. It is over
# with its own last record. It is read while a process may begin batches of it and the process's
# host is not frozen. This part does not know leases or owners.
class Gap(msgspec.Struct, frozen=True):
    """A time in which no process read one shard."""

    key: str
    began_s: float
    length_s: float


class ReadingGaps:
    """Gets the begin and the end of each reading; keeps every gap that ended."""

    def __init__(self) -> None:
        self.ended: list[Gap] = []
        self._unread_since: dict[str, float] = {}
        self._readers: dict[str, object] = {}
        self._were_read: set[str] = set()
        self._blocked: set[str] = set()
        self._over: set[str] = set()

    def readable(self, key: str, now: float) -> None:
        """The shard has something to read from now on."""
        was_blocked = key in self._blocked
        self._blocked.discard(key)
        if was_blocked and key not in self._readers and key in self._unread_since:
            self._unread_since[key] = now
        elif key not in self._were_read:
            self._unread_since.setdefault(key, now)

    def unreadable(self, key: str) -> None:
        """It must not be read for now: a parent is read again, and it is `readable` after that."""
        self._blocked.add(key)

    def begins(self, key: str, reader: object, now: float) -> None:
        """`reader` may begin batches; repeated at each renewal."""
        if self._readers.get(key) is reader or key in self._over:
            return
        self._readers[key] = reader
        since = self._unread_since.pop(key, None)
        if since is not None:
            self.ended.append(Gap(key, since, now - since))
        self._were_read.add(key)

    def ends(self, key: str, reader: object, now: float) -> None:
        """`reader` may not, or cannot, read any more. Ignored for another reader than the last."""
        if self._readers.get(key) is reader:
            del self._readers[key]
            self._unread_since[key] = now

    def over(self, key: str) -> None:
        """Its last record is processed: it has nothing left to read, also if a gate opens later (a
        renewal's answer may be on its way)."""
        self._over.add(key)
        self._readers.pop(key, None)
        self._unread_since.pop(key, None)
        self._were_read.add(key)

    def unread(self) -> dict[str, float]:
        """The shards without a reader now, and since when."""
        unread = self._unread_since.items()
        return {key: since for key, since in unread if key not in self._blocked}

    def since(self, began_s: float, *, until_s: float = float("inf")) -> Iterable[Gap]:
        """The gaps that began in a time."""
        return (gap for gap in self.ended if began_s <= gap.began_s < until_s)


# The events of each lease, as far as they are kept, and the error that contains them.
#
# An entry stores the values themselves. They become text only on request: most runs end well and
# need none.
# The last events of a lease in a failure's report: a few failovers of its life.
_ENTRIES_MAX: Final = 60


class RuleBroken(Exception):
    """A promise of the README did not hold: which one, for which lease.

    It never leaves the simulation: `Fleet` raises an InvariantViolation instead, with the story.
    """

    def __init__(self, rule: str, key: str, words: str) -> None:
        super().__init__(f"{rule}: {words}")
        self.key = key


class Stories:
    """The last events of every lease."""

    def __init__(self) -> None:
        self._of: dict[str, deque[tuple[float, str, str, Any]]] = {}

    def note(self, key: str, time_s: float, who: str, what: str, detail: Any = "") -> None:
        entries = self._of.get(key)
        if entries is None:
            entries = self._of[key] = deque(maxlen=_ENTRIES_MAX)
        entries.append((time_s, who, what, detail))

    def text_of(self, key: str) -> str:
        """The story of one lease, a line an event."""
        return "\n".join(
            f"  {clock(time_s)}  {who:<24} {what} {_text(detail)}".rstrip()
            for time_s, who, what, detail in self._of.get(key, ())
        )

    def whole_text(self) -> str:
        """Every story, in the order of the keys."""
        return "\n".join(f"{key}\n{self.text_of(key)}" for key in sorted(self._of))


def _text(detail: Any) -> str:
    """A value as one line that is the same in every process: sets in order."""
    if isinstance(detail, frozenset):
        return "{" + ", ".join(sorted(map(_text, detail))) + "}"
    if isinstance(detail, tuple):
        return "(" + ", ".join(map(_text, detail)) + ")"
    if isinstance(detail, ExtendedSequenceNumber):
        number = parse(detail.sequence_number)
        return str(detail) if number is None else f"record {number.counter}"
    if not isinstance(detail, msgspec.Struct):
        return str(detail)
    fields = msgspec.structs.asdict(detail).items()
    shown = (f"{name}={_text(value)}" for name, value in fields if _is_shown(name, value))
    return f"{type(detail).__name__}({', '.join(shown)})"


def _is_shown(name: str, value: Any) -> bool:
    """Whether a field has content; the key is left out, because the story is under it."""
    return name != "key" and value is not None and value is not False and value != ""


def clock(time_s: float) -> str:
    """Virtual time in readable form."""
    minutes, seconds = divmod(time_s, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:09.6f}"
