"""What a verb has found, on standard output: as text for people, or as JSON for programs.

A verb makes one value, its facts. Here is chosen which form is printed, and how JSON looks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kclrun.cli.messages import echo
from kclrun.model.text import escaped_in_json

F = TypeVar("F")


def print_json(facts: object) -> None:
    """Print one JSON document, indented."""
    echo(json.dumps(msgspec.to_builtins(facts), indent=2))


def print_json_lines(facts: Iterable[object]) -> None:
    """Print one JSON document a line."""
    for fact in facts:
        echo(json_line(fact))


def print_report(
    facts: F,
    print_text: Callable[[F], object],
    *,
    as_json: bool,
    in_json: Callable[[F], object] = print_json,
) -> None:
    """Print the facts by `print_text`, or `in_json`: all their fields, if nothing else is given."""
    if as_json:
        in_json(facts)
    else:
        print_text(facts)


def json_line(fact: object, *, enc_hook: Callable[[Any], Any] | None = None) -> str:
    """One JSON document on one line. `enc_hook` encodes the types that msgspec does not know."""
    return escaped_in_json(msgspec.json.encode(fact, enc_hook=enc_hook).decode())
