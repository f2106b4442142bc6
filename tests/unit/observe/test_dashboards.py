"""Dashboard and alerts: each expression is PromQL over series and labels that a manager has."""

import functools
import json
import re

import promql_parser
import pytest
import yaml
from promql_parser import (
    AggregateExpr,
    BinaryExpr,
    Call,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
    VectorSelector,
)

from kclrun.cli.program import run_program
from kclrun.observe.alarms import RETENTION_S, alarms, prometheus_rules
from kclrun.observe.grafana import dashboard, rows
from kclrun.observe.metrics import METRICS, SERIES, labels_by_series
from tests.support.tables import over_rows

# What Prometheus itself puts on each series that it scrapes.
OF_TARGET = {"instance", "job"}
HOUR_S = 3600.0


def below(node):
    """The expressions inside one; an unknown kind of expression fails the test."""
    if isinstance(node, BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, AggregateExpr | ParenExpr):
        return [node.expr]
    if isinstance(node, Call):
        return node.args
    assert isinstance(node, VectorSelector | MatrixSelector | NumberLiteral), node
    return []


def read(expression):
    """Series and labels of an expression, by Prometheus' grammar."""
    series, labels, todo = set(), set(), [promql_parser.parse(expression)]
    while todo:
        node = todo.pop()
        todo += below(node)
        if isinstance(node, AggregateExpr) and node.modifier is not None:
            labels |= set(node.modifier.labels)
        if isinstance(node, MatrixSelector):
            node = node.vector_selector
        if isinstance(node, VectorSelector):
            series.add(node.name)
            labels |= {one.name for one in node.matchers.matchers}
    return series, labels


def panels():
    return [one for one in dashboard()["panels"] if one["type"] != "row"]


def queries():
    for panel in panels():
        for target in panel["targets"]:
            plain = target["expr"].replace("$__rate_interval", "5m")
            yield plain, target["legendFormat"]


def alerts(**asked):
    [group] = prometheus_rules(**asked)["groups"]
    return {one["alert"]: one for one in group["rules"]}


@over_rows(
    ("expression", "legend"),
    lambda: [
        *queries(),
        *((one["expr"], "") for one in alerts().values()),
        *((one["expr"], "") for one in alerts(application='a"\\').values()),
    ],
)
def test_an_expression_names_series_and_labels_of_the_catalogue(expression, legend):
    series, labels = read(expression)
    known = [set(labels_by_series()[name]) for name in series]

    assert series
    # A label that only one of several series has would match nothing.
    assert labels <= set.intersection(*known) | OF_TARGET
    shown = set(re.findall(r"{{(\w+)}}", legend))
    assert shown <= (labels | set.union(*known) | OF_TARGET)


def test_every_series_is_on_the_dashboard():
    shown = set().union(*(read(one[0])[0] for one in queries()))

    assert shown == {kind.prometheus for kind in METRICS.values()} | SERIES.keys()


def test_what_only_grows_is_looked_at_by_its_rate_only():
    of_all = [one[0] for one in queries()] + [one["expr"] for one in alerts().values()]
    text = " ".join(of_all)

    for name in re.findall(r"\bkclrun_\w+_total\b", text):
        if not name.startswith(("kclrun_total",)):
            bare = re.findall(rf"(\w+)\({name}", text)
            assert set(bare) <= {"rate", "increase", "absent"}


def test_the_dashboard_is_laid_out_without_overlap_and_asks_for_what_it_uses():
    board = json.loads(json.dumps(dashboard()))
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (one["gridPos"] for one in board["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} <= set(range(24))
    assert len({one["id"] for one in board["panels"]}) == len(board["panels"])
    asked = {one["name"] for one in board["templating"]["list"]}
    text = json.dumps(board["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) == asked | {"__rate_interval"}
    assert all(one["description"] for one in panels())


def test_alerts_of_one_application_name_it_at_each_series_and_half_its_retention():
    rules = alerts(application="orders", retention_s=72 * HOUR_S)

    assert rules["KclrunNearDataLoss"]["expr"] == (
        'max by (application, shard) (kclrun_lag_seconds{application="orders"}) > 129600'
    )
    assert rules["KclrunNoConsumer"]["expr"] == (
        'sum by (application) (kclrun_worker_leases{application="orders"}) == 0'
        ' or absent(kclrun_worker_leases{application="orders"})'
    )


def test_the_file_of_alarms_has_names_once_and_watches_metrics_that_are_published():
    names = [alarm.name for alarm in alarms()]
    assert len(names) == len(set(names)) == len({alarm.alert for alarm in alarms()}) > 10
    watched = {metric.name for alarm in alarms() if alarm.watch for metric in alarm.watch.metrics}
    assert watched <= METRICS.keys()
    (near,) = [alarm.watch for alarm in alarms() if alarm.name == "near data loss"]
    assert near.condition == f"> {RETENTION_S / 2 * 1000:.0f}"
    for watch in filter(None, (alarm.watch for alarm in alarms())):
        assert bool(watch.expression) == (len(watch.metrics) > 1)


def test_the_file_of_panels_has_titles_once_and_a_legend_for_each_query():
    panels = [panel for row in rows() for panel in row.panels]

    assert len(panels) == len({panel.title for panel in panels}) > 20
    assert all(panel.queries for panel in panels)
    assert all("{{application}}" in query.legend for panel in panels for query in panel.queries)


def test_each_alarm_says_what_it_means_and_what_to_do():
    for alarm, rule in zip(alarms(), alerts().values(), strict=True):
        assert rule["annotations"]["summary"] == alarm.summary
        # Plain text: the pages' marks mean nothing in a message.
        assert not set("`[]") & set(rule["annotations"]["description"])
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert ("for" in rule) == (alarm.minutes > 0)


@pytest.mark.parametrize(
    ("arguments", "made", "parsed"),
    [
        (["grafana"], dashboard, json.loads),
        (
            ["alerts", "--application", "orders", "--retention", "2h"],
            functools.partial(prometheus_rules, application="orders", retention_s=2 * HOUR_S),
            yaml.safe_load,
        ),
    ],
)
def test_the_verb_prints_what_a_reader_of_its_format_gets_back(capsys, arguments, made, parsed):
    assert run_program(["dashboards", *arguments]) == 0

    assert parsed(capsys.readouterr().out) == made()
