"""`kclrun check`: is everything right? Settings, user code, AWS; each told, nothing changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kclrun.cli import exit_codes, messages
from kclrun.cli.config_options import Configuration, load_configuration
from kclrun.errors import KclrunError, NotFound
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.cli.world import Aws
    from kclrun.config.schema import Settings

__all__ = ["check"]

Stage = Callable[[], str]


@click.command()
@click.option("--config", "-c", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a setting.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file, for editors.")
@click.option("--no-environment", is_flag=True, help="Settings and processor only; no AWS.")
def check(
    config: Path | None, overrides: tuple[str, ...], *, schema: bool, no_environment: bool
) -> int:
    """Check settings, processor and AWS; change nothing.

    \b
    kclrun check --config app.yaml                    everything
    kclrun check --config app.yaml --no-environment   without AWS, for a build
    kclrun check --schema > kclrun.schema.json        completion in your editor
    """
    if schema:
        from kclrun.config.json_schema import json_schema

        click.echo(json.dumps(json_schema(), indent=2))
        return exit_codes.DRAINED
    if config is None:
        raise click.UsageError("Missing option '--config'.")
    return _check(config, overrides, with_aws=not no_environment)


def _check(config: Path, overrides: Sequence[str], *, with_aws: bool) -> int:
    configuration = load_configuration(config, overrides)
    settings = configuration.settings
    streams = "streams" if settings.streams else "stream"
    click.echo(
        f"settings   ok  application {settings.application}, {streams} {settings.stream_names}"
    )
    code = exit_codes.DRAINED
    if settings.engine == "spark":
        code = _stage("spark", lambda: _spark(settings))
    code = code or _stage("user code", lambda: _user_code(configuration))
    if not with_aws:
        return code
    if settings.aws.endpoint == "embedded":
        click.echo("aws        ok  embedded: it is made when the application runs")
        return code
    return code or _check_aws(configuration)


def _check_aws(configuration: Configuration) -> int:
    from kclrun.cli.world import Aws

    aws = Aws(configuration.settings)
    code = _stage("aws", lambda: _identity(aws))
    if code:
        return code
    # All are asked even if the first fails: two messages now beat one now and one later.
    codes = [
        _stage("stream", partial(_stream, aws, source.name))
        for source in configuration.settings.sources
    ]
    if configuration.settings.engine == "fleet":
        codes.append(_stage("table", lambda: _table(aws)))
    return next((code for code in codes if code), exit_codes.DRAINED)


def _stage(name: str, stage: Stage) -> int:
    try:
        click.echo(f"{name:<10} ok  {stage()}")
    except KclrunError as error:
        click.echo(f"{name:<10} --  wrong")
        return messages.tell(error, "check")
    return exit_codes.DRAINED


def _spark(settings: Settings) -> str:
    from kclrun.cli.spark_run import require_spark
    from kclrun.config.engine_rules import unused_settings

    version = require_spark(settings).version
    unused = ", ".join(unused_settings(settings))
    return f"PySpark {version}" + (f"; without meaning on it: {unused}" if unused else "")


def _user_code(configuration: Configuration) -> str:
    from kclrun.cli.user_code import named_user_code, require_user_code

    require_user_code(configuration)
    return ", ".join(named_user_code(configuration).values())


def _identity(aws: Aws) -> str:
    aws.credentials.current()
    return f"credentials found; region {aws.kinesis.region}, Kinesis at {aws.kinesis.url}"


def _stream(aws: Aws, stream: str) -> str:
    from kclrun.cli.world import patiently

    patience_s = float(aws.settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    admin = aws.admin_of(stream)
    summary = patiently(admin.summary, deadline, patience_s)
    if summary.status == "DELETING":
        raise NotFound(f"stream {summary.name} is being deleted")
    patiently(admin.list_shards, deadline, patience_s)
    return (
        f"{summary.name} is {summary.status}: {summary.open_shards} open shards,"
        f" {summary.retention_hours} h of retention"
    )


def _table(aws: Aws) -> str:
    from kclrun.aws.table_setup import inspect_table, refuse_kcl3
    from kclrun.cli.streams import refuse_other_kind
    from kclrun.errors import TableRefused

    settings = aws.settings
    client = aws.control.dynamodb_reads()
    report = inspect_table(client, settings.table)
    if report is None and not settings.leases.create:
        raise TableRefused(
            f"lease table {settings.table} does not exist, and leases.create is off\n"
            "Create it, or set leases.create: on"
        )
    if report is None:
        return f"{settings.table} does not exist yet; the first start creates it"
    refuse_kcl3(client, settings.table, settings.application)
    refuse_other_kind(aws)
    pages = list(aws.table.scan())
    leases = sum(len(page.leases) for page in pages)
    broken = sorted(key for page in pages for key in page.broken)
    index = "with" if report.has_owner_index else "without"
    unreadable = f"; unreadable rows: {', '.join(broken[:5])}" if broken else ""
    return f"{report.name} is {report.status}, {index} owner index: {leases} leases{unreadable}"
