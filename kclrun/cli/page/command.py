"""`kclrun page`: a web page of the whole fleet, from the lease table and the stream's tip.

It only reads, as `kclrun leases`, `kclrun lag` and `kclrun doctor` without `--yes` do.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import DEFAULT_CONFIG, DURATION, ConfigCommand, config_options
from kclrun.cli.messages import command_of, leases_command
from kclrun.config.units import Duration
from kclrun.model.stream import is_loopback_host

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.page.snapshot import About

# More often it would take too much of the reads that a shard's applications share (`reading.py`).
_EVERY_MIN_S: Final = 5.0
_EVERY_MAX_S: Final = 3_600.0


@click.command(cls=ConfigCommand)
@config_options
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Another address than loopback: there is no password.",
)
@click.option(
    "--every",
    type=DURATION,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="How often the table is read, however many people look; the lag every third time.",
)
def page(
    config: Path | None, overrides: tuple[str, ...], *, port: int, listen: str, every: Duration
) -> int:
    """Show the whole fleet as a web page: owners, shards, lag, halts, findings of the doctor.

    It only reads, with your credentials, and changes nothing; it runs on a laptop until Ctrl-C.
    Without credentials for the stream it shows the table, and no lag.

    \b
    kclrun page --config app.yaml
    kclrun page --config app.yaml --port 0            takes a free port, and prints it
    """
    if not _EVERY_MIN_S <= every <= _EVERY_MAX_S:
        raise click.UsageError(f"--every is {_EVERY_MIN_S:g}s to {_EVERY_MAX_S:g}s.")
    from kclrun.cli.page.reading import FleetReader
    from kclrun.cli.services import fleet_aws
    from kclrun.page.server import serve_pages

    aws = fleet_aws(config, overrides)
    about = _about(aws, config or DEFAULT_CONFIG, overrides, every_s=float(every))
    # Credentials that are missing end the start, not each reading.
    aws.credentials.current()
    reader = FleetReader(aws, every_s=float(every))
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    server = serve_pages(listen, port, about, reader.look)
    try:
        reader.start()
        click.echo(f"The fleet of {about.application}: {server.url}/ (Ctrl-C ends it)")
        if not is_loopback_host(listen):
            click.echo(
                "There is no password: everyone that reaches this address can read the page.",
                err=True,
            )
        asked.wait()
    finally:
        reader.close()
        server.close()
    return exit_codes.DRAINED


def _about(aws: Aws, file: Path, overrides: Sequence[str], *, every_s: float) -> About:
    from kclrun.cli.page.plan import letters_of, plan_of
    from kclrun.cli.page.reading import SCANS_A_MEASUREMENT
    from kclrun.page.snapshot import About

    settings = aws.settings
    return About(
        application=settings.application,
        streams=settings.stream_names,
        table=settings.table,
        place=settings.aws.endpoint or f"region {aws.kinesis.region}",
        leases_command=leases_command(file, overrides),
        doctor_command=command_of("doctor", file, overrides),
        letters_command=command_of("dead-letters", file, overrides),
        letters=letters_of(settings),
        refresh_s=round(every_s),
        lag_every_s=every_s * SCANS_A_MEASUREMENT,
        plan=plan_of(settings),
    )
