"""What a refusal says about this machine's clock. Pure.

The services refuse a request whose signature has a date that is minutes off. Some say so by a code
that means nothing else, some only in the message, and some with the code of a wrong key. The date
of the answer is the service's clock.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Final

import msgspec

# The services accept a date that is up to five minutes off. A code that may have other causes
# counts as a wrong clock only from four minutes on. All AWS SDKs use this figure.
SKEW_BELIEVED_S: Final = 240.0
# The first codes always mean a wrong clock. The second ones may have another cause: a wrong key
# gives the same code.
CLOCK_SKEW_CODES: Final = frozenset(
    {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
)
POSSIBLE_CLOCK_SKEW_CODES: Final = frozenset(
    {"AuthFailure", "InvalidSignatureException", "SignatureDoesNotMatch"}
)
# The service refused expired keys before it did anything, and the parent will send newer keys:
# the request may be repeated, as after a refused connection.
EXPIRED_KEYS: Final = frozenset({"ExpiredToken", "ExpiredTokenException"})

# With one of the codes above, or with that of a permission (S3's AccessDenied).
_OF_THE_DATE: Final = re.compile(
    r"(?i)signature expired|signature not yet current|request has expired|request is not yet valid"
    r"|(valid|invalid|future|past|wrong) (x-amz-)?date\b|request time.* too large|too skewed"
)
# "… is now earlier than 20261129T093613Z (20261129T094113Z - 5 min.)": the service's time is the
# one in parentheses.
_SERVICE_TIME: Final = re.compile(r"\((\d{8}T\d{6}Z) ?[-+] ?\d+ ?min")
_ADVICE: Final = "Set the clock (timedatectl, chronyc): AWS refuses requests that are minutes off"


class Dates(msgspec.Struct, frozen=True):
    """The clocks of one exchange: the service's, if its answer says one; this machine's at that
    time; and the one that requests are signed with, which is this machine's or a corrected one."""

    service_at: float | None
    here_at: float
    signed_at: float


def is_of_clock(code: str, message: str) -> bool:
    """Whether a refusal is surely about the date of the request."""
    return code in CLOCK_SKEW_CODES or _OF_THE_DATE.search(message) is not None


def is_perhaps_of_clock(code: str, message: str) -> bool:
    """Whether a refusal is about the date of the request, or about the keys."""
    return code in POSSIBLE_CLOCK_SKEW_CODES or is_of_clock(code, message)


def clock_words(code: str, message: str, shown: str, dates: Dates | None) -> str | None:
    """What the refusal of a caller says about this machine's clock, with advice on a second line;
    None if nothing does. `shown` is the message as it may be logged."""
    words = None if dates is None else _words(code, message, shown, dates)
    if words is None and is_of_clock(code, message):
        words = f"the service refuses the date of the request: {shown}"
    return None if words is None else f"{words}\n{_ADVICE}"


def _words(code: str, message: str, shown: str, dates: Dates) -> str | None:
    if code in EXPIRED_KEYS:
        # Keys are renewed by this machine's clock: one that is behind renews them too late.
        is_behind = dates.service_at is not None and dates.here_at < dates.service_at
        late = _difference(dates.here_at, dates.service_at) if is_behind else None
        return None if late is None else f"{shown}; {late}, so keys are renewed too late"
    difference = _difference(dates.signed_at, dates.service_at)
    if difference is not None and not is_perhaps_of_clock(code, message):
        return f"{shown}; {difference}"
    return difference or _difference(dates.signed_at, _time_in(message))


def _time_in(message: str) -> float | None:
    """The service's time in its message, without which an answer may be."""
    found = _SERVICE_TIME.search(message)
    if found is None:
        return None
    try:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _difference(at: float, service_at: float | None) -> str | None:
    """By how much a clock is off the service's; None where that is not known, or too little."""
    if service_at is None or abs(at - service_at) < SKEW_BELIEVED_S:
        return None
    return (
        f"the clock of this machine is {_roughly(abs(at - service_at))}"
        f" {'ahead of' if at > service_at else 'behind'} the service's,"
        f" which says {formatdate(service_at, usegmt=True)}"
    )


def _roughly(seconds: float) -> str:
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes % 1440 // 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
