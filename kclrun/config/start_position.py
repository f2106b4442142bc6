"""`start:` in typed form: where a shard without a lease is read from.

Rule: an instant names its zone and lies in the past; `now` is an argument.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime

__all__ = ["StartPosition", "parse_start"]


class StartPosition(msgspec.Struct, frozen=True):
    """A sentinel, and with AT_TIMESTAMP the instant."""

    sentinel: ExtendedSequenceNumber
    at: WallTime | None = None


def parse_start(text: str, now: WallTime) -> StartPosition:
    """Read TRIM_HORIZON, LATEST or an ISO-8601 instant in the past. Raises: SettingsError."""
    for sentinel in (TRIM_HORIZON, LATEST):
        if text == sentinel.sequence_number:
            return StartPosition(sentinel)
    moment = _instant(text)
    if moment.timestamp() > now:
        raise SettingsError(
            f"start: {text} is in the future (it is now {_shown(now)})\n"
            "Records that are yet to come are read with start: LATEST"
        )
    return StartPosition(AT_TIMESTAMP, WallTime(moment.timestamp()))


def _instant(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            "start: expected TRIM_HORIZON, LATEST or an instant such as 2026-03-01T06:00:00Z,"
            f" got {text[:60]!r}"
        ) from None
    if moment.tzinfo is None:
        raise SettingsError(f"start: {text} does not say its time zone; add Z for UTC, or +01:00")
    return moment


def _shown(now: WallTime) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
