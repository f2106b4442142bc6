"""The settings of `process()`: types, bounds, rules and values as in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

import msgspec

from kclrun.config.convert import Problem, settle, summary
from kclrun.config.rules import processor_rules
from kclrun.config.schema import Settings, StreamSettings
from kclrun.config.units import Duration, OutOfRange
from kclrun.errors import SettingsError
from kclrun.model.policies import Order, Then


class Replaced(TypedDict, total=False):
    """The keywords that `process` had before 1.0, one for a setting. kclrun 2.0 lacks them."""

    batch_max: int
    retries: int
    backoff_s: float
    then: Then
    dead_letter: Mapping[str, str] | None
    limit: int
    decode: str | None
    schema: str | None
    concurrency: int | None
    order: Order
    timeout_s: float | None


# The setting of each of them.
REPLACED: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_max": ("fetch", "batch_max"),
    "retries": ("on_error", "retries"),
    "backoff_s": ("on_error", "backoff"),
    "then": ("on_error", "then"),
    "dead_letter": ("on_error", "dead_letter"),
    "limit": ("on_error", "limit"),
    "decode": ("decode",),
    "schema": ("output", "schema"),
    "concurrency": ("concurrency", "records"),
    "order": ("concurrency", "order"),
    "timeout_s": ("concurrency", "timeout"),
}
# The sections and settings that `process` takes. A user's own program has the others elsewhere: the
# stream in `source`, the query in Spark's writer.
_TAKEN: Final[Mapping[str, frozenset[str]]] = {
    "fetch": frozenset({"batch_max"}),
    "output": frozenset({"schema"}),
    "on_error": frozenset(),
    "concurrency": frozenset(),
    "decode": frozenset(),
}


def processor_settings(
    processor: str,
    streams: Sequence[str],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    replaced: Replaced,
) -> Settings:
    """The settings of `process(spark, processor, source, settings=given, **replaced)`, where
    `source` are `streams`.

    Raises: SettingsError, naming every setting and keyword with a value that is refused.
    """
    tree = _with_replaced(given, replaced)
    has_concurrency = "concurrency" in given or replaced.get("concurrency") is not None
    tree |= {
        "application": "application",  # `process()` names it after the class
        "engine": "spark",
        "processor": processor,
        "options": dict(options),
    }
    problems: list[Problem] = list(_not_taken(given))
    settings = settle(Settings, tree, problems, {})
    names = tuple(StreamSettings(name=name) for name in streams)
    settings = msgspec.structs.replace(settings, streams=names)
    problems += processor_rules(settings) if not problems else ()
    if problems:
        named = [_of_keyword(problem, replaced) for problem in problems]
        raise SettingsError(summary(named, {}, ""))
    if not has_concurrency:
        return msgspec.structs.replace(settings, concurrency=None)
    return settings


def _with_replaced(given: Mapping[str, Any], replaced: Replaced) -> dict[str, Any]:
    """The settings, and those of the keywords of before."""
    tree = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()
    }
    for keyword, given_value in replaced.items():
        path, value = REPLACED[keyword], _value(keyword, given_value)
        if value is None:
            continue
        if len(path) == 1:
            tree[path[0]] = value
        else:
            tree.setdefault(path[0], {})[path[1]] = value
    return tree


def _not_taken(given: Mapping[str, Any]) -> list[Problem]:
    where = (
        "is not a setting of kclrun.spark.process, which takes decode, fetch.batch_max, on_error,"
        " concurrency and output.schema"
    )
    problems = [Problem((name,), where) for name in given if name not in _TAKEN]
    for section, taken in _TAKEN.items():
        inside = given.get(section)
        if taken and isinstance(inside, Mapping):
            problems += [Problem((section, name), where) for name in inside if name not in taken]
    return problems


def _value(keyword: str, value: Any) -> Any:
    """As the setting has it: those in seconds are durations there."""
    if value is None or not keyword.endswith("_s"):
        return value
    try:
        return Duration.of(value)
    except OutOfRange as error:
        raise SettingsError(f"{keyword}: {error}") from None


def _of_keyword(problem: Problem, replaced: Replaced) -> Problem:
    """The same problem at the keyword that the value comes from."""
    for keyword, path in REPLACED.items():
        if keyword in replaced and problem.path[: len(path)] == path:
            return Problem((keyword, *problem.path[len(path) :]), problem.text)
    return problem
