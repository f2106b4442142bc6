"""User code over one shard, in a Python worker of Spark.

Calls what the contracts of `kclrun.processor` promise, as the fleet does: what raises is given
again after the pauses of `on_error`, with its rows taken back; then the task fails, and Spark may
run the whole range again elsewhere. Nothing is skipped [I9]. Knows no Spark. Rule: decisions are
those of `tenure.py` and the error policy. Next: `source.py`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kclrun.codec.kpl import drop_until
from kclrun.consuming.error_policy import ErrorPolicy, GiveUp
from kclrun.errors import ConfigError, ProcessorError
from kclrun.loading import load_processor
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import Checkpointer, Context, RecordProcessor
from kclrun.spark.fused.emitting import EmittedRows
from kclrun.spark.fused.tenure import Ack, Tenure
from kclrun.spark.ranges import ShardRange

__all__ = ["Hosted", "ProcessorJob"]

# Frames of user code in a message: enough to name the place.
_FRAMES_MAX: Final = 30
_log = logging.getLogger(__name__)


class ProcessorJob(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, as the tasks are told. `stream` is the bare name; `run` is new at every start.

    `paths` are folders that the processor is imported from; where they do not exist, it comes
    from the environment.
    """

    application: str
    stream: str
    processor: str
    paths: tuple[str, ...]
    options: Mapping[str, Any]
    batch_max: int
    uncheckpointed_max: int
    on_error: ErrorPolicy
    run: str

    def user_code(self) -> type[RecordProcessor]:
        """Imported once in a process. Raises: ProcessorLoadError."""
        return _load(self.processor, self.paths)


@functools.lru_cache(maxsize=16)  # one an application; a session has few
def _load(reference: str, paths: tuple[str, ...]) -> type[RecordProcessor]:
    return load_processor(reference, [Path(path) for path in paths])


class Hosted:
    """One instance, from `initialize` to `shard_ended` or `lease_lost`.

    `begin` is the position it starts at; `token` the fencing token of the task. Every method that
    calls user code raises ProcessorError when user code does: the instance is then of no use.
    """

    def __init__(
        self,
        job: ProcessorJob,
        shard_id: str,
        begin: ExtendedSequenceNumber,
        token: int,
        *,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_released = False
        self._job = job
        self._shard_id = shard_id
        self._token = token
        self._wait = wait
        self._clock = clock
        self._rows = EmittedRows(shard_id)
        self._tenure = Tenure(begin, job.uncheckpointed_max)
        self._tenure_lock = threading.Lock()  # user code may checkpoint from any of its threads
        self._checkpointer = Checkpointer(self._checkpoint)
        user_code = job.user_code()
        self._attempt("initialize", lambda: self._initialize(user_code, begin))

    @property
    def rows(self) -> EmittedRows:
        return self._rows

    @property
    def position(self) -> ExtendedSequenceNumber:
        """The last record given."""
        return self._tenure.delivered

    def go_on(self, token: int) -> None:
        """The next range begins where this instance stands; it is another task's by now."""
        self._token = self._context.fencing_token = token
        self._tenure.continue_with_next_range()

    def process(self, records: Sequence[Record]) -> None:
        """Give some records, at least one, in one call of `process_records`."""
        last = self._tenure.deliver(records)
        started = self._clock()
        self._attempt("process_records", lambda: self._give(records), last)
        self._tenure.process(last, self._clock() - started)

    def end_shard(self) -> None:
        """The shard's last record was processed."""
        started = self._clock()
        self._attempt(
            "shard_ended", lambda: self._processor.shard_ended(self._checkpointer), SHARD_END
        )
        self._tenure.end(self._clock() - started)

    def give_up(self) -> None:
        """The processor asked to be released: its last chance to checkpoint, once."""
        self._attempt(
            "shutdown_requested",
            lambda: self._processor.shutdown_requested(self._checkpointer),
            policy=ErrorPolicy(retries=0, backoff_s=0.0),
        )

    def lose(self) -> None:
        """Others have the shard. What `lease_lost` raises is logged: it is nobody's any more."""
        try:
            self._processor.lease_lost()
        except BaseException as error:  # noqa: BLE001 - user code: whatever it raises
            _log.warning("%s: lease_lost raised %s", self._shard_id, _words(error))

    def ack(self, shard_range: ShardRange) -> Ack:
        """The account of the range; ask once its rows have left."""
        return self._tenure.ack(shard_range, self._rows.count())

    def _initialize(self, user_code: type[RecordProcessor], begin: ExtendedSequenceNumber) -> None:
        # A fresh one for each attempt: a half-initialised instance is none.
        self._processor = user_code()
        self._context = Context(
            application=self._job.application,
            stream=self._job.stream,
            shard_id=self._shard_id,
            lease_key=self._shard_id,
            position=begin,
            options=self._job.options,
            fencing_token=self._token,
            uncheckpointed_max=self._job.uncheckpointed_max,
            checkpoint_mode="batch",
            emit=self._rows.emit,
            release=self._release,
        )
        self._processor.initialize(self._context)

    def _give(self, records: Sequence[Record]) -> None:
        # What a former attempt checkpointed before it raised is not given again.
        left = drop_until(records, self._tenure.checkpointed)
        if left:
            self._processor.process_records(
                RecordBatch(left, None, self._token), self._checkpointer
            )

    def _checkpoint(self, at: ExtendedSequenceNumber | None) -> None:
        with self._tenure_lock:
            self._tenure.checkpoint(at)
            self._rows.cover()

    def _release(self) -> None:
        self.is_released = True

    def _attempt(
        self,
        where: str,
        call: Callable[[], None],
        covers: ExtendedSequenceNumber | None = None,
        policy: ErrorPolicy | None = None,
    ) -> None:
        """Call until it returns; `covers` is the position of its rows, None where it has none."""
        attempts = 0
        while True:
            attempts += 1
            try:
                self._call_with_rows(call, covers)
                return
            except BaseException as error:  # noqa: BLE001 - user code: also SystemExit
                decision = (policy or self._job.on_error).decide(attempts)
                if isinstance(decision, GiveUp) or isinstance(error, ConfigError):
                    raise ProcessorError(self._failure(where, error, attempts)) from None
                _log.warning(
                    "%s: %s raised %s; again in %g s",
                    *(self._shard_id, where, _words(error), decision.pause_s),
                )
            self._wait(decision.pause_s)

    def _call_with_rows(
        self, call: Callable[[], None], covers: ExtendedSequenceNumber | None
    ) -> None:
        if covers is None:
            call()
            return
        self._rows.begin_call(covers)
        try:
            call()
        except BaseException:
            self._rows.take_back_call()
            raise
        self._rows.end_call()

    def _failure(self, where: str, error: BaseException, attempts: int) -> str:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        times = "once" if attempts == 1 else f"{attempts} times"
        return (
            f"{where} of {self._job.processor} raised {_words(error)} ({times})\n"
            f"Shard {self._shard_id} of {self._job.stream}, records up to {self.position}\n"
            "The range is given again from its beginning if Spark runs the task again\n"
            + "".join(traceback.format_list(frames[-_FRAMES_MAX:]))
        ).rstrip()


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - user code's own __str__ may raise
        return type(error).__name__
