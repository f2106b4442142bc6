"""A run of `engine: spark`: everything asked and answered, then a session, then the query.

Rule: PySpark, the options, the stream and the permissions are settled before a JVM is started; the
JVM lives no longer than the run. Look next: `spark/running/runtime.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.cli.config_options import Configuration
from kclrun.cli.output_place import with_absolute_output
from kclrun.cli.watched import watched
from kclrun.config.rules import EMBEDDED
from kclrun.errors import KclrunError, SettingsError
from kclrun.loading import import_paths
from kclrun.model.time import WallTime
from kclrun.observe.line_sink import LineSink
from kclrun.observe.logs import EventLog
from kclrun.spark.engine.jvm import SUBMITTED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kclrun.config.schema import Settings
    from kclrun.spark.engine.versions import Capabilities
    from kclrun.spark.running.runtime import ExitReason, SparkRun

__all__ = ["require_spark", "spark_run"]

_STDERR: Final = 2
SumUp = Callable[[], str | None]


def require_spark(settings: Settings) -> Capabilities:
    """PySpark, and the settings it is given, without starting any of it. Raises: SettingsError."""
    from kclrun.spark.running.runtime import require_runnable

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
    configuration: Configuration,
    report: Path | None,
    source_is_done: Callable[[], bool],
    sum_up: SumUp,
) -> tuple[int, str | None]:
    """Run until it ends: the exit code, and what `sum_up` said while the session still stood.

    `sum_up` is called after an end in good order that is no stop half-way. Raises: KclrunError.
    """
    from kclrun.cli.world import require_stream

    settings = with_absolute_output(configuration)
    capabilities = require_spark(settings)
    require_stream(settings)
    paths = import_paths(settings.path, configuration.folder)
    with (
        watched(settings) as (shown, on_snapshot),
        _log(shown) as log,
        _session(shown, paths, log) as spark,
    ):
        from kclrun.spark.running.runtime import ExitReason, SparkRun

        run = SparkRun(
            shown,
            spark,
            log,
            import_paths=paths,
            source_is_done=source_is_done,
            on_snapshot=on_snapshot,
        )
        reason = _reported(run, capabilities, report)
        is_whole = reason is ExitReason.CAUGHT_UP or (
            reason is ExitReason.DRAINED and settings.until is None
        )
        return reason.exit_code, sum_up() if is_whole else None


def _reported(run: SparkRun, capabilities: Capabilities, report: Path | None) -> ExitReason:
    """Run it, and write its report, whatever it came to."""
    try:
        reason = run.run(capabilities)
    except KclrunError as error:
        if report is not None:
            run.write_report(report, f"failed: {type(error).__name__}")
        raise
    if report is not None:
        run.write_report(report, reason.value)
    return reason


@contextmanager
def _session(settings: Settings, paths: tuple[Path, ...], log: EventLog) -> Iterator[SparkSession]:
    """A session for this run; afterwards, no JVM of ours is left."""
    from kclrun.spark.engine.jvm import close_session
    from kclrun.spark.engine.session import open_session
    from kclrun.spark.running.engine_output import captured_engine
    from kclrun.spark.running.source_options import as_option_texts
    from kclrun.spark.running.translating import told_as_ours

    if settings.aws.profile is not None:
        os.environ["AWS_PROFILE"] = settings.aws.profile
    _let_workers_import(paths)
    with captured_engine(log), told_as_ours():
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
    """Python workers on this machine import user code from where we do; on others it is installed
    or shipped (spark.submit.pyFiles)."""
    former = os.environ.get("PYTHONPATH")
    folders = [str(path) for path in paths] + ([former] if former else [])
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


@contextmanager
def _log(settings: Settings) -> Iterator[EventLog]:
    """JSON for machines, words for a terminal, unless the settings say which."""
    wanted = settings.log.format
    as_json = wanted == "json" or (wanted == "auto" and not sys.stderr.isatty())
    # Of its own: what Spark writes to standard error is read and logged, and must not meet itself.
    descriptor = os.dup(_STDERR)
    sink = LineSink(descriptor)
    try:
        yield EventLog(
            sink,
            app=settings.application,
            owner=f"spark:{os.getpid()}",
            level=settings.log.level,
            as_json=as_json,
        )
    finally:
        sink.close()
        os.close(descriptor)


def _is_local(settings: Settings) -> bool:
    master = settings.spark.master or settings.spark.conf.get("spark.master")
    return str(master).startswith("local") if master else SUBMITTED not in os.environ
