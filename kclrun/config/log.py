"""Rules of `log:`, and which packages are the user's own. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kclrun.config.convert import Problem
from kclrun.config.schema import LogSettings, Settings
from kclrun.model.logger import CAPPED_LOGGERS


def log_rules(log: LogSettings) -> Iterator[Problem]:
    """The problems of these settings."""
    for name, level in log.levels.items():
        path = ("log", "levels", name)
        if not name or name.startswith(".") or name.endswith("."):
            yield Problem(path, "is not the name of a logger, such as httpx or mylib.retries")
        elif level == "debug" and name.partition(".")[0] in CAPPED_LOGGERS:
            yield Problem(path, "its debug lines show signed requests: expected info or above")


def own_packages(settings: Settings) -> tuple[str, ...]:
    """The first names of the modules with the user's code."""
    references = [settings.processor, settings.decode]
    for source in settings.sources:
        references += [source.processor, source.decode]
    otlp = settings.observe.otlp
    if otlp is not None and otlp.traces is not None:
        references.append(otlp.traces.context)
    tops = {
        reference.partition(":")[0].partition(".")[0]
        for reference in references
        if reference and ":" in reference
    }
    return tuple(sorted(tops))
