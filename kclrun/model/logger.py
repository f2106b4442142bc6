"""Loggers of Python's logging by their names: whose they are, and the level that is set for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

# Never below info: their debug lines show signed headers and bodies [S6].
CAPPED_LOGGERS: Final = ("botocore", "boto3", "urllib3", "s3transfer")
_MAIN: Final = frozenset({"root", "__main__"})


def is_of_users(
    name: str,
    own: Collection[str],
    place: str | None,
    *,
    libraries: Collection[str],
    standard: Collection[str],
) -> bool:
    """Whether a logger of this name belongs to the user's code, and not to a library.

    It does if its first name is one of `own`, the packages of the processor and of other user code
    of the settings; or is not a module (`place` is None); or is a module outside of `libraries`,
    the folders of installed packages. `place` is the file or folder of the module of that name,
    `standard` are the modules of Python.
    """
    top = name.partition(".")[0]
    if top in own or top in _MAIN:
        return True
    if top in standard:
        return False
    return place is None or not any(place.startswith(f"{folder}/") for folder in libraries)


def level_for(name: str, levels: Mapping[str, str]) -> str | None:
    """The level that is set for a logger: that of the longest name that is it or a parent."""
    while name:
        if name in levels:
            return levels[name]
        name = name.rpartition(".")[0]
    return None
