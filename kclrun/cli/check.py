"""`kclrun check`: checks settings, user code and AWS, reports each result, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.cli import exit_codes, messages
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigCommand,
    Configuration,
    config_options,
    json_option,
)
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_json
from kclrun.cli.waiting import waiting_for
from kclrun.errors import KclrunError, ServiceError, TableRefused
from kclrun.loading import import_paths
from kclrun.model.time import Instant

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.config.schema import Settings
    from kclrun.ports import StreamSummary

Stage = Callable[[], str]


@click.command(cls=ConfigCommand)
@config_options
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file, for editors.")
@click.option("--no-environment", is_flag=True, help="Settings and processor only; no AWS.")
@json_option("One JSON array: each check, whether it is ok, and what was found.")
def check(config: ConfigChoice, *, schema: bool, no_environment: bool, as_json: bool) -> int:
    """Check settings, processor and AWS; change nothing.

    \b
    kclrun check --config app.yaml                    everything
    kclrun check --config app.yaml --no-environment   without AWS, for a build
    kclrun check --schema > kclrun.schema.json        completion in your editor
    """
    if schema:
        from kclrun.config.convert import json_schema

        print_json(json_schema())
        return exit_codes.DRAINED
    configuration = config.load()
    checks: list[Checked] | None = [] if as_json else None
    code = _check(configuration, checks, no_environment=no_environment)
    if checks is not None:
        print_json(checks)
    return code


class Checked(msgspec.Struct, frozen=True):
    """The result of one check: what was found, or what is wrong."""

    check: str
    is_ok: bool
    words: str


def _check(
    configuration: Configuration, checks: list[Checked] | None, *, no_environment: bool
) -> int:
    """All checks, printed, or added to `checks`; the exit code of the first that failed."""
    from kclrun.config.rules import unused_settings

    settings = configuration.settings
    streams = "streams" if settings.streams else "stream"
    # The names of outputs may be the longest.
    width = max(map(len, ("user code ", *(f"outputs.{name} " for name in settings.outputs))))
    stage = partial(_stage, width) if checks is None else partial(_noted, checks)
    read = f"application {settings.application}, {streams} {settings.stream_names}"
    if unused := unused_settings(settings):
        read += f"\nno effect with engine: {settings.engine}: {', '.join(unused)}"
    stage("settings", lambda: read)
    code = exit_codes.DRAINED
    if settings.engine == "spark":
        code = stage("spark", lambda: _spark(settings))
    code = code or stage("user code", lambda: _user_code(configuration))
    if no_environment:
        return code
    if settings.aws.endpoint == "embedded":
        stage("aws", lambda: "embedded: it is made when the application runs")
        return code
    return code or _check_aws(configuration, stage)


def _check_aws(configuration: Configuration, stage: Callable[[str, Stage], int]) -> int:
    from kclrun.cli.destination_checks import check_letters, output_checks
    from kclrun.cli.services import Aws

    aws = Aws(configuration.settings)
    code = stage("aws", lambda: _identity(aws))
    if code:
        return code
    # All checks run even if the first one fails, so that one run reports all errors.
    codes = [
        stage("stream", partial(_stream, aws, source.name))
        for source in configuration.settings.sources
    ]
    is_fleet = configuration.settings.engine == "fleet"
    if is_fleet:
        codes.append(stage("table", lambda: _table(aws)))
    if configuration.settings.on_error.then == "dead-letter":
        codes.append(stage("letters", lambda: check_letters(aws)))
    if is_fleet:
        paths = import_paths(configuration.settings.path, configuration.folder)
        codes += [stage(name, check_output) for name, check_output in output_checks(aws, paths)]
    return next((code for code in codes if code), exit_codes.DRAINED)


def _stage(width: int, name: str, stage: Stage) -> int:
    try:
        with waiting_for(f"the check of {name.strip()}"):
            checked = stage()
        echo(f"{name:<{width}} ok  {checked}")
    except KclrunError as error:
        echo(f"{name:<{width}} --  wrong")
        return messages.report_error(error, "check")
    return exit_codes.DRAINED


def _noted(checks: list[Checked], name: str, stage: Stage) -> int:
    """As `_stage`, for JSON: the result is added to `checks`."""
    try:
        checks.append(Checked(name, is_ok=True, words=stage()))
    except KclrunError as error:
        checks.append(Checked(name, is_ok=False, words=str(error)))
        return exit_codes.exit_code_of(error)
    return exit_codes.DRAINED


def _spark(settings: Settings) -> str:
    from kclrun.cli.run.spark import require_spark

    return f"PySpark {require_spark(settings).version}"


def _user_code(configuration: Configuration) -> str:
    from kclrun.cli.user_code import named_user_code, require_user_code

    require_user_code(configuration)
    return ", ".join(named_user_code(configuration).values())


def _identity(aws: Aws) -> str:
    aws.credentials.current()
    service = "Kinesis" if aws.source is aws.kinesis else "DynamoDB Streams"
    return f"credentials found; region {aws.source.region}, {service} at {aws.source.url}"


def _stream(aws: Aws, stream: str) -> str:
    from kclrun.cli.services import advising_on_streams, readable
    from kclrun.cli.startup import patiently
    from kclrun.model import statuses

    patience_s = float(aws.settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    admin = aws.admin_of(stream)
    with advising_on_streams(aws):
        summary = patiently(admin.summary, deadline, patience_s, what=aws.called_stream(stream))
    readable(summary)
    patiently(admin.list_shards, deadline, patience_s, what=aws.called_stream(stream))
    consumer = ""
    if aws.settings.fetch.mode == "fan-out":
        consumer = patiently(
            lambda: _consumer(aws, summary),
            deadline,
            patience_s,
            what=f"the consumers of {summary.name}",
        )
    remark = statuses.of_stream(summary.arn).remark(summary.status)
    return (
        f"{summary.name} is {summary.status}: {summary.open_shards} open shards,"
        f" {summary.retention_hours} h of retention{consumer}{f'; {remark}' if remark else ''}"
    )


def _consumer(aws: Aws, summary: StreamSummary) -> str:
    from kclrun.cli.consumers import own_consumer, room_for_consumer
    from kclrun.model.statuses import CONSUMER

    name = own_consumer(aws, summary)
    found = aws.consumers_of(summary.arn).find(name)
    if found is None:
        remark = room_for_consumer(aws, summary)
        return f"; consumer {name} is registered at the first start{remark}"
    trouble = CONSUMER.trouble(found.status)
    meaning = f" ({trouble.meaning})" if trouble is not None and trouble.meaning else ""
    return f"; consumer {name} is {found.status}{meaning}"


def _table(aws: Aws) -> str:
    from kclrun.aws.table_setup import inspect_table, refuse_kcl3, require_usable
    from kclrun.cli.services import open_streams, refuse_other_kind, remarks_on_names
    from kclrun.config.kcl import kcl_application

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
    require_usable(report)
    refuse_kcl3(client, settings.table, kcl_application(settings))
    try:
        opened = open_streams(aws)
    except ServiceError:  # the check of the streams reports it
        opened = {}
    refuse_other_kind(aws, {key: stream.summary.created_at for key, stream in opened.items()})
    pages = list(aws.table.scan())
    keys = [lease.key for page in pages for lease in page.leases]
    remarks = "".join(f"; {remark}" for remark in remarks_on_names(aws, opened, keys))
    leases = sum(len(page.leases) for page in pages)
    reasons = {key: why for page in pages for key, why in page.reasons.items()}
    broken = sorted(
        f"{key} ({reasons[key]})" if key in reasons else key
        for page in pages
        for key in page.broken
    )
    index = "with" if report.has_owner_index else "without"
    unreadable = f"; unreadable rows: {', '.join(broken[:5])}" if broken else ""
    found = f"{report.name} is {report.status}, {index} owner index: {leases} leases"
    return found + unreadable + remarks
