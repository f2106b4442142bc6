"""Lock files: one for each start of a manager, held shared by it and its lease processes [P3].

It does not know the rows of leases; it learns of former owners from the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kclrun.errors import HostRefused, SettingsError
from kclrun.model.lease import Owner, OwnerId

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")
# Long enough for an EC2 name; the hash after it distinguishes two truncated names.
_HOST_CHARACTERS_MAX: Final = 63
# 40 bits of hash over boot and folder: with a million slots, 1 in 2 that any two of them collide,
# and these two would need the same host name as well.
_HASH_CHARACTERS: Final = 10
# 64 bits, new at each start.
_NONCE_BYTES: Final = 8


@dataclass
class Identity:
    """An owner, its held lock, and the former owners of the same slot.

    An owner is a group, a slot that names the host and its boot, and the nonce of this start. The
    nonce is new at every start. The slot is the same for all starts whose exit a lock file can
    prove (one boot, one lock folder), so only those can be proven gone [P3].
    """

    owner: Owner
    lock: HeldLock
    folder: LockFolder

    @property
    def id(self) -> OwnerId:
        return self.owner.id

    def seize_former(self) -> frozenset[OwnerId]:
        """Former owners of our slot that are newly proven gone: no process of theirs lives."""
        return self.folder.seize_former(self.owner.slot, self.owner.nonce)

    def retire(self, *, is_named: bool = False) -> None:
        """Release every lock. The own file is removed if no process of ours is left.

        `is_named`: rows may still name us. Then the file stays: by it, a successor on this host
        proves us gone and takes those rows at once.
        """
        self.lock.retire(is_named=is_named)
        self.folder.close()


def establish(application: str, group: str, environment: Mapping[str, str]) -> Identity:
    """Become a new owner on this host, its lock held.

    Raises: SettingsError without a usable folder for lock files; HostRefused if /proc does not say
    which boot of the host this is.
    """
    folder = LockFolder(state_folder(application, environment))
    slot = host_slot(socket.gethostname(), _boot_id(), folder.identity)
    owner, lock = folder.hold(lambda: Owner(group, slot, secrets.token_hex(_NONCE_BYTES)))
    return Identity(owner, lock, folder)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise HostRefused(
            f"{_BOOT_ID} cannot be read: {error.strerror}. kclrun takes its former leases at once"
            " only after a restart within one boot, and needs all of /proc besides: mount it, and"
            " remove ProcSubset=pid from the service"
        ) from error


def host_slot(host_name: str, boot_id: str, folder_identity: str) -> str:
    """`<host name>-<hash>`: letters, digits, dots and dashes only."""
    host = _UNSAFE.sub("-", host_name)[:_HOST_CHARACTERS_MAX].strip("-.") or "host"
    digest = hashlib.sha256(f"{boot_id}\n{folder_identity}".encode()).hexdigest()
    return f"{host}-{digest[:_HASH_CHARACTERS]}"


_FILE_NAME: Final = re.compile(r"[0-9a-f]{8,64}\.lock\Z")
# An owner id is a group, a slot of at most 80 characters and a nonce of 16 characters.
_CONTENT_BYTES_MAX: Final = 1024
# The files of former starts that are checked. They are removed once their rows are gone, so there
# is a handful in practice.
_FORMER_MAX: Final = 256
_NONCE_TRIES_MAX: Final = 5


def state_folder(application: str, environment: Mapping[str, str]) -> Path:
    """The folder of an application's lock files: $KCLRUN_STATE_DIR/<application>, else below
    $XDG_STATE_HOME/kclrun, else below ~/.local/state/kclrun. It is made with mode 0700, or changed
    to it [S13]: a user who could remove a lock file there could cause two owners of one lease.

    Raises: SettingsError if it cannot be made, or belongs to another user.
    """
    folder = _state_root(environment) / application
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid():
            folder.chmod(0o700)
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder for lock files {folder}: {error.strerror};"
            " set KCLRUN_STATE_DIR to a local folder this user may write to"
        ) from error
    if status.st_uid != os.geteuid():
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
    """Our own lock file, held shared. Each lease process holds it too, by an open of its own."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor that holds the lock; -1 once retired."""
        return self._fd

    @property
    def is_in_place(self) -> bool:
        """Whether the file still has its name.

        A removed file cannot get its name back (the kernel links no file without a name). Another
        file of that name would prove nothing about the lease processes that hold this one. So a
        successor waits for expiry then [P3].
        """
        return self._fd < 0 or _is_at(self.path, self._fd)

    def retire(self, *, is_named: bool = False) -> None:
        """At the end of a manager: remove the file if no lease process holds it any more.

        With `is_named` (rows may still name the owner) it stays, and a successor removes it later.
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
    """The lock files of one application on this host, and the locks of former owners that we hold.

    A lock held exclusively proves that no process of that nonce lives. We keep it held: a former
    lease process that is only about to begin cannot get the lock any more, and exits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[OwnerId, tuple[Path, int]] = {}

    @property
    def identity(self) -> str:
        """Device and inode: another folder (a container's own, say) means another host slot."""
        status = self.folder.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def hold(self, new_owner: Callable[[], Owner]) -> tuple[Owner, HeldLock]:
        """Make and hold a file for a new owner. Each call of `new_owner` gives a new nonce.

        Raises: SettingsError if the folder accepts no file or no lock.
        """
        for _ in range(_NONCE_TRIES_MAX):
            owner = new_owner()
            path = self.folder / f"{owner.nonce}.lock"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.write(fd, owner.id.encode())
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another manager's search locked the file before we did; it may be removed, too.
                os.close(fd)
                continue
            except FileExistsError:
                continue
            except OSError as error:
                # On a full disk the file is made and its content is not. Starts that fail again and
                # again would leave so many files that `seize_former` misses the real ones.
                with contextlib.suppress(OSError):
                    path.unlink()
                raise SettingsError(
                    f"cannot lock {path}: {error.strerror}; KCLRUN_STATE_DIR must be on a local"
                    " disk with room"
                ) from error
            if _is_at(path, fd):
                return owner, HeldLock(path, fd)
            os.close(fd)
        raise SettingsError(
            f"no lock file of ours survives in {self.folder}: find the program that removes them"
        )

    def seize_former(self, slot: str, own_nonce: str) -> frozenset[OwnerId]:
        """Try once to lock exclusively every other file of our slot; returns the owners newly
        proven gone.

        The locks stay held until `forget`. Cheap enough for every 100 ms: some system calls for
        each former start. A folder that cannot be read now (no free descriptor, say) yields none.
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

        Call it with owners that were held before a complete scan began and that it did not find.
        """
        for owner in self._held.keys() & set(owners):
            path, fd = self._held.pop(owner)
            # In a folder that became read-only the file stays: the next start finds it again.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(fd)

    def close(self) -> None:
        for _, fd in self._held.values():
            os.close(fd)
        self._held.clear()


def _seize(path: Path, slot: str) -> tuple[OwnerId, int] | None:
    """The owner of a lock file and the descriptor that locks it exclusively, or None."""
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
    if owner is None or (owner.slot, owner.nonce) != (slot, path.stem) or not _is_at(path, fd):
        os.close(fd)
        return None
    return owner.id, fd


def _is_at(path: Path, fd: int) -> bool:
    """Whether `path` still names the file that we hold."""
    mine = os.fstat(fd)
    try:
        there = path.stat()
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
