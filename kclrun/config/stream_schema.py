"""The settings of one of several streams. Part of `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kclrun.config.setting_types import ProcessorRef, StreamName, documented

__all__ = ["StreamSettings", "stream_name"]


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several streams of an application, and what is its own."""

    name: Annotated[StreamName, documented("stream name or ARN")]
    processor: Annotated[
        ProcessorRef | None, documented("module:Class for this stream, if not the application's")
    ] = None
    priority: Annotated[
        int,
        documented(
            "0 is first; the niceness of its lease processes, for when CPU is short", ge=0, le=19
        ),
    ] = 0
    options: Annotated[
        dict[str, Any],
        documented("given to this stream's processor, over the application's options"),
    ] = {}
    start: Annotated[
        str | None,
        documented("where its shards without a lease begin, if not the application's start"),
    ] = None


def stream_name(stream: str) -> str:
    """The name in an ARN, or the name itself."""
    return stream.rpartition("/")[2]
