"""Whether an offset belongs to the stream that answers. Pure.

Sequence numbers of one stream mean nothing in another, and a stream that was deleted and created
again is another: reading on by its checkpoint would skip or repeat records without a word.
"""

from __future__ import annotations

from kclrun.errors import OffsetRefused
from kclrun.ports import StreamSummary
from kclrun.spark.offsets import Offset

__all__ = ["require_same_stream"]


def require_same_stream(offset: Offset, stream: StreamSummary) -> None:
    """Raises: OffsetRefused where the offset is of another stream, or of an earlier one of the
    same name."""
    if offset.stream != stream.arn:
        raise OffsetRefused(
            f"the checkpoint is of another stream\n  checkpoint  {offset.stream}\n"
            f"  options     {stream.arn}\n"
            "To go on: name that stream again, or start with a new checkpoint location"
        )
    created_ms = round(stream.created_at * 1000)
    if offset.created_ms != created_ms:
        raise OffsetRefused(
            f"the stream {stream.name} was deleted and created again since the checkpoint was"
            f" written\n  checkpoint  created at {offset.created_ms} ms\n"
            f"  stream now  created at {created_ms} ms\n"
            "Its records are others: start with a new checkpoint location"
        )
