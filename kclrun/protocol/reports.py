"""The reports of a lease process to its manager, from its core through its ring to the manager's
core. Pure. `ipc/messages.py` encodes them and bounds their texts.

It does not know how either side reacts to them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.model.sequence import ExtendedSequenceNumber

# The length of an error in the reason of a halt. Every renewal of the row pays for the reason; the
# log has the whole error.
_REASON_CHARACTERS_MAX: Final = 300


class Report(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Any report. The key of its lease is not in it: user code shares the memory of the ring, and
    must not report about another lease."""


class LeaseClaimed(Report, frozen=True):
    """The claim succeeded [P4]: the lease's counter and the position where reading begins. From now
    on only the lease process writes the row."""

    counter: int
    position: ExtendedSequenceNumber


class StartUnclaimed(Report, frozen=True):
    """The claim did not succeed, or came too late; no record was read."""

    reason: str


class Checkpointed(Report, frozen=True):
    """The row has this position; a success reply confirmed it."""

    position: ExtendedSequenceNumber
    counter: int


class ShardEnded(Report, frozen=True):
    """The row is at SHARD_END, and these children have rows and may be taken first [P12]."""

    children: tuple[str, ...]


class LeaseReleased(Report, frozen=True):
    """The lease was given away, at this position, confirmed by a success reply [P17]; `how`, in
    words."""

    position: ExtendedSequenceNumber
    how: str = ""


class LeaseKept(Report, frozen=True):
    """The process ended its work in good order and gave nothing away: its manager asked it to, and
    goes on with the lease in a process of its own; or `is_paused`: an operator paused the lease."""

    is_paused: bool = False


class LeaseLost(Report, frozen=True):
    """Another owner has the row, the row is gone, or the fence has passed [P7]."""

    reason: str


class ProcessReplaced(Report, frozen=True):
    """The process ends so that the next one begins from the row, which is ours as far as it knows:
    an output refused rows at their commit, an output has rows of another owner, or another program
    moved the checkpoint."""

    reason: str


# `where` of a dead letter that cannot be kept for now.
DEAD_LETTER: Final = "dead letter"
# `where` of an output that is away, or that refuses its rows.
OUTPUT: Final = "output"
# The keyed state could not begin, or is of another position.
STATE: Final = "state"
# Failures that are not of user code: the call waits for what is named.
DESTINATIONS: Final = frozenset({DEAD_LETTER, OUTPUT, STATE})


class ProcessorRaised(Report, frozen=True):
    """User code raised, for the `attempts`th time, in `where` (the method's name, or DEAD_LETTER).

    The call is repeated in `pause_s`. `raised_at` is file, line and function; `record` the place of
    the record within its batch. Without a traceback it is a repetition of the failure before.
    `waits` above 0: it raised RetryLater for the `waits`th time in a row, which is not an attempt.
    """

    where: str
    error: str
    raised_at: str
    record: str
    traceback_text: str
    attempts: int
    pause_s: float
    waits: int = 0


class ProcessorWaited(Report, frozen=True):
    """`where` raises RetryLater no more, after `tries` calls in `waited_s` that did."""

    where: str
    tries: int
    waited_s: float


class ProcessorRecovered(Report, frozen=True):
    """`where` raised before, and has returned at its `attempts`th call."""

    where: str
    attempts: int


class ProcessorFailed(Report, frozen=True):
    """User code raised and the error policy gave up: it is not called again. Texts hold no payload.

    `raised_at` is the file, line and function of user code. `record` is the place of the record
    within its batch, as far as known; `position` is its position, or None if not known.
    `is_host_fault`: the host had no memory, descriptor or disk left for the call. The process ends
    and the lease is not halted: another host may have it. It happened while user code was at
    records, and one of them may need more than any host has.
    """

    where: str
    error: str
    attempts: int
    position: ExtendedSequenceNumber | None = None
    traceback_text: str = ""
    raised_at: str = ""
    record: str = ""
    is_host_fault: bool = False


class RecordGivenUp(Report, frozen=True):
    """A record was given up after `calls` calls that raised with it, and the lease continues.

    It is kept as a dead letter, durably, or it was skipped (`is_skipped`).
    """

    position: ExtendedSequenceNumber
    error: str
    raised_at: str
    traceback_text: str
    calls: int
    is_skipped: bool


class ProcessBroke(Report, frozen=True):
    """The process ends for a reason that is not the processor's: its host has no descriptor, memory
    or disk for it, another process has its data file, or kclrun has a bug."""

    reason: str


class GilHeld(Report, frozen=True):
    """A C call of the user's code held the GIL for so long that no renewal was possible."""

    seconds: float


class RecordsExpired(Report, frozen=True):
    """Records after this position expired before they were read, and are lost: those of a shard
    that was trimmed, whose lease ends [P13], or those at the head of an open one. `detail` says,
    in words, what an operator can do.
    """

    position: ExtendedSequenceNumber
    detail: str


class RowsWereRefused(Report, frozen=True):
    """An output refused rows of records up to `upto` at their commit, as `error` says. The process
    ends; the next one tries the rows of each call for `outputs`, and `on_error` decides about the
    records. `rounds` and `outputs` are as in `RowTrial`."""

    upto: ExtendedSequenceNumber
    rounds: int
    error: str
    outputs: tuple[str, ...]


class ProcessWarned(Report, frozen=True):
    """A warning to log once; the lease continues."""

    detail: str


# The last report of a process.
EndReport = (
    StartUnclaimed
    | ShardEnded
    | LeaseReleased
    | LeaseKept
    | LeaseLost
    | ProcessReplaced
    | ProcessorFailed
    | ProcessBroke
)
# The reports that the manager's core takes; the others are only logged.
CoreReport = LeaseClaimed | Checkpointed | EndReport
AnyReport = (
    CoreReport
    | ProcessorRaised
    | ProcessorWaited
    | ProcessorRecovered
    | RecordGivenUp
    | GilHeld
    | RecordsExpired
    | RowsWereRefused
    | ProcessWarned
)


def reason_of(failure: ProcessorRaised | ProcessorFailed) -> str:
    """For the lease's row, the live table and /health: the error, its place, and its record."""
    if isinstance(failure, ProcessorRaised) and failure.waits:
        at = f" ({failure.raised_at})" if failure.raised_at else ""
        return f"{failure.where} waits: {_short(failure.error)}{at}"
    times = "once" if failure.attempts == 1 else f"{failure.attempts} times"
    where = f"{failure.where} failed {times}" if failure.where else "the processor failed"
    error = _short(failure.error)
    record = f"record {failure.record}" if failure.record else ""
    at = "; ".join(part for part in (failure.raised_at, record) if part)
    return f"{where}: {error} ({at})" if at else f"{where}: {error}"


def _short(error: str) -> str:
    if len(error) <= _REASON_CHARACTERS_MAX:
        return error
    return f"{error[:_REASON_CHARACTERS_MAX]}…"
