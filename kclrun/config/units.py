"""Values as people write them: durations, sizes, start positions, addresses to listen at.

`10s`, `1m30s`, `250ms`; `16MiB`, `512 KiB`; `latest`, an instant with its zone; `0.0.0.0:9464`.
Durations load into a subclass of float (seconds), sizes of int (bytes), so code computes with plain
numbers. Pure: the time is an argument.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime, utc_text

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {"": 1, "B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GiB": 2**30}
DURATION_PATTERN: Final = r"^(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+$"
SIZE_PATTERN: Final = rf"^[0-9]+(?:\.[0-9]+)?\s*(?:{'|'.join(filter(None, _BYTES))})?$"
# 100 years: a waiting thread takes 292 of them, and a date ends with the year 9999.
_DURATION_MAX_S: Final = 36_500 * 86_400.0
# The largest size that a lease process can receive: it fits into 63 bits.
_SIZE_MAX: Final = 2**63 - 1
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
# What a time of the command line may be, for help texts and errors.
TIME_FORMS: Final = "2026-03-01T06:00:00Z, 2026-03-01 (UTC), 10m for ten minutes ago, or now"
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")


class OutOfRange(ValueError):
    """A value of the right form, with its limit in words."""


class Duration(float):
    """Seconds."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read `10s`, `1m30s`, `250ms`, `2h`. Raises: ValueError that names the accepted forms."""
        if not isinstance(text, str) or not re.fullmatch(DURATION_PATTERN[1:-1], text):
            raise ValueError(f"expected a duration such as 10s, 250ms or 1m30s, got {text!r}")
        return cls.of(sum(float(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(text)))

    @classmethod
    def of(cls, seconds: float) -> Duration:
        """A number of seconds, as a program gives it. Raises: OutOfRange."""
        if not seconds >= 0:  # NaN, too
            raise OutOfRange(f"expected 0 seconds or more, got {seconds}")
        if seconds > _DURATION_MAX_S:
            raise OutOfRange("expected a duration of at most 36500d, which are 100 years")
        return cls(seconds)

    @property
    def text(self) -> str:
        """The text that people write, in the largest unit that divides it: `2m`, `90s`, `250ms`."""
        for unit in ("d", "h", "m", "s"):
            if self and self % _SECONDS[unit] == 0:
                return f"{int(self / _SECONDS[unit])}{unit}"
        milliseconds = f"{self * 1000:.3f}".rstrip("0").rstrip(".")
        return f"{milliseconds}ms" if self else "0s"


class ByteSize(int):
    """Bytes."""

    @classmethod
    def parse(cls, text: object) -> ByteSize:
        """Read `16MiB`, `512 KiB`, `10MB` or plain bytes. Raises: ValueError."""
        if isinstance(text, int) and not isinstance(text, bool):
            size: float = text
        else:
            match = _SIZE.match(text) if isinstance(text, str) else None
            if match is None or match[2] not in _BYTES:
                raise ValueError(f"expected a size such as 16MiB or 512KiB, got {text!r}")
            size = float(match[1]) * _BYTES[match[2]]
        if size > _SIZE_MAX:
            raise OutOfRange("expected a size of less than 8 EiB")
        return cls(int(size))

    @property
    def text(self) -> str:
        """The text that people write: `16MiB`, `512KiB`, `1000B`."""
        for unit in ("GiB", "MiB", "KiB"):
            if self and self % _BYTES[unit] == 0:
                return f"{self // _BYTES[unit]}{unit}"
        return f"{int(self)}B"


class StartPosition(msgspec.Struct, frozen=True):
    """A sentinel, and with AT_TIMESTAMP the instant."""

    sentinel: ExtendedSequenceNumber
    at: WallTime | None = None


def parse_start(
    text: str,
    now: WallTime,
    name: str = "start",
    sentinels: Sequence[ExtendedSequenceNumber] = (TRIM_HORIZON, LATEST),
) -> StartPosition:
    """Read one of `sentinels` or an ISO-8601 instant in the past; `name` is the setting, for
    errors. Raises: SettingsError."""
    for sentinel in sentinels:
        if text == sentinel.sequence_number:
            return StartPosition(sentinel)
    names = ", ".join(sentinel.sequence_number for sentinel in sentinels)
    expected = f"{names}{' or ' if names else ''}an instant such as 2026-03-01T06:00:00Z"
    try:
        # The value is not quoted: it may come from the environment, or be a secret.
        moment = _past_instant(text, now, expected, is_quoted=False)
    except ValueError as error:
        hint = ""
        if isinstance(error, OutOfRange) and LATEST in sentinels:
            hint = f"\nRecords that are yet to come are read with {name}: LATEST"
        raise SettingsError(f"{name}: {error}{hint}") from None
    return StartPosition(AT_TIMESTAMP, moment)


def parse_time(
    text: str, now: WallTime, sentinels: Sequence[ExtendedSequenceNumber] = ()
) -> StartPosition:
    """Read a time of the command line: one of `sentinels` in any case, an instant in the past, a
    date (its first instant in UTC), a duration for so long ago, or `now`, which is LATEST if that
    is one of them. Raises: ValueError that names the accepted forms."""
    by_name = {sentinel.sequence_number: sentinel for sentinel in sentinels}
    if text.upper() in by_name:
        return StartPosition(by_name[text.upper()])
    if text == "now":
        is_tip = LATEST in sentinels
        return StartPosition(LATEST) if is_tip else StartPosition(AT_TIMESTAMP, now)
    if re.fullmatch(DURATION_PATTERN[1:-1], text):
        return StartPosition(AT_TIMESTAMP, WallTime(now - Duration.parse(text)))
    expected = ", ".join([*by_name, TIME_FORMS])
    whole = f"{text}T00:00:00Z" if _DATE.fullmatch(text) else text
    try:
        return StartPosition(AT_TIMESTAMP, _past_instant(whole, now, expected))
    except OutOfRange as error:
        if LATEST not in sentinels:
            raise
        raise OutOfRange(f"{error}; records that are yet to come are read with LATEST") from None


def parse_instant(text: str, expected: str, *, is_quoted: bool = True) -> WallTime:
    """An ISO-8601 instant with a zone, in the past or the future; `expected` names the accepted
    forms, for errors, and a text that is none is quoted. Raises: ValueError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        got = f", got {text[:60]!r}" if is_quoted else ""
        raise ValueError(f"expected {expected}{got}") from None
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone; add Z for UTC, or +01:00")
    try:
        return WallTime(moment.astimezone(UTC).timestamp())
    except OverflowError:  # a first day of the year 1 that is still in the year 0 in UTC
        raise ValueError(f"{text} is before the year 1 in UTC") from None


def _past_instant(text: str, now: WallTime, expected: str, *, is_quoted: bool = True) -> WallTime:
    """As `parse_instant`. Raises: OutOfRange, a ValueError, for the future."""
    at = parse_instant(text, expected, is_quoted=is_quoted)
    if at > now:
        raise OutOfRange(f"{text} is in the future (it is now {utc_text(now)})")
    return at


_LOOPBACK: Final = "127.0.0.1"
_PORT: Final = re.compile(r"[0-9]+")
_PORT_MAX: Final = 65535


def parse_listen(text: str | int) -> tuple[str, int]:
    """Host and port; a port alone is on loopback. Port 0 takes a free one.

    The host is an address, never a name: a name may stand for several addresses, or for others
    later.
    Raises: ValueError that names the accepted forms.
    """
    host, colon, port = str(text).rpartition(":")
    address = host.removeprefix("[").removesuffix("]") if colon else _LOOPBACK
    address = _LOOPBACK if address == "localhost" else address
    try:
        ipaddress.ip_address(address)
        if _PORT.fullmatch(port) and int(port) <= _PORT_MAX:
            return address, int(port)
    except ValueError:
        pass
    raise ValueError("expected a port of this machine such as 9464, or ADDRESS:PORT")
