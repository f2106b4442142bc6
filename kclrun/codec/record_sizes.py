"""The sizes of the records that a stream takes, as the service counts them.

Every stream takes 1 MiB a record, its key included, and up to 10 MiB where its owner has raised its
limit. `RecordLimit` asks for it, but only about a record that is larger than every stream takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kclrun.codec.kpl import parse_hash_key
from kclrun.errors import LimitExceeded, ServiceError
from kclrun.model.quotas import (
    MIB,
    PARTITION_KEY_CHARACTERS_MAX,
    RECORD_BYTES_DEFAULT,
    RECORD_BYTES_LARGEST,
)
from kclrun.model.record import PutEntry
from kclrun.model.retries import Retries, repeated

# Ours, of one PutRecords: emulators take 5 MiB, as the service did before October 2025. A larger
# record is sent in a request of its own.
REQUEST_BYTES_MAX: Final = 5 * MIB
# The owner may raise the limit while we run. An account has 20 DescribeStreamSummary a second.
_AGE_MAX_S: Final = 30.0
# Pauses of 0.5, 1 and 2 s: throttling by other callers ends in them.
_RETRIES: Final = Retries(attempts_max=4, base_s=0.25, max_s=2.0)


def checked_size_bytes(entry: PutEntry, bytes_max: int, unknown: str = "") -> int:
    """The size of a record as the service counts it. `unknown` follows the limit in the message.

    Raises: LimitExceeded for a record that it never accepts; names neither data nor key.
    """
    key = entry.partition_key
    characters = len(key)
    if not 0 < characters <= PARTITION_KEY_CHARACTERS_MAX:
        raise LimitExceeded(
            f"a partition key has {characters} characters; the service takes 1 to"
            f" {PARTITION_KEY_CHARACTERS_MAX}"
        )
    if entry.explicit_hash_key is not None:
        parse_hash_key(entry.explicit_hash_key)
    try:
        size_bytes = len(entry.data) + (characters if key.isascii() else len(key.encode()))
    except UnicodeEncodeError:
        # Not chained: the original error contains the key.
        raise LimitExceeded("a partition key holds a lone surrogate and has no UTF-8") from None
    if size_bytes > bytes_max:
        raise LimitExceeded(
            f"a record has {size_bytes} bytes, its key included; at most {bytes_max} are taken"
            f"{unknown}"
        )
    return size_bytes


class RecordLimit:
    """The limit of one stream. 1 MiB until a larger record is to be put: then `ask` reads the
    stream's own, at most each 30 s, or gives None where the service does not say it. For one
    thread.

    If it cannot be asked, the limit is 1 MiB, and the refusal of a record says why.
    """

    def __init__(
        self,
        ask: Callable[[], int | None],
        *,
        clock: Callable[[], float],
        wait: Callable[[float], object],
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._wait = wait
        self._bytes_max = RECORD_BYTES_DEFAULT
        self._asked_at = -math.inf
        self._unknown = ""

    @property
    def unknown(self) -> str:
        """Why the stream's own limit is not known, to follow the limit in a sentence; empty if it
        is known, or was not asked."""
        return self._unknown

    def covering(self, size_bytes: int) -> int:
        """The limit, as far as it matters for a record of this size. Waits up to 4 s."""
        if size_bytes > self._bytes_max and self._clock() - self._asked_at >= _AGE_MAX_S:
            self._look()
        return self._bytes_max

    def checked_size_bytes(self, entry: PutEntry) -> int:
        """The size of the record, if this stream takes it. Raises: LimitExceeded."""
        size_bytes = checked_size_bytes(entry, RECORD_BYTES_LARGEST)
        if size_bytes <= self._bytes_max:
            return size_bytes
        bytes_max = self.covering(size_bytes)
        return checked_size_bytes(entry, bytes_max, self._unknown)

    def _look(self) -> None:
        try:
            found = repeated(self._ask, _RETRIES, wait=self._wait, chance=lambda: 1.0)
        except ServiceError as error:
            self._unknown = f", unless the stream allows more; that is not known: {error}"
        else:
            self._bytes_max = found or RECORD_BYTES_DEFAULT
            self._unknown = ""
        self._asked_at = self._clock()
