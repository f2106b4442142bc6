"""`${VAR}` and `${VAR:-default}` in text values, from an environment that is an argument.

`$${` is a literal `${`. What was expanded stays marked, so that a number or a switch may come from
the environment, and so that a message never shows a value that was not in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kclrun.config.yaml_reader import Path
from kclrun.errors import SettingsError

__all__ = ["Expanded", "dotted", "expand"]

_REFERENCE: Final = re.compile(r"\$(\$\{)|\$\{([^}]*)\}")
_INSIDE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\Z", re.DOTALL)


class Expanded(str):
    """A text in which variables were replaced; `source` is what the file said."""

    __slots__ = ("source",)

    source: str

    @classmethod
    def of(cls, text: str, source: str) -> Expanded:
        expanded = cls(text)
        expanded.source = source
        return expanded


def expand(value: Any, environment: Mapping[str, str], path: Path = ()) -> Any:
    """Replace the variables in every text below `value`; keys are left alone.

    A variable that is unset or empty takes its default. Raises: SettingsError naming variable and
    path where there is none.
    """
    if isinstance(value, dict):
        return {key: expand(item, environment, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, environment, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def replaced(match: re.Match[str]) -> str:
        return "${" if match[1] else _look_up(match[2], environment, path)

    return Expanded.of(_REFERENCE.sub(replaced, value), value)


def _look_up(inside: str, environment: Mapping[str, str], path: Path) -> str:
    parts = _INSIDE.match(inside)
    if parts is None:
        raise SettingsError(
            f"{dotted(path)}: ${{{inside}}} is no variable; write ${{NAME}} or ${{NAME:-default}}"
        )
    name, default = parts[1], parts[2]
    found = environment.get(name)
    if found or (found is not None and default is None):
        return found
    if default is None:
        raise SettingsError(
            f"{dotted(path)}: the environment variable {name} is not set\n"
            f"Set it, or give a default: ${{{name}:-default}}"
        )
    return default


def dotted(path: Path) -> str:
    """A path as `--set` takes it: `embedded.reshard[0].after`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".") or "the file"
