"""Runs the application of the settings: the composition of `kclrun run` and `kclrun.run`.

The settings, the user's code, the stream and the table are checked before the first record is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import Configuration
from kclrun.cli.messages import command_of, echo
from kclrun.cli.terminal import stop_signals
from kclrun.cli.user_code import (
    dead_letter_folder,
    output_folder,
    print_rows_folder,
    require_folder,
    require_user_code,
    with_absolute_output,
)
from kclrun.cli.waiting import said_in_the_log
from kclrun.config.rules import EMBEDDED
from kclrun.errors import SettingsError, host_error
from kclrun.loading import import_paths, load_function
from kclrun.model.reading import Replay

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.local.filling import Filling, FillReport
    from kclrun.manager.forks import Launcher
    from kclrun.manager.world import FleetServices
    from kclrun.observe.sample import ManagerSample

OnSample = Callable[["ManagerSample"], None]
# Shows a run while it lasts: the settings to run with, and what takes its samples. It gets the
# settings, and the progress of the fill of an embedded stream.
Display = Callable[
    ["Settings", Callable[[], "Filling | None"]],
    AbstractContextManager[tuple["Settings", OnSample | None]],
]


@contextmanager
def watched(
    settings: Settings, filling: Callable[[], Filling | None] = lambda: None
) -> Iterator[tuple[Settings, OnSample | None]]:
    """The live table of a run, with the log lines as text above it: the settings for the run, and
    the function that takes its samples (None without a terminal).

    `filling` returns the progress of the fill of an embedded stream.
    """
    if not (settings.log.format == "auto" and sys.stdout.isatty() and sys.stderr.isatty()):
        yield settings, None
        return
    from kclrun.cli.run.live_table import Bars, LiveDisplay

    # Log lines go through the display as text, because their descriptor is not a terminal then.
    log = msgspec.structs.replace(settings.log, format="text")
    bars = Bars(filling, is_until=settings.until is not None)
    with LiveDisplay(bars) as display:
        yield msgspec.structs.replace(settings, log=log), display.show


def run_application(configuration: Configuration, report: Path | None, display: Display) -> int:
    """Run the application until it is asked to stop, or as `until` says; the exit code.

    From the main thread. `report` is written. `display` shows the run. Raises: KclrunError.
    """
    with said_in_the_log(configuration.settings):
        return _run(configuration, report, display)


def _run(configuration: Configuration, report: Path | None, display: Display) -> int:
    """Check what needs no AWS, then run on the engine."""
    if configuration.settings.engine == "spark":
        from kclrun.cli.run.spark import require_spark

        require_spark(configuration.settings)
    require_user_code(configuration)
    folder = output_folder(configuration.settings)
    if folder is not None:
        require_folder("output.path", folder)
    for name, output in configuration.settings.outputs.items():
        if output.path is not None:
            require_folder(f"outputs.{name}.path", Path(output.path).absolute())
    if (letters := dead_letter_folder(configuration.settings)) is not None:
        require_folder("on_error.dead_letter.path", letters)
    if report is not None:
        require_folder("--report", report.absolute().parent)
    if configuration.settings.aws.endpoint == EMBEDDED:
        return _run_embedded(configuration, report, display)
    if configuration.settings.embedded is not None:
        echo(
            f"embedded: is not used with aws.endpoint {configuration.settings.aws.endpoint}, which"
            " has its own streams; records get there with"
            f"  {command_of('put', configuration.file, configuration.overrides)} FILE  or"
            f"  {command_of('local', configuration.file, ())}",
            err=True,
        )
    if configuration.settings.engine == "spark":
        return _run_spark(configuration, report, lambda: True, lambda: None, display=display)
    return _run_fleet(configuration, report, lambda: True, display=display)


def run_replay(configuration: Configuration, report: Path, replay: Replay) -> int:
    """Run a replay with its own settings, as the fleet runs; the exit code. `report` is written."""
    with said_in_the_log(configuration.settings):
        require_user_code(configuration, replay.row_names or None)
        return _run_fleet(configuration, report, lambda: True, display=watched, replay=replay)


def _run_embedded(configuration: Configuration, report: Path | None, display: Display) -> int:
    from kclrun.cli.run.embedded import embedded_run

    with embedded_run(configuration) as embedded:
        reached = msgspec.structs.replace(configuration, settings=embedded.settings)
        if reached.settings.engine == "spark":
            return _run_spark(
                reached,
                report,
                embedded.source_is_done,
                embedded.report,
                embedded.filling,
                display=display,
            )
        code = _run_fleet(
            reached,
            report,
            embedded.source_is_done,
            embedded.filling,
            outlives_run=False,
            display=display,
        )
        filled = embedded.report()
    _print_filled(filled)
    if code == exit_codes.DRAINED and _is_whole(configuration, filled):
        text = _summary(reached)
        if text is not None:
            echo(text)
    return code


def _run_fleet(
    configuration: Configuration,
    report: Path | None,
    source_is_done: Callable[[], bool],
    filling: Callable[[], Filling | None] = lambda: None,
    *,
    display: Display,
    outlives_run: bool = True,
    replay: Replay | None = None,
) -> int:
    """Run the lease manager until the end. Raises: KclrunError before the first take.

    `outlives_run`: the lease table still exists after the run, for `kclrun leases`.
    """
    from kclrun.cli.page.command import page_beside_run
    from kclrun.manager.runtime import run_fleet

    settings = with_absolute_output(configuration)
    signals = stop_signals()
    paths = import_paths(settings.path, configuration.folder)
    with display(settings, filling) as (shown, on_sample), page_beside_run(configuration) as url:
        if url is not None and shown.log.format == "text":  # else each line is JSON
            echo(f"The page of the fleet: {url}/", err=True)
        command = command_of("leases", configuration.file, configuration.overrides)
        launcher, world = _open_fleet(shown, paths)
        reason = run_fleet(
            shown,
            world,
            import_paths=[str(path) for path in paths],
            until=shown.until,
            report_path=report,
            on_sample=on_sample,
            source_is_done=source_is_done,
            launcher=launcher,
            leases_command=command if outlives_run else None,
            replay=replay,
            stop_signals=signals,
        )
    print_rows_folder(configuration.settings)
    return reason.exit_code


def _open_fleet(settings: Settings, paths: Sequence[Path]) -> tuple[Launcher, FleetServices]:
    """Start the launcher and open the AWS clients.

    The launcher imports the modules of lease processes while this process makes its AWS calls.
    """
    from kclrun.manager.forks import Launcher, modules_of
    from kclrun.manager.runtime import WORKER_ENTRY

    launcher = Launcher(WORKER_ENTRY, modules_of(settings), only=settings.environment.only)
    try:
        launcher.start()
    except OSError as error:
        what = "The fork server is a process in a session of its own."
        reason = f"{error.strerror} ({type(error).__name__})"
        raise host_error(what, reason, error.errno) from error
    try:
        from kclrun.cli.startup import open_world

        return launcher, open_world(settings, paths)
    except BaseException:
        launcher.stop()
        raise


def _run_spark(
    configuration: Configuration,
    report: Path | None,
    source_is_done: Callable[[], bool],
    filled: Callable[[], FillReport | None],
    filling: Callable[[], Filling | None] = lambda: None,
    *,
    display: Display,
) -> int:
    """The summary is made before the session is closed, because it may read the output with it."""
    from kclrun.cli.run.spark import spark_run

    def sum_up() -> str | None:
        return _summary(configuration) if _is_whole(configuration, filled()) else None

    settings = with_absolute_output(configuration)
    signals = stop_signals()
    paths = import_paths(settings.path, configuration.folder)
    with display(settings, filling) as (shown, on_sample):
        code, text = spark_run(
            shown,
            paths,
            report,
            source_is_done,
            sum_up,
            on_sample=on_sample,
            stop_signals=signals,
        )
    print_rows_folder(configuration.settings)
    _print_filled(filled())  # raises if the filler failed, which also ended the run
    if text is not None:
        echo(text)
    return code


def _print_filled(filled: FillReport | None) -> None:
    if filled is not None:
        echo(
            f"Put {filled.user_records:,} records in {filled.records:,} Kinesis records;"
            f" {filled.reshards} reshards.",
            err=True,
        )


def _is_whole(configuration: Configuration, filled: FillReport | None) -> bool:
    """Whether the summary would cover all records: a run that was cut short has no summary."""
    embedded = configuration.settings.embedded
    return filled is not None or embedded is None or embedded.fill is None


def _summary(configuration: Configuration) -> str | None:
    """The text of `summary` for the output folder; None without one. Raises: SettingsError."""
    settings = configuration.settings
    folder = output_folder(settings)
    if settings.summary is None or folder is None:
        return None

    paths = import_paths(settings.path, configuration.folder)
    text = load_function("summary", settings.summary, paths)(folder)
    if not isinstance(text, str):
        raise SettingsError(
            f"summary: {settings.summary} returned a {type(text).__name__}, no text"
        )
    return text
