"""Opening a shard's rows again: lock, cut marks and data back to the claimed position.

Knows: the data file, its marks, the position. May not know: rows, batches, threads.
Rule: marks are cut before the bytes they speak of, so a crash in between is cut again the same
way; and bytes that no mark accounts for are set aside, never deleted. Next: `emitted_rows.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from typing import Final

from kclrun.errors import SinkError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.durable_files import open_locked, sync, sync_folder
from kclrun.sinks.marks import Mark, MarksFile, mark_at

__all__ = ["failure", "open_at"]

# A thousand resets of one shard in one folder: somebody should look.
_SET_ASIDE_MAX: Final = 1000
# What Kinesis allows in a shard id; and it keeps a file name inside its folder.
_SHARD_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z", re.ASCII)

_log = logging.getLogger(__name__)


def open_at(
    folder: Path, shard_id: str, position: ExtendedSequenceNumber, lock_wait_s: float
) -> tuple[int, MarksFile, Mark]:
    """The locked data file, cut back to `position`; its marks; and the mark it stands at.

    Raises: SinkError, as `EmittedRows.open` says.
    """
    if not _SHARD_ID.match(shard_id):
        raise SinkError(f"{shard_id[:128]!r} is no shard id: no file is named after it")
    path = folder / f"{shard_id}.jsonl"
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        descriptor = open_locked(path, lock_wait_s)
    except OSError as error:
        raise failure(path, "open", error) from error
    try:
        marks = MarksFile(folder / f"{shard_id}.marks")
        if _must_be_set_aside(descriptor, marks, position):
            descriptor = _set_aside(path, descriptor, lock_wait_s)
        return descriptor, marks, _go_back(path, descriptor, marks, position)
    except OSError as error:
        os.close(descriptor)
        raise failure(path, "open", error) from error
    except BaseException:
        os.close(descriptor)
        raise


def failure(path: Path, verb: str, error: OSError) -> SinkError:
    """The OS error in the words of the sink: which file, what was tried, what to do."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    hint = ": make room on the disk" if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
    return SinkError(f"cannot {verb} {path}: {error.strerror or error} ({name}){hint}")


def _must_be_set_aside(descriptor: int, marks: MarksFile, position: ExtendedSequenceNumber) -> bool:
    """Are there rows that reading from `position` may not bring again?

    So it is when no mark says how far they belong to it. And when a shard begins anew at a
    sentinel although two checkpoints were got ready since: a crash explains one, a lease table
    that was reset or lost explains more, and a new LATEST is another instant.
    """
    if os.fstat(descriptor).st_size == 0:
        return False
    numbered = sum(not mark.position.is_sentinel for mark in marks.marks)
    begins_anew = mark_at(marks.marks, position) is None
    return begins_anew or (_is_start(position) and numbered >= 2)


def _is_start(position: ExtendedSequenceNumber) -> bool:
    return position.is_sentinel and position.sequence_number != "SHARD_END"


def _set_aside(path: Path, descriptor: int, lock_wait_s: float) -> int:
    """Rename the file to the first free `.old-<n>`, and lock a new, empty one in its place."""
    for number in range(1, _SET_ASIDE_MAX + 1):
        aside = path.with_name(f"{path.name}.old-{number}")
        if not aside.exists():
            break
    else:
        raise SinkError(f"{path} was set aside {_SET_ASIDE_MAX} times: clear the folder")
    path.rename(aside)
    sync_folder(path.parent)
    fresh = open_locked(path, lock_wait_s)
    os.close(descriptor)
    _log.warning("rows of another run were set aside as %s: its lease was reset", aside)
    return fresh


def _go_back(
    path: Path, descriptor: int, marks: MarksFile, position: ExtendedSequenceNumber
) -> Mark:
    """Cut marks, then data, to what `position` covers; returns the mark it now stands at."""
    size = os.fstat(descriptor).st_size
    base = mark_at(marks.marks, position)
    if size == 0:  # new, set aside, or moved away by its reader: the marks of old mean nothing
        base = Mark(position, 0)
        marks.drop_all_but([base])
        return base
    if base is None or base.length > size:
        raise SinkError(
            f"{path} has {size} bytes and its marks say"
            f" {base.length if base else 'nothing'}: somebody cut it or replaced it."
            f" To go on, move it and {marks.path.name} away, together"
        )
    marks.drop_all_but([mark for mark in marks.marks if mark.position <= position])
    os.ftruncate(descriptor, base.length)
    sync(descriptor)
    if base.length and os.pread(descriptor, 1, base.length - 1) != b"\n":
        raise SinkError(f"{path} has no line end at {base.length}, where its marks say one is")
    return Mark(position, base.length)
