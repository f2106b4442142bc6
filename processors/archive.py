"""Archiving a stream: every record as a line in compressed files, each line exactly once.

Needs `checkpoint: {every: manual}`: a checkpoint is made only when a file is complete.
Rule: a file is named after the shard and the first position in it, is written under another name,
synced, renamed, and only then checkpointed at its last record. A replay from the checkpoint
begins with the same record, so it makes the same name and replaces what it finds.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any, Final

from kclrun import (
    Checkpointer,
    Context,
    ExtendedSequenceNumber,
    Record,
    RecordBatch,
    RecordProcessor,
)

__all__ = ["JsonLines"]

# What is compressed at once: good ratios from some 100 KiB on, and a bound on memory.
_CHUNK_BYTES: Final = 2**20
_ROTATE_BYTES: Final = 64 * 2**20
_UNITS: Final = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class JsonLines(RecordProcessor):
    """Writes the records of a shard to gzip files of JSON lines.

    Settings it needs: `checkpoint: {every: manual}`. With any other, the runtime would checkpoint
    records that are in no finished file yet.

    Options: `folder` (required); `rotate_bytes`, lines before compression (default 64MiB);
    `rotate_records` (default, and at most, half of `checkpoint.uncheckpointed_max`, so that a
    whole batch always has room).

    Files: `<shardId>-<first sequence number>-<sub>.jsonl.gz`. Lines: `sequence_number`,
    `sub_sequence_number`, `partition_key`, `arrived_at` (ISO 8601, UTC), and `data` as text, or
    `data_base64` where the bytes are not UTF-8.

    A file that is not full stays under its temporary name (`.<shardId>-….tmp`) and is read again
    from the stream after a crash. Several hosts may share the folder: the next owner of the shard
    removes the unfinished file of the former owner, which then cannot finish that file.
    """

    def initialize(self, context: Context) -> None:
        if context.checkpoint_every != "manual":
            raise ValueError(
                "archive.JsonLines needs `checkpoint: {every: manual}` in its settings"
            )
        options = context.options
        if not options.get("folder"):
            raise ValueError("options.folder: name the folder the archive goes to")
        self._folder = Path(options["folder"])
        self._shard_id = context.shard_id
        self._rotate_bytes = _size(options.get("rotate_bytes", _ROTATE_BYTES))
        self._rotate_records = max(1, context.uncheckpointed_max // 2)
        if options.get("rotate_records") is not None:
            self._rotate_records = min(self._rotate_records, int(options["rotate_records"]))
        if self._rotate_records < 1 or self._rotate_bytes < 1:
            raise ValueError("options.rotate_records and rotate_bytes: at least 1")
        self._file: _GrowingFile | None = None
        self._taken = context.position
        self._finished: ExtendedSequenceNumber | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob(f".{self._shard_id}-*.tmp"):
            unfinished.unlink(missing_ok=True)

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """A call that is repeated writes nothing twice: records that were taken are passed over."""
        self._checkpoint_finished(checkpointer)
        if self._file is not None and self._is_full(self._file):
            self._finish(checkpointer)
        for record in batch:
            if record.position <= self._taken:
                continue
            if self._file is None:
                self._file = _GrowingFile(self._folder, self._shard_id, record.position)
            self._file.append(_line(record))
            self._taken = record.position
            if self._is_full(self._file):
                self._finish(checkpointer)
        if self._file is not None:
            self._file.flush_if_large()

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        self._finish(checkpointer)
        checkpointer.checkpoint()

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        self._finish(checkpointer)

    def lease_lost(self) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _is_full(self, file: _GrowingFile) -> bool:
        return file.records >= self._rotate_records or file.line_bytes >= self._rotate_bytes

    def _finish(self, checkpointer: Checkpointer) -> None:
        if self._file is not None:
            self._file.finish()
            self._file, self._finished = None, self._taken
        self._checkpoint_finished(checkpointer)

    def _checkpoint_finished(self, checkpointer: Checkpointer) -> None:
        """Checkpoint the file that was finished, also if that failed in a former call."""
        if self._finished is not None:
            at = self._finished
            checkpointer.checkpoint(at.sequence_number, at.sub_sequence_number)
            self._finished = None


class _GrowingFile:
    """A gzip file under its temporary name: members appended at an offset we keep.

    A chunk is compressed in memory and written at that offset, so a write that failed half-way
    (a full disk) is repeated at the same place.
    """

    def __init__(self, folder: Path, shard_id: str, first: ExtendedSequenceNumber) -> None:
        name = f"{shard_id}-{first.sequence_number}-{first.sub_sequence_number}.jsonl.gz"
        self._path = folder / name
        self._temporary = folder / f".{name}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o666)
        self._offset = 0
        self._sync_failed = False
        self._chunk = bytearray()
        self.records = 0
        self.line_bytes = 0

    def append(self, line: bytes) -> None:
        """Take one line; raises, before it took it, if the disk is full."""
        self.flush_if_large()
        self._chunk += line
        self.records += 1
        self.line_bytes += len(line)

    def flush_if_large(self) -> None:
        if len(self._chunk) >= _CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        """Complete, synced, and under its own name. Raises: OSError.

        May be repeated after a full disk. Not after a failed fsync, which the kernel reports only
        once: the shard then has to be read again from its checkpoint.
        """
        if self._sync_failed:
            raise OSError(errno.EIO, "an fsync failed before", str(self._temporary))
        self._flush()
        # Opened before the rename: without a free descriptor the call fails, and may be repeated.
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.ftruncate(self._descriptor, self._offset)
            self._sync(self._descriptor)
            self._temporary.replace(self._path)
            self._sync(folder)
        finally:
            os.close(folder)
        os.close(self._descriptor)

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError:
            self._sync_failed = True
            raise

    def discard(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._chunk:
            return
        member = gzip.compress(self._chunk, compresslevel=6, mtime=0)
        done = 0
        while done < len(member):
            done += os.pwrite(self._descriptor, member[done:], self._offset + done)
        self._offset += len(member)
        self._chunk.clear()


def _line(record: Record) -> bytes:
    row: dict[str, Any] = {
        "sequence_number": record.sequence_number,
        "sub_sequence_number": record.sub_sequence_number,
        "partition_key": record.partition_key,
        "arrived_at": record.arrived_at.isoformat().replace("+00:00", "Z"),
    }
    try:
        row["data"] = record.data.decode()
    except UnicodeDecodeError:
        row["data_base64"] = base64.b64encode(record.data).decode()
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _size(value: object) -> int:
    match = re.fullmatch(r"(\d{1,12}) ?([KMG]iB|B)?", str(value))
    if match is None:
        raise ValueError(f"options.rotate_bytes: expected 64MiB, 512KiB or bytes, got {value!r}")
    return int(match[1]) * _UNITS[match[2] or ""]
