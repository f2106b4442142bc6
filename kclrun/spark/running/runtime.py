"""One run of `engine: spark`, from opening the session to the last line of the log.

A stop ends the run between two batches. Errors that are found before the first batch are reported
as on the fleet.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kclrun.config.rules import unused_settings
from kclrun.config.schema import Settings
from kclrun.errors import KclrunError
from kclrun.files.durable import write_report
from kclrun.lifecycle.stopping import STOP_SIGNALS, StopPlan
from kclrun.model.time import Instant, WallTime
from kclrun.observe.logs import EventLog
from kclrun.observe.sample import ManagerSample
from kclrun.spark.engine.versions import Capabilities, installed
from kclrun.spark.running.failures import failure_of
from kclrun.spark.running.progress import RunCounts, read_lags, read_progress
from kclrun.spark.running.query import (
    AVAILABLE_NOW,
    Query,
    as_kclrun_errors,
    made_query,
    source_settings,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


# One query is watched until it ends by itself, after its running batch, or is cut short.
#
# A stop never interrupts a batch within the grace period, so its rows are committed. The main
# thread looks at the query a few times a second: Spark's own listeners would need a server for
# calls back from the JVM, and their events have the same content as the progress.
#
# PySpark cannot end a query between two batches: `StreamingQuery.stop()` interrupts the batch that
# runs. Spark itself ends queries of `availableNow` after a batch: it sets their state to TERMINATED
# once the batch is committed. `let_end` sets the same state, so that any query ends after its
# running batch. Those are internals of Spark (the same from 4.0 to 4.3). Where they are missing,
# the query is stopped in the first gap between two batches that a look finds.
#
# Spark's messages of a query whose thread has ended (`StreamExecution`).
_ENDED: Final = ("Stopped", "Terminated with exception")


def let_end(query: StreamingQuery) -> bool:
    """Make the query begin no further batch. Returns at once: whether Spark's internals were found.

    A query that has ended by itself is not changed.
    """
    from py4j.protocol import Py4JError

    try:
        execution = query._jsq.streamingQuery()  # noqa: SLF001 - PySpark has no public way
        state = execution.state()
        kind = state.get().getClass()
        package = kind.getName().rpartition(".")[0]
        terminated = kind.getClassLoader().loadClass(f"{package}.TERMINATED$")
        state.set(terminated.getField("MODULE$").get(None))
    except Py4JError:
        return False
    return True


def has_come_to_rest(query: StreamingQuery) -> bool:
    """Whether no batch of the query is under way at this moment."""
    status = query.status
    return status["message"] in _ENDED or not status["isTriggerActive"]


# A look costs a call or two to the JVM, some milliseconds each.
_LOOK_EVERY_S: Final = 0.2
# The interval of the looks after a stop request. Two looks must find the query at rest: one look
# may fall into the instant before a batch begins.
_REST_EVERY_S: Final = 0.05
_LOOKS_AT_REST: Final = 2


class Ending(enum.Enum):
    """The way in which a query ended."""

    BY_ITSELF = "by itself"
    AS_ASKED = "as asked, after its running batch"
    CUT_SHORT = "cut short: its batch is done again"


class Watch:
    """Watches one query after the other. `take_progress` gets each new progress, decoded."""

    def __init__(
        self,
        stop: StopPlan,
        *,
        take_progress: Callable[[dict[str, Any]], None],
        looked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stop = stop
        self._take_progress = take_progress
        self._looked = looked
        self._clock = clock
        self._wait = wait
        self._seen: int  # the newest batch of the query that is watched

    def until_ended(self, query: StreamingQuery, is_enough: Callable[[], bool]) -> Ending:
        """Watch until the query ends, `is_enough`, or a stop is wanted; passes on all its progress.

        Raises: the KclrunError that the query's failure stands for.
        """
        self._seen = -1
        ending = Ending.BY_ITSELF
        while query.isActive:
            self._look(query)
            if self._stop.is_wanted or is_enough():
                ending = self._end(query)
                break
            self._wait(_LOOK_EVERY_S)
        self._look(query)
        failure = query.exception()
        if failure is not None:
            raise failure_of(str(failure)) from failure
        return ending

    def _end(self, query: StreamingQuery) -> Ending:
        let_end(query)
        looks = 0
        while looks < _LOOKS_AT_REST:
            if self._stop.is_over(Instant(self._clock())):
                query.stop()
                return Ending.CUT_SHORT
            looks = looks + 1 if has_come_to_rest(query) else 0
            self._look(query)
            self._wait(_REST_EVERY_S)
        # The query only waits for its next trigger: end that wait, and the query's thread.
        query.stop()
        return Ending.AS_ASKED

    def _look(self, query: StreamingQuery) -> None:
        for progress in _progress_since(query, self._seen):
            self._take_progress(progress)
            if "addBatch" in progress.get("durationMs", {}):
                self._seen = progress["batchId"]
        self._looked()


def _progress_since(query: StreamingQuery, seen: int) -> list[dict[str, Any]]:
    """The progress since batch `seen`, oldest first; an idle one again at each look, for its lag.

    Spark keeps the last hundred: more than it can make between two looks.
    """
    last = query.lastProgress
    if last is None:
        return []
    newest = _decoded(last)
    if newest["batchId"] <= seen:
        return []
    if newest["batchId"] == seen + 1:
        return [newest]
    return [
        progress for progress in map(_decoded, query.recentProgress) if progress["batchId"] > seen
    ]


def _decoded(progress: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(progress.json)
    return decoded


# As in the manager: often enough for a display, and a look at the JVM costs milliseconds.
_SHOW_EVERY_S: Final = 1.0


class ExitReason(enum.Enum):
    """The reason why a run ended, with the texts of the fleet's report."""

    DRAINED = "drained"
    CAUGHT_UP = "caught up"
    CUT_SHORT = "stopped before it was drained"

    @property
    def exit_code(self) -> int:
        """0 for an orderly end; 75 (EX_TEMPFAIL) for a run that was cut short."""
        return os.EX_TEMPFAIL if self is ExitReason.CUT_SHORT else os.EX_OK


def require_runnable(settings: Settings, now: WallTime) -> Capabilities:
    """Checks that these settings can run on the installed PySpark; starts nothing.

    Raises: SettingsError naming the cause: PySpark, an option of the source, a trigger.
    """
    found = installed()
    source_settings(settings, now)
    return found


class SparkRun:
    """The run of one application in one session. From the main thread only.

        until caught up    the configured trigger while the source is being filled; then
                           AvailableNow on the same checkpoint, until all records that were there
                           are committed
        else               the configured trigger until a signal, or the query's own end

    `source_is_done` reports, for `until`, that no further records are expected. `on_sample` is
    called about once a second. `stop_signals` request a stop.
    """

    def __init__(
        self,
        settings: Settings,
        spark: SparkSession,
        log: EventLog,
        *,
        import_paths: Sequence[Path],
        source_is_done: Callable[[], bool],
        on_sample: Callable[[ManagerSample], None] | None,
        stop_signals: Iterable[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        self._settings = settings
        self._signals = (*stop_signals, signal.SIGQUIT)
        self._spark = spark
        self._log = log
        self._paths = tuple(import_paths)
        self._source_is_done = source_is_done
        self._on_sample = on_sample
        self._owner = f"spark:{spark.sparkContext.applicationId}"
        self._began = Instant(time.monotonic())
        self._shown = self._began
        self._stop = StopPlan(float(settings.shutdown.grace))
        self._reported_stage = self._stop.stage
        self._counts = RunCounts(self._began)
        self._watch = Watch(self._stop, take_progress=self._progressed, looked=self._looked)

    def run(self, capabilities: Capabilities) -> ExitReason:
        """Run until the end. Raises: KclrunError, also that of the query's failure."""
        former = {number: signal.signal(number, self._signalled) for number in self._signals}
        try:
            with as_kclrun_errors():
                query = made_query(self._settings, self._spark, self._paths, capabilities)
                self._introduce(capabilities)
                reason = self._run(query)
        except KclrunError as error:
            self._log.note("query_failed", error=type(error).__name__, text=str(error))
            raise
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self._log.note(
            "query_stopped",
            reason=reason.value,
            records=self._counts.records,
            batches=self._counts.batches,
        )
        return reason

    def write_report(self, path: Path, reason: str) -> None:
        """Raises: SettingsError if it cannot be written."""
        report = self._counts.report(
            application=self._settings.application,
            stream=self._stream,
            owner=self._owner,
            exit_reason=reason,
            seconds=time.monotonic() - self._began,
        )
        write_report(path, report)

    def _run(self, query: Query) -> ExitReason:
        is_until = self._settings.until is not None
        trigger = self._settings.spark.trigger
        if not is_until or not (trigger == AVAILABLE_NOW or self._source_is_done()):
            is_enough = self._source_is_done if is_until else lambda: False
            ending = self._watch.until_ended(query.start(trigger), is_enough)
            if not is_until or self._stop.is_wanted:
                return self._reason(ending)
        while True:
            was_done = self._source_is_done()
            ending = self._watch.until_ended(query.start(AVAILABLE_NOW), lambda: False)
            if self._stop.is_wanted:
                return self._reason(ending)
            if was_done:
                self._log.note("caught_up", records=self._counts.records)
                return ExitReason.CAUGHT_UP

    def _reason(self, ending: Ending) -> ExitReason:
        if ending is Ending.CUT_SHORT:
            return ExitReason.CUT_SHORT
        by_itself = ending is Ending.BY_ITSELF and not self._stop.is_wanted
        return ExitReason.CAUGHT_UP if by_itself else ExitReason.DRAINED

    @property
    def _stream(self) -> str:
        return self._settings.stream_names

    def _introduce(self, capabilities: Capabilities) -> None:
        settings = self._settings
        self._log.note(
            "query_started",
            version=capabilities.version,
            stream=self._stream,
            start=settings.start_text,
            processor=settings.processor,
            pipeline=settings.pipeline,
            trigger=str(getattr(settings.spark.trigger, "text", settings.spark.trigger)),
            checkpoint=settings.spark.checkpoint,
            master=self._spark.sparkContext.master,
            grace_s=float(settings.shutdown.grace),
        )
        unused = unused_settings(settings)
        if unused:
            self._log.note("settings_unused", keys=", ".join(unused))

    def _progressed(self, progress: Mapping[str, Any]) -> None:
        self._counts.lagged(read_lags(progress))
        batch = read_progress(progress)
        if batch is None:
            return
        late = self._counts.late
        ended = self._counts.add(batch, Instant(time.monotonic()))
        self._log.note(
            "batch_committed",
            count=batch.batch_id,
            records=batch.records,
            bytes=batch.bytes,
            seconds=batch.seconds,
            shards=len(batch.shards),
        )
        # At the first, and where their number has a digit more: few lines, however many there are.
        if batch.late and (not late or len(str(self._counts.late)) > len(str(late))):
            self._log.note("rows_late", count=self._counts.late)
        for shard_id in ended:
            self._log.note("shard_ended", shard=shard_id)

    def _looked(self) -> None:
        stage = self._stop.stage
        if stage is not self._reported_stage:
            is_first = self._reported_stage.value == "running"
            self._log.note("draining" if is_first else "stop_hurried", state=stage.value)
            self._reported_stage = stage
        now = Instant(time.monotonic())
        if self._on_sample is not None and now - self._shown >= _SHOW_EVERY_S:
            self._shown = now
            self._on_sample(
                self._counts.sample(
                    application=self._settings.application,
                    stream=self._stream,
                    owner=self._owner,
                    is_draining=self._stop.is_wanted,
                    now=now,
                )
            )

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        """Only note the request: this runs between two instructions of the main thread."""
        self._stop.press(signal.Signals(number), Instant(time.monotonic()))
