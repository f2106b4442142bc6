"""YAML text in, plain values out, with the line of every key; and nothing a hostile file can abuse.

Safe tags only; duplicate keys, merge keys and cyclic aliases are errors; sizes, nesting and what
aliases may expand to are bounded [S3]. Instants stay text: `start:` is read by `start_position.py`.
May not know what a setting is. Look next: `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import yaml

from kclrun.errors import SettingsError

__all__ = ["ALIASED_NODES_MAX", "DEPTH_MAX", "TEXT_BYTES_MAX", "Document", "Path", "read_yaml"]

Path = tuple[str | int, ...]

# The longest sensible file is a few hundred lines; a mebibyte is a mistake or an attack.
TEXT_BYTES_MAX: Final = 1_000_000
# An alias may repeat a block or two; "a billion laughs" needs far more nodes than this.
ALIASED_NODES_MAX: Final = 1_000
# Settings nest four deep; `options` may nest on, within reason and far from Python's own limit.
DEPTH_MAX: Final = 40

_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """The safe loader, without dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute, not mutated
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class Document(msgspec.Struct, frozen=True):
    """What a text says: its value, and the line (from 1) on which each path stands."""

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
        raise SettingsError(_in_words(error)) from None
    except (RecursionError, ValueError) as error:
        # ValueError: what PyYAML's own constructors trip over, such as an int of 5,000 digits.
        raise SettingsError(f"not readable as YAML: {type(error).__name__}") from None
    return Document(value, reader.lines)


class _Reader:
    """Turns the node graph into values, counting what aliases repeat."""

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
        return self._loader.construct_object(node)

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
        # YAML 1.1 reads a bare `on` as a boolean: as a key it is the word.
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


def _in_words(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"not readable as YAML: {str(error).splitlines()[0]}"
    line = error.problem_mark.line + 1
    return f"line {line}: not readable as YAML: {error.problem or error.context}"
