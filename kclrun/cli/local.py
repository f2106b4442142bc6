"""`kclrun local`: the embedded AWS in the foreground, for tests and other programs."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import click

from kclrun.cli.config_options import ConfigChoice, ConfigCommand, optional_config_options
from kclrun.cli.terminal import stop_signals
from kclrun.config.embedded import SHARDS_MAX
from kclrun.config.schema import AwsSettings
from kclrun.model.stream import LOOPBACK_REGION

# The service's rule for names.
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,63}")


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
@click.option(
    "--region",
    metavar="NAME",
    help="With --stream: its region; without, that of AWS_REGION or the profile, else us-east-1.",
)
def local(
    config: ConfigChoice,
    port: int,
    hosts: tuple[str, ...],
    credentials: str | None,
    streams: tuple[str, ...],
    *,
    region: str | None,
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
    from kclrun.local.server import NewStreams, run_local

    run = partial(
        run_local,
        port,
        hosts=hosts,
        limits=limits,
        serves_moto_api=serves_moto_api,
        stop_signals=stop_signals(),
    )
    named = dict(_stream(text) for text in streams)
    from kclrun.cli.run.embedded import embedded_streams, furnished, local_region

    if config.named is None:
        own = local_region(AwsSettings(region=_region(region))) if named else LOOPBACK_REGION
        return run(credentials=_pair(credentials), streams=NewStreams(named, own))
    if region is not None:
        raise click.UsageError("--region and --config exclude each other: --set aws.region=NAME")
    if credentials is not None:
        raise click.UsageError("--credentials and --config exclude each other.")
    configuration = config.load_for("embedded", "output", "outputs", "state", "path")
    settings = configuration.settings
    return run(
        credentials=None,
        streams=NewStreams(embedded_streams(settings) | named, local_region(settings.aws)),
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


def _region(name: str | None) -> str | None:
    if name is not None and not _REGION.fullmatch(name):
        raise click.BadParameter(
            f"expected a region such as eu-west-1, got {name[:60]!r}", param_hint="--region"
        )
    return name


def _pair(credentials: str | None) -> tuple[str, str] | None:
    if credentials is None:
        return None
    key, _, secret = credentials.partition(":")
    if not (key and secret):
        raise click.BadParameter("expected KEY:SECRET", param_hint="--credentials")
    return key, secret
