"""The main thread of a lease process: it runs user code and nothing else.

It takes tasks from the desk, calls the processor and posts the results. For a failed call it
describes the exception: where it was raised and at which record.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import Final, Protocol

import msgspec

import kclrun
from kclrun.codec.kpl import drop_until
from kclrun.consuming import events as on
from kclrun.consuming.commands import (
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
)
from kclrun.consuming.policy import ErrorPolicy, GiveUp, host_fault
from kclrun.errors import ConfigError, HostFailed
from kclrun.ipc import transitions as told
from kclrun.model.lease import Lease
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import RecordProcessor, call_method
from kclrun.worker.desk import Batch, Call, CheckpointDesk, Desk, DeskClosed, Exhausted, GateFound

# Enough frames to name the place; the ring also truncates the text to its own limit.
FRAMES_MAX: Final = 30
# `raise … from …`, and groups within groups: deeper exceptions explain nothing more.
_CHAIN_MAX: Final = 8
# A source of this size parses in a fraction of a second; generated ones may be larger.
_SOURCE_LINES_MAX: Final = 20_000
_LOOPS: Final = (
    *(ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_OURS: Final = f"{Path(kclrun.__file__).parent}{os.sep}"
_LIBRARY: Final = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

Frame = tuple[TracebackType, str]


class Failure(msgspec.Struct, frozen=True):
    """One exception. Its texts contain no payload, except a payload in the exception's own text.

    `raised_at` is file, line and function of user code. `record` is the record's place within the
    batch, as far as it is known. `position` is its position; None if the record is not known.
    """

    error: str
    raised_at: str = ""
    record: str = ""
    position: ExtendedSequenceNumber | None = None
    traceback_text: str = ""

    def is_as(self, other: Failure) -> bool:
        """Whether it is a repetition: the same error, place and record."""
        return (self.error, self.raised_at, self.record) == (
            other.error,
            other.raised_at,
            other.record,
        )


def describe(error: BaseException, records: Sequence[Record] = ()) -> Failure:
    """`error` as raised by user code; `records` is the batch of the call.

    It uses the traceback and the names of local variables, never a payload or a key.
    """
    frames = list(_frames(error.__traceback__))
    index = _record_at_hand(frames, records) if records else None
    return Failure(
        words_of(error),
        _raised_at(frames),
        _place(index, records) if records else "",
        records[index].position if index is not None else None,
        _traceback_text(error),
    )


def words_of(error: BaseException) -> str:
    """The class and message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - user code's own __str__ may raise
        return type(error).__name__


def _frames(tb: TracebackType | None) -> Iterator[Frame]:
    """The frames outside kclrun, the innermost last, each with its file."""
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not _is_ours(file):
            yield tb, file
        tb = tb.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith((_OURS, "<frozen "))


def _raised_at(frames: Sequence[Frame]) -> str:
    """The innermost line of user code, not of a library that it called."""
    own = [each for each in frames if not each[1].startswith((*_LIBRARY, "<"))]
    # User code that is installed as a library still counts as user code.
    if not frames:
        return ""
    tb, file = (own or frames)[-1]
    return f"{_shortened(file)}:{tb.tb_lineno} in {tb.tb_frame.f_code.co_name}"


def _shortened(file: str) -> str:
    """The path relative to the folder that it was imported from."""
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if root.startswith(os.sep)]
    root = max((root for root in roots if file.startswith(root)), key=len, default="")
    return file.removeprefix(root)


def _record_at_hand(frames: Sequence[Frame], records: Sequence[Record]) -> int | None:
    """The index of the record that the failing line works on, if that is certain.

    A record is named only if the failing line works on it: it is the variable of a loop around that
    line, or an argument of the function. A record that a finished loop left in its variable is not
    the cause.
    """
    if len(records) == 1:
        return 0
    indexes = {id(record): index for index, record in enumerate(records)}
    for tb, file in reversed(frames):
        code, values = tb.tb_frame.f_code, tb.tb_frame.f_locals
        found = {
            indexes[id(value)]
            for name, value in _records_among(values, indexes).items()
            if _is_worked_on(name, code, file, tb)
        }
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _records_among(values: Mapping[str, object], indexes: Mapping[int, int]) -> dict[str, object]:
    # By identity: a comparison would call user code.
    return {name: value for name, value in values.items() if id(value) in indexes}


def _is_worked_on(name: str, code: CodeType, file: str, tb: TracebackType) -> bool:
    if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return True
    lines = linecache.getlines(file, tb.tb_frame.f_globals)
    if not 0 < len(lines) <= _SOURCE_LINES_MAX:
        return False
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        _binds(node, name)
        for node in ast.walk(tree)
        if isinstance(node, _LOOPS) and node.lineno <= tb.tb_lineno <= (node.end_lineno or 0)
    )


def _binds(loop: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        for node in ast.walk(loop)
    )


def _place(index: int | None, records: Sequence[Record]) -> str:
    count = len(records)
    if index is not None:
        return f"{index + 1} of {count}, at {records[index].position}"
    return f"not known: one of {count}, from {records[0].position} to {records[-1].position}"


def _traceback_text(error: BaseException) -> str:
    try:
        told = traceback.TracebackException.from_exception(error, limit=-FRAMES_MAX)
    except Exception:  # noqa: BLE001 - an exception of user code may be anything
        return words_of(error)
    for each in itertools.islice(_chain(told), _CHAIN_MAX):
        theirs = [frame for frame in each.stack if not _is_ours(frame.filename)]
        if theirs:  # else all frames are ours: keep them
            each.stack = traceback.StackSummary.from_list(theirs)
    return "".join(told.format())


def _chain(
    told: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    if told is None:
        return
    yield told
    yield from _chain(told.__cause__)
    yield from _chain(told.__context__)
    for each in told.exceptions or ():
        yield from _chain(each)


class RowScope(Protocol):
    """The emitted rows, as far as one call of user code is concerned."""

    def begin_batch(self) -> None: ...

    def end_batch(self, position: ExtendedSequenceNumber) -> None: ...

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None: ...


class Deliverer:
    """Runs `serve` on the main thread until the desk closes.

    If user code raises, the error policy decides: repeat the same call after a pause, or halt the
    lease. Nothing is skipped [I9]. Rows emitted by a failed call are discarded before the call is
    repeated.

    `prepare` makes a new processor, ready for `initialize`, once the lease is claimed. It is called
    again for each attempt, because a half-initialised instance cannot be used. `broke` ends the
    process: its host lacks a resource that `initialize` needs, so another try, or another host, may
    succeed. A lack of resources while records are processed is reported as a failure of the
    processor: a record may need more than any host has.
    """

    def __init__(
        self,
        desk: Desk,
        post: Callable[[on.Event], None],
        policy: ErrorPolicy,
        *,
        prepare: Callable[[Lease], tuple[RecordProcessor, RowScope | None]],
        checkpoints: CheckpointDesk,
        tell: Callable[[told.Transition], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._desk = desk
        self._post = post
        self._policy = policy
        self._prepare = prepare
        self._checkpoints = checkpoints
        self._tell = tell
        self._broke = broke
        self._processor: RecordProcessor | None = None
        self._rows: RowScope | None = None
        self._token = 0
        self.delivered: ExtendedSequenceNumber | None = None

    def serve(self) -> None:
        """Perform one task after the other."""
        while True:
            match self._desk.next_task():
                case DeskClosed():
                    return
                case GateFound():
                    self._post(on.GateShut())
                case Exhausted(children, is_expired):
                    self._post(on.ShardExhausted(children, is_expired))
                case Batch() as batch:
                    self._deliver(batch)
                case call:
                    self._call(call)

    def _deliver(self, batch: Batch) -> None:
        self.delivered = batch.last
        self._post(on.BatchDelivered(batch.last, len(batch.records), batch.payload_bytes))
        if batch.records and not self._attempt_until_it_holds(
            "process_records", lambda: self._process(batch), batch.last, batch.records
        ):
            return
        self._desk.note_returned(batch)
        self._post(on.BatchProcessed(batch.last))

    def _process(self, batch: Batch) -> None:
        # A checkpoint inside the batch holds, even if the attempt that made it then raised: the
        # records that it covers are not delivered again.
        durable = self._checkpoints.durable
        records = batch.records if durable is None else drop_until(batch.records, durable)
        if records:
            handed = RecordBatch(records, batch.millis_behind_latest, self._token)
            call_method(self._user_code, "process_records", handed, self._checkpoints.checkpointer)

    def _call(self, call: Call) -> None:
        match call:
            case CallInitialize(row):
                done = self._attempt_until_it_holds("initialize", lambda: self._begin(row))
            case CallShardEnded():
                done = self._attempt_until_it_holds("shard_ended", self._end_shard, SHARD_END)
            case CallShutdownRequested():
                done = self._once("shutdown_requested", self._shut_down)
            case CallLeaseLost():
                done = self._once("lease_lost", self._user_code_lease_lost)
        if done:
            self._post(on.CallReturned())

    def _begin(self, row: Lease) -> None:
        self._token = row.counter
        self._processor, self._rows = self._prepare(row)

    def _end_shard(self) -> None:
        call_method(self._user_code, "shard_ended", self._checkpoints.checkpointer)

    def _shut_down(self) -> None:
        call_method(self._user_code, "shutdown_requested", self._checkpoints.checkpointer)

    def _user_code_lease_lost(self) -> None:
        call_method(self._user_code, "lease_lost")

    @property
    def _user_code(self) -> RecordProcessor:
        assert self._processor is not None, "no call before initialize"
        return self._processor

    def _attempt_until_it_holds(
        self,
        where: str,
        call: Callable[[], None],
        covers: ExtendedSequenceNumber | None = None,
        records: Sequence[Record] = (),
    ) -> bool:
        """Call until it returns; False if it was given up, or the gate was shut meanwhile.

        `covers` is the position of the rows that the call emits; None if it emits none.
        `records` are the records of the call, for the description of a failure.
        """
        attempts = 0
        last: Failure | None = None
        while True:
            attempts += 1
            try:
                self._call_with_rows(call, covers)
            except BaseException as error:  # noqa: BLE001 - user code: also asyncio's CancelledError
                failure = describe(error, records)
                if last is not None and failure.is_as(last):
                    # A repetition is reported in brief: its traceback was logged the first time.
                    failure = msgspec.structs.replace(failure, traceback_text="")
                if not self._may_repeat(where, error, attempts, failure):
                    return False
                last = failure
            else:
                if attempts > 1:
                    self._tell(told.Recovered(where, attempts))
                return True

    def _call_with_rows(
        self, call: Callable[[], None], covers: ExtendedSequenceNumber | None
    ) -> None:
        rows = self._rows if covers is not None else None
        if rows is None or covers is None:
            call()
            return
        rows.begin_batch()
        try:
            call()
        except BaseException:
            rows.take_back_batch(self._checkpoints.durable)
            raise
        rows.end_batch(covers)

    def _may_repeat(
        self, where: str, error: BaseException, attempts: int, failure: Failure
    ) -> bool:
        decision = self._policy.decide(attempts)
        fault = host_fault(error)
        if fault is not None and where == "initialize":
            # No wait here: the manager starts the next process, ever later, or gives the lease to
            # another host.
            self._desk.halt()
            self._broke(HostFailed(f"{where} failed: {fault}"))
            return False
        if isinstance(decision, GiveUp) or isinstance(error, ConfigError):
            self._desk.halt()
            self._post(_given_up(where, failure, attempts, is_host_fault=fault is not None))
            return False
        raised = told.Raised(
            where,
            failure.error,
            failure.raised_at,
            failure.record,
            failure.traceback_text,
            attempts,
            decision.pause_s,
        )
        self._tell(raised)
        return self._desk.may_try_again(decision.pause_s, is_batch=where == "process_records")

    def _once(self, where: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - user code: also asyncio's CancelledError
            self._post(_given_up(where, describe(error), 1))
            return False
        return True


def _given_up(
    where: str, failure: Failure, attempts: int, *, is_host_fault: bool = False
) -> on.ProcessorFailed:
    return on.ProcessorFailed(
        where,
        failure.error,
        attempts,
        failure.position,
        failure.traceback_text,
        failure.raised_at,
        failure.record,
        is_host_fault,
    )
