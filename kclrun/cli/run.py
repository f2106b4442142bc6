"""`kclrun run`, the default verb: settings in, a running fleet member, an exit code out.

Everything that can be wrong is found before the first lease is taken: the settings, the user's
code, the stream, the table. Rule: what happens while it runs belongs to the manager.
Look next: `manager/runtime.py`; `embedded_run.py` for aws.endpoint: embedded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import Configuration, config_options, load_configuration
from kclrun.config.rules import EMBEDDED
from kclrun.errors import SettingsError
from kclrun.loading import import_paths

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.manager.launching import Launcher
    from kclrun.manager.world import World
    from kclrun.observe.snapshot import Snapshot

__all__ = ["run"]

_UNTIL_HELP: Final = "End when every shard is read, or halted (65)."

OnSnapshot = Callable[["Snapshot"], None]


@click.command()
@config_options
@click.option("--until", type=click.Choice(["caught-up"]), help=_UNTIL_HELP)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write what was done, as JSON.",
)
def run(config: Path, overrides: tuple[str, ...], until: str | None, report: Path | None) -> int:
    """Run the application on this machine until SIGTERM or Ctrl-C, then drain.

    \b
    kclrun --config app.yaml
    kclrun --config app.yaml --set leases.max=8 --until caught-up
    """
    from kclrun.cli.user_code import require_user_code

    configuration = load_configuration(config, overrides)
    if until is not None:
        settings = msgspec.structs.replace(configuration.settings, until="caught-up")
        configuration = msgspec.structs.replace(configuration, settings=settings)
    require_user_code(configuration)
    if configuration.settings.output is not None:
        _require_folder("output.path", _output_folder(configuration))
    if report is not None:
        _require_folder("--report", report.absolute().parent)
    if configuration.settings.aws.endpoint == EMBEDDED:
        return _run_embedded(configuration, report)
    return _run_fleet(configuration, report, lambda: True)


def _run_embedded(configuration: Configuration, report: Path | None) -> int:
    from kclrun.cli.embedded_run import embedded_run

    with embedded_run(configuration) as embedded:
        reached = msgspec.structs.replace(configuration, settings=embedded.settings)
        code = _run_fleet(reached, report, embedded.source_is_done)
        filled = embedded.report()
    if filled is not None:
        click.echo(
            f"Put {filled.user_records:,} records in {filled.records:,} Kinesis records;"
            f" {filled.reshards} reshards.",
            err=True,
        )
    if code == exit_codes.DRAINED and _is_whole(configuration, filled):
        _summarize(reached)
    return code


def _is_whole(configuration: Configuration, filled: object) -> bool:
    """Whether a summary would be of everything: a run that was cut short sums up nothing."""
    embedded = configuration.settings.embedded
    return filled is not None or embedded is None or embedded.fill is None


def _run_fleet(
    configuration: Configuration, report: Path | None, source_is_done: Callable[[], bool]
) -> int:
    settings = _with_absolute_output(configuration)
    paths = [str(path) for path in import_paths(settings.path, configuration.folder)]

    def fleet(settings: Settings, on_snapshot: OnSnapshot | None) -> int:
        from kclrun.manager.runtime import run_fleet

        launcher, world = _open(settings)
        return run_fleet(
            settings,
            world,
            import_paths=paths,
            until=settings.until,
            report_path=report,
            on_snapshot=on_snapshot,
            source_is_done=source_is_done,
            launcher=launcher,
        ).exit_code

    if not _is_watched(settings):
        return fleet(settings, None)
    from kclrun.cli.live_display import LiveDisplay

    # Log lines go through the display, as text: their descriptor is then no terminal any more.
    log = msgspec.structs.replace(settings.log, format="text")
    with LiveDisplay() as display:
        return fleet(msgspec.structs.replace(settings, log=log), display.show)


def _open(settings: Settings) -> tuple[Launcher, World]:
    """The launcher loads what lease processes need while we ask AWS who and where we are."""
    from kclrun.cli.world import open_world
    from kclrun.manager.launching import Launcher
    from kclrun.manager.runtime import WORKER_ENTRY

    launcher = Launcher(WORKER_ENTRY)
    launcher.start()
    try:
        return launcher, open_world(settings)
    except BaseException:
        launcher.stop()
        raise


def _is_watched(settings: Settings) -> bool:
    """Whether a person looks on: then there is a live table instead of JSON lines."""
    return settings.log.format == "auto" and sys.stdout.isatty() and sys.stderr.isatty()


def _summarize(configuration: Configuration) -> None:
    """Call `summary` with the output folder and print what it returns. Raises: SettingsError."""
    settings = configuration.settings
    if settings.summary is None or settings.output is None:
        return
    from kclrun.loading import load_function

    paths = import_paths(settings.path, configuration.folder)
    text = load_function("summary", settings.summary, paths)(_output_folder(configuration))
    if not isinstance(text, str):
        raise SettingsError(
            f"summary: {settings.summary} returned a {type(text).__name__}, no text"
        )
    click.echo(text)


def _with_absolute_output(configuration: Configuration) -> Settings:
    """Lease processes are told a place that does not depend on where they stand."""
    settings = configuration.settings
    if settings.output is None:
        return settings
    path = str(_output_folder(configuration))
    output = msgspec.structs.replace(settings.output, path=path)
    return msgspec.structs.replace(settings, output=output)


def _require_folder(setting: str, folder: Path) -> None:
    """Make it now, or each lease process would halt its shard over it. Raises: SettingsError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{setting}: cannot make the folder {folder}: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{setting}: user {os.geteuid()} may not write to {folder}")


def _output_folder(configuration: Configuration) -> Path:
    """Where emitted rows go: `output.path`, relative to the current folder."""
    assert configuration.settings.output is not None
    return Path(configuration.settings.output.path).absolute()
