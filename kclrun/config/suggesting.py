"""What to say about a name that is not known: the nearest one that is, or all of them. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["hint"]


def hint(unknown: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean region?`, or `; known: region, …` in their order.

    Names are compared without regard to case: some come lower-cased.
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(unknown.lower(), names, n=1)
    return (
        f"; did you mean {names[close[0]]}?" if close else f"; known: {', '.join(names.values())}"
    )
