"""`kclrun consumers`: the registered consumers of the application's streams, and their removal.

`fetch.mode: fan-out` registers a consumer, and no run removes one. A stream can have 20, and each
is billed by the hour, so removal is a verb of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kclrun.aws.fan_out import consumer_of, registered, require_active, require_room
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigGroup,
    config_options,
    ends_with_plan,
    json_option,
    yes_option,
)
from kclrun.cli.messages import echo
from kclrun.cli.one_by_one import OneByOne
from kclrun.cli.reports import print_json, print_report
from kclrun.config.changes import refuse_changes
from kclrun.errors import NotFound

if TYPE_CHECKING:
    from kclrun.aws.fan_out import Consumer, StreamConsumers
    from kclrun.cli.services import Aws
    from kclrun.ports import StreamSummary


@click.group(cls=ConfigGroup)
def consumers() -> None:
    """Show and remove the consumers of enhanced fan-out.

    \b
    kclrun consumers list --config app.yaml
    kclrun consumers remove NAME --config app.yaml --yes
    """


@consumers.command(name="list")
@config_options
@json_option("One JSON array.")
def list_consumers(config: ConfigChoice, *, as_json: bool) -> int:
    """Show every consumer of the application's streams; its own is marked."""
    aws, others = _aws(config), OneByOne("consumers")
    reads = aws.settings.fetch.mode == "fan-out"
    found: dict[str, list[RegisteredConsumer]] = {}
    for summary, of_stream in _streams(aws, others):
        with others.going_on():
            listed = of_stream.listed()
            own = own_consumer(aws, summary) if reads else None
            found[summary.name] = [
                RegisteredConsumer(
                    stream=summary.name,
                    name=consumer.name,
                    status=consumer.status,
                    arn=consumer.arn,
                    created_at=consumer.created_at,
                    is_own=consumer.name == own,
                )
                for consumer in listed
            ]
    print_report(found, _print_consumers, as_json=as_json, in_json=_print_in_json)
    return others.code


class RegisteredConsumer(msgspec.Struct, frozen=True):
    """A consumer of one of the application's streams."""

    stream: str
    name: str
    status: str
    arn: str
    created_at: float
    is_own: bool


def _print_in_json(found: Mapping[str, Sequence[RegisteredConsumer]]) -> None:
    print_json([consumer for of_stream in found.values() for consumer in of_stream])


def _print_consumers(found: Mapping[str, Sequence[RegisteredConsumer]]) -> None:
    for stream, consumers_of_it in found.items():
        echo(f"{stream}: {len(consumers_of_it)} registered consumers")
        for consumer in consumers_of_it:
            mark = "  (this application's)" if consumer.is_own else ""
            echo(f"  {consumer.name:<32} {consumer.status:<8} {consumer.arn}{mark}")


@consumers.command()
@click.argument("name", metavar="NAME")
@config_options
@yes_option
def remove(name: str, config: ConfigChoice, *, yes: bool) -> int:
    """Deregister a consumer from each of the application's streams.

    Its subscriptions end at once. Machines that still read by it go on by polling.
    """
    aws, others = _aws(config), OneByOne("consumers")
    found = list(_named(aws, name, others))
    if not found and others.code:
        return others.code
    if not found:
        raise NotFound(
            f"no stream of this application has a consumer {name}\n"
            "Show them:  kclrun consumers list"
        )
    for stream, _, consumer in found:
        echo(f"Would remove consumer {consumer.name} of stream {stream}: {consumer.arn}")
    if ends_with_plan(is_confirmed=yes):
        return others.code
    for stream, of_stream, consumer in found:
        with others.going_on():
            of_stream.deregister(consumer.arn)
            echo(f"Removed consumer {consumer.name} of stream {stream}.")
    return others.code


_TO_POLL: Final = "fetch.mode: polling"


def own_consumer(aws: Aws, summary: StreamSummary) -> str:
    """The name of the consumer by which the application reads this stream.

    Raises: SettingsError for the ARN of another stream's consumer.
    """
    named = aws.settings.fetch.consumer or aws.settings.application
    return consumer_of(summary, named, "fetch.consumer")


def active_consumer(aws: Aws, summary: StreamSummary) -> str:
    """The ARN of that consumer, which is registered if it is not there.

    Raises: as `registered`; Unavailable while it is not ACTIVE.
    """
    name, consumers = own_consumer(aws, summary), aws.consumers_of(summary.arn)
    found = registered(consumers, summary, name, to_poll=_TO_POLL)
    require_active(found, summary)
    return found.arn


def room_for_consumer(aws: Aws, summary: StreamSummary) -> str:
    """A remark on the room for one more consumer; empty with plenty. Raises: SettingsError."""
    return require_room(aws.consumers_of(summary.arn), summary, to_poll=_TO_POLL)


def _named(
    aws: Aws, name: str, others: OneByOne
) -> Iterator[tuple[str, StreamConsumers, Consumer]]:
    for summary, of_stream in _streams(aws, others):
        consumer: Consumer | None = None
        with others.going_on():
            consumer = of_stream.find(name)
        if consumer is not None:
            yield summary.name, of_stream, consumer


def _streams(aws: Aws, others: OneByOne) -> Iterator[tuple[StreamSummary, StreamConsumers]]:
    from kclrun.cli.services import open_streams

    for stream in open_streams(aws, on_missing=others.missing).values():
        yield stream.summary, aws.consumers_of(stream.summary.arn)


def _aws(config: ConfigChoice) -> Aws:
    from kclrun.cli.services import Aws

    settings = config.load_for().settings
    refuse_changes(settings, "consumers", "that of a DynamoDB table is read by polling alone")
    return Aws(settings)
