"""Moves a stopped query back to the fleet: its checkpoint becomes positions of leases.

A record that the query has not committed never lies below a position that is written. Must not
know: PySpark, the writes of rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from kclrun.codec.kpl import open_aggregates
from kclrun.errors import OffsetRefused, SettingsError, Unavailable
from kclrun.model.lease import Lease, LeaseKey, highest_generation
from kclrun.model.output import Cursors, StoredCursors
from kclrun.model.reading import PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard, ShardGraph
from kclrun.model.time import WallTime
from kclrun.ports import ShardReader, next_page
from kclrun.spark.keyed.names import lineage_of
from kclrun.spark.lineage import KEY_SPACE, ancestors_of
from kclrun.spark.offsets import Offset, decode_offset, parts_of
from kclrun.spark.positions import Position, PositionKind

# The last committed batch, from the files of a Structured Streaming checkpoint:
#
#     offsets/17   where batch 17 ends in every source: a version, metadata, one line a source
#     commits/17   written once batch 17 is in the sink
#
# Source: Spark's `OffsetSeqLog` and `CommitLog`, version 1 of either.
_VERSION: Final = "v1"
_BATCH: Final = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z")
_NO_OFFSET: Final = "-"
# Ten thousand shards of 150 bytes are 1.5 MB; a file far above that is not one of Spark's.
_FILE_BYTES_MAX: Final = 64 * 2**20
_SHOWN_MAX: Final = 100


class CommittedBatch(msgspec.Struct, frozen=True):
    """The last batch that is committed, and the end of each of its sources, as JSON texts.

    `is_another_begun`: one more was planned and not committed; its rows may be in the sink.
    """

    batch_id: int
    sources: tuple[str, ...]
    is_another_begun: bool


def local_folder(place: str) -> Path:
    """The folder that a path or file: URL names. Raises: SettingsError for other stores."""
    parts = urlsplit(place)
    if parts.scheme in {"s3", "s3a", "s3n"}:
        raise SettingsError(
            f"{place} is in S3: copy what is needed of it, and name the copy\n"
            f"  aws s3 sync s3://{parts.netloc}{parts.path} checkpoint"
            " --exclude '*' --include 'offsets/*' --include 'commits/*'"
        )
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" in place:
        raise SettingsError(f"{place}: expected a folder; copy offsets/ and commits/ into one")
    return Path(place)


def read_committed(folder: Path) -> CommittedBatch:
    """The last committed batch. Raises: SettingsError for a folder that is not a checkpoint, or of
    a query that has not committed a batch; OffsetRefused for a file of another version."""
    commits, offsets = (_batches(folder, name) for name in ("commits", "offsets"))
    if not commits:
        raise SettingsError(
            f"{folder}: no batch is committed there: the query has read nothing to its end"
        )
    batch_id = max(commits)
    if batch_id not in offsets:
        raise SettingsError(
            f"{folder}: offsets/{batch_id} is missing, and commits/{batch_id} is there"
        )
    version, *lines = _text(folder / "offsets" / str(batch_id)).split("\n")
    if version != _VERSION:
        raise OffsetRefused(
            f"{folder}: offsets/{batch_id} is of version {version[:_SHOWN_MAX]!r}, this kclrun"
            f" knows {_VERSION}"
        )
    return CommittedBatch(batch_id, tuple(lines[1:]), max(offsets) > batch_id)


def offset_of_stream(batch: CommittedBatch, arn: str) -> Offset:
    """The end of the one kclrun source of the batch that reads this stream.

    Raises: OffsetRefused if there is none, or several.
    """
    offsets = [offset for text in batch.sources for offset in _offsets(text)]
    found = [offset for offset in offsets if offset.streams[""].arn == arn]
    if len(found) == 1:
        return found[0]
    if found:
        raise OffsetRefused(
            f"the query reads {arn} in {len(found)} sources, each at its own position: an"
            " application has one position in a shard, so it cannot continue from several"
        )
    others = (
        ", ".join(sorted({offset.streams[""].arn for offset in offsets}))
        or "no kclrun source at all"
    )
    raise OffsetRefused(f"the checkpoint is not of {arn}: it has {others}\nCheck `stream`")


def lineage_of_stream(batch: CommittedBatch, arn: str) -> str | None:
    """The lineage of the state of the query that reads this stream; None if it had no state."""
    for text in batch.sources:
        try:
            plain = msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
        if isinstance(plain, dict) and plain.get("stream") == arn:
            return lineage_of(plain) or None
    return None


def _offsets(text: str) -> tuple[Offset, ...]:
    """The offset of each stream that a source reads; none for sources of another kind."""
    if text == _NO_OFFSET:
        return ()
    try:
        plain = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return ()
    if not isinstance(plain, dict):
        return ()
    if {"v", "streams", "t"} <= plain.keys():
        return tuple(parts_of(decode_offset(plain)).values())
    is_ours = {"v", "stream", "created", "shards"} <= plain.keys()
    return (decode_offset(plain),) if is_ours else ()


def _batches(folder: Path, name: str) -> frozenset[int]:
    try:
        entries = [entry.name for entry in (folder / name).iterdir()]
    except OSError as error:
        raise SettingsError(
            f"{folder} is not a checkpoint of Structured Streaming: {name}/ cannot be read"
            f" ({error.strerror})"
        ) from None
    return frozenset(int(entry) for entry in entries if _BATCH.match(entry))


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise OffsetRefused(f"{file} is larger than any offset of Spark's")
        return file.read_bytes().decode()
    except OSError as error:
        raise SettingsError(f"{file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise OffsetRefused(f"{file} is not text") from None


# A query's position in a shard as a lease's checkpoint: everything up to it is done.
#
# How far before record n the search for the previous record begins: ten times as far if no record
# arrived in that time.
_BACK_S: Final = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)
# Fewer than a call may return: one record is looked for.
_PAGE_RECORDS: Final = 1_000
# A front end of the service may lag: an empty answer at the tip is believed the third time.
_TIP_LOOKS: Final = 3
_TIP_PAUSE_S: Final = 0.3


class LeaseCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint; with LATEST, the instant it is pinned to [P14]. `note` names a loss."""

    checkpoint: ExtendedSequenceNumber
    pinned_at: WallTime | None = None
    note: str = ""


def checkpoint_for(
    reader: ShardReader,
    shard_id: str,
    position: Position,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> LeaseCheckpoint:
    """The checkpoint from which a fleet reads exactly the records after `position`.

    Spark's bounds are often "before record n", and a lease can only name a processed record. n - 1
    does not help: it is not the number of a record, and the service refuses numbers that it did not
    make. So the stream is read to find the record before n; if there is none, the result is
    TRIM_HORIZON. Where the answer is not certain, the position is lower, so that records come
    twice.

    Reads the stream only for a record's number: two to four calls, more where the shard had been
    idle. Raises: a ServiceError leaf.
    """
    match position.kind:
        case PositionKind.TRIM_HORIZON:
            return LeaseCheckpoint(TRIM_HORIZON)
        case PositionKind.TIMESTAMP:
            return LeaseCheckpoint(LATEST, WallTime(position.timestamp_ms / 1000))
        case PositionKind.SHARD_END:
            return LeaseCheckpoint(SHARD_END)
    if position.sub_sequence_number is not None:
        return LeaseCheckpoint(
            ExtendedSequenceNumber(position.number, position.sub_sequence_number)
        )
    search = _Search(reader, shard_id, position.number, wait)
    return search.before() if position.is_before else search.after()


class _Search:
    """Searches one record of one shard, and the record before it."""

    def __init__(
        self, reader: ShardReader, shard_id: str, number: str, wait: Callable[[float], object]
    ) -> None:
        self._reader = reader
        self._shard_id = shard_id
        self._number = number
        self._wait = wait

    def after(self) -> LeaseCheckpoint:
        record = self._record()
        if record is not None:
            return LeaseCheckpoint(_end_of(record))
        # The record is not in the stream any more, so none of its user records comes again.
        return LeaseCheckpoint(
            ExtendedSequenceNumber(self._number),
            note="that record has expired; so has what followed it, if it is as old",
        )

    def before(self) -> LeaseCheckpoint:
        record = self._record()
        if record is None:
            return LeaseCheckpoint(
                TRIM_HORIZON, note="records that the query had not read have expired: lost"
            )
        for back_s in _BACK_S:
            since = WallTime(max(0.0, record.approximate_arrival_timestamp - back_s))
            found = self._last_before(StartPoint(IteratorType.AT_TIMESTAMP, timestamp=since))
            if found is not None:
                return LeaseCheckpoint(_end_of(found))
        found = self._last_before(StartPoint(IteratorType.TRIM_HORIZON))
        return LeaseCheckpoint(TRIM_HORIZON if found is None else _end_of(found))

    def _record(self) -> Record | None:
        """The record itself, None if it is not in the stream any more."""
        there = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, self._number)
        first = next(self._records(there, 1), None)
        return first if first is not None and first.sequence_number == self._number else None

    def _last_before(self, start: StartPoint) -> Record | None:
        """The last record before ours, found by reading on from an earlier place."""
        last = None
        for record in self._records(start, _PAGE_RECORDS):
            if _order(record.sequence_number) >= _order(self._number):
                return last
            last = record
        raise Unavailable(
            f"{self._shard_id} held record {self._number} a moment ago and does not show it now:"
            " try again",
            operation="GetRecords",
        )

    def _records(self, start: StartPoint, limit: int) -> Iterator[Record]:
        cursor = PageCursor(start)
        looks = 0
        while looks < _TIP_LOOKS:
            page = next_page(self._reader, self._shard_id, cursor, limit)
            yield from page.records
            if page.next_iterator is None:
                return
            if page.is_empty_tip:
                looks += 1
                self._wait(_TIP_PAUSE_S)


def _end_of(record: Record) -> ExtendedSequenceNumber:
    """The position after the whole record: the last user record where it is an aggregate."""
    users = open_aggregates([record])
    # An aggregate may be empty.
    return users[-1].position if users else ExtendedSequenceNumber(record.sequence_number)


def _order(number: str) -> tuple[int, str]:
    return (len(number), number)


# The rows of a lease table to write for a query's offset. Pure.
#
# A row never moves back; a row that is further than the query stays. An ancestor of a shard that
# the query reads is done. Children of ended shards get their rows together with them. Other
# children get none: their rows come with their parents' end [P12].
class Create(msgspec.Struct, frozen=True, tag=True):
    """The shard has no row yet: one is put."""

    lease: Lease
    note: str = ""

    @property
    def shard_id(self) -> str:
        return self.lease.key

    @property
    def position(self) -> ExtendedSequenceNumber:
        return self.lease.checkpoint

    @property
    def token(self) -> int:
        """The counter of the row while we write it."""
        return 0


class Move(msgspec.Struct, frozen=True, tag=True):
    """The row is further back. `children` are named on it where the shard has ended.
    `state_version` names the state at `to`, if there is one."""

    row: Lease
    to: ExtendedSequenceNumber
    children: frozenset[str] = frozenset()
    note: str = ""
    state_version: str | None = None

    @property
    def shard_id(self) -> str:
        return self.row.key

    @property
    def position(self) -> ExtendedSequenceNumber:
        return self.to

    @property
    def token(self) -> int:
        """The counter of the row while we write it."""
        return self.row.counter + 1

    @property
    def cursors(self) -> Cursors | None:
        """Those of a row with state: the outputs begin where it is."""
        return None if self.state_version is None else ()


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Nothing is written; `why` is the reason. `row` is None where the table has none."""

    shard_id: str
    row: Lease | None
    why: str


Step = Create | Move | Keep


def with_state(step: Create | Move, version: str) -> Create | Move:
    """The step, with a version of the keyed state at its position."""
    if isinstance(step, Move):
        return msgspec.structs.replace(step, state_version=version)
    outputs = StoredCursors(step.lease.checkpoint, ())
    return Create(
        msgspec.structs.replace(step.lease, outputs=outputs, state_version=version), step.note
    )


def plan_rows(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> tuple[Step, ...]:
    """One step for each shard, children before the parents that end [P12].

    `checkpoints` are those of the query's offset, `rows` the table as scanned, by shard id.
    """
    steps = [
        *_children(checkpoints, graph, rows),
        *(
            _step(checkpoint, checkpoints[checkpoint], graph, rows)
            for checkpoint in sorted(checkpoints)
        ),
        *_passed(checkpoints, graph, rows),
    ]
    generation = highest_generation(rows.values())
    return tuple(_of_generation(step, generation) for step in steps)


def _of_generation(step: Step, generation: int) -> Step:
    """A new row belongs to the generation of the table [K4]."""
    if not isinstance(step, Create):
        return step
    return Create(msgspec.structs.replace(step.lease, generation=generation), step.note)


def _step(
    shard_id: str, done: LeaseCheckpoint, graph: ShardGraph, rows: Mapping[str, Lease]
) -> Step:
    row, shard = rows.get(shard_id), graph.get(shard_id)
    if row is not None:
        return _forward(row, done, graph)
    if shard is None:
        is_done = done.checkpoint == SHARD_END
        why = "ended and expired" if is_done else "expired, with records that were not read: lost"
        return Keep(shard_id, None, why)
    return Create(_lease(shard, done, graph), done.note)


def _forward(row: Lease, done: LeaseCheckpoint, graph: ShardGraph) -> Step:
    to = done.checkpoint
    if to.is_sentinel and to != SHARD_END:
        return Keep(row.key, row, f"the query has read nothing there yet ({to})")
    if to <= row.checkpoint:
        stands = "stands there already" if row.checkpoint == to else "is further than the query"
        return Keep(row.key, row, f"{stands} ({to})")
    is_ended = to == SHARD_END
    children = frozenset(graph.children_of(row.key)) if is_ended else frozenset[str]()
    return Move(row, to, children - row.children, done.note)


def _children(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> Iterator[Step]:
    """Children of parents that the query has ended; the query has not begun these children."""
    for shard in graph:
        is_known = shard.shard_id in checkpoints or shard.shard_id in rows
        parents = [parent for parent in shard.parents if parent in checkpoints or parent in graph]
        if is_known or not any(parent in checkpoints for parent in parents):
            continue
        ended = (checkpoints.get(parent, LeaseCheckpoint(TRIM_HORIZON)) for parent in parents)
        if all(checkpoint.checkpoint == SHARD_END for checkpoint in ended):
            yield Create(
                _lease(shard, LeaseCheckpoint(TRIM_HORIZON), graph), "a child; not begun yet"
            )


def _passed(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> Iterator[Step]:
    """Rows of shards that the query has passed: it reads their children."""
    lineage = ShardGraph([*graph, *(_shard(row) for row in rows.values() if row.key not in graph)])
    above = {parent for checkpoint in checkpoints for parent in ancestors_of(lineage, checkpoint)}
    for shard_id in sorted(above.intersection(rows) - checkpoints.keys()):
        row = rows[shard_id]
        if not row.is_ended:
            yield _forward(
                row, LeaseCheckpoint(SHARD_END, note="the query reads its descendants"), graph
            )


def _lease(shard: Shard, done: LeaseCheckpoint, graph: ShardGraph) -> Lease:
    is_ended = done.checkpoint == SHARD_END
    return Lease(
        key=LeaseKey(shard.shard_id),
        checkpoint=done.checkpoint,
        parents=frozenset(shard.parents),
        children=frozenset(graph.children_of(shard.shard_id)) if is_ended else frozenset(),
        hash_range=shard.hash_range,
        latest_pinned_at=done.pinned_at,
    )


def _shard(row: Lease) -> Shard:
    parents = sorted(row.parents)[:2]
    return Shard(row.key, KEY_SPACE, "0", "0", *parents)  # for its parents alone
