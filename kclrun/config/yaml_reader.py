"""YAML text in, plain values out, with the line of every key; `${VAR}` in text is expanded.

Safe tags only. Duplicate keys, merge keys and cyclic aliases are errors; sizes, nesting and the
expansion of aliases are bounded [S3]. Instants stay text: `start:` is read by `units.py`. The
environment is an argument. `Expanded` marks expanded texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
import yaml

from kclrun.errors import SettingsError

Path = tuple[str | int, ...]

# The longest sensible file is a few hundred lines; a mebibyte is a mistake or an attack.
TEXT_BYTES_MAX: Final = 1_000_000
# An alias may repeat a block or two; "a billion laughs" needs far more nodes than this.
ALIASED_NODES_MAX: Final = 1_000
# Settings nest four deep; `options` may nest on, within reason and far from Python's own limit.
DEPTH_MAX: Final = 40

# The range that lease processes can receive (msgpack). A longer number is an identifier, and a
# text.
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1

_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """The safe loader, without dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute, not mutated
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # Also where the tag is written: `!!timestamp 2026-03-01` is the text.
    yaml_constructors = yaml.SafeLoader.yaml_constructors | {
        _TIMESTAMP: yaml.SafeLoader.construct_yaml_str
    }


class Document(msgspec.Struct, frozen=True):
    """The content of a text: its value, and the line (from 1) of each path."""

    value: Any
    lines: dict[Path, int]


def read_yaml(text: str) -> Document:
    """Read one YAML document. Raises: SettingsError that names the line."""
    if len(text.encode(errors="surrogatepass")) > TEXT_BYTES_MAX:
        raise SettingsError(f"the text is longer than {TEXT_BYTES_MAX:,} bytes")
    try:
        loader = _Loader(text)
        reader = _Reader(loader)
        node = loader.get_single_node()
        value = None if node is None else reader.value(node, (), 0)
    except yaml.YAMLError as error:
        raise SettingsError(_in_words(error, text)) from None
    except (RecursionError, ValueError) as error:
        # ValueError: raised by PyYAML's own scanner for some texts.
        raise SettingsError(f"not readable as YAML: {type(error).__name__}") from None
    return Document(value, reader.lines)


class _Reader:
    """Turns the node graph into values, and counts the repetitions by aliases."""

    def __init__(self, loader: _Loader) -> None:
        self.lines: dict[Path, int] = {}
        self._loader = loader
        self._seen: set[int] = set()
        self._aliased_nodes = 0

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self._count(node, depth)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path, depth))
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)
            ]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        line = node.start_mark.line + 1
        try:
            scalar = self._loader.construct_object(node)
        except (AttributeError, LookupError, ValueError):
            # PyYAML converts a text to its tag unchecked: `!!bool maybe`, `!!int ''`, `0b_`.
            if not node.value.lstrip("+-").replace("_", "").isdecimal():
                tag = node.tag.rpartition(":")[2]
                raise SettingsError(
                    f"line {line}: {node.value[:60]!r} cannot be read as !!{tag}; if it is a text,"
                    " put it in quotes"
                ) from None
            scalar = _INT_MAX + 1  # Python makes no int of more than 4,300 decimal digits
        if isinstance(scalar, int) and not _INT_MIN <= scalar <= _INT_MAX:
            raise SettingsError(
                f"line {line}: a number of more than 64 bits; if it is an identifier, put it in"
                " quotes"
            )
        return scalar

    def _pairs(self, node: yaml.MappingNode, path: Path, depth: int) -> Iterator[tuple[str, Any]]:
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._key(key_node, line)
            if key in first_line:
                raise SettingsError(
                    f"line {line}: {key!r} appears twice (first on line {first_line[key]})"
                )
            first_line[key] = line
            self.lines[(*path, key)] = line
            yield key, self.value(value_node, (*path, key), depth + 1)

    def _key(self, node: yaml.Node, line: int) -> str:
        if node.tag == "tag:yaml.org,2002:merge":
            raise SettingsError(f"line {line}: merge keys (<<) are not supported; write them out")
        if not isinstance(node, yaml.ScalarNode):
            raise SettingsError(f"line {line}: a key must be a word")
        # YAML 1.1 reads a bare `on` as a boolean. As a key it is the word.
        return str(node.value)

    def _count(self, node: yaml.Node, depth: int) -> None:
        line = node.start_mark.line + 1
        if depth > DEPTH_MAX:
            raise SettingsError(f"line {line}: nested deeper than {DEPTH_MAX}")
        if id(node) in self._seen:
            self._aliased_nodes += 1
            if self._aliased_nodes > ALIASED_NODES_MAX:
                raise SettingsError(
                    f"line {line}: aliases repeat more than {ALIASED_NODES_MAX:,} values"
                )
        self._seen.add(id(node))


def _in_words(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: not readable as YAML: the character U+{error.character:04X}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"not readable as YAML: {str(error).splitlines()[0]}"
    line = error.problem_mark.line + 1
    message = f"line {line}: not readable as YAML: {error.problem or error.context}"
    if any("${" in here for here in text.splitlines()[line - 1 : line]):
        return f'{message}\nInside {{ }} and [ ] a variable needs quotes: "${{NAME}}"'
    return message


_REFERENCE: Final = re.compile(r"\$(\$\{)|\$\{([^}]*)\}")
_INSIDE: Final = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\Z", re.DOTALL)
# A file of a secret: no step out of its folder.
_SECRET: Final = re.compile(r"secret:([A-Za-z0-9_][A-Za-z0-9_.-]*)\Z")


class Expanded(str):
    """A text in which variables were replaced; `source` is the text in the file.

    The mark lets a number or a switch come from the environment, and keeps values that were not in
    the file out of messages.
    """

    __slots__ = ("source",)

    source: str

    @classmethod
    def of(cls, text: str, source: str) -> Expanded:
        expanded = cls(text)
        expanded.source = source
        return expanded


def expand(
    value: Any,
    environment: Mapping[str, str],
    secret: Callable[[str], str],
    path: Path = (),
    unknown: Callable[[Path], bool] = lambda _: False,
) -> Any:
    """Replace `${NAME}`, `${env:NAME}` and `${secret:NAME}` in every text below `value`; keys are
    left alone.

    A variable that is unset or empty takes its default. `secret` gives the secret of a name; it is
    percent-encoded if it is a part of an URL. `unknown` is called with the path of a text whose
    variable or secret is missing: if it answers yes, the text stays as it is in the file.
    Raises: SettingsError naming variable and path if there is no default.
    """

    def below(item: Any, step: str | int) -> Any:
        return expand(item, environment, secret, (*path, step), unknown)

    if isinstance(value, dict):
        return {key: below(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [below(item, at) for at, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return Expanded.of(_replaced(value, environment, secret, path), value)
    except SettingsError:
        if not unknown(path):
            raise
        return Expanded.of(value, value)


def _replaced(
    value: str, environment: Mapping[str, str], secret: Callable[[str], str], path: Path
) -> str:
    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return "${"
        named = _SECRET.match(match[2])
        if named is None:
            return _look_up(match[2], environment, path)
        try:
            found = secret(named[1])
        except SettingsError as error:
            raise SettingsError(
                f"{dotted(path)}: {error}\nA secret is a file of this name in the folder that"
                " KCLRUN_SECRETS names, in systemd's CREDENTIALS_DIRECTORY, or in /run/secrets"
            ) from None
        # Inside of an URL, `@`, `:` or `/` of a password would end it.
        return quote(found, safe="") if "://" in value else found

    return _REFERENCE.sub(replaced, value)


def _look_up(inside: str, environment: Mapping[str, str], path: Path) -> str:
    parts = _INSIDE.match(inside)
    if parts is None:
        raise SettingsError(
            f"{dotted(path)}: ${{{inside}}} is not a variable; write ${{NAME}}, ${{NAME:-default}}"
            " or ${secret:NAME}"
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
    """A path in a message: `embedded.reshard[0].after`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".") or "the file"
