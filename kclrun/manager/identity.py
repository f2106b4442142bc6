"""Who this manager is: a group, a slot that names the host and its boot, a nonce of this start.

Rule [P3]: the nonce is new at every start; the slot is the same for all starts that a lock file can
tell about (one boot, one lock folder), so only those can be proven gone. Look next: `locks.py`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kclrun.manager.locks import HeldLock, LockFolder, state_folder
from kclrun.model.lease import Owner, OwnerId

__all__ = ["Identity", "establish", "host_slot"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")
# Long enough for an EC2 name; the hash behind it keeps two cut names apart.
_HOST_CHARACTERS_MAX: Final = 63
# 40 bits of hash over boot and folder: with a million slots, 1 in 2 that any two of them meet,
# and they would have to share their host name as well.
_HASH_CHARACTERS: Final = 10
# 64 bits, new at each start.
_NONCE_BYTES: Final = 8


@dataclass
class Identity:
    """An owner, its held lock, and what is known of those before it in the same slot."""

    owner: Owner
    lock: HeldLock
    folder: LockFolder

    @property
    def id(self) -> OwnerId:
        return self.owner.id

    def seize_former(self) -> frozenset[OwnerId]:
        """Former owners of our slot that are newly proven gone; nothing of theirs lives."""
        return self.folder.seize_former(self.owner.slot, self.owner.nonce)

    def retire(self, *, is_named: bool = False) -> None:
        """Let go of every lock. The own file goes if nobody of ours is left.

        `is_named`: rows may name us still. The file stays then, as the proof by which a successor
        on this host takes them at once.
        """
        self.lock.retire(is_named=is_named)
        self.folder.close()


def establish(application: str, group: str, environment: Mapping[str, str]) -> Identity:
    """Become a new owner on this host, its lock held.

    Raises: SettingsError if there is no place for lock files.
    """
    folder = LockFolder(state_folder(application, environment))
    slot = host_slot(socket.gethostname(), _BOOT_ID.read_text().strip(), folder.identity)
    owner, lock = folder.hold(lambda: Owner(group, slot, secrets.token_hex(_NONCE_BYTES)))
    return Identity(owner, lock, folder)


def host_slot(host_name: str, boot_id: str, folder_identity: str) -> str:
    """`<host name>-<hash>`: letters, digits, dots and dashes only."""
    host = _UNSAFE.sub("-", host_name)[:_HOST_CHARACTERS_MAX].strip("-.") or "host"
    digest = hashlib.sha256(f"{boot_id}\n{folder_identity}".encode()).hexdigest()
    return f"{host}-{digest[:_HASH_CHARACTERS]}"
