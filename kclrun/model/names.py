"""The known name that an unknown one may stand for. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(unknown: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean region?`, or `; known: region, …` in their order.

    Names are compared without regard to case: some come lower-cased.
    """
    names = list(known)
    near = nearest(unknown, names)
    return f"; did you mean {near}?" if near is not None else f"; known: {', '.join(names)}"


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """The known name with the most similar spelling; None if no name is similar."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(unknown.lower(), names)
    return names[close[0]] if close else None
