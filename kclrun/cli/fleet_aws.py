"""The services of an application that keeps leases, for the verbs that look at its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kclrun.cli.config_options import load_configuration
from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["fleet_aws"]


def fleet_aws(config: Path, overrides: Sequence[str]) -> Aws:
    """Table and stream of the configuration. Raises: SettingsError, on Spark too: no leases."""
    from kclrun.cli.world import Aws

    settings = load_configuration(config, overrides).settings
    if settings.engine == "spark":
        raise SettingsError(
            "engine: spark keeps no leases: positions are in the query's checkpoint,"
            f" {settings.spark.checkpoint or 'made by each run'}\n"
            "Lag and progress by shard:  kclrun --config … on a terminal, or --report FILE"
        )
    return Aws(settings)
