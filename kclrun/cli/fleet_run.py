"""A run of `engine: fleet`: the lease manager of this machine, with what it needs opened.

Rule: what happens while it runs belongs to the manager. Look next: `manager/runtime.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kclrun.cli.config_options import Configuration
from kclrun.cli.output_place import with_absolute_output
from kclrun.cli.watched import watched
from kclrun.loading import import_paths

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.manager.launching import Launcher
    from kclrun.manager.world import World

__all__ = ["fleet_run"]


def fleet_run(
    configuration: Configuration, report: Path | None, source_is_done: Callable[[], bool]
) -> int:
    """Run until it ends; the exit code. Raises: KclrunError before the first lease is taken."""
    settings = with_absolute_output(configuration)
    paths = [str(path) for path in import_paths(settings.path, configuration.folder)]
    with watched(settings) as (shown, on_snapshot):
        from kclrun.manager.runtime import run_fleet

        launcher, world = _open(shown)
        return run_fleet(
            shown,
            world,
            import_paths=paths,
            until=shown.until,
            report_path=report,
            on_snapshot=on_snapshot,
            source_is_done=source_is_done,
            launcher=launcher,
        ).exit_code


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
