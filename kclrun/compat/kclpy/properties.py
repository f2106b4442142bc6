"""A Java properties file into names and values. Pure; bounded by who reads the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kclrun.errors import SettingsError

__all__ = ["read_properties"]

# A line that ends in an odd number of backslashes goes on in the next.
_GOES_ON: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
# A key ends at the first = : or space that no backslash protects.
_KEY: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NAMED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(text: str) -> dict[str, str]:
    """The properties in the order of the file; of one that is set twice, the last value.

    As `java.util.Properties` reads them: `#` and `!` begin comments, `\\` at a line's end joins it
    with the next, `\\uXXXX` is a character. Raises: SettingsError for a `\\u` that is none.
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

    # Java writes what is beyond 16 bits as two escapes.
    halves = _ESCAPE.sub(character, text).encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "replace")
