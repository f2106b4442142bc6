"""The settings as the page shows them: sections of names and values, without secrets. Pure.

Rule: only settings that are named here are shown, and those cannot hold a secret. Of options and
tags only the names are shown, of a database nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kclrun.config.schema import OutputSettings, Settings, StreamSettings, stream_name

Pairs = tuple[tuple[str, str], ...]

# Settings in sections of their own, all values of which are durations, sizes, numbers and names.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "leases": (
        "max",
        "per_process",
        "moves_per_cycle",
        "balance",
        "failover",
        "group",
        "cleanup",
        "create",
    ),
    "fetch": ("mode", "consumer", "idle", "buffer", "batch_max", "kpl_range"),
    "checkpoint": ("every", "uncheckpointed_max"),
    "on_error": ("retries", "backoff", "max_age", "then", "limit"),
    "observe": ("listen", "hot_window"),
    "instance": ("watch", "rebalance", "group", "launch_hook", "termination_hook"),
    "aws": ("region", "endpoint", "profile", "role_arn", "start_timeout"),
}
_DESTINATIONS: Final = ("path", "s3", "dynamodb", "kinesis", "sqs", "sns", "firehose")


def plan_of(settings: Settings) -> tuple[tuple[str, Pairs], ...]:
    """All sections, in the order of the page."""
    application = [
        ("application", settings.application),
        ("lease table", settings.table),
        ("engine", settings.engine),
        ("start", settings.start_text),
        ("stall", _text(settings.stall)),
    ]
    sections: list[tuple[str, Pairs]] = [("Application", tuple(application))]
    sections += [
        (f"Stream {stream_name(source.name)}", tuple(_stream(source)))
        for source in settings.sources
    ]
    for name, names in _SECTIONS.items():
        section = getattr(settings, name)
        pairs = tuple((f"{name}.{each}", _text(getattr(section, each))) for each in names)
        sections.append((name, pairs))
    outputs = {"output": settings.output, **settings.outputs}
    for name, output in outputs.items():
        if output is not None:
            sections.append((f"Output {name}", tuple(_output(output))))
    return tuple(sections)


def letters_of(settings: Settings) -> str:
    """Where dead letters are, in words; empty if the application keeps none."""
    if settings.on_error.then != "dead-letter":
        return ""
    place = settings.on_error.dead_letter
    kinds = (("folder", place.path), ("bucket", place.s3), ("queue", place.sqs))
    named = [f"{kind} {where}" for kind, where in (*kinds, ("stream", place.stream)) if where]
    return f"Dead letters are kept in: {', '.join(named) or 'the folder of the application'}."


def _stream(source: StreamSettings) -> Iterator[tuple[str, str]]:
    yield "name", source.name
    yield "processor", _text(source.processor)
    yield "decode", _text(source.decode)
    yield "start", _text(source.start)
    yield "priority", _text(source.priority)
    yield "options (names only)", ", ".join(sorted(source.options)) or "none"


def _output(output: OutputSettings) -> Iterator[tuple[str, str]]:
    for name in _DESTINATIONS:
        where = getattr(output, name)
        if where is not None:
            yield name, where
    if output.sql is not None:
        yield "sql", f"table {output.table}; its address is not shown"
    yield "format", _text(output.format)
    if output.roll is not None:
        yield "roll", f"every {_text(output.roll.every)} or {_text(output.roll.size)}"


def _text(value: Any) -> str:
    """A value as the file would have it; a dash where it is left out."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    shown = getattr(value, "text", None)
    return str(shown) if isinstance(shown, str) else str(msgspec.to_builtins(value, str_keys=True))
