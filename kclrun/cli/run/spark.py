"""A run of `engine: spark`: makes all checks, then opens a session, then runs the query.

PySpark, the options, the stream and the permissions are checked before a JVM is started. The JVM
ends with the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.cli.startup import require_stream
from kclrun.config.rules import EMBEDDED
from kclrun.errors import KclrunError, SettingsError
from kclrun.lifecycle.stopping import STOP_SIGNALS
from kclrun.model.time import WallTime
from kclrun.observe.logs import EventLog, LineSink, log_of
from kclrun.observe.sample import ManagerSample
from kclrun.spark.engine.java import SUBMITTED, close_session
from kclrun.spark.engine.session import open_session
from kclrun.spark.running.failures import captured_engine
from kclrun.spark.running.progress import FIRST_BATCH
from kclrun.spark.running.query import as_kclrun_errors, as_option_texts
from kclrun.spark.running.runtime import ExitReason, SparkRun, require_runnable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kclrun.config.schema import Settings
    from kclrun.spark.engine.versions import Capabilities

_STDERR: Final = 2
OnSample = Callable[[ManagerSample], None]
SumUp = Callable[[], str | None]


def require_spark(settings: Settings) -> Capabilities:
    """Check PySpark and its settings without starting it. Raises: SettingsError."""
    if settings.aws.profile is not None and not _is_local(settings):
        raise SettingsError(
            "aws.profile: is a file of this machine, and executors run on others\n"
            "Use aws.role_arn, or give the role to the machines of the cluster"
        )
    reached = settings
    if settings.aws.endpoint == EMBEDDED:
        aws = msgspec.structs.replace(settings.aws, endpoint=None)
        reached = msgspec.structs.replace(settings, aws=aws)
    return require_runnable(reached, WallTime(time.time()))


def spark_run(
    settings: Settings,
    paths: tuple[Path, ...],
    report: Path | None,
    source_is_done: Callable[[], bool],
    sum_up: SumUp,
    *,
    on_sample: OnSample | None,
    stop_signals: Iterable[signal.Signals] = STOP_SIGNALS,
) -> tuple[int, str | None]:
    """Run until the end. Returns the exit code and the text of `sum_up`.

    `paths` are the folders of user code. `sum_up` is called after a complete run that ended in good
    order, before the session is closed. Raises: KclrunError.
    """
    capabilities = require_spark(settings)
    require_stream(settings)
    with _log(settings) as log, ExitStack() as stack:
        _show_starting(settings, log, on_sample, capabilities.version)
        spark = stack.enter_context(_session(settings, paths, log))

        run = SparkRun(
            settings,
            spark,
            log,
            import_paths=paths,
            source_is_done=source_is_done,
            on_sample=on_sample,
            stop_signals=stop_signals,
        )
        reason = _reported(run, capabilities, report)
        is_whole = reason is ExitReason.CAUGHT_UP or (
            reason is ExitReason.DRAINED and settings.until is None
        )
        return reason.exit_code, sum_up() if is_whole else None


def _reported(run: SparkRun, capabilities: Capabilities, report: Path | None) -> ExitReason:
    """Run it, and write its report, also after a failure."""
    try:
        reason = run.run(capabilities)
    except KclrunError as error:
        if report is not None:
            run.write_report(report, f"failed: {type(error).__name__}")
        raise
    if report is not None:
        run.write_report(report, reason.value)
    return reason


def _show_starting(
    settings: Settings, log: EventLog, on_sample: OnSample | None, version: str
) -> None:
    """Show that the start of a JVM, and of Python workers for the first batch, takes time."""
    log.note("engine_starting", version=version)
    if on_sample is not None:
        on_sample(
            ManagerSample(
                application=settings.application,
                stream=settings.stream_names,
                owner=f"spark:{os.getpid()}",
                uptime_s=0.0,
                has_leases=False,
                doing=FIRST_BATCH,
            )
        )


@contextmanager
def _session(settings: Settings, paths: tuple[Path, ...], log: EventLog) -> Iterator[SparkSession]:
    """A session for this run. At the end, the JVM that we started is stopped."""
    if settings.aws.profile is not None:
        os.environ["AWS_PROFILE"] = settings.aws.profile
    _let_workers_import(paths)
    with captured_engine(log), as_kclrun_errors():
        spark = open_session(
            application=settings.application,
            master=settings.spark.master,
            conf=as_option_texts(settings.spark.conf),
        )
    try:
        yield spark
    finally:
        close_session(spark)


def _let_workers_import(paths: tuple[Path, ...]) -> None:
    """Python workers on this machine import user code from the same folders as this process. On
    other machines it is installed or shipped (spark.submit.pyFiles)."""
    former = os.environ.get("PYTHONPATH")
    folders = [str(path) for path in paths] + ([former] if former else [])
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


@contextmanager
def _log(settings: Settings) -> Iterator[EventLog]:
    # A descriptor of its own: the lines that Spark writes to standard error are read and logged,
    # and the log lines must not be read again.
    descriptor = os.dup(_STDERR)
    sink = LineSink(descriptor)
    try:
        yield log_of(settings, f"spark:{os.getpid()}", sink)
    finally:
        sink.close()
        os.close(descriptor)


def _is_local(settings: Settings) -> bool:
    master = settings.spark.master or settings.spark.conf.get("spark.master")
    return str(master).startswith("local") if master else SUBMITTED not in os.environ
