"""`kclrun local`: the embedded AWS in the foreground, for tests and other programs."""

from __future__ import annotations

import click

__all__ = ["local"]


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=4567, show_default=True)
@click.option("--limits", is_flag=True, help="Enforce the per-shard limits of the service.")
@click.option(
    "--credentials",
    metavar="KEY:SECRET",
    help="Accept only requests signed with these; without, any credentials do.",
)
def local(port: int, credentials: str | None, *, limits: bool) -> int:
    """Serve Kinesis, DynamoDB, CloudWatch, S3 and SQS on 127.0.0.1 until Ctrl-C.

    \b
    kclrun local --port 4567
    aws --endpoint-url http://127.0.0.1:4567 kinesis list-streams
    kclrun --config app.yaml --set aws.endpoint=http://127.0.0.1:4567
    """
    from kclrun.local.server import run_local

    return run_local(port, limits=limits, credentials=_pair(credentials))


def _pair(credentials: str | None) -> tuple[str, str] | None:
    if credentials is None:
        return None
    key, colon, secret = credentials.partition(":")
    if not (key and colon and secret):
        raise click.BadParameter("expected KEY:SECRET", param_hint="--credentials")
    return key, secret
