"""`kclrun local`: the embedded AWS in the foreground, for tests and other programs."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import click

from kclrun.cli.config_options import ConfigChoice, ConfigCommand, optional_config_options
from kclrun.cli.terminal import stop_signals
from kclrun.config.schema import SHARDS_MAX

# The service's rule for names.
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@click.command(cls=ConfigCommand)
@optional_config_options
@click.option("--port", type=click.IntRange(0, 65535), default=4567, show_default=True)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="ADDRESS|NAME",
    help="Listen here and not on 127.0.0.1; given again, a further name that clients call it by.",
)
@click.option("--limits", is_flag=True, help="Enforce the per-shard limits of the service.")
@click.option(
    "--credentials",
    metavar="KEY:SECRET",
    help="Accept only requests signed with these; without, any credentials do.",
)
@click.option(
    "--moto-api",
    "serves_moto_api",
    is_flag=True,
    help="Serve moto's own interface, too: /moto-api/reset and the like.",
)
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="NAME[:SHARDS]",
    help="Make this stream, with so many shards or one (repeatable).",
)
def local(
    config: ConfigChoice,
    port: int,
    hosts: tuple[str, ...],
    credentials: str | None,
    streams: tuple[str, ...],
    *,
    limits: bool,
    serves_moto_api: bool,
) -> int:
    """Serve Kinesis, DynamoDB with its streams, CloudWatch, S3, SQS, SNS and Firehose on 127.0.0.1.

    It runs until Ctrl-C. Web pages of other sites get nothing from it. With --config it makes what
    that application needs: its streams with the records of embedded.fill, and the streams, buckets,
    queues and topics of its outputs.

    \b
    kclrun local --stream hello:2
    kclrun local --config app.yaml
    kclrun --config app.yaml --set aws.endpoint=http://127.0.0.1:4567
    kclrun put FILE --config app.yaml --set aws.endpoint=http://127.0.0.1:4567
    aws --endpoint-url http://127.0.0.1:4567 kinesis list-streams
    """
    from kclrun.local.server import run_local

    run = partial(
        run_local,
        port,
        hosts=hosts,
        limits=limits,
        serves_moto_api=serves_moto_api,
        stop_signals=stop_signals(),
    )
    named = dict(_stream(text) for text in streams)
    if config.named is None:
        return run(credentials=_pair(credentials), streams=named)
    if credentials is not None:
        raise click.UsageError("--credentials and --config exclude each other.")
    from kclrun.cli.run.embedded import embedded_streams, furnished

    configuration = config.load_for("embedded", "output", "outputs", "state", "path")
    return run(
        credentials=None,
        streams=embedded_streams(configuration.settings) | named,
        furnished=partial(furnished, configuration),
    )


def _stream(text: str) -> tuple[str, int]:
    """`hello:2`: a name and the number of shards. Raises: click.BadParameter."""
    name, colon, number = text.partition(":")
    shards = int(number) if number.isascii() and number.isdecimal() and len(number) < 6 else 0
    if not _NAME.fullmatch(name) or (colon and not 1 <= shards <= SHARDS_MAX):
        raise click.BadParameter(
            f"expected NAME or NAME:SHARDS, such as hello:2, got {text[:60]!r}",
            param_hint="--stream",
        )
    return name, shards or 1


def _pair(credentials: str | None) -> tuple[str, str] | None:
    if credentials is None:
        return None
    key, _, secret = credentials.partition(":")
    if not (key and secret):
        raise click.BadParameter("expected KEY:SECRET", param_hint="--credentials")
    return key, secret
