"""What `observe:` may say: an address to listen at, dimensions that CloudWatch takes. Pure.

Limits: CloudWatch, PutMetricData, Dimension: 30 to a metric, of which two are ours; 255 characters
of ASCII to a name, 1,024 to a value; no name begins with a colon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kclrun.config.listening import parse_listen
from kclrun.config.schema import ObserveSettings
from kclrun.config.settle import Problem

__all__ = ["observe_rules"]

_OWN_DIMENSIONS: Final = frozenset({"Application", "Shard"})
_DIMENSIONS_MAX: Final = 30 - len(_OWN_DIMENSIONS)
_NAME_CHARACTERS_MAX: Final = 255
_VALUE_CHARACTERS_MAX: Final = 1024


def observe_rules(observe: ObserveSettings) -> Iterator[Problem]:
    """The problems of these settings."""
    if observe.listen is not None:
        try:
            parse_listen(observe.listen)
        except ValueError as error:
            yield Problem(("observe", "listen"), str(error))
    if observe.cloudwatch is not None:
        yield from _dimensions(observe.cloudwatch.dimensions)


def _dimensions(dimensions: Mapping[str, str]) -> Iterator[Problem]:
    path = ("observe", "cloudwatch", "dimensions")
    if len(dimensions) > _DIMENSIONS_MAX:
        yield Problem(path, f"expected at most {_DIMENSIONS_MAX}: CloudWatch takes no more")
    for name, value in dimensions.items():
        if name in _OWN_DIMENSIONS:
            yield Problem((*path, name), "is set by kclrun; choose another name")
        elif name.startswith(":") or not _is_text(name, _NAME_CHARACTERS_MAX):
            yield Problem((*path, name), "is no name of a dimension: plain text, no colon in front")
        elif not _is_text(value, _VALUE_CHARACTERS_MAX):
            yield Problem((*path, name), "expected a value of plain text that is not empty")


def _is_text(text: str, characters_max: int) -> bool:
    is_plain = text.isascii() and text.isprintable()
    return bool(text.strip()) and is_plain and len(text) <= characters_max
