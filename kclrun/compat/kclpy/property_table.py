"""The properties of the MultiLangDaemon, each with its setting and the differences; a reader.

`properties.yaml` has the table. `app_yaml.py` writes by it, and a page of the reference shows it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kclrun.config.data_files import package_data
from kclrun.errors import SettingsError

# A line that ends in an odd number of backslashes continues in the next.
_GOES_ON: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
# A key ends at the first = : or space without a backslash before it.
_KEY: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NAMED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(text: str) -> dict[str, str]:
    """The properties in the order of the file; of a property set twice, the last value.

    As `java.util.Properties` reads them: `#` and `!` begin comments, `\\` at a line's end joins it
    with the next, `\\uXXXX` is a character. Raises: SettingsError for a `\\u` without four digits.
    """
    properties: dict[str, str] = {}
    for line in _logical_lines(text):
        match = _KEY.match(line)
        assert match is not None, "the pattern takes the empty text, too"
        name = _unescaped(match[1])
        properties.pop(name, None)
        properties[name] = _unescaped(line[match.end() :])
    return properties


def _logical_lines(text: str) -> Iterator[str]:
    begun = ""
    for line in re.split(r"\r\n|\r|\n", text):
        bare = line.lstrip(" \t\f")
        if not begun and (not bare or bare[0] in "#!"):
            continue
        begun += bare
        if _GOES_ON.search(begun):
            begun = begun[:-1]
            continue
        yield begun
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code == "u":
            raise SettingsError(f"{text[:40]!r}: \\u is followed by four hexadecimal digits")
        return chr(int(code[1:], 16)) if len(code) > 1 else _NAMED.get(code, code)

    # Java writes characters beyond 16 bits as two escapes.
    halves = _ESCAPE.sub(character, text).encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "replace")


class Property(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One property. `setting` is empty for a property without a counterpart.

    `note` is the reason then; else it is the difference.
    """

    name: str
    setting: str
    note: str = ""


class _Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties without a counterpart, for one reason."""

    because: str
    names: tuple[str, ...]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    with_setting: tuple[Property, ...]
    without: tuple[_Reason, ...]


@functools.cache
def known_properties() -> tuple[Property, ...]:
    """All properties: those with a setting first."""
    table = package_data("kclrun.compat.kclpy", "properties.yaml", _Table)
    without = (
        Property(name, "", reason.because) for reason in table.without for name in reason.names
    )
    return (*table.with_setting, *without)


@functools.cache
def by_name() -> Mapping[str, Property]:
    """Each property by its name in lower case: the daemon accepts `AWSCredentialsProvider` and
    `AwsCredentialsProvider`, and has changed the case of other names over the years."""
    return {known.name.lower(): known for known in known_properties()}
