"""Hash keys: where in the stream's 128-bit key space a record belongs.

Rule: an explicit hash key wins; else it is the MD5 of the partition key's UTF-8, read as an
unsigned big-endian number (Kinesis API reference, PutRecord). Look next: `kpl.py`.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kclrun.errors import LimitExceeded
from kclrun.model.shard import HASH_KEY_MAX

__all__ = ["effective_hash_key", "parse_hash_key"]

# 2**128 - 1 has 39 digits. Checked first, so that `int` never sees a text of any length.
_DIGITS_MAX: Final = 39


def effective_hash_key(partition_key: str, explicit_hash_key: str | None) -> int:
    """The hash key that decides the shard of a record, 0 to 2**128 - 1.

    Raises: LimitExceeded if the explicit hash key is no number in that range, or the partition
    key cannot be written as UTF-8.
    """
    if explicit_hash_key is not None:
        return parse_hash_key(explicit_hash_key)
    try:
        encoded = partition_key.encode()
    except UnicodeEncodeError:
        # Not chained: the original names the key.
        raise LimitExceeded("a partition key holds a lone surrogate and has no UTF-8") from None
    return int.from_bytes(hashlib.md5(encoded, usedforsecurity=False).digest(), "big")


def parse_hash_key(text: str) -> int:
    """A hash key from its decimal text. Raises: LimitExceeded for anything but 0 to 2**128 - 1."""
    if 0 < len(text) <= _DIGITS_MAX and text.isascii() and text.isdigit():
        hash_key = int(text)
        if hash_key <= HASH_KEY_MAX:
            return hash_key
    raise LimitExceeded(f"a hash key is no decimal number from 0 to {HASH_KEY_MAX}")
