"""Opaque tokens: sealed with a secret, so that nobody builds one or reads one.

A token is its payload under a keystream, with a keyed checksum that also names its purpose. The
same payload gives the same token: using one twice is as good as using it once.
Rule: the secret is an argument; a token never reaches an error message.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

__all__ = ["seal", "unseal"]

_CHECKSUM_BYTES: Final = 16
# The longest payload sealed here is a page token: a few hundred bytes.
_TOKEN_CHARACTERS_MAX: Final = 4096


def _checksum(secret: bytes, purpose: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(
        payload, digest_size=_CHECKSUM_BYTES, key=secret, person=purpose
    ).digest()


def _mask(secret: bytes, checksum: bytes, payload: bytes) -> bytes:
    """Payload under the keystream of secret and checksum; its own inverse."""
    stream = hashlib.shake_256(secret + checksum).digest(len(payload))
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(
        len(payload), "big"
    )


def seal(secret: bytes, purpose: bytes, payload: bytes) -> str:
    """A token for `payload`. `secret` is at most 64 bytes, `purpose` at most 16."""
    checksum = _checksum(secret, purpose, payload)
    return base64.b64encode(checksum + _mask(secret, checksum, payload)).decode("ascii")


def unseal(secret: bytes, purpose: bytes, token: str) -> bytes | None:
    """The payload of a token sealed with this secret for this purpose; None for any other text."""
    if len(token) > _TOKEN_CHARACTERS_MAX:
        return None
    try:
        sealed = base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError):
        return None
    checksum, masked = sealed[:_CHECKSUM_BYTES], sealed[_CHECKSUM_BYTES:]
    payload = _mask(secret, checksum, masked)
    if not hmac.compare_digest(checksum, _checksum(secret, purpose, payload)):
        return None
    return payload
