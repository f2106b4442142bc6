"""Durations and sizes as people write them: `10s`, `1m30s`, `250ms`; `16MiB`, `512 KiB`.

They load into subclasses of float (seconds) and int (bytes), so code computes with plain numbers.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["DURATION_PATTERN", "SIZE_PATTERN", "ByteSize", "Duration"]

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {"": 1, "B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GiB": 2**30}
DURATION_PATTERN: Final = r"^(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+$"
SIZE_PATTERN: Final = rf"^[0-9]+(?:\.[0-9]+)?\s*(?:{'|'.join(filter(None, _BYTES))})?$"
_DURATION: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+\Z")
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")


class Duration(float):
    """Seconds."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read `10s`, `1m30s`, `250ms`, `2h`. Raises: ValueError saying what is expected."""
        if not isinstance(text, str) or not _DURATION.match(text):
            raise ValueError(f"expected a duration such as 10s, 250ms or 1m30s, got {text!r}")
        return cls(sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(text)))

    @property
    def text(self) -> str:
        """As people write it, in the largest unit that divides it: `2m`, `90s`, `250ms`."""
        for unit in ("d", "h", "m", "s"):
            if self >= _SECONDS[unit] and self % _SECONDS[unit] == 0:
                return f"{int(self / _SECONDS[unit])}{unit}"
        milliseconds = f"{self * 1000:.3f}".rstrip("0").rstrip(".")
        return f"{milliseconds}ms" if self else "0s"


class ByteSize(int):
    """Bytes."""

    @classmethod
    def parse(cls, text: object) -> ByteSize:
        """Read `16MiB`, `512 KiB`, `10MB` or plain bytes. Raises: ValueError."""
        if isinstance(text, int) and not isinstance(text, bool):
            return cls(text)
        match = _SIZE.match(text) if isinstance(text, str) else None
        if match is None or match[2] not in _BYTES:
            raise ValueError(f"expected a size such as 16MiB or 512KiB, got {text!r}")
        return cls(int(float(match[1]) * _BYTES[match[2]]))

    @property
    def text(self) -> str:
        """As people write it: `16MiB`, `512KiB`, `1000B`."""
        for unit in ("GiB", "MiB", "KiB"):
            if self >= _BYTES[unit] and self % _BYTES[unit] == 0:
                return f"{self // _BYTES[unit]}{unit}"
        return f"{int(self)}B"
