"""What a person reads when something is wrong: what happened, what we know, what to do.

One message, on standard error, first line short. A traceback only for our own bugs, because it
is of use to nobody else. Rule: no control character of foreign text reaches the terminal [S6].
"""

from __future__ import annotations

import platform
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Final

from kclrun.cli import exit_codes
from kclrun.errors import (
    AccessDenied,
    DataLoss,
    EngineFailed,
    KclrunError,
    NotFound,
    ProcessorError,
    Throttled,
    Unavailable,
)

__all__ = ["bug_report", "for_a_person", "harmless", "tell"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# `kclrun check` reads and changes nothing; so may the others be described.
_CANNOT: Final[Mapping[str, str]] = {
    "run": "Cannot start",
    "check": "Check failed",
    "doctor": "Cannot examine the lease table",
    "iam": "Cannot say which permissions are needed",
    "init": "Init failed",
    "local": "Cannot start the embedded AWS",
    "put": "Cannot put",
    "lag": "Cannot measure the lag",
    "leases": "Cannot show the leases",
    "tail": "Cannot tail",
}
# The service does not know the caller: no grant would help. Names of the services' error codes.
_UNKNOWN_CALLER: Final = re.compile(
    r"UnrecognizedClient|InvalidSignature|SignatureDoesNotMatch|ExpiredToken|InvalidClientTokenId"
)
_HINTS: Final[tuple[tuple[type[KclrunError], str], ...]] = (
    (
        AccessDenied,
        "Grant it to the role or user whose credentials these are: `kclrun iam` prints the policy",
    ),
    (NotFound, "Check the name, aws.region, and the account of the credentials"),
    (Throttled, "The service asked us to slow down for too long; try again later"),
    (EngineFailed, "What was committed stays; start it again, and the rest is read again"),
    (Unavailable, "Check the network, aws.region and aws.endpoint, then try again"),
)


def tell(error: BaseException, verb: str) -> int:
    """Write the message for an error that ends the program; the exit code."""
    code = exit_codes.exit_code_of(error)
    is_ours = code == exit_codes.OUR_BUG
    sys.stderr.write(bug_report(error) if is_ours else for_a_person(error, verb))
    sys.stderr.flush()
    return code


def for_a_person(error: BaseException, verb: str) -> str:
    """The message for an error that is not our bug."""
    first, *more = harmless(str(error)).split("\n")
    lines = [f"{_beginning(error, verb)}: {first}", *(f"  {line}" for line in more)]
    hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), None)
    if isinstance(error, AccessDenied) and _UNKNOWN_CALLER.search(first):
        hint = "The credentials are wrong or have expired; check them, aws.profile and aws.role_arn"
    # A refusal of several lines says itself what to do.
    if hint is not None and not (more and isinstance(error, AccessDenied)):
        lines.append(f"  {hint}")
    return "\n".join(lines) + "\n"


def _beginning(error: BaseException, verb: str) -> str:
    """What it kept us from: some errors end what ran already."""
    if isinstance(error, ProcessorError | DataLoss | EngineFailed):
        return "Ended"
    return _CANNOT.get(verb, "Cannot go on")


def bug_report(error: BaseException) -> str:
    """What to send us: the traceback and the versions, and where to."""
    from kclrun.cli.version import versions

    trace = harmless("".join(traceback.format_exception(error)))
    return (
        f"{trace}\n"
        f"This is a bug in kclrun: {type(error).__name__} should never end the program.\n"
        "  Please report it with the text above and this line, at the project's issue tracker:\n"
        f"  {versions()}, Python {platform.python_version()}, {platform.platform()}\n"
    )


def harmless(text: str) -> str:
    """Foreign text without what moves a cursor, hides text or forges a line."""
    return _CONTROL.sub("�", text)
