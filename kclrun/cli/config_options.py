"""`--config` and `--set`, the same for every verb that reads the configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

__all__ = ["Configuration", "config_options", "load_configuration"]


class Configuration(msgspec.Struct, frozen=True):
    """The settings, and the folder of the file that relative paths start from."""

    settings: Settings
    folder: Path
    file: Path


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config FILE` and `--set a.b=c` to a command, as `config` and `overrides`."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=VALUE",
        help="Override one setting, such as leases.max=8 (repeatable).",
    )(command)
    return click.option(
        "--config",
        "-c",
        required=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="The configuration file.",
    )(command)


def load_configuration(config: Path, overrides: Sequence[str]) -> Configuration:
    """Load and check the file. Raises: SettingsError."""
    from kclrun.config.load import load_settings

    settings = load_settings(config, overrides, environment=os.environ, now=WallTime(time.time()))
    return Configuration(settings, config.resolve().parent, config)
