"""`kclrun dashboards`: prints a dashboard and alert rules made of the catalogue of metrics.

It reads no settings and sends no request.
"""

from __future__ import annotations

import click

from kclrun.cli import exit_codes
from kclrun.cli.reports import print_json
from kclrun.cli.times import DURATION
from kclrun.config.units import Duration


@click.group()
def dashboards() -> None:
    """Print a Grafana dashboard, or alert rules for Prometheus.

    \b
    kclrun dashboards grafana > kclrun.json
    kclrun dashboards alerts --application orders --retention 72h > kclrun-alerts.yaml
    """


@dashboards.command()
def grafana() -> int:
    """Print a dashboard as JSON: Grafana, Dashboards, New, Import."""
    from kclrun.observe.grafana import dashboard

    print_json(dashboard())
    return exit_codes.DRAINED


@dashboards.command()
@click.option(
    "--application",
    metavar="NAME",
    help="Watch this one; without, each that is scraped, but not that one of them is missing.",
)
@click.option(
    "--retention",
    type=DURATION,
    default="24h",
    show_default=True,
    help="That of the stream; an alert fires at half of it.",
)
def alerts(application: str | None, retention: Duration) -> int:
    """Print alert rules as YAML, a file for `rule_files` of Prometheus."""
    import yaml

    from kclrun.observe.alarms import prometheus_rules

    rules = prometheus_rules(application=application, retention_s=float(retention))
    click.echo(yaml.safe_dump(rules, sort_keys=False, width=100), nl=False)
    return exit_codes.DRAINED
