"""Text of other origin, made fit for a terminal or one line of a log. Pure.

The one place that defines which characters never leave unchanged [S6]: controls, line and paragraph
separators, lone surrogates, and formatting characters, which are invisible and may reorder, hide or
smuggle text. Emoji joined by U+200D come apart; that is a faithful view of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

# Unicode's categories Cc, Cf, Zl, Zp and Cs, and the whole block of tags and variation selectors
# above U+E0000. Written out, because a query of `unicodedata` for each of 1.1 million characters
# would take 0.1 s at every start; a test compares.
_UNSAFE_BUT_LINES: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    r"\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff"
)
_BUT_LINES: Final = re.compile(f"[{_UNSAFE_BUT_LINES}]")
_NAMED_MAX: Final = 8
_ALL: Final = re.compile(rf"[\t\n{_UNSAFE_BUT_LINES}]")
# What looks like a key or a token: the id of an access key, a long run, the value of a field whose
# name says so, and the user and the query of a URL.
_KEY_ID: Final = re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b")
_LONG_RUN: Final = re.compile(r"[A-Za-z0-9+/=_-]{40,}")
_LETTER: Final = re.compile(r"[A-Za-z]")
_DIGIT: Final = re.compile(r"[0-9]")
_NAMED_SECRET: Final = re.compile(
    r"(?i)((?:secret|token|password|passwd|pwd|signature|access[_-]?key|api[_-]?key)[a-z_-]*[\"']?"
    r"\s*(?:=|:(?=\s*\S{6}))\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&}]+)"
)
_USER_INFO: Final = re.compile(
    r"(?<=://)[^\s/@?#\"']*(?:@[^\s/@?#\"']*)*@|[^\s/@:\"']*:[^\s/@\"']+@"
)
_QUERY: Final = re.compile(r"(://[^\s?#\"']*)[?#][^\s\"']*")


def escaped(text: str, *, keeps_lines: bool = False) -> str:
    r"""On one line: a line feed as `\n`, an escape as `\x1b`. `keeps_lines`: line feeds and tabs
    stay, for JSON, which escapes them itself."""
    return (_BUT_LINES if keeps_lines else _ALL).sub(_escape, text)


def escaped_in_json(encoded: str) -> str:
    r"""JSON with such characters as `\u202e`, which is the same value to every program."""
    return _BUT_LINES.sub(lambda match: json.dumps(match[0])[1:-1], encoded)


def sanitize(text: str) -> str:
    """Several lines, without characters that move a cursor, hide text or forge a line."""
    return _BUT_LINES.sub("�", text)


def some_of(names: Sequence[str]) -> str:
    """The first eight names, and how many there are if there are more."""
    more = f", … {len(names)} in all" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _unless_plain(match: re.Match[str]) -> str:
    """A long run of letters alone is a word or a filling."""
    has_both = _LETTER.search(match[0]) and _DIGIT.search(match[0])
    return "…" if has_both else match[0]


def without_secrets(text: str) -> str:
    """A text of other origin for a message: whatever looks like a key, a token or a password is
    left out. It may leave out more than that."""
    shown = _NAMED_SECRET.sub(r"\1…", _USER_INFO.sub("…@", text))
    return _LONG_RUN.sub(_unless_plain, _KEY_ID.sub("…", _QUERY.sub(r"\1?…", shown)))
