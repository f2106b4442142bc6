"""`kclrun consumers`: the registered consumers of the application's streams, and their removal.

`fetch.mode: fan-out` registers a consumer, and no run removes one. A stream can have 20, and each
is billed by the hour, so removal is a verb of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigGroup, config_options, load_configuration
from kclrun.errors import NotFound
from kclrun.model.text import harmless

if TYPE_CHECKING:
    from kclrun.aws.fan_out import Consumer, StreamConsumers
    from kclrun.cli.world import Aws


@click.group(cls=ConfigGroup)
def consumers() -> None:
    """Show and remove the consumers of enhanced fan-out.

    \b
    kclrun consumers list --config app.yaml
    kclrun consumers remove NAME --config app.yaml --yes
    """


@consumers.command(name="list")
@config_options
def list_consumers(config: Path | None, overrides: tuple[str, ...]) -> int:
    """Show every consumer of the application's streams, its own marked."""
    aws = _aws(config, overrides)
    own = _own_name(aws)
    for stream, of_stream in _streams(aws):
        found = of_stream.listed()
        click.echo(f"{stream}: {len(found)} registered consumers")
        for each in found:
            mark = "  (this application's)" if each.name == own else ""
            click.echo(f"  {harmless(each.name):<32} {each.status:<8} {each.arn}{mark}")
    return exit_codes.DRAINED


@consumers.command()
@click.argument("name", metavar="NAME")
@config_options
@click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
def remove(name: str, config: Path | None, overrides: tuple[str, ...], *, yes: bool) -> int:
    """Deregister a consumer from each of the application's streams.

    Its subscriptions end at once. Machines that still read by it go on by polling.
    """
    aws = _aws(config, overrides)
    found = list(_named(aws, name))
    if not found:
        raise NotFound(
            f"no stream of this application has a consumer {name}\n"
            "Show them:  kclrun consumers list"
        )
    for stream, of_stream, consumer in found:
        if yes:
            of_stream.deregister(consumer.arn)
            click.echo(f"Removed consumer {consumer.name} of stream {stream}.")
        else:
            click.echo(f"Would remove consumer {consumer.name} of stream {stream}: {consumer.arn}")
    if not yes:
        click.echo("Do it with --yes.")
    return exit_codes.DRAINED


def _named(aws: Aws, name: str) -> Iterator[tuple[str, StreamConsumers, Consumer]]:
    for stream, of_stream in _streams(aws):
        consumer = of_stream.find(name)
        if consumer is not None:
            yield stream, of_stream, consumer


def _streams(aws: Aws) -> Iterator[tuple[str, StreamConsumers]]:
    from kclrun.cli.streams import open_streams

    for stream in open_streams(aws).values():
        yield stream.summary.name, aws.consumers_of(stream.summary.arn)


def _own_name(aws: Aws) -> str | None:
    """The consumer by which the application reads, if it reads by one."""
    from kclrun.aws.fan_out import consumer_name

    settings = aws.settings
    if settings.fetch.mode != "fan-out":
        return None
    return consumer_name(settings.fetch.consumer or settings.application)


def _aws(config: Path | None, overrides: tuple[str, ...]) -> Aws:
    from kclrun.cli.world import Aws

    return Aws(load_configuration(config, overrides).settings)
