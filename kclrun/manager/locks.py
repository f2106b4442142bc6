"""Lock files: one a manager start, held shared by it and by each of its lease processes [P3].

Holds: `LockFolder`, `HeldLock`. May not know: leases' rows; it learns of former owners from the
files. Rule: a lock held exclusively proves that nobody of that nonce lives, and it stays held:
a former lease process that still wanted to begin cannot get it any more and exits.
Look next: `identity.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from kclrun.errors import SettingsError
from kclrun.model.lease import Owner, OwnerId

__all__ = ["HeldLock", "LockFolder", "state_folder"]

_FILE_NAME: Final = re.compile(r"[0-9a-f]{8,64}\.lock\Z")
# An owner id is a group, a slot of at most 80 characters and a nonce of 16.
_CONTENT_BYTES_MAX: Final = 1024
# Former starts whose files are looked at; cleaned up as their rows go, so a handful in practice.
_FORMER_MAX: Final = 256
_NONCE_TRIES_MAX: Final = 5


def state_folder(application: str, environment: Mapping[str, str]) -> Path:
    """Where the lock files of an application are: $KCLRUN_STATE_DIR/<application>, else below
    $XDG_STATE_HOME/kclrun, else below ~/.local/state/kclrun. Made with, or narrowed to, mode
    0700 [S13]: whoever could remove a lock file there could make us two owners.

    Raises: SettingsError if it cannot be made, or belongs to somebody else.
    """
    folder = _state_root(environment) / application
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder for lock files {folder}: {error.strerror};"
            " set KCLRUN_STATE_DIR to a local folder this user may write to"
        ) from error
    if status.st_uid == os.geteuid():
        folder.chmod(0o700)
    else:
        raise SettingsError(
            f"the folder for lock files {folder} belongs to user {status.st_uid}, not to"
            f" {os.geteuid()}; set KCLRUN_STATE_DIR to a folder of this user"
        )
    return folder


def _state_root(environment: Mapping[str, str]) -> Path:
    if environment.get("KCLRUN_STATE_DIR"):
        return Path(environment["KCLRUN_STATE_DIR"]).absolute()
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]).absolute() / "kclrun"
    home = environment.get("HOME")
    if not home:
        raise SettingsError("no HOME in the environment: set KCLRUN_STATE_DIR to a local folder")
    return Path(home).absolute() / ".local" / "state" / "kclrun"


class HeldLock:
    """Our own lock file, held shared. Lease processes hold it too, each by its own open."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def retire(self, *, is_named: bool = False) -> None:
        """At the end of a manager: remove the file if no lease process holds it any more.

        One whose owner rows may still name stays for a successor, who removes it later.
        """
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_named:
                self.path.unlink()
        os.close(self._fd)
        self._fd = -1


class LockFolder:
    """The lock files of one application on this host, and the former ones that we hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[OwnerId, tuple[Path, int]] = {}

    @property
    def identity(self) -> str:
        """Device and inode: another folder (a container's own, say) is another host slot."""
        status = self.folder.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def hold(self, new_owner: Callable[[], Owner]) -> tuple[Owner, HeldLock]:
        """Make and hold a file for a new owner. `new_owner` gives one with a new nonce a call.

        Raises: SettingsError if the folder takes no file or no lock.
        """
        for _ in range(_NONCE_TRIES_MAX):
            owner = new_owner()
            path = self.folder / f"{owner.nonce}.lock"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.write(fd, owner.id.encode())
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another manager's search found the file before we held it; it may be gone too.
                os.close(fd)
                continue
            except FileExistsError:
                continue
            except OSError as error:
                # A full disk takes the name and not the owner: starts that fail again and again
                # would leave so many that `seize_former` no longer gets to the real ones.
                with contextlib.suppress(OSError):
                    path.unlink()
                raise SettingsError(
                    f"cannot lock {path}: {error.strerror}; KCLRUN_STATE_DIR must be on a local"
                    " disk with room"
                ) from error
            if _is_at(path, fd):
                return owner, HeldLock(path, fd)
            os.close(fd)
        raise SettingsError(f"no lock file of ours survives in {self.folder}: who removes them?")

    def seize_former(self, slot: str, own_nonce: str) -> frozenset[OwnerId]:
        """Try once to lock exclusively every other file of our slot; the owners newly proven gone.

        Those we got stay locked until `forget`. Cheap enough for every 100 ms: some system calls a
        former start. A folder that cannot be looked into now (no descriptor left, say) shows none.
        """
        gained: set[OwnerId] = set()
        for path in self._files():
            if not _FILE_NAME.match(path.name) or path.stem == own_nonce:
                continue
            if any(path == held for held, _ in self._held.values()):
                continue
            owner = _seize(path, slot)
            if owner is not None:
                self._held[owner[0]] = (path, owner[1])
                gained.add(owner[0])
        return frozenset(gained)

    def _files(self) -> list[Path]:
        try:
            return sorted(self.folder.glob("*.lock"))[:_FORMER_MAX]
        except OSError:
            return []

    @property
    def held(self) -> frozenset[OwnerId]:
        """The former owners proven gone, as long as a row may name them."""
        return frozenset(self._held)

    def forget(self, owners: Iterable[OwnerId]) -> None:
        """Remove the files of held former owners that no row names any more.

        To be called with owners held before a whole scan began and not found by it.
        """
        for owner in self._held.keys() & set(owners):
            path, fd = self._held.pop(owner)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)

    def close(self) -> None:
        for _, fd in self._held.values():
            os.close(fd)
        self._held.clear()


def _seize(path: Path, slot: str) -> tuple[OwnerId, int] | None:
    """The owner of a lock file and the descriptor that holds it exclusively, or None."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content = os.pread(fd, _CONTENT_BYTES_MAX, 0).decode("utf-8", "replace")
    except OSError:
        os.close(fd)
        return None
    owner = Owner.parse(content)
    is_ours = owner is not None and owner.slot == slot and owner.nonce == path.stem
    if owner is None or not is_ours or not _is_at(path, fd):
        os.close(fd)
        return None
    return owner.id, fd


def _is_at(path: Path, fd: int) -> bool:
    """Whether the file we hold is still the one of that name."""
    mine = os.fstat(fd)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
