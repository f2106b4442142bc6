"""The outputs of an application: which settings fit which destination, and each one resolved.

Pure. `rules.py` calls the rules; the manager makes an `OutputDestination` of each output for the
start command of a lease process, and `kclrun check` for its tests.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

import msgspec

from kclrun.config.convert import Problem
from kclrun.config.destinations import OutputSettings, RollSettings
from kclrun.config.schema import (
    Settings,
    stream_name,
)
from kclrun.config.yaml_reader import Path
from kclrun.model.output import MAIN_OUTPUT, OutputDestination, setting_of
from kclrun.model.row_schema import RowSchema
from kclrun.model.stream import StreamKey, stream_name_of

# The row of a lease has a cursor for each output, of about 100 bytes, and stays below 1 KB [K2].
OUTPUTS_MAX: Final = 4

_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}")
# `s3://bucket`, and `s3:/bucket`: a wrongly written path would be a folder named `s3:`.
URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_DESTINATIONS: Final = (
    "path",
    "s3",
    "sql",
    "dynamodb",
    "kinesis",
    "sqs",
    "sns",
    "firehose",
    "use",
)
# The settings of an output that are for some destinations only; the others are for all of them.
_FITS: Final[Mapping[str, frozenset[str]]] = {
    "format": frozenset({"path", "s3", "kinesis", "sqs", "sns", "firehose"}),
    "roll": frozenset({"path", "s3"}),
    "table": frozenset({"sql"}),
    "write": frozenset({"sql"}),
    "create": frozenset({"sql"}),
    "aggregate": frozenset({"kinesis"}),
    "key": frozenset({"sql", "kinesis", "sqs", "sns"}),
}
_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "path": ("json", "csv", "parquet"),
    "s3": ("json", "parquet"),
}
_KINDS: Final[Mapping[str, str]] = {"sqs": "queue", "sns": "topic"}
_OF_SPARK: Final = ("mode", "partition_by")
_WITHOUT_EFFECT_ON_SPARK: Final = ("roll", "buffer")
_PLAIN: Final = OutputSettings()


def output_places(settings: Settings, stream: StreamKey) -> tuple[OutputDestination, ...]:
    """Every output of the fleet, in the order of the settings, `output` first: resolved for the
    leases of this stream. Each of several streams has a folder of its own: shard ids repeat."""
    return tuple(_place(settings, stream, name, output) for name, output in named_outputs(settings))


def output_rules(settings: Settings) -> Iterator[Problem]:
    """The problems of the outputs of a fleet."""
    named = named_outputs(settings)
    if len(named) > OUTPUTS_MAX:
        yield Problem(
            ("outputs",), f"are {len(named)} with `output`: at most {OUTPUTS_MAX} are written"
        )
    for name in settings.outputs:
        if name == MAIN_OUTPUT or not _NAME.fullmatch(name):
            yield Problem(
                ("outputs", name),
                "is not the name of an output: 1 to 32 of a-z, 0-9, _ and -, and not `output`",
            )
    seen: list[tuple[Any, str]] = []
    for name, output in named:
        at = _at(name)
        destinations = _destinations(output)
        if len(destinations) != 1:
            yield _not_one(at, destinations)
            continue
        yield from _fitting(at, output, destinations[0])
        yield from _complete(at, output, destinations[0])
        yield from schema_rule(at, output)
        # Two outputs of one class write to two places, as their options say.
        place = (destinations[0], getattr(output, destinations[0]), output.table, output.options)
        for other, first in seen:
            if other == place:
                yield Problem(
                    (*at, destinations[0]), f"is the destination of {setting_of(first)} already"
                )
        seen.append((place, name))
        if output.kinesis is not None and stream_name(output.kinesis) in {
            stream_name(source.name) for source in settings.sources
        }:
            yield Problem(
                (*at, "kinesis"), "is read by this application: it would process its own rows"
            )


def spark_output_rules(settings: Settings) -> Iterator[Problem]:
    """The settings of outputs that are for the fleet only."""
    if settings.outputs:
        yield Problem(("outputs",), "is for engine: fleet; a query of Spark has one output")
    output = settings.output
    if output is None:
        return
    for name in (*_DESTINATIONS, *_FITS):
        # Spark has formats, folders and schemas of its own.
        is_taken = name in {"path", "format", *_WITHOUT_EFFECT_ON_SPARK}
        if not is_taken and getattr(output, name) != getattr(_PLAIN, name):
            yield Problem(
                ("output", name),
                "is for engine: fleet; on Spark the output is a `format` with its `options`, in"
                " the folder or s3a:// place `path`",
            )
    for name, value in output.options.items():
        if not isinstance(value, str | int | float | bool):
            yield Problem(("output", "options", name), "expected a text, a number or a switch")


def unused_output_settings(output: OutputSettings) -> list[str]:
    """The settings of `output` that were set and have no effect with engine: spark, which writes
    the same rows to the same folder a batch at a time."""
    changed = [
        name for name in _WITHOUT_EFFECT_ON_SPARK if getattr(output, name) != getattr(_PLAIN, name)
    ]
    return [f"output.{name}" for name in changed]


def schema_rule(at: Path, output: OutputSettings) -> Iterator[Problem]:
    """The problems of a `schema` that is not one, or that lacks the key."""
    if output.schema is not None:
        try:
            columns = {column.name for column in RowSchema.parse(output.schema).columns}
        except ValueError as error:
            yield Problem((*at, "schema"), str(error))
            return
        for name in output.key:
            if name not in columns:
                yield Problem((*at, "key"), f"{name} is not a column of `schema`")


def named_outputs(settings: Settings) -> list[tuple[str, OutputSettings]]:
    """Every output by its name, in the order of the settings, `output` first."""
    main = [] if settings.output is None else [(MAIN_OUTPUT, settings.output)]
    return [*main, *settings.outputs.items()]


def sent_of_outputs(settings: Settings) -> tuple[int, str]:
    """The bytes of the outputs that each start of a lease process sends, and what they are."""
    outputs = [output for _, output in named_outputs(settings)]
    size = len("".join(output.schema or "" for output in outputs).encode(errors="replace"))
    options = [output.options for output in outputs if output.use is not None and output.options]
    if not options:
        return size, "`schema`"
    # Texts that are not Unicode are a problem of their own.
    with contextlib.suppress(UnicodeEncodeError):
        size += len(msgspec.msgpack.encode(options))
    return size, "`schema` and `options` of outputs"


def _at(name: str) -> tuple[str, ...]:
    return tuple(setting_of(name).split("."))


def _destinations(output: OutputSettings) -> list[str]:
    return [name for name in _DESTINATIONS if getattr(output, name) is not None]


def _not_one(at: Path, destinations: list[str]) -> Problem:
    if destinations:
        return Problem((*at, destinations[1]), f"and {destinations[0]} exclude each other")
    return Problem(at, f"names no destination: write one of {', '.join(_DESTINATIONS)}")


def _fitting(at: Path, output: OutputSettings, destination: str) -> Iterator[Problem]:
    """Settings that have no meaning with this destination."""
    for name, fitting in _FITS.items():
        if destination not in fitting and getattr(output, name) != getattr(_PLAIN, name):
            *most, last = sorted(fitting)
            listed = f"{', '.join(most)} and {last}" if most else last
            yield Problem((*at, name), f"is for {listed}; it has no meaning with {destination}")
    for name in _OF_SPARK:
        if getattr(output, name) != getattr(_PLAIN, name):
            yield Problem((*at, name), "is for engine: spark")
    if output.options and destination != "use":
        yield Problem((*at, "options"), "is for engine: spark, and for an output with `use`")
    yield from _sendable(at, output)
    formats = _FORMATS.get(destination, ("json",))
    if output.format is not None and destination in _FITS["format"]:
        if output.format not in formats:
            yield Problem((*at, "format"), f"expected {' or '.join(formats)} with {destination}")
        elif output.path is not None and output.roll is None and output.format != "json":
            yield Problem(
                (*at, "format"),
                f"{output.format} needs `roll: {{}}`: a file that grows has JSON lines",
            )
    scheme = URL.match(output.path) if output.path is not None else None
    if scheme is not None:
        there = " Write s3: instead" if scheme[0].startswith("s3") else ""
        yield Problem(
            (*at, "path"), f"expected a folder of this machine, not a URL ({scheme[0]}…).{there}"
        )


def _sendable(at: Path, output: OutputSettings) -> Iterator[Problem]:
    try:
        msgspec.msgpack.encode(output.options)
    except UnicodeEncodeError:
        yield Problem((*at, "options"), "a text in it is not Unicode, and cannot be sent")


def _complete(at: Path, output: OutputSettings, destination: str) -> Iterator[Problem]:
    """Settings that are missing beside others, or too many."""
    if destination == "sql" and not output.table:
        yield Problem((*at, "table"), "is missing; the table of the rows")
    if destination == "path" and output.roll is None and at != (MAIN_OUTPUT,):
        yield Problem((*at, "roll"), "is missing: only `output` may be a file that grows; `{}`")
    if output.write == "upsert" and not output.key:
        yield Problem((*at, "key"), "is missing: the columns of the key that an upsert finds")
    if output.write == "insert" and destination == "sql" and output.key and not output.create:
        yield Problem((*at, "key"), "is for `write: upsert`, or for a table that is created")
    if destination != "sql" and len(output.key) > 1:
        yield Problem((*at, "key"), "is one column: messages of one value keep their order")
    queue = output.sqs or output.sns
    if output.key and queue is not None and not queue.endswith(".fifo"):
        yield Problem(
            (*at, "key"), f"orders the messages of a FIFO {_KINDS[destination]} (….fifo) only"
        )
    if output.schema is None and (output.create or output.format in {"csv", "parquet"}):
        what = "create" if output.create else f"format: {output.format}"
        yield Problem((*at, "schema"), f"is missing: `{what}` needs the columns and their types")
    if output.buffer <= 0:
        yield Problem((*at, "buffer"), "expected more than nothing, such as 64MiB")
    if output.roll is not None and (output.roll.every <= 0 or output.roll.size <= 0):
        yield Problem((*at, "roll"), "expected a time and a size above nothing")


def _place(
    settings: Settings, stream: StreamKey, name: str, output: OutputSettings
) -> OutputDestination:
    (destination,) = _destinations(output)
    # Only `s3` rolls without being asked to.
    roll = output.roll or (RollSettings() if output.s3 is not None else None)
    path = output.path
    if path is not None and stream:
        path = str(PurePath(path) / stream_name_of(stream))
    is_service = destination not in {"path", "sql", "use"}
    return OutputDestination(
        name=name,
        **{setting: getattr(output, setting) for setting in _DESTINATIONS if setting != "path"},
        path=path,
        options=output.options if output.use is not None else {},
        format=output.format or "json",
        roll_s=0.0 if roll is None else float(roll.every),
        roll_bytes=0 if roll is None else int(roll.size),
        buffer_bytes=int(output.buffer),
        table=output.table or "",
        is_upsert=output.write == "upsert",
        creates_table=output.create,
        key=output.key,
        aggregates=output.aggregate,
        schema=output.schema,
        endpoint_url=settings.aws.url_of(destination) if is_service else None,
    )
