"""The message for an error that ends the program: the event, its details, and advice.

There is one message, on standard error, with a short first line. Only our own bugs get a traceback,
because it does not help users. Every verb prints by `echo`: control characters of foreign text
never reach the terminal [S6].
"""

from __future__ import annotations

import errno
import platform
import re
import select
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

import click

from kclrun import __version__, errors
from kclrun.cli import exit_codes
from kclrun.model.text import sanitize

# As many names as a line of a terminal shows.
_NAMES_TABLE: Final = re.compile(r"(?:application|table|stream|aws\.[a-z_.]+)=")
# The first words of a message, by verb.
_CANNOT: Final[Mapping[str, str]] = {
    "run": "Cannot start",
    "check": "Check failed",
    "doctor": "Cannot examine the lease table",
    "iam": "Cannot make the policy",
    "init": "Init failed",
    "local": "Cannot start the embedded AWS",
    "migrate": "Cannot migrate",
    "put": "Cannot put",
    "lag": "Cannot measure the lag",
    "leases": "Cannot show the leases",
    "reset": "Cannot reset",
    "pause": "Cannot pause",
    "resume": "Cannot resume",
    "page": "Cannot show the fleet",
    "replay": "Cannot replay",
    "why": "Cannot explain the shard",
    "top": "Cannot show the fleet",
    "tail": "Cannot tail",
}
# Error codes for an unknown caller: another permission would not help.
_UNKNOWN_CALLER: Final = re.compile(
    r"UnrecognizedClient|AuthFailure|InvalidSignature|SignatureDoesNotMatch|ExpiredToken"
    r"|InvalidClientTokenId|InvalidAccessKeyId|InvalidToken|UserNotFound|AccessKey"
)
_NAMED_IN_REPORTS: Final = ("boto3", "msgspec", "protobuf")
# The status of a table or a stream, which AWS has answered.
_STATUS: Final = re.compile(r"[A-Z][A-Z_]+")
_LISTENS_NOT: Final = re.compile(r"nothing listens at \S+:(\d+)")
_HINTS: Final[tuple[tuple[type[errors.KclrunError], str], ...]] = (
    (
        errors.AccessDenied,
        "Grant it to the role or user whose credentials these are: `kclrun iam` prints the policy",
    ),
    (errors.Throttled, "The service asked us to slow down for too long; try again later"),
    (errors.EngineFailed, "What was committed stays; start it again, and the rest is read again"),
    (
        errors.ExpiredKeys,
        "Renew the keys where they come from (aws sso login, a new session token), then try again",
    ),
    (errors.NothingListens, "Start the service there, or correct aws.endpoint"),
    (errors.Unavailable, "Check the network, aws.region and aws.endpoint, then try again"),
)


@contextmanager
def naming_table(table: str) -> Iterator[None]:
    """Raises: NotFound that names the lease table, in place of the service's for its reads."""
    try:
        yield
    except errors.NotFound as error:
        message = f"there is no lease table {table}; the first start makes it"
        raise error.reworded(message) from None


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a text for people, without control characters of whatever origin [S6]. Once its
    terminal is gone the text is dropped: it changes no exit code."""
    try:
        click.echo(sanitize(text), err=err)
    except OSError as error:
        if not is_of_lost_terminal(error, sys.stderr if err else sys.stdout):
            raise
        # Python must not flush it at the exit.
        setattr(sys, "stderr" if err else "stdout", None)


def columns_of(text: str) -> int:
    """The columns that a text takes on a terminal: a wide character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def has_lost_reader(*files: TextIO | None) -> bool:
    """Whether the reader of one of these outputs has closed it. No write is needed to see that."""
    waiter = select.poll()
    for file in files:
        with suppress(AttributeError, OSError, ValueError):  # not a file of the system, or closed
            waiter.register(file.fileno(), 0)  # type: ignore[union-attr]
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in waiter.poll(0))


def is_of_lost_terminal(error: BaseException, *files: TextIO | None) -> bool:
    """Whether a write failed because one of these files was a terminal that is closed."""
    return isinstance(error, OSError) and error.errno == errno.EIO and has_lost_reader(*files)


def report_error(error: BaseException, verb: str) -> int:
    """Write the message for an error that ends the program; returns the exit code."""
    code = exit_codes.exit_code_of(error)
    if code == exit_codes.OUR_BUG:
        text = bug_report(error)
    elif isinstance(error, errors.KclrunError):
        text = for_a_person(error, verb)
    else:
        text = _host_report(error)
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # Nothing can be shown, and the code still answers. Python must not flush at exit.
        sys.stderr = None
    return code


def _host_report(error: BaseException) -> str:
    """The report of a shortage that the kernel or Python raised: its place and advice."""
    number = error.errno if isinstance(error, OSError) else None
    what = "kclrun could not go on without it."
    reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    trace = sanitize("".join(traceback.format_exception(error)))
    return f"{trace}\nEnded: {errors.host_error(what, reason, number)}\n"


def for_a_person(error: BaseException, verb: str) -> str:
    """The message for an error that is not our bug."""
    first, *more = sanitize(str(error)).split("\n")
    lines = [f"{_beginning(error, verb)}: {first}", *(f"  {line}" for line in more)]
    hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), None)
    is_of_aws = isinstance(error, errors.NothingListens) and error.operation
    if is_of_aws and (port := _LISTENS_NOT.search(first)):
        hint = (
            f"Start the service there, or correct aws.endpoint;  kclrun local --port {port[1]}"
            "  serves an AWS on this machine"
        )
    elif isinstance(error, errors.Unavailable) and _STATUS.fullmatch(error.code):
        hint = None if more else "AWS has answered: wait until it is ACTIVE, then try again"
    elif isinstance(error, errors.Unavailable) and not error.operation:  # not of AWS
        hint = "Check that it runs and can be reached from here, then try again"
    if isinstance(error, errors.AccessDenied) and _UNKNOWN_CALLER.search(first):
        hint = "The credentials are wrong or have expired; check them, aws.profile and aws.role_arn"
    # A refusal of several lines contains its own advice.
    if hint is not None and not (more and isinstance(error, errors.AccessDenied)):
        lines.append(f"  {hint}")
    return "\n".join(lines) + "\n"


def _beginning(error: BaseException, verb: str) -> str:
    """The first words: the program could not do its verb, or an error ended the running one."""
    if isinstance(error, errors.ProcessorError | errors.DataLoss | errors.EngineFailed):
        return "Ended"
    return _CANNOT.get(verb, "Cannot go on")


def bug_report(error: BaseException) -> str:
    """The text of a bug report: the traceback, the versions, and where to send it."""
    trace = sanitize("".join(traceback.format_exception(error)))
    return (
        f"{trace}\n"
        f"This is a bug in kclrun: {type(error).__name__} should never end the program.\n"
        "  Please report it with the text above and this line, at the project's issue tracker:\n"
        f"  {_versions()}\n"
    )


def versions() -> str:
    """One line with the versions of kclrun and of its main dependencies."""
    from importlib import metadata

    def version_of(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "(not installed)"

    dependencies = [f"{name} {version_of(name)}" for name in _NAMED_IN_REPORTS]
    return ", ".join([f"kclrun {__version__}", *dependencies])


def _versions() -> str:
    """Never raises, even if imports fail because the program has no free file descriptor."""
    try:
        return f"{versions()}, Python {platform.python_version()}, {platform.platform()}"
    except (ImportError, OSError):
        return f"Python {sys.version}"


def command_of(verb: str, file: Path, overrides: Sequence[str]) -> str:
    """A verb of kclrun with the options for the table of this configuration.

    Of the overrides, only those are shown that name the table, the stream or the access to AWS,
    because others may contain a secret.
    """
    kept = [override for override in overrides if _NAMES_TABLE.match(override)]
    options = [f"--config {shlex.quote(str(file))}", *(f"--set {shlex.quote(s)}" for s in kept)]
    return sanitize(f"kclrun {verb} {' '.join(options)}")
