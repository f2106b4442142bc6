"""Is the user's code importable? Asked in a process of its own, so that ours never holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from kclrun.cli.config_options import Configuration
from kclrun.config.schema import Settings
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.loading import MARK, import_paths
from kclrun.manager.process_rights import allowed_environment

__all__ = ["named_user_code", "own_module", "require_user_code"]

# Importing pandas or a model on a cold disk takes some ten seconds; a minute means it hangs.
_IMPORT_MAX_S: Final = 60


def named_user_code(configuration: Configuration) -> Mapping[str, str]:
    """The code these settings name, by setting. Raises: SettingsError without a processor."""
    settings = configuration.settings
    processors = _processors(settings)
    if not processors and settings.pipeline is None:
        other = ", or a pipeline" if settings.engine == "spark" else ""
        raise SettingsError(
            "processor: is missing; name your RecordProcessor, such as processors.hello:Hello"
            f"{other}"
        )
    fill = settings.embedded.fill if settings.embedded is not None else None
    named = {
        **processors,
        "pipeline": settings.pipeline,
        "summary": settings.summary,
        "embedded.fill.source": fill.source if fill is not None else None,
    }
    return {setting: reference for setting, reference in named.items() if reference is not None}


def _processors(settings: Settings) -> dict[str, str]:
    """The processors that a stream has, by setting: the application's, and streams' own."""
    named = {}
    for index, source in enumerate(settings.sources):
        is_own = bool(settings.streams) and settings.streams[index].processor is not None
        if source.processor is not None:
            named[f"streams[{index}].processor" if is_own else "processor"] = source.processor
    return named


def require_user_code(configuration: Configuration) -> None:
    """Import all of it once, elsewhere. Raises: SettingsError, ProcessorLoadError.

    The processor with the environment of a lease process, or it would load here and halt every
    shard there; the rest with ours, which Spark's workers on this machine have, too.
    """
    named = dict(named_user_code(configuration))
    if configuration.settings.engine == "fleet":
        processors = {
            setting: named.pop(setting) for setting in _processors(configuration.settings)
        }
        _import(configuration, processors, allowed_environment(os.environ))
    if named:
        _import(configuration, named, os.environ)


def _import(
    configuration: Configuration, named: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    paths = import_paths(configuration.settings.path, configuration.folder)
    arguments = [f"{setting}={reference}" for setting, reference in named.items()]
    command = [*own_module("kclrun.loading"), *arguments, "--", *map(str, paths)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module; references are checked by pattern
            command,
            env=environment,
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
        said = said or f"the import ended with exit code {done.returncode}"
        raise ProcessorLoadError(said + _on_withheld_variables(said, environment))


def _on_withheld_variables(said: str, environment: Mapping[str, str]) -> str:
    """What to do where user code missed a variable that we have and do not pass on [S9]."""
    withheld = sorted(
        name for name in os.environ.keys() - environment.keys() if f"'{name}'" in said
    )
    if not withheld:
        return ""
    names = ",".join(withheld)
    return f"\nLease processes get a variable of that name with:  export KCLRUN_PASS_ENV={names}"


def own_module(module: str) -> list[str]:
    """The command for one of our modules, with the current folder kept off its path [S4]."""
    return [sys.executable, "-P", "-m", module]
