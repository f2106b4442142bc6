"""HTML by construction: only this module makes `Html`, and all other text is escaped.

Rows of the table hold texts of other programs. Rule: every text of a page is escaped and bounded,
and every link leads to a page of ours.
"""

from __future__ import annotations

import html
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlencode

from kclrun.model.text import sanitize

# A row of DynamoDB has 400 KB, which one text of it may fill; a traceback's end has 2,000.
TEXT_MAX: Final = 4_000
# Attributes whose names are not those of an argument.
_NAMES: Final = {
    "class_": "class",
    "aria_label": "aria-label",
    "aria_hidden": "aria-hidden",
    "aria_current": "aria-current",
    "aria_live": "aria-live",
    "data_news": "data-news",
    "http_equiv": "http-equiv",
}
_EMPTY: Final = frozenset({"meta", "link", "input"})


class Html(str):
    """Text that is HTML already. Only `element` and `joined` make it."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]


def element(tag: str, *children: Child, **attributes: str | int | None) -> Html:
    """One element; a text among its children is escaped, None is left out.

    Attributes: `class_` is `class`, `aria_label` is `aria-label`; None is left out. A link is made
    by `link`, so that no text from a row becomes an address.
    """
    named = "".join(
        [
            f' {_NAMES.get(name, name)}="{_escaped(str(value))}"'
            for name, value in attributes.items()
            if value is not None
        ]
    )
    if tag in _EMPTY:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{joined(*children)}</{tag}>")


def joined(*children: Child) -> Html:
    """Children one after the other."""
    parts: list[str] = []
    for child in children:
        kind = type(child)  # compared so, because a page of 1,000 shards has 40,000 children
        if kind is Html:
            parts.append(child)  # type: ignore[arg-type]
        elif kind is str:
            parts.append(_escaped(child))  # type: ignore[arg-type]
        elif kind is int:
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(_escaped(str(child)))
        elif child is not None:
            parts.append(joined(*child))  # type: ignore[misc]
    return Html("".join(parts))


def link(
    path: str,
    text: Child,
    query: Mapping[str, str | int | None] = types.MappingProxyType({}),
    *,
    is_current: bool = False,
) -> Html:
    """A link to a path of ours; the query's values are quoted, None is left out."""
    assert path.startswith("/"), "only to our own pages"
    given = {name: value for name, value in query.items() if value is not None}
    asked = f"?{urlencode(given, errors='replace')}" if given else ""
    return element("a", text, href=path + asked, aria_current="page" if is_current else None)


def as_title(text: str) -> str:
    """The text with a capital first letter; the others stay, for they may be a name or a time."""
    return text[:1].upper() + text[1:]


def short(text: str, most: int = 120) -> str:
    """At most so many characters of the first line."""
    first, newline, _ = text.partition("\n")
    return f"{first[:most]}…" if newline or len(first) > most else first


def _escaped(text: str) -> str:
    return _safe(text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…")


# Most of a page's texts are there many times: classes, states, owners. 16 MB at most.
@lru_cache(maxsize=4_096)
def _safe(text: str) -> str:
    return html.escape(sanitize(text))
