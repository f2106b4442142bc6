"""Maps a service's error, or a missing answer, to one of our error classes. Pure.

The wire client and the control plane share it. `ports.classify` decides whether to retry. This
module chooses the class, says which permission is missing, and keeps secrets out of the message,
because services quote the request (an iterator in a validation error; the signed headers, session
token included, in a signature error).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kclrun import errors
from kclrun.aws.clocks import (
    CLOCK_SKEW_CODES,
    EXPIRED_KEYS,
    POSSIBLE_CLOCK_SKEW_CODES,
    Dates,
    clock_words,
    is_of_clock,
)
from kclrun.aws.operations import Operation
from kclrun.ports import Retry, classify

# The service does not take these keys: unknown, deleted, expired, or with another secret.
REFUSED_KEYS: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "UnrecognizedClientException",
        *POSSIBLE_CLOCK_SKEW_CODES,
    }
)
_DENIED: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "OptInRequired",
        "UnrecognizedClientException",
        *POSSIBLE_CLOCK_SKEW_CODES,
        *CLOCK_SKEW_CODES,
    }
)
# Servers beside AWS have codes of their own for a caller that they do not know: XAdminUserNotFound.
_OF_THE_CALLER: Final = re.compile(r"(?i)user|access_?key|credential|account|^auth")
_NOT_FOUND: Final = frozenset({"ResourceNotFoundException", "TableNotFoundException"})
_LEAF_OF: Final[Mapping[Retry, type[errors.ServiceError]]] = {
    Retry.AGAIN_SLOWER: errors.Throttled,
    Retry.AGAIN: errors.Unavailable,
    Retry.READ_BACK: errors.OutcomeUnknown,
    Retry.NEW_ITERATOR: errors.ExpiredIterator,
}

# An iterator has 150 characters and more, a session token has more. An ARN does not match: its
# colons interrupt the run.
_LONG_RUN: Final = re.compile(r"[A-Za-z0-9+/=_]{60,}")
# An error's name, such as `ThrottlingException` or `AWS.SimpleQueueService.NonExistentQueue`. It is
# logged as it is, so it must not contain a line break.
_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e\u00a0-\uffff]+")
_TEXT_MAX: Final = 400


class ErrorReply(msgspec.Struct, frozen=True):
    """The error body of a JSON service; `code` is "" where the body is not one.

    `item` and `reasons` are DynamoDB's: the present row, and a reason for each part of a cancelled
    transaction. `dates` are the clocks of the exchange, where they are known.
    """

    code: str = ""
    message: str = ""
    item: dict[str, dict[str, object]] | None = None
    reasons: tuple[tuple[str, dict[str, dict[str, object]] | None], ...] = ()
    dates: Dates | None = None


class _Reason(msgspec.Struct, rename="pascal"):
    code: str | None = None
    item: dict[str, dict[str, object]] | None = None


class _Body(msgspec.Struct):
    type_: str | None = msgspec.field(name="__type", default=None)
    code: str | None = None
    message: str | None = None
    capital_message: str | None = msgspec.field(name="Message", default=None)
    item: dict[str, dict[str, object]] | None = msgspec.field(name="Item", default=None)
    reasons: list[_Reason] | None = msgspec.field(name="CancellationReasons", default=None)


_DECODER: Final = msgspec.json.Decoder(_Body)


def parse_error_reply(body: bytes | bytearray, type_header: str | None = None) -> ErrorReply:
    """Read an error body, however broken it is: never raises.

    The name comes as `{"__type": "namespace#Name"}` or in `x-amzn-ErrorType: Name:http://…`.
    """
    try:
        parsed = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = _Body()
    reasons = parsed.reasons or ()
    return ErrorReply(
        code=code_in(parsed.type_ or type_header or parsed.code or ""),
        message=parsed.message or parsed.capital_message or "",
        item=parsed.item,
        reasons=tuple((reason.code or "None", reason.item) for reason in reasons),
    )


def code_in(named: str) -> str:
    """The name of an error without its namespace or address; "" if there is none."""
    found = _CODE.search(named.rpartition("#")[2])
    return "" if found is None else found[0]


def service_error(
    operation: Operation, reply: ErrorReply, status: int | None, *, was_sent: bool = True
) -> errors.ServiceError:
    """Our error for one failed request: operation, code, and a message that may be logged.

    `status` is None where no answer came; `reply.message` then describes the failure.
    """
    code = reply.code or ("" if status is None else f"HTTP {status}")
    leaf = _leaf(operation, reply, status, was_sent=was_sent)
    shown = safe_text(reply)
    if issubclass(leaf, errors.AccessDenied | errors.ExpiredKeys):
        shown = clock_words(reply.code, reply.message, shown, reply.dates) or shown
    text = f"{operation.name}: {code}: {shown}" if code else _silent(operation, reply)
    return leaf(text, operation=operation.name, code=code)


def nothing_listens(operation: Operation, host: str) -> errors.NothingListens:
    """The error for a connection that this host refused, at an address of its own."""
    text = f"{operation.name}: nothing listens at {host} (connection refused)"
    return errors.NothingListens(text, operation=operation.name)


def _leaf(
    operation: Operation, reply: ErrorReply, status: int | None, *, was_sent: bool
) -> type[errors.ServiceError]:
    code = reply.code
    if code in EXPIRED_KEYS:
        return errors.ExpiredKeys
    retry = classify(code, status, is_write=operation.is_write, was_sent=was_sent)
    if retry is not Retry.GIVE_UP:
        return _LEAF_OF[retry]
    # 407: a proxy wants a user and a password.
    if code in _DENIED or status in {401, 403, 407} or _OF_THE_CALLER.search(code):
        return errors.AccessDenied
    return errors.NotFound if code in _NOT_FOUND else errors.InvalidRequest


def _silent(operation: Operation, reply: ErrorReply) -> str:
    return f"{operation.name}: no answer: {reply.message}"


def safe_text(reply: ErrorReply) -> str:
    """The service's message as it may be logged: first line, no long runs, no control characters.

    A signature error quotes the canonical request with the session token, so our own text is used.
    """
    first_line = reply.message.partition("\n")[0]
    if reply.code in POSSIBLE_CLOCK_SKEW_CODES and not is_of_clock(reply.code, first_line):
        return "the signature was refused: wrong secret key, wrong region, or this host's clock"
    shown = _LONG_RUN.sub("…", _UNPRINTABLE.sub(" ", first_line))
    return shown[:_TEXT_MAX] or "the service gave no reason"


# The object that is created as a probe of a bucket; the permission is for all of its objects.
PROBE_OBJECT: Final = "_kclrun/probe"
# Other codes mean that the service does not know the caller at all: no permission would help.
LACKS_PERMISSION: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthorizationError", "NotAuthorized"}
)
# "User: … is not authorized to perform: sqs:SendMessage on resource: arn:… because …".
_RESOURCE: Final = re.compile(r"on resource: \"?(arn:[^\s\"']+)")


@contextlib.contextmanager
def advising(operation: Operation, resource: str) -> Iterator[None]:
    """Adds to an AccessDenied the action to allow, and the ARN: the one that the service names,
    else `resource`. If the service does not know the caller, the error stays as it is."""
    try:
        yield
    except errors.AccessDenied as error:
        if error.code not in LACKS_PERMISSION:
            raise
        named = _RESOURCE.search(str(error))
        where = resource if named is None else named[1].rstrip(".,;")
        if where.endswith(PROBE_OBJECT):
            where = f"{where.removesuffix(PROBE_OBJECT)}*"
        advice = f"Allow {' and '.join(operation.iam_actions)} on {where}"
        refusal = "it may not be written to: " if operation.is_write else ""
        raise error.reworded(
            f"{refusal}{error}\n{advice}; `kclrun iam` prints the policy"
        ) from None
