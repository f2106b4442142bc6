"""Where a run writes: folders made and checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kclrun.cli.config_options import Configuration
from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

__all__ = ["output_folder", "require_folder", "with_absolute_output"]


def output_folder(settings: Settings) -> Path | None:
    """`output.path` as a folder of this machine, relative to the current one; None where rows go
    elsewhere: nowhere, into a stream, to s3a://…"""
    output = settings.output
    if output is None or output.path is None or "://" in output.path:
        return None
    return Path(output.path).absolute()


def with_absolute_output(configuration: Configuration) -> Settings:
    """Other processes are told a place that does not depend on where they stand."""
    settings = configuration.settings
    folder = output_folder(settings)
    if settings.output is None or folder is None:
        return settings
    output = msgspec.structs.replace(settings.output, path=str(folder))
    return msgspec.structs.replace(settings, output=output)


def require_folder(setting: str, folder: Path) -> None:
    """Make it now, or each process would fail over it later. Raises: SettingsError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{setting}: cannot make the folder {folder}: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{setting}: user {os.geteuid()} may not write to {folder}")
