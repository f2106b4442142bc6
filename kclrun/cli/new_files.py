"""Writing files that were not there before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["write_new"]

# The configuration must not be writable by others [S4], whatever the umask says.
_MODE: Final = 0o644


def write_new(path: Path, text: str) -> None:
    """Write a file and the folders above it. Raises: OSError, also where it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive: a file that appeared since we looked is not overwritten either.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, _MODE)
        file.write(text)
