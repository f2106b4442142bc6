"""Which lines of Python's logging are shown: `log.level`, `log.levels`; libraries at warning."""

from __future__ import annotations

import functools
import logging
import site
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from typing import Final

from kclrun.model.logger import is_of_users, level_for

_NUMBERS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES_MAX: Final = 1024


def place_of_module(top: str) -> str | None:
    """The file or folder of an imported module; None if there is none."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return file
    # A package without `__init__.py`, such as `google`.
    return next((str(folder) for folder in getattr(module, "__path__", ())), None)


class LoggerLevels:
    """The least level of each logger. `level` is that of the user's own loggers, `levels` are those
    that are set by name, `own` are the packages of the user's code."""

    def __init__(
        self,
        level: str,
        levels: Mapping[str, str],
        own: Collection[str],
        place_of: Callable[[str], str | None] = place_of_module,
    ) -> None:
        self._level = level
        self._levels = levels
        self._own = frozenset(own)
        self._place_of = place_of
        # A logger that is used often costs a look-up.
        self.least = functools.lru_cache(_NAMES_MAX)(self._least)

    def _least(self, name: str) -> int:
        """The number of the least level whose lines are shown."""
        named = level_for(name, self._levels)
        if named is not None:
            return _NUMBERS[named]
        number = _NUMBERS[self._level]
        place = self._place_of(name.partition(".")[0])
        is_own = is_of_users(
            name,
            self._own,
            place,
            libraries=_library_folders(),
            standard=sys.stdlib_module_names,
        )
        return number if is_own else max(number, logging.WARNING)

    def apply(self) -> None:
        """Set the levels of the loggers: a line that is not shown is not made, where that is
        known."""
        logging.getLogger().setLevel(_NUMBERS[self._level])
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(_NUMBERS[level])


@functools.cache
def _library_folders() -> frozenset[str]:
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    return frozenset({*folders, *site.getsitepackages(), site.getusersitepackages()})
