"""A reset of one stream in words: what becomes of its rows, and of those in its outputs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import OutputDestination, file_name
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream import StreamKey, display_name
from kclrun.model.time import WallTime, utc_text
from kclrun.operating.reset import ResetPlan
from kclrun.operating.summaries import shortened
from kclrun.protocol.writes import CreateLease, ResetLease, keys_of


class StreamReset(msgspec.Struct, frozen=True):
    """The plan of one stream, with the rows as they are. `notes` are about kept positions."""

    stream: StreamKey
    name: str
    plan: ResetPlan
    rows: Mapping[LeaseKey, Lease]
    notes: Mapping[LeaseKey, str]


def halt_reason(to: str, now: WallTime) -> str:
    """On halted rows until the reset is complete; to the millisecond, so of this reset alone."""
    return (
        f"a reset to {to} was begun at {utc_text(now, 'milliseconds')} and is not complete\n"
        "Stop every manager of the application, and repeat  kclrun reset"
    )


def position_after(write: ResetLease | CreateLease) -> ExtendedSequenceNumber:
    """The checkpoint of the row after the write."""
    return write.lease.checkpoint if isinstance(write, CreateLease) else write.position


def moved_in_words(reset: StreamReset, to: str) -> Iterator[str]:
    """The rows that the reset moves or makes, a line for each. `to` is that of the operator."""
    for write in (*reset.plan.begin, *reset.plan.end):
        (key,) = keys_of(write)
        note = reset.notes.get(key)
        where = to if note is None else shortened(str(position_after(write)))
        noted = f"; {note}" if note else ""
        if isinstance(write, CreateLease):
            yield f"{display_name(key)}: new, at {where}{noted}"
            continue
        row = reset.rows[key]
        halted = "; its halt goes" if row.halt is not None else ""
        yield f"{display_name(key)}: {shortened(str(row.checkpoint))} to {where}{noted}{halted}"


def removed_in_words(reset: StreamReset) -> Iterator[str]:
    """The rows that the reset removes, a line for each."""
    coming = {key for write in reset.plan.begin for key in keys_of(write)}
    for write in reset.plan.remove:
        row = reset.rows[write.key]
        comes_again = not coming.isdisjoint(row.parents)
        coming |= {write.key} if comes_again else set()
        why = "it comes again when its parents end" if comes_again else "its children go on"
        yield f"{display_name(write.key)}: {shortened(str(row.checkpoint))}, removed: {why}"


def output_in_words(place: OutputDestination, generation: int) -> str:
    """What happens to the rows of one output [K4]."""
    if place.grows:
        name = file_name("SHARD", generation)
        return f"rows go to new files, {name}.jsonl in {place.path}; those of before stay"
    if place.s3 is not None or place.path is not None:
        where = place.s3 or place.path
        return (
            f"rows appear again, in folders …/SHARD/{generation}/ of {where}; those of before stay"
        )
    if place.sql is not None and place.is_upsert:
        return f"rows appear again in {place.table}, and replace those of the same key"
    if place.sql is not None:
        return f"rows are inserted again into {place.table}, beside those of before"
    if place.dynamodb is not None:
        return f"items are put again into {place.dynamodb}, over those of the same key"
    if place.use is not None:
        return f"rows are given to {place.use} again, with another key; those of before stay"
    return "messages are sent again; a FIFO queue or topic takes them, too"
