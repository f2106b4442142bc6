"""`kclrun run`, the default verb: runs the application of the settings and returns an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import msgspec

from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options

_UNTIL_HELP: Final = "End when every shard is read, or halted (65)."


@click.command(cls=ConfigCommand)
@config_options
@click.option("--until", type=click.Choice(["caught-up"]), help=_UNTIL_HELP)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write what was done, as JSON.",
)
def run(config: ConfigChoice, until: str | None, report: Path | None) -> int:
    """Run the application until SIGTERM or Ctrl-C, then end in good order.

    \b
    kclrun --config app.yaml
    kclrun --config app.yaml --set leases.max=8 --until caught-up
    """
    configuration = config.load()
    if until is not None:
        settings = msgspec.structs.replace(configuration.settings, until="caught-up")
        configuration = msgspec.structs.replace(configuration, settings=settings)
    from kclrun.cli.run import application

    return application.run_application(configuration, report, application.watched)
