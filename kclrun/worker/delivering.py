"""The main thread: user code and nothing else.

Takes tasks from the desk, calls the processor, posts what came of it. If user code raises, the
error policy decides: the same thing again after a pause, or the lease is halted; nothing is
skipped [I9]. Rows emitted by a failed call are taken back before it is repeated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Final, Protocol

from kclrun.codec.kpl import drop_until
from kclrun.consuming import events as on
from kclrun.consuming.commands import (
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
)
from kclrun.consuming.error_policy import ErrorPolicy, GiveUp
from kclrun.errors import ConfigError
from kclrun.model.lease import Lease
from kclrun.model.record import RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import RecordProcessor
from kclrun.worker.checkpointing import CheckpointDesk
from kclrun.worker.desk import Batch, Call, Desk, DeskClosed, Exhausted, GateFound

__all__ = ["Deliverer", "RowScope"]

# A traceback of 30 frames names the place; the ring cuts the text to its own bound besides.
FRAMES_MAX: Final = 30


class RowScope(Protocol):
    """Where emitted rows go, as far as one call of user code is concerned."""

    def begin_batch(self) -> None: ...

    def end_batch(self, position: ExtendedSequenceNumber) -> None: ...

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None: ...


class Deliverer:
    """Runs `serve` on the main thread until the desk closes.

    `prepare` makes a fresh processor, ready for `initialize`, once the lease is claimed; it is
    called again for each attempt, since a half-initialised instance is not one.
    """

    def __init__(
        self,
        desk: Desk,
        post: Callable[[on.Event], None],
        policy: ErrorPolicy,
        *,
        prepare: Callable[[Lease], tuple[RecordProcessor, RowScope | None]],
        checkpoints: CheckpointDesk,
        warn: Callable[[str], None],
    ) -> None:
        self._desk = desk
        self._post = post
        self._policy = policy
        self._prepare = prepare
        self._checkpoints = checkpoints
        self._warn = warn
        self._processor: RecordProcessor | None = None
        self._rows: RowScope | None = None
        self._token = 0
        self.delivered: ExtendedSequenceNumber | None = None

    def serve(self) -> None:
        """One task after the other."""
        while True:
            match self._desk.next_task():
                case DeskClosed():
                    return
                case GateFound():
                    self._post(on.GateShut())
                case Exhausted(children):
                    self._post(on.ShardExhausted(children))
                case Batch() as batch:
                    self._deliver(batch)
                case call:
                    self._call(call)

    def _deliver(self, batch: Batch) -> None:
        self.delivered = batch.last
        self._post(on.BatchDelivered(batch.last, len(batch.records), batch.payload_bytes))
        if batch.records and not self._attempt_until_it_holds(
            "process_records", lambda: self._process(batch), batch.last
        ):
            return
        self._post(on.BatchProcessed(batch.last))

    def _process(self, batch: Batch) -> None:
        # A checkpoint inside the batch, made by an attempt that then raised, holds: what it
        # covers is not given again.
        durable = self._checkpoints.durable
        records = batch.records if durable is None else drop_until(batch.records, durable)
        if records:
            handed = RecordBatch(records, batch.millis_behind_latest, self._token)
            self._user_code.process_records(handed, self._checkpoints.checkpointer)

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
        self._user_code.shard_ended(self._checkpoints.checkpointer)

    def _shut_down(self) -> None:
        self._user_code.shutdown_requested(self._checkpoints.checkpointer)

    def _user_code_lease_lost(self) -> None:
        self._user_code.lease_lost()

    @property
    def _user_code(self) -> RecordProcessor:
        assert self._processor is not None, "no call before initialize"
        return self._processor

    def _attempt_until_it_holds(
        self,
        where: str,
        call: Callable[[], None],
        covers: ExtendedSequenceNumber | None = None,
    ) -> bool:
        """Call until it returns; False when it was given up, or the gate shut meanwhile.

        `covers` is the position that the rows emitted by the call belong to; None for none.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                self._call_with_rows(call, covers)
                return True
            except BaseException as error:  # noqa: BLE001 - user code: also asyncio's CancelledError
                if not self._may_repeat(where, error, attempts, covers):
                    return False

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
        self,
        where: str,
        error: BaseException,
        attempts: int,
        position: ExtendedSequenceNumber | None,
    ) -> bool:
        decision = self._policy.decide(attempts)
        if isinstance(decision, GiveUp) or isinstance(error, ConfigError):
            self._desk.halt()
            self._post(_failure(where, error, attempts, position))
            return False
        self._warn(f"{where} raised {_words(error)}; again in {decision.pause_s:g} s")
        return self._desk.may_try_again(decision.pause_s, is_batch=where == "process_records")

    def _once(self, where: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - user code: also asyncio's CancelledError
            self._post(_failure(where, error, 1, None))
            return False
        return True


def _failure(
    where: str, error: BaseException, attempts: int, position: ExtendedSequenceNumber | None
) -> on.ProcessorFailed:
    frames = traceback.format_exception(error, limit=-FRAMES_MAX)
    return on.ProcessorFailed(where, _words(error), attempts, position, "".join(frames))


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - user code's own __str__ may raise
        return type(error).__name__
