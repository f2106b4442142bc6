"""A file, the command line and the environment into `Settings`; or a message a person can act on.

Read (trusted, bounded) → override → refuse secrets → expand → settle into types → rules. Rule: all
problems are reported at once, each with its path, and with its line if it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kclrun.config import yaml_reader
from kclrun.config.convert import Problem, settle, summary
from kclrun.config.file_permissions import read_secret, read_trusted, refuse_secrets
from kclrun.config.rules import missing_stream, relation_rules, value_rules
from kclrun.config.schema import Settings
from kclrun.config.yaml_reader import dotted, expand
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

_SECRETS: Final = "/run/secrets"
# For a file without an application. The value is never seen, because its lack is a problem.
_STAND_INS: Final = {"application": "application"}


def load_settings(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    now: WallTime,
    used: Collection[str] | None = None,
) -> Settings:
    """The settings of a file, `--set` overrides applied, `${VAR}` replaced.

    `now` judges `start:`. `used` names the sections that the caller uses, besides those of the
    streams and the lease table; None: all. What else the file has may lack its variables.
    Raises: SettingsError, naming every problem found.
    """
    return settings_of(
        read_trusted(path), overrides, environment=environment, now=now, name=path.name, used=used
    )


def settings_of(
    text: str,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    now: WallTime,
    name: str = "the file",
    used: Collection[str] | None = None,
) -> Settings:
    """The same for a text; messages call it `name`. Raises: SettingsError."""
    document = _document(text, name)
    lines = dict(document.lines)
    tree = document.value if document.value is not None else {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{name}: expected settings, one a line, such as `stream: orders`")
    for override in overrides:
        for overridden in _override(tree, override):
            lines.pop(overridden, None)
    return settings_from(tree, environment=environment, now=now, name=name, lines=lines, used=used)


def settings_from(
    tree: dict[str, Any],
    *,
    environment: Mapping[str, str],
    now: WallTime,
    name: str,
    lines: Mapping[yaml_reader.Path, int] | None = None,
    used: Collection[str] | None = None,
) -> Settings:
    """The same for values as YAML has them; `lines` has the lines of a file. Raises:
    SettingsError."""
    refuse_secrets(tree)
    problems: list[Problem] = list(missing_stream(tree))
    left = _UnusedValues(used)
    settings = settle(Settings, _expanded(tree, environment, left), problems, _STAND_INS)
    problems = left.others(problems)
    # Rules between settings are checked once each setting fits its type.
    rules = [*value_rules(settings, now), *(relation_rules(settings) if not problems else ())]
    problems.extend(left.others(rules))
    if problems:
        raise SettingsError(summary(problems, lines or {}, name))
    return settings


# What a verb needs that looks at the streams and the lease table. The others name the sections that
# they use, too.
_COMMON: Final = frozenset(
    {"application", "stream", "streams", "engine", "start", "aws", "leases", "fetch", "until"}
)
# What is used only by a verb that runs user code or opens an output: the processor's own options,
# the address of a database, and the options of Spark. None of them names a resource in AWS.
_OF_A_RUN: Final = frozenset({"options", "sql", "conf"})


class _UnusedValues:
    """The values that are not used, and whose variable or secret is missing: they are left as they
    are in the file, and no rule judges their section."""

    def __init__(self, used: Collection[str] | None) -> None:
        self._used = used
        self._sections: set[yaml_reader.Path] = set()

    def take(self, path: yaml_reader.Path) -> bool:
        """Whether the value at this path is not used."""
        if self._used is None:
            return False
        is_of_run = any(step in _OF_A_RUN for step in path)
        if not is_of_run and (path[0] in _COMMON or path[0] in self._used):
            return False
        self._sections.add(_section(path))
        return True

    def others(self, problems: Iterable[Problem]) -> list[Problem]:
        """Those of the problems that are not of such a section."""
        return [problem for problem in problems if _section(problem.path) not in self._sections]


def _section(path: yaml_reader.Path) -> yaml_reader.Path:
    """One output, one setting of a stream, or a section at the top."""
    return path[: {"outputs": 2, "streams": 3}.get(str(path[0]), 1)] if path else path


def _expanded(tree: dict[str, Any], environment: Mapping[str, str], left: _UnusedValues) -> Any:
    """Secrets are files of one folder: that of systemd's credentials, or that of containers."""
    named = environment.get("KCLRUN_SECRETS") or environment.get("CREDENTIALS_DIRECTORY")
    folder = Path(named or _SECRETS)
    return expand(tree, environment, lambda name: read_secret(folder / name), unknown=left.take)


def _document(text: str, name: str) -> yaml_reader.Document:
    try:
        return yaml_reader.read_yaml(text)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None


def _override(tree: dict[str, Any], override: str) -> Iterator[yaml_reader.Path]:
    """Put one `a.b=c` into the tree; yields the paths whose lines are not valid any more."""
    target, equals, text = override.partition("=")
    steps = target.split(".")
    if not equals or not all(steps):
        raise SettingsError(f"--set {override[:60]}: expected a.b=value, such as leases.max=8")
    value = _document(text, f"--set {target}").value
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
