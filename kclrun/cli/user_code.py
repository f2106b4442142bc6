"""Is the user's code importable? Asked in a process of its own, so that ours never holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from kclrun.cli.config_options import Configuration
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.loading import MARK, import_paths

__all__ = ["named_user_code", "own_module", "require_user_code"]

# Importing pandas or a model on a cold disk takes some ten seconds; a minute means it hangs.
_IMPORT_MAX_S: Final = 60


def named_user_code(configuration: Configuration) -> Mapping[str, str]:
    """The code these settings name, by setting. Raises: SettingsError without a processor."""
    settings = configuration.settings
    if settings.processor is None:
        raise SettingsError(
            "processor: is missing; name your RecordProcessor, such as processors.hello:Hello"
        )
    fill = settings.embedded.fill if settings.embedded is not None else None
    named = {
        "processor": settings.processor,
        "summary": settings.summary,
        "embedded.fill.source": fill.source if fill is not None else None,
    }
    return {setting: reference for setting, reference in named.items() if reference is not None}


def require_user_code(configuration: Configuration) -> None:
    """Import all of it once, elsewhere. Raises: SettingsError, ProcessorLoadError."""
    named = named_user_code(configuration)
    paths = import_paths(configuration.settings.path, configuration.folder)
    arguments = [f"{setting}={reference}" for setting, reference in named.items()]
    command = [*own_module("kclrun.loading"), *arguments, "--", *map(str, paths)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module; references are checked by pattern
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_IMPORT_MAX_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProcessorLoadError(
            f"importing {', '.join(named.values())} takes longer than {_IMPORT_MAX_S} s\n"
            "An import must not wait for the network; connect in `initialize`"
        ) from None
    if done.returncode != os.EX_OK:
        said = done.stderr.decode(errors="replace").rpartition(MARK)[2].strip()
        raise ProcessorLoadError(said or f"the import ended with exit code {done.returncode}")


def own_module(module: str) -> list[str]:
    """The command for one of our modules, with the current folder kept off its path [S4]."""
    return [sys.executable, "-P", "-m", module]
