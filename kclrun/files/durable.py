"""Files that survive a SIGKILL or a power cut at any instruction: write, sync, replace, lock.

A write goes to an offset that the caller keeps: a write that failed half-way (OSError) is repeated
at the same place. After a failed fsync the content of the file is unknown (SyncFailed): stop using
it [S13].
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import OutputLocked, SettingsError, SinkError

# The former holder is a process that is being ended: its exit frees the lock within milliseconds.
_LOCK_POLL_S: Final = 0.02
# No write of a file takes a day.
_UNFINISHED_S: Final = 86_400.0
# Descriptors whose file is locked: forked children of user code must not keep the lock.
_KEPT_FROM_CHILDREN: Final[set[int]] = set()
# A descriptor that takes no bytes. Opened now: a child at its limit of descriptors could not.
_NOTHING: Final = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class SyncFailed(OSError):
    """fsync failed. The kernel may have dropped the pages, and reports that only once: do not try
    again."""


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


def check_folder(folder: Path) -> str:
    """The folder in words; creates nothing. Raises: SettingsError if the folder cannot be made or
    written to."""
    # Path.exists raises where this user may not look.
    above = (folder, *folder.absolute().parents)
    there = next(path for path in above if os.path.exists(path))
    if not there.is_dir():
        raise SettingsError(f"cannot use the folder {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingsError(
            f"cannot use the folder {folder}: {there} is read-only, or user {os.geteuid()} may not"
            " write to it"
        )
    return f"the folder {folder}"


def make_folder(folder: Path) -> None:
    """Make it and its missing parents; each is synced into its own parent, topmost first.

    Raises: OSError, SyncFailed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of `path`: readers see, also after a crash, the old or the new, whole.

    The temporary name is fixed: callers hold the lock of the data file beside it, so no other
    process writes it, and a crash leaves at most one behind. Raises: OSError (the old file stays),
    SyncFailed.
    """
    _replace(path, content, path.with_name(path.name + ".tmp"), os.O_TRUNC | os.O_NOFOLLOW)


def _replace(path: Path, content: bytes, temporary: Path, flags: int) -> None:
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
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
    A child that Python code forks does not get it. Close it with `close_locked`.
    Raises: OutputLocked when another process keeps it for longer than `wait_s`; OSError.
    """
    deadline = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, descriptor):
                keep_from_children(descriptor)
                return descriptor
            os.close(descriptor)  # its former holder renamed the file while we waited
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if time.monotonic() >= deadline:
            raise OutputLocked(
                f"{path} is locked by another process (waited {wait_s:g} s): a former lease"
                f" process or a child of it still runs; see `fuser {path}`"
            )
        time.sleep(_LOCK_POLL_S)


def close_locked(descriptor: int) -> None:
    """Close a descriptor of `open_locked`, and with it release the lock."""
    _KEPT_FROM_CHILDREN.discard(descriptor)
    os.close(descriptor)


def keep_from_children(descriptor: int) -> None:
    """Children that are forked from now on do not get this file, nor the lock on it: a flock is
    held until the last process that has the descriptor closes it or exits. Programs started by exec
    do not get the descriptor either: it is close-on-exec."""
    _KEPT_FROM_CHILDREN.add(descriptor)


def _release_in_child() -> None:
    """In a forked child: replace the copies by descriptors that take no bytes. If they were closed,
    the numbers would soon be those of other files, and `emit` in the child would write to them."""
    for descriptor in _KEPT_FROM_CHILDREN:
        os.dup2(_NOTHING, descriptor, inheritable=False)
    _KEPT_FROM_CHILDREN.clear()


os.register_at_fork(after_in_child=_release_in_child)


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def publish_file(path: Path, content: bytes) -> None:
    """Replace the content of `path`, as `replace_file` does, where no lock is held.

    The temporary name cannot be guessed, and is new each time: processes may write the same file at
    the same time, and `path` may be in /tmp, where another user could have put a link under a
    predictable name. Raises: OSError (the old file stays), SyncFailed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        _replace(path, content, temporary, os.O_EXCL)
    finally:
        temporary.unlink(missing_ok=True)


def create_file(path: Path, content: bytes) -> bool:
    """Create `path` with this content, whole and durable; False if it is there already: it then
    stays as it is. Of several processes that create it at the same time one gets True.

    Raises: OSError, also where the file system has no hard links; SyncFailed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    publish_file(temporary, content)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a process left in `publish_file` or `create_file` when it was killed,
    a day ago or longer. Raises: OSError."""
    before = time.time() - _UNFINISHED_S
    for path in folder.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < before:
                path.unlink()


def write_report(path: Path, report: msgspec.Struct) -> None:
    """Write the file of `--report`: replaced whole or not at all [S13].

    Raises: SettingsError with the path.
    """
    data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_file(path, data)
    except OSError as error:
        raise SettingsError(f"cannot write the report {path}: {error.strerror}") from None


def failure(path: Path, verb: str, error: OSError) -> SinkError:
    """The OS error as a SinkError: the file, the attempt, and the remedy."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    hint = ": make room on the disk" if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
    return SinkError(f"cannot {verb} {path}: {error.strerror or error} ({name}){hint}")


@contextlib.contextmanager
def failing(path: Path, verb: str) -> Iterator[None]:
    """Raises: SinkError for an OSError, with the path."""
    try:
        yield
    except OSError as error:
        raise failure(path, verb, error) from error
