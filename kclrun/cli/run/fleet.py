"""A run of `engine: fleet`: opens the launcher and the AWS clients, then runs the lease manager.

The manager handles all events of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kclrun.cli.config_options import Configuration
from kclrun.cli.messages import leases_command
from kclrun.cli.run.watched import watched
from kclrun.cli.user_code import with_absolute_output
from kclrun.cli.world import open_world
from kclrun.errors import host_error
from kclrun.loading import import_paths
from kclrun.manager.forks import Launcher
from kclrun.manager.runtime import WORKER_ENTRY, run_fleet

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.local.filling import Filling
    from kclrun.manager.world import World


def fleet_run(
    configuration: Configuration,
    report: Path | None,
    source_is_done: Callable[[], bool],
    filling: Callable[[], Filling | None] = lambda: None,
    *,
    outlives_run: bool = True,
) -> int:
    """Run until the end; returns the exit code. Raises: KclrunError before the first take.

    `outlives_run`: the lease table still exists after the run, for `kclrun leases`.
    """
    settings = with_absolute_output(configuration)
    paths = [str(path) for path in import_paths(settings.path, configuration.folder)]
    with watched(settings, filling) as (shown, on_sample):
        command = leases_command(configuration.file, configuration.overrides)
        launcher, world = _open(shown)
        return run_fleet(
            shown,
            world,
            import_paths=paths,
            until=shown.until,
            report_path=report,
            on_sample=on_sample,
            source_is_done=source_is_done,
            launcher=launcher,
            leases_command=command if outlives_run else None,
        ).exit_code


def _open(settings: Settings) -> tuple[Launcher, World]:
    """Start the launcher and open the AWS clients.

    The launcher imports the modules of lease processes while this process makes its AWS calls.
    """
    launcher = Launcher(WORKER_ENTRY, only=settings.environment.only)
    try:
        launcher.start()
    except OSError as error:
        what = "The fork server is a process in a session of its own."
        reason = f"{error.strerror} ({type(error).__name__})"
        raise host_error(what, reason, error.errno) from error
    try:
        return launcher, open_world(settings)
    except BaseException:
        launcher.stop()
        raise
