"""The versions of a shard's keyed state: their names, and their format in bytes [K14].

A version is a snapshot (all keys) or a delta (the changes since its base). Once written it never
changes. Its name is unique: two owners that write a version for one position write two versions,
and the row of the lease names the one that is the state [V5, V9].
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from kclrun.errors import SettingsError

# The entry of a key: its partition key, the name of the value, and the value; None removes it.
Change = tuple[str, str, bytes | None]

# 2 may hold timers and a watermark (`timers.py`). A version without them is written as 1, which
# releases before timers read.
FORMAT: Final = 2
FORMAT_WITHOUT_TIMERS: Final = 1
_MAGIC: Final = b"kclrun-state\n"
_DIGEST_BYTES: Final = 16
_NAME: Final = re.compile(r"(\d{10,})-(\d{6,})-[0-9a-f]{8}\Z", re.ASCII)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version: `changes` on top of `base`, or all entries if it has none.

    The version is the state of `shard` at `cursor`. `token` is the fencing token of the owner that
    wrote it, `attempt` counts the versions of that owner. A large snapshot is several versions:
    each but the first `is_part` and has other keys than its base. `outbox` names the object in the
    store that holds the rows of the commit, if there are any (`outputs/outbox.py`).
    """

    name: str
    shard: str
    cursor: str
    token: int
    attempt: int
    base: str | None
    changes: list[Change]
    format: int = FORMAT
    is_part: bool = False
    outbox: str | None = None


def version_name(token: int, attempt: int, nonce: str) -> str:
    """A name that no other version of the shard has or will have: `nonce` is random, of 8 hex
    digits, because a lease table that was restored counts its tokens again. 26 characters."""
    return f"{token:010}-{attempt:06}-{nonce}"


def token_of(name: str) -> int | None:
    """The fencing token in the name of a version; None for another name."""
    match = _NAME.match(name)
    return None if match is None else int(match[1])


def encode_version(version: Version) -> bytes:
    """The bytes of a version, with a checksum of them."""
    return with_checksum(_MAGIC, msgspec.msgpack.encode(version))


def with_checksum(magic: bytes, body: bytes) -> bytes:
    """The bytes of an object of the store, for `checked`."""
    return b"".join((magic, _digest(body), body))


def checked(magic: bytes, what: str, content: bytes) -> memoryview:
    """The body of an object that `with_checksum` made. Raises: SettingsError, which names the
    object as `what`."""
    body = memoryview(content)[len(magic) + _DIGEST_BYTES :]
    if not content.startswith(magic):
        raise SettingsError(f"{what} is not one: restore it")
    if content[len(magic) : len(magic) + _DIGEST_BYTES] != _digest(body):
        raise SettingsError(f"{what} is damaged (its checksum differs)")
    return body


def decode_version(name: str, content: bytes) -> Version:
    """The version of this name. Raises: SettingsError, in words, if the bytes are not it."""
    body = checked(_MAGIC, f"the state version {name}", content)
    try:
        found = msgspec.msgpack.decode(body, type=_Format)
        if found.format > FORMAT:
            raise SettingsError(
                f"the state version {name} has format {found.format}: a newer kclrun wrote it"
            )
        version = msgspec.msgpack.decode(body, type=Version)
    except msgspec.MsgspecError:
        raise SettingsError(f"the state version {name} cannot be read") from None
    if version.name != name:
        raise SettingsError(f"the state version {name} is a copy of {version.name[:40]}")
    return version


class _Format(msgspec.Struct):
    format: int = 0


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
