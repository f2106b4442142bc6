"""What happened to each lease, as far as it is kept; and the error that tells it.

Rule: an entry is the values themselves, put into words only when somebody asks: most runs end
well and nobody does.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec

from kclrun.local.sequence_numbers import parse
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["RuleBroken", "Stories", "clock"]

# The last events of a lease that a failure tells: a few failovers' worth of its life.
_ENTRIES_MAX: Final = 60


class RuleBroken(Exception):
    """A promise of the README did not hold: which one, of which lease.

    Never leaves the simulation: `Fleet` tells it as an InvariantViolation, with the story.
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

    def tell(self, key: str) -> str:
        """The story of one lease, a line an event."""
        return "\n".join(
            f"  {clock(time_s)}  {who:<24} {what} {_words(detail)}".rstrip()
            for time_s, who, what, detail in self._of.get(key, ())
        )

    def tell_all(self) -> str:
        """Every story, in the order of the keys."""
        return "\n".join(f"{key}\n{self.tell(key)}" for key in sorted(self._of))


def _words(detail: Any) -> str:
    """A value as one line that is the same in every process: sets in order."""
    if isinstance(detail, frozenset):
        return "{" + ", ".join(sorted(map(_words, detail))) + "}"
    if isinstance(detail, tuple):
        return "(" + ", ".join(map(_words, detail)) + ")"
    if isinstance(detail, ExtendedSequenceNumber):
        number = parse(detail.sequence_number)
        return str(detail) if number is None else f"record {number.counter}"
    if not isinstance(detail, msgspec.Struct):
        return str(detail)
    fields = msgspec.structs.asdict(detail).items()
    said = (f"{name}={_words(value)}" for name, value in fields if _tells(name, value))
    return f"{type(detail).__name__}({', '.join(said)})"


def _tells(name: str, value: Any) -> bool:
    """Whether a field says something: the key is the story's own."""
    return name != "key" and value is not None and value is not False and value != ""


def clock(time_s: float) -> str:
    """Virtual time as people read it."""
    minutes, seconds = divmod(time_s, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:09.6f}"
