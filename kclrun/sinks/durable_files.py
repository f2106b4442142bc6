"""Files that survive a SIGKILL or a power cut at any instruction: write, sync, replace, lock.

Knows: file descriptors and folders. May not know: what is in the files.
Rule: a write goes to an offset the caller keeps, so a write that failed half-way is repeated at
the same place (OSError); after a failed fsync nothing about the file is known (SyncFailed) and the
caller must give it up [S13]. Next: `marks.py`, `emitted_rows.py`.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from kclrun.errors import SinkError

__all__ = ["SyncFailed", "open_locked", "replace_file", "sync", "sync_folder", "write_at"]

# The former holder is a process being ended: it frees the lock within milliseconds of its death.
_LOCK_POLL_S: Final = 0.02


class SyncFailed(OSError):
    """The kernel may have thrown the pages away and will not say so twice: do not try again."""


def sync(descriptor: int) -> None:
    """fsync. Raises: SyncFailed."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise SyncFailed(error.errno, f"fsync: {error.strerror}") from error


def write_at(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`. Raises: OSError; repeating the call is then harmless."""
    done = 0
    with memoryview(data) as whole:  # released at once: a bytearray with a view cannot shrink
        while done < len(data):
            with whole[done:] as rest:
                done += os.pwrite(descriptor, rest, offset + done)


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in `folder` durable. Raises: SyncFailed, OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in the place of `path`: readers and crashes see the old or the new, whole.

    The temporary name is fixed: callers hold the lock of the data file beside it, so nobody else
    writes it, and a crash leaves at most one behind. Raises: OSError (the old stands), SyncFailed.
    """
    temporary = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o666)
    try:
        write_at(descriptor, content, 0)
        sync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_folder(path.parent)


def open_locked(path: Path, wait_s: float) -> int:
    """Open or create `path` for reading and writing, locked against every other process.

    The lock is an exclusive flock: it ends with the last process that holds the descriptor.
    Raises: SinkError when another process keeps it for longer than `wait_s`; OSError.
    """
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, descriptor):
                return descriptor
            os.close(descriptor)  # its former holder set the file aside while we waited
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if time.monotonic() >= deadline:
            raise SinkError(
                f"{path} is locked by another process (waited {wait_s:g} s): a former lease"
                f" process or a child of it still runs; see `fuser {path}`"
            )
        time.sleep(_LOCK_POLL_S)


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
