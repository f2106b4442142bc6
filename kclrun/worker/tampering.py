"""What user code did to the process that it shares with kclrun: descriptors that it closed, and
functions of the standard library that it replaced. Imported before user code is."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from types import ModuleType
from typing import Final

# Of these, kclrun's own threads call functions while user code runs.
_MODULES: Final[tuple[ModuleType, ...]] = (os, select, socket, threading, time)
_ORIGINALS: Final = {
    (module, name): value
    for module in _MODULES
    for name, value in vars(module).items()
    if callable(value) and not name.startswith("_")
}
_NAMED_MAX: Final = 5


def replaced() -> tuple[str, ...]:
    """The functions that are not those of the standard library any more, by their names."""
    return tuple(
        sorted(
            f"{module.__name__}.{name}"
            for (module, name), value in _ORIGINALS.items()
            if vars(module).get(name) is not value
        )
    )


def cause_of(error: BaseException) -> str:
    """What user code did that explains this error of our own code, in words; empty if nothing."""
    if isinstance(error, OSError) and error.errno == errno.EBADF:
        return (
            "a descriptor that kclrun uses was closed in this process: user code may close only"
            " those that it opened (os.closerange, a library that makes itself a daemon)"
        )
    names = replaced()
    if not names or isinstance(error, OSError):
        return ""
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return (
        f"user code replaced {', '.join(names[:_NAMED_MAX])}{more} in this process, which kclrun"
        " uses, too"
    )
