"""`--config` and `--set`, the same for every verb that reads the configuration.

A verb that does nothing but read the file takes it as its argument, too.
"""

from __future__ import annotations

import functools
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

__all__ = ["Configuration", "config_argument", "config_options", "load_configuration"]


class Configuration(msgspec.Struct, frozen=True):
    """The settings, and the folder of the file that relative paths start from."""

    settings: Settings
    folder: Path
    file: Path


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config FILE` and `--set a.b=c` to a command, as `config` and `overrides`."""
    return _config_option(_set_option(command), required=True)


def config_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `config_options`, and the file may be given without the option's name.

    Usage errors, exit 64: no file, or two.
    """

    @functools.wraps(command)
    def with_file(file: Path | None, config: Path | None, **options: Any) -> Any:
        if file is None and config is None:
            raise click.UsageError("which configuration? Name its file: app.yaml")
        if file is not None and config is not None:
            raise click.UsageError(f"two configurations: {file}, and --config {config}")
        return command(config=file or config, **options)

    argument = click.argument(
        "file", metavar="[FILE]", required=False, type=click.Path(path_type=Path)
    )
    return argument(_config_option(_set_option(with_file), required=False))


def _set_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=VALUE",
        help="Override one setting, such as leases.max=8 (repeatable).",
    )(command)


def _config_option(command: Callable[..., Any], *, required: bool) -> Callable[..., Any]:
    return click.option(
        "--config",
        "-c",
        required=required,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="The configuration file.",
    )(command)


def load_configuration(config: Path, overrides: Sequence[str]) -> Configuration:
    """Load and check the file. Raises: SettingsError."""
    from kclrun.config.load import load_settings

    settings = load_settings(config, overrides, environment=os.environ, now=WallTime(time.time()))
    return Configuration(settings, config.resolve().parent, config)
