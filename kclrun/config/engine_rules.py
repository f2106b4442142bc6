"""What `engine:` says about the other settings. Pure; `rules.py` tells it with the rest.

Rule: a setting that would mislead on the engine at hand is refused; one that merely means nothing
there is named when the application starts (`unused_settings`), so that one file serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kclrun.config.schema import OutputSettings, Settings, SparkSettings, StartAtLeases
from kclrun.config.settle import Problem

__all__ = ["EMBEDDED", "engine_rules", "unused_settings"]

EMBEDDED: Final = "embedded"

# The output formats of Spark that write files, and so need a folder.
_FILE_FORMATS: Final = frozenset({"avro", "csv", "json", "orc", "parquet", "text", "xml"})
# What takes a processor's rows as they are.
_UNTYPED: Final = frozenset({None, "console", "json", "memory", "noop", "text"})
# What the runner sets from elsewhere in the file: one fact, one place.
_SET_ELSEWHERE: Final[Mapping[str, str]] = {
    "streamname": "stream",
    "streamarn": "stream",
    "region": "aws.region",
    "endpointurl": "aws.endpoint",
    "rolearn": "aws.role_arn",
    "startingoffsets": "start",
    "startingposition": "start",
    "initialposition": "start",
    "startingtimestamp": "start",
    "startingleases": "start",
    "startingleasesendpointurl": "aws.endpoints.dynamodb",
    "pollinterval": "fetch.idle",
}


def engine_rules(settings: Settings) -> Iterator[Problem]:
    """The problems between the engine and the rest."""
    if settings.engine == "fleet":
        yield from _fleet(settings)
    else:
        yield from _spark(settings)


def unused_settings(settings: Settings) -> tuple[str, ...]:
    """What was set and mean nothing with engine: spark."""
    plain = Settings(application=settings.application)
    sections = ("instance", "leases", "observe", "stall")
    changed = [name for name in sections if getattr(settings, name) != getattr(plain, name)]
    if settings.checkpoint.every not in {plain.checkpoint.every, "batch"}:
        changed.append("checkpoint.every")
    return tuple(sorted(changed))


def _fleet(settings: Settings) -> Iterator[Problem]:
    if isinstance(settings.start, StartAtLeases):
        yield Problem(
            ("start",),
            "leases is for engine: spark; the fleet goes on from its own lease table by itself",
        )
    if settings.pipeline is not None:
        yield Problem(("pipeline",), "is for engine: spark; the fleet runs a processor")
    if settings.spark != SparkSettings():
        yield Problem(("spark",), "is for engine: spark; remove it, or set that")
    output = settings.output
    if output is None:
        return
    if output.path is None:
        yield Problem(("output", "path"), "is missing; a text")
    for name in _changed(output, OutputSettings(path=output.path)):
        yield Problem(
            ("output", name), "is for engine: spark; the fleet writes JSON lines, one file a shard"
        )


def _spark(settings: Settings) -> Iterator[Problem]:
    if settings.processor is not None and settings.pipeline is not None:
        yield Problem(("pipeline",), "and processor exclude each other: name one of them")
    if settings.checkpoint.every == "manual":
        yield Problem(
            ("checkpoint", "every"),
            "manual has no meaning with engine: spark: Spark commits whole batches, and what the"
            " processor did not checkpoint would not be read again",
        )
    if settings.fetch.kpl_range == "drop":
        yield Problem(("fetch", "kpl_range"), "drop is for engine: fleet; on Spark all are kept")
    yield from _checkpoint(settings)
    yield from _source(settings)
    yield from _output(settings)


def _checkpoint(settings: Settings) -> Iterator[Problem]:
    checkpoint = settings.spark.checkpoint
    is_embedded = settings.aws.endpoint == EMBEDDED
    if is_embedded and checkpoint is not None:
        yield Problem(
            ("spark", "checkpoint"),
            "is made by each run with aws.endpoint: embedded, whose stream is new each time;"
            " remove it",
        )
    elif not is_embedded and not checkpoint:
        yield Problem(
            ("spark", "checkpoint"),
            "is missing: the place where Spark keeps how far the query is, such as"
            " /var/lib/orders/checkpoint or s3a://bucket/orders",
        )


def _source(settings: Settings) -> Iterator[Problem]:
    for name in settings.spark.source:
        elsewhere = _SET_ELSEWHERE.get(name.lower())
        if elsewhere is not None:
            yield Problem(("spark", "source", name), f"is set by {elsewhere}; remove it here")


def _output(settings: Settings) -> Iterator[Problem]:
    output = settings.output
    if output is None:
        return
    if output.path is None and output.format in {None, *_FILE_FORMATS}:
        yield Problem(("output", "path"), "is missing; a text")
    if output.schema is not None and settings.pipeline is not None:
        yield Problem(
            ("output", "schema"), "is for a processor's rows; a pipeline's DataFrame has its own"
        )
    if settings.processor is not None:
        yield from _emitted(output)


def _emitted(output: OutputSettings) -> Iterator[Problem]:
    if output.schema is None and output.format not in _UNTYPED:
        yield Problem(
            ("output", "schema"),
            "is missing: emitted rows are JSON, and this format has typed columns; name them, such"
            " as `carrier string, flights long`",
        )
    if output.mode != "append":
        yield Problem(("output", "mode"), "is append for a processor: emitted rows are final")


def _changed(one: msgspec.Struct, other: msgspec.Struct) -> list[str]:
    names = one.__struct_fields__
    return [name for name in names if getattr(one, name) != getattr(other, name)]
