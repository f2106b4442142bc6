"""`kclrun run`, the default verb: settings in, a running application, an exit code out.

Everything that can be wrong is found before the first record is read: the settings, the user's
code, the stream, the table. Look next: `fleet_run.py` and `spark_run.py` for the engines,
`embedded_run.py` for aws.endpoint: embedded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import Configuration, config_options, load_configuration
from kclrun.cli.output_place import output_folder, require_folder
from kclrun.config.rules import EMBEDDED
from kclrun.errors import SettingsError
from kclrun.loading import import_paths

if TYPE_CHECKING:
    from kclrun.local.filling import FillReport

__all__ = ["run"]

_UNTIL_HELP: Final = "End when every shard is read, or halted (65)."


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
    """Run the application until SIGTERM or Ctrl-C, then end in good order.

    \b
    kclrun --config app.yaml
    kclrun --config app.yaml --set leases.max=8 --until caught-up
    """
    from kclrun.cli.user_code import require_user_code

    configuration = load_configuration(config, overrides)
    if until is not None:
        settings = msgspec.structs.replace(configuration.settings, until="caught-up")
        configuration = msgspec.structs.replace(configuration, settings=settings)
    if configuration.settings.engine == "spark":
        from kclrun.cli.spark_run import require_spark

        require_spark(configuration.settings)
    require_user_code(configuration)
    folder = output_folder(configuration.settings)
    if folder is not None:
        require_folder("output.path", folder)
    if report is not None:
        require_folder("--report", report.absolute().parent)
    if configuration.settings.aws.endpoint == EMBEDDED:
        return _run_embedded(configuration, report)
    if configuration.settings.engine == "spark":
        return _run_spark(configuration, report, lambda: True, lambda: None)
    return _run_fleet(configuration, report, lambda: True)


def _run_embedded(configuration: Configuration, report: Path | None) -> int:
    from kclrun.cli.embedded_run import embedded_run

    with embedded_run(configuration) as embedded:
        reached = msgspec.structs.replace(configuration, settings=embedded.settings)
        if reached.settings.engine == "spark":
            return _run_spark(reached, report, embedded.source_is_done, embedded.report)
        code = _run_fleet(reached, report, embedded.source_is_done)
        filled = embedded.report()
    _tell(filled)
    if code == exit_codes.DRAINED and _is_whole(configuration, filled):
        text = _summary(reached)
        if text is not None:
            click.echo(text)
    return code


def _run_fleet(
    configuration: Configuration, report: Path | None, source_is_done: Callable[[], bool]
) -> int:
    from kclrun.cli.fleet_run import fleet_run

    return fleet_run(configuration, report, source_is_done)


def _run_spark(
    configuration: Configuration,
    report: Path | None,
    source_is_done: Callable[[], bool],
    filling: Callable[[], FillReport | None],
) -> int:
    """The summary is made while the session stands: it may read the output with it."""
    from kclrun.cli.spark_run import spark_run

    def sum_up() -> str | None:
        return _summary(configuration) if _is_whole(configuration, filling()) else None

    code, text = spark_run(configuration, report, source_is_done, sum_up)
    _tell(filling())  # which raises where the filler failed, and so ended the run
    if text is not None:
        click.echo(text)
    return code


def _tell(filled: FillReport | None) -> None:
    if filled is not None:
        click.echo(
            f"Put {filled.user_records:,} records in {filled.records:,} Kinesis records;"
            f" {filled.reshards} reshards.",
            err=True,
        )


def _is_whole(configuration: Configuration, filled: FillReport | None) -> bool:
    """Whether a summary would be of everything: a run that was cut short sums up nothing."""
    embedded = configuration.settings.embedded
    return filled is not None or embedded is None or embedded.fill is None


def _summary(configuration: Configuration) -> str | None:
    """What `summary` makes of the output folder; None without one. Raises: SettingsError."""
    settings = configuration.settings
    folder = output_folder(settings)
    if settings.summary is None or folder is None:
        return None
    from kclrun.loading import load_function

    paths = import_paths(settings.path, configuration.folder)
    text = load_function("summary", settings.summary, paths)(folder)
    if not isinstance(text, str):
        raise SettingsError(
            f"summary: {settings.summary} returned a {type(text).__name__}, no text"
        )
    return text
