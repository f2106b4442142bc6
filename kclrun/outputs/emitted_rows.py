"""Emitted rows: one file of JSON lines for each shard, in step with the lease's checkpoint.

This module does not know leases, records or AWS.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

from kclrun.codec.row_lines import encode_row_line
from kclrun.errors import InvariantViolation, SinkError
from kclrun.files.durable import SyncFailed, close_locked, failure, sync, write_at
from kclrun.model.output import EMITTED_OUTSIDE, Cursor
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.outputs.marks import Mark, MarksFile, mark_at, open_at
from kclrun.outputs.row_ledger import RowLedger
from kclrun.processor import KeptRow, Row

# One write call of 1 MiB takes well under a millisecond and saves one for each of some 5,000 rows.
BUFFER_BYTES_MAX: Final = 2**20
# A fenced process writes nothing after its fence, one `failover` (10 s by default) after its last
# renewal.
_LOCK_WAIT_S: Final = 10.0


class EmittedRows:
    """The file of the rows of one shard.

    The rule is *truncate to the checkpoint*. Before a checkpoint at P is written to the lease
    table, the rows that it covers are synced, and after them a mark (P, length). A process that
    starts from Q cuts the file back to the greatest mark at or below Q. So rows whose checkpoint
    was never acknowledged are gone before their records are read again: a crash leaves no row twice
    and no half line.

    That holds for each folder. After the loss of a host its folder keeps the rows since the last
    checkpoint, and the next owner, with another disk, emits these again: put `output.path` on a
    shared file system where that matters. A file whose bytes no mark explains is renamed
    (`….jsonl.old-1`), never deleted.

    The main thread calls `begin_batch`, then `emit` from user code, then `end_batch` or
    `take_back_batch`; and `cover` when user code asks for a checkpoint. The lease thread calls
    `make_durable` right before it writes a checkpoint. A checkpoint of finished batches does not
    cover the rows of the batch that is running meanwhile: the noted positions separate them.

    Raises, everywhere: SinkError. A full disk may be tried again. After a failed fsync the object
    stays broken, and the next process that opens the folder returns to the last mark.
    """

    def __init__(self, path: Path, descriptor: int, marks: MarksFile, durable: Mark) -> None:
        self.path = path
        self._descriptor = descriptor
        self._marks = marks
        self._base = durable
        self._durable = durable
        self._may_forget = False
        self._ledger = RowLedger[int]()  # of bytes; bounded by uncheckpointed_max
        self._written = durable.length
        self._buffer = bytearray()
        self._broken: str | None = None
        self._lock = threading.Lock()  # guards the fields above; make_durable syncs without it
        self._durable_lock = threading.Lock()  # one make_durable or take-back at a time; outer

    @classmethod
    def open(
        cls,
        folder: Path,
        shard_id: str,
        position: ExtendedSequenceNumber,
        *,
        lock_wait_s: float = _LOCK_WAIT_S,
    ) -> Self:
        """Open the shard's file and cut it back to `position`, the checkpoint as claimed.

        Call it after the claim and before the first read. At SHARD_END all marked rows stay.
        Raises: SinkError when another process still has the file after `lock_wait_s`, or when file
        and marks do not belong together.
        """
        opened = open_at(folder, shard_id, position, lock_wait_s)
        return cls(folder / f"{shard_id}.jsonl", *opened)

    @property
    def length(self) -> int:
        """Bytes emitted and not taken back, including the buffered ones."""
        return self._written + len(self._buffer)

    def emit(self, row: Row) -> None:
        """Add one row. It is durable once `make_durable` covered it.

        Raises: TypeError, LimitExceeded as `encode_row_line`; SinkError outside a batch, or if the
        disk is full: the batch can then be taken back and tried again.
        """
        self._add(encode_row_line(row))

    def emit_to(self, _name: str) -> Callable[[Row], None]:
        """The function that adds one row: all rows go to this file."""
        return self.emit

    def prepare(self, row: Row, to: str) -> KeptRow:
        """A row that its record keeps until it is done. Raises: TypeError, LimitExceeded."""
        line = encode_row_line(row)
        return KeptRow(to, line, len(line))

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared. Raises: SinkError, as `emit`."""
        self._add(row.encoded)

    def _add(self, line: bytes) -> None:
        with self._lock:
            self._check_usable()
            if self._ledger.call_start is None:
                raise SinkError(EMITTED_OUTSIDE)
            self._buffer += line
            if len(self._buffer) < BUFFER_BYTES_MAX:
                return
            try:
                self._write_buffer()
            except SinkError:
                del self._buffer[-len(line) :]  # bounds memory if user code goes on
                raise

    def begin_batch(self) -> None:
        """A call of user code starts: its rows can be taken back together.

        Raises: InvariantViolation when the former call was neither ended nor taken back.
        """
        with self._lock:
            if self._ledger.call_start is not None:
                raise InvariantViolation(f"{self.path}: a batch begins inside a batch")
            self._ledger.begin_call((self.length,))
            if self._may_forget:  # not earlier: a batch that is taken back may need them again
                self._ledger.leave(self._durable.position)
                self._may_forget = False

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """The call returned; `position` is that of its last record, SHARD_END for shard_ended."""
        with self._lock:
            self._cut(position)
            self._ledger.end_call()

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code asks for a checkpoint: it covers all rows emitted until this call.

        Also if `position` is below the last processed record: rows of later records that were
        emitted already are covered, too, because a row does not name its record. Rows emitted after
        the checkpoint of the whole batch belong to the next checkpoint, and a crash before that one
        loses them. So user code must emit before it checkpoints.
        """
        with self._lock:
            self._cut(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        """The call raised: its rows are removed, except those that the acknowledged checkpoint
        covers.

        `checkpoint` is the last one acknowledged (left out: the last made durable). The records up
        to it must not be passed to the processor again.
        """
        with self._durable_lock, self._lock, self._breaking():
            self._check_usable()
            if self._ledger.call_start is None:
                raise InvariantViolation(f"{self.path}: no batch to take back")
            acknowledged = checkpoint or self._durable.position
            kept = self._ledger.kept(acknowledged, (self._covered_by(acknowledged),))
            self._cut_back(*kept)
            self._ledger.take_back(kept)

    def make_durable(self, position: ExtendedSequenceNumber) -> None:
        """Make all rows noted at or below `position` survive a crash, before it returns.

        Call it before the checkpoint at `position` is sent, and do not send it if this raises.
        Costs two fsyncs; nothing if no row was added since the last one.
        """
        with self._durable_lock, self._breaking():
            with self._lock:
                self._check_usable()
                target = Mark(position, self._covered_by(position))
                marked = mark_at(self._marks.marks, position)
                must_mark = marked is None or marked.length < target.length
                if must_mark:
                    self._write_buffer()
            if must_mark:
                sync(self._descriptor)
                self._marks.append(target)
            with self._lock:
                self._durable, self._may_forget = target, True

    def close(self) -> None:
        """Release the file; rows that no durable checkpoint covers are removed. Idempotent."""
        with contextlib.suppress(SinkError):  # rows emitted after the checkpoint() of their batch
            self.make_durable(self._durable.position)
        with self._durable_lock, self._lock:
            if self._descriptor < 0:
                return
            with contextlib.suppress(OSError):  # the next process to open it cuts it back anyway
                if not self._broken:
                    self._cut_back(self._durable.length)
            self._marks.close()
            close_locked(self._descriptor)
            self._descriptor = -1
            self._broken = "it is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, position: ExtendedSequenceNumber) -> None:
        """The rows emitted so far belong to the checkpoint at `position`, or to a later one."""
        durable = self._durable
        had = durable.length if durable.position <= position else self._covered_by(position)
        self._ledger.cut(position, (self.length,), (had,))

    def _covered_by(self, position: ExtendedSequenceNumber) -> int:
        """The bytes that a checkpoint at `position` covers, as noted or marked so far."""
        covered = self._ledger.covered(position)
        if covered is not None:
            return covered[0]
        if not self._ledger and self._durable.position <= position:
            return self._durable.length
        mark = mark_at([self._base, self._durable, *self._marks.marks], position)
        return (mark or self._base).length

    def _write_buffer(self) -> None:
        """Write the buffer to the file. After a failure nothing changed: it can be repeated."""
        if not self._buffer:
            return
        try:
            write_at(self._descriptor, self._buffer, self._written)
            os.ftruncate(self._descriptor, self.length)  # a write that failed before was longer
        except OSError as error:
            raise failure(self.path, "write", error) from error
        self._written += len(self._buffer)
        self._buffer.clear()

    def _cut_back(self, length: int) -> None:
        """Forget the rows emitted beyond `length`; first the marks, then the bytes."""
        kept = [mark for mark in self._marks.marks if mark.length <= length]
        if len(kept) < len(self._marks.marks):
            self._marks.drop_all_but(kept)
        if self._durable.length > length:
            if not kept:
                raise InvariantViolation(f"{self.path}: no mark left at or below {length}")
            self._durable = kept[-1]
        del self._buffer[max(0, length - self._written) :]
        self._written = min(self._written, length)
        os.ftruncate(self._descriptor, self._written)

    def _check_usable(self) -> None:
        if self._broken:
            raise SinkError(f"{self.path} takes no rows: {self._broken}")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """OS errors become SinkError. An error that leaves the file's state unknown breaks it."""
        try:
            yield
        except SyncFailed as error:
            self._broken = f"{error}; what is on disk is unknown until it is opened again"
            raise failure(self.path, "sync", error) from error
        except OSError as error:
            raise failure(self.path, "write", error) from error


class CursorRows(EmittedRows):
    """The rows of all outputs of one shard in one file, each with the cursor of its record, so that
    the rows of two processor versions can be compared.

    A line is `{"at": …, "ordinal": n, "to": output, "row": {…}}`. Which record emitted a row is
    known when its call returns, so rows wait until then. They are bounded, because a call gets one
    record.
    """

    _waiting: list[tuple[str, bytes]]

    def begin_batch(self) -> None:
        super().begin_batch()
        self._waiting, self._ordinal = [], 0

    def emit_to(self, name: str) -> Callable[[Row], None]:
        return lambda row: self.keep(name, encode_row_line(row))

    def place(self, row: KeptRow) -> None:
        self.keep(row.to, row.encoded)

    def keep(self, to: str, line: bytes) -> None:
        """Add an encoded row for the output `to`. Raises: SinkError, as `emit`."""
        with self._lock:
            self._check_usable()
            if self._ledger.call_start is None:
                raise SinkError(EMITTED_OUTSIDE)
            if len(self._buffer) >= BUFFER_BYTES_MAX:
                self._write_buffer()
            self._waiting.append((to, line))

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        self._name(position)
        super().end_batch(position)

    def cover(self, position: ExtendedSequenceNumber) -> None:
        self._name(position)
        super().cover(position)

    def _name(self, position: ExtendedSequenceNumber) -> None:
        """The rows that wait belong to the record at `position`: add them to the buffer."""
        at = str(Cursor(position))
        with self._lock:
            for to, line in self._waiting:
                head = encode_row_line({"at": at, "ordinal": self._ordinal, "to": to})
                self._buffer += head.rstrip()[:-1] + b',"row":' + line.rstrip() + b"}\n"
                self._ordinal += 1
            self._waiting.clear()
