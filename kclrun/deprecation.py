"""How an old name warns while it goes on working beside its new one.

The page docs/reference/public-names.md says for how long. Must not know which names there are.
"""

from __future__ import annotations

import warnings


def warn_of_old_name(old: str, new: str, *, gone_in: str, depth: int = 2) -> None:
    """Warn that `old` goes: `new` is the name to use, and version `gone_in` lacks the old one.

    The warning shows the line that is `depth` calls above this one: 2 is the caller of the function
    that warns. Python shows a DeprecationWarning in `__main__` and in tests, once a line.
    """
    warnings.warn(
        f"{old} is deprecated: use {new}. kclrun {gone_in} does not have it",
        DeprecationWarning,
        stacklevel=depth + 1,
    )
