"""A file, the command line and the environment into `Settings`; or a message a person can act on.

Read (trusted, bounded) → override → refuse secrets → expand → settle into types → rules.
Rule: everything wrong is told at once, with its path, and its line where it has one.
Look next: `schema.py` for the settings, `settle.py` for the walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kclrun.config import yaml_reader
from kclrun.config.expand import dotted, expand
from kclrun.config.rules import broken_rules
from kclrun.config.schema import Settings
from kclrun.config.settle import Problem, settle, summary
from kclrun.config.stream_rules import missing_stream
from kclrun.config.trust import read_trusted, refuse_secrets
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

__all__ = ["load_settings", "settings_of"]


def load_settings(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    now: WallTime,
) -> Settings:
    """The settings of a file, `--set` overrides applied, `${VAR}` replaced.

    `now` judges `start:`. Raises: SettingsError, naming every problem found.
    """
    return settings_of(
        read_trusted(path), overrides, environment=environment, now=now, name=path.name
    )


def settings_of(
    text: str,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    now: WallTime,
    name: str = "the file",
) -> Settings:
    """The same for a text; `name` is what messages call it. Raises: SettingsError."""
    document = _document(text, name)
    lines = dict(document.lines)
    tree = document.value if document.value is not None else {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{name}: expected settings, one a line, such as `stream: orders`")
    for override in overrides:
        for overridden in _override(tree, override):
            lines.pop(overridden, None)
    refuse_secrets(tree)
    problems: list[Problem] = list(missing_stream(tree))
    settings: Settings | None = settle(Settings, expand(tree, environment), problems)
    if settings is not None:
        problems.extend(broken_rules(settings, now))
    if settings is None or problems:
        raise SettingsError(summary(problems, lines, name))
    return settings


def _document(text: str, name: str) -> yaml_reader.Document:
    try:
        return yaml_reader.read_yaml(text)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None


def _override(tree: dict[str, Any], override: str) -> Iterator[yaml_reader.Path]:
    """Put one `a.b=c` into the tree; yields the paths whose lines no longer hold."""
    target, equals, text = override.partition("=")
    steps = target.split(".")
    if not equals or not all(steps):
        raise SettingsError(f"--set {override[:60]}: expected a.b=value, such as leases.max=8")
    value = _override_value(target, text)
    for index, step in enumerate(steps[:-1]):
        below = tree.get(step)
        if below is None:
            below = tree[step] = {}
        if not isinstance(below, dict):
            there = dotted(tuple(steps[: index + 1]))
            raise SettingsError(f"--set {target}: {there} holds no settings of its own")
        tree = below
    tree[steps[-1]] = value
    yield tuple(steps)


def _override_value(target: str, text: str) -> Any:
    try:
        return yaml_reader.read_yaml(text).value
    except SettingsError as error:
        raise SettingsError(f"--set {target}: {error}") from None
