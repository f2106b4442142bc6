"""What `stream:` and `streams:` may say together. Pure; `rules.py` tells it with the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kclrun.config.schema import Settings
from kclrun.config.settle import Problem
from kclrun.config.start_position import parse_start
from kclrun.config.stream_schema import StreamSettings, stream_name
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

__all__ = ["missing_stream", "stream_rules"]


def missing_stream(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """That no stream is named at all, told of the plain values, with whatever else is wrong."""
    if tree.get("stream") is None and not tree.get("streams"):
        yield Problem(
            ("stream",),
            "is missing; a text that is a stream's name or ARN; several go to `streams:`",
        )


def stream_rules(settings: Settings, now: WallTime) -> Iterator[Problem]:
    """The problems of one stream or several; `now` judges their starts."""
    if not settings.streams:
        return
    if settings.stream is not None:
        yield Problem(
            ("streams",), "and stream exclude each other: name every stream under streams"
        )
    if settings.engine == "spark":
        yield Problem(
            ("streams",),
            "is for engine: fleet; a query reads one stream: give each a file of its own,"
            " with stream:",
        )
    if settings.pipeline is not None:
        return
    seen: dict[str, int] = {}
    for index, stream in enumerate(settings.streams):
        yield from _of_one(stream, index, seen, now)
        if stream.processor is None and settings.processor is None:
            yield Problem(
                ("streams", index, "processor"),
                "is missing, and there is no processor for all streams",
            )


def _of_one(
    stream: StreamSettings, index: int, seen: dict[str, int], now: WallTime
) -> Iterator[Problem]:
    # People, logs and output folders know a stream by its name, so the same name in another account
    # is refused, too, though its leases would be told apart.
    first = seen.setdefault(stream_name(stream.name), index)
    if first != index:
        yield Problem(
            ("streams", index, "name"), f"is named twice: streams[{first}] has that name already"
        )
    if stream.start is not None:
        try:
            parse_start(stream.start, now)
        except SettingsError as error:
            yield Problem(("streams", index, "start"), str(error).removeprefix("start: "))
