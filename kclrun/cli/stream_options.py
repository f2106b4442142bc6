"""`--config` or `--stream`: how the verbs that need a stream and nothing else are told which."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kclrun.cli.config_options import load_configuration
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

__all__ = ["stream_options", "stream_settings"]

_OPTIONS: Final = (
    click.option("--config", "-c", metavar="FILE", type=click.Path(path_type=Path)),
    click.option(
        "--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting."
    ),
    click.option(
        "--stream",
        metavar="NAME|ARN",
        help="The stream: one of several of --config, or without it.",
    ),
    click.option("--endpoint", metavar="URL", help="With --stream: where, if not AWS."),
    click.option("--region", metavar="NAME", help="With --stream: the region."),
)


def stream_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `config`, `overrides`, `stream`, `endpoint` and `region` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def stream_settings(
    *,
    config: Path | None,
    overrides: Sequence[str],
    stream: str | None,
    endpoint: str | None,
    region: str | None,
    verb: str,
) -> Settings:
    """The file's settings, or some for the stream named on the command line, by the same rules.

    Raises: SettingsError; click.UsageError without `--config` and `--stream`, and unless the stream
    is one of the file's, and named where it has several.
    """
    if config is not None:
        return _configured(load_configuration(config, overrides).settings, stream)
    if stream is None:
        raise click.UsageError("Give either --config FILE or --stream NAME.")
    from kclrun.config.load import settings_of

    given = {"stream": stream, "aws.endpoint": endpoint, "aws.region": region}
    named = [f"{name}='{value}'" for name, value in given.items() if value is not None]
    return settings_of(
        f"application: {verb}",
        [*named, *overrides],
        environment={},
        now=WallTime(time.time()),
        name="--stream",
    )


def _configured(settings: Settings, stream: str | None) -> Settings:
    """The file's settings, narrowed to the stream that is meant."""
    if stream is None:
        if settings.streams:
            raise click.UsageError(
                f"The application has several streams: name one with --stream"
                f" ({settings.stream_names})."
            )
        return settings
    try:
        return settings.of_stream(stream)
    except SettingsError as error:
        raise click.UsageError(f"--stream: {error}") from None
