"""Checks that a checkpoint belongs to the query's streams, by ARN and time of creation. Pure.

A stream may be added to those of a checkpoint. A stream that is left out is refused, because no
query would read its remaining rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from kclrun.errors import OffsetRefused
from kclrun.ports import StreamSummary
from kclrun.spark.offsets import Offset, StreamIs, together
from kclrun.spark.stream_set import Streams


def identities(streams: Streams) -> Mapping[str, StreamIs]:
    """The identity of each stream, as an offset stores it."""
    return {stream: _identity(summary) for stream, summary in streams.items()}


def of_these_streams(offset: Offset, streams: Streams) -> Offset:
    """The offset as one of these streams, or of some of them. The offset of a single stream becomes
    a part of an offset of several. Raises: OffsetRefused for others, also of a re-created stream.
    """
    if "" in offset.streams and "" not in streams:
        arn = offset.streams[""].arn
        (named,) = [each for each, summary in streams.items() if summary.arn == arn] or [""]
        if named:
            offset = together({named: offset}, offset.aligned_ms)
    unread = [which for each, which in offset.streams.items() if _is_another(which, streams, each)]
    if unread:
        arns = ", ".join(summary.arn for summary in streams.values())
        raise OffsetRefused(
            f"the checkpoint is of {unread[0].arn}, the query reads {arns}: {_advice(offset)}"
        )
    refuse_recreated(offset.streams, streams)
    return offset


def refuse_recreated(known: Mapping[str, StreamIs], streams: Streams) -> None:
    """Raises: OffsetRefused for a stream that was made again since; the message names it."""
    for stream, which in known.items():
        if which.created_ms != _identity(streams[stream]).created_ms:
            raise OffsetRefused(
                f"{streams[stream].name} was deleted and re-created since the checkpoint was begun:"
                " what the checkpoint says of its shards is about records that are gone\n"
                "To go on: a new checkpoint location"
            )


def _is_another(which: StreamIs, streams: Streams, stream: str) -> bool:
    return stream not in streams or streams[stream].arn != which.arn


def _advice(offset: Offset) -> str:
    if "" in offset.streams:
        return "another stream\nTo go on: name that stream, or use a new checkpoint location"
    return (
        "streams may be added to a checkpoint, and none left out\n"
        f"To go on: name {','.join(sorted(offset.streams))} in streamName, and others as you like,"
        " or use a new checkpoint location"
    )


def _identity(summary: StreamSummary) -> StreamIs:
    return StreamIs(summary.arn, round(summary.created_at * 1000))
