"""The arguments of `process()` as settings: types, bounds, rules and values as in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.config.convert import Problem, settle, summary
from kclrun.config.rules import processor_rules
from kclrun.config.schema import Settings, StreamSettings
from kclrun.config.units import Duration, OutOfRange
from kclrun.config.yaml_reader import Path
from kclrun.errors import SettingsError

# The argument of a setting, where it has another name.
_ARGUMENTS: Final[Mapping[Path, str]] = {
    ("fetch", "batch_max"): "batch_max",
    ("on_error", "retries"): "retries",
    ("on_error", "backoff"): "backoff_s",
    ("on_error", "then"): "then",
    ("on_error", "dead_letter"): "dead_letter",
    ("on_error", "limit"): "limit",
    ("output", "schema"): "schema",
    ("concurrency", "records"): "concurrency",
    ("concurrency", "order"): "order",
    ("concurrency", "timeout"): "timeout_s",
}


def processor_settings(processor: str, streams: Sequence[str], **given: Any) -> Settings:
    """The settings of `process(spark, processor, source, **given)`, where `source` are `streams`.

    Raises: SettingsError, naming every argument with a value that the setting refuses.
    """
    tree: dict[str, Any] = {
        "application": "application",  # `process()` names it after the class
        "engine": "spark",
        "processor": processor,
        "options": dict(given["options"] or {}),
        "decode": given["decode"],
        "fetch": {"batch_max": given["batch_max"]},
        "on_error": {
            "retries": given["retries"],
            "backoff": _duration("backoff_s", given["backoff_s"]),
            "then": given["then"],
            "dead_letter": given["dead_letter"],
            "limit": given["limit"],
        },
        "concurrency": {
            "records": 1 if given["concurrency"] is None else given["concurrency"],
            "order": given["order"],
            "timeout": _duration("timeout_s", given["timeout_s"]),
        },
    }
    if given["schema"] is not None:
        tree["output"] = {"schema": given["schema"]}
    problems: list[Problem] = []
    settings = settle(Settings, tree, problems, {})
    names = tuple(StreamSettings(name=name) for name in streams)
    settings = msgspec.structs.replace(settings, streams=names)
    problems += processor_rules(settings) if not problems else ()
    if problems:
        raise SettingsError(summary([_of_argument(problem) for problem in problems], {}, ""))
    if given["concurrency"] is None:
        return msgspec.structs.replace(settings, concurrency=None)
    return settings


def _duration(argument: str, seconds: float | None) -> Duration | None:
    try:
        return None if seconds is None else Duration.of(seconds)
    except OutOfRange as error:
        raise SettingsError(f"{argument}: {error}") from None


def _of_argument(problem: Problem) -> Problem:
    """The same problem at the argument that the setting comes from."""
    argument = _ARGUMENTS.get(problem.path[:2])
    if argument is None:
        return problem
    return Problem((argument, *problem.path[2:]), problem.text)
