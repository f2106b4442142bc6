"""`--config` or `--stream`: how the verbs that need a stream and nothing else are told which."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kclrun.cli.config_options import load_configuration
from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

__all__ = ["stream_options", "stream_settings"]

_OPTIONS: Final = (
    click.option("--config", "-c", metavar="FILE", type=click.Path(path_type=Path)),
    click.option(
        "--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting."
    ),
    click.option("--stream", metavar="NAME|ARN", help="The stream, instead of --config."),
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

    Raises: SettingsError; click.UsageError unless just one of `--config` and `--stream` is given.
    """
    if config is not None and stream is None:
        return load_configuration(config, overrides).settings
    if stream is None or config is not None:
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
