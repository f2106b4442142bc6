"""Writes new files and never overwrites one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

# The configuration must not be writable by others [S4], with any umask.
_MODE: Final = 0o644


def write_new(path: Path, text: str) -> None:
    """Write a file and create its parent folders. Raises: OSError, also if the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive: a file that was created since the caller's check is not overwritten either.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, _MODE)
        file.write(text)
