"""The alarms: the series that each watches in Prometheus and in CloudWatch, and the action to take.

`alarms.yaml` has them. The page of alarms and `kclrun dashboards alerts` are made of it; the
CloudFormation template is compared with it. This module does not know where metrics are published.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kclrun.config.data_files import package_data
from kclrun.observe.metrics import APPLICATION

# The retention of a new stream.
RETENTION_S: Final = 24 * 3600.0
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SERIES_NAME: Final = re.compile(r"\bkclrun_\w+")


class WatchedMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric of CloudWatch; `id` is its name in the expression."""

    id: str
    name: str
    statistic: str


class CloudWatchAlarm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An alarm of CloudWatch, over periods of a minute: all of the last `minutes` break the limit.
    `expression` combines the metrics."""

    metrics: tuple[WatchedMetric, ...]
    condition: str
    minutes: int
    expression: str = ""
    is_breached_by_silence: bool = False


class Alarm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One alarm. `sign` is its condition in words; `expr` is in PromQL, where `{half_s}` is half of
    the retention. `watch` is None where CloudWatch has no such metric."""

    name: str
    alert: str
    summary: str
    sign: str
    meaning: str
    action: str
    expr: str
    minutes: int
    watch: CloudWatchAlarm | None = None
    is_urgent: bool = False


@functools.cache
def alarms() -> tuple[Alarm, ...]:
    """All alarms, in the order of the page."""
    return package_data("kclrun.observe", "alarms.yaml", tuple[Alarm, ...])


def narrowed(expression: str, matchers: Mapping[str, str]) -> str:
    """The expression with `matchers` (a series' name to the text in its braces) at each series."""

    def with_matcher(found: re.Match[str]) -> str:
        matcher = matchers.get(found[0], "")
        return f"{found[0]}{{{matcher}}}" if matcher else found[0]

    return SERIES_NAME.sub(with_matcher, expression)


def prometheus_rules(
    *, application: str | None = None, retention_s: float = RETENTION_S
) -> dict[str, Any]:
    """The alarms as a rule file of Prometheus; for one application, or for each that is scraped."""
    return {
        "groups": [
            {
                "name": "kclrun" if application is None else f"kclrun {application}",
                "rules": [_rule(alarm, application, retention_s) for alarm in alarms()],
            }
        ]
    }


def _rule(alarm: Alarm, application: str | None, retention_s: float) -> dict[str, Any]:
    expression = alarm.expr.format(half_s=f"{retention_s / 2:.0f}")
    if application is not None:
        # A string of PromQL has the escapes of JSON.
        matcher = f"{APPLICATION.lower()}={msgspec.json.encode(application).decode()}"
        names = SERIES_NAME.findall(expression)
        expression = narrowed(expression, dict.fromkeys(names, matcher))
    waits = {"for": f"{alarm.minutes}m"} if alarm.minutes else {}
    return {
        "alert": alarm.alert,
        "expr": expression,
        **waits,
        "labels": {"severity": "critical" if alarm.is_urgent else "warning"},
        "annotations": {
            "summary": alarm.summary,
            "description": f"{_plain(alarm.meaning)}. What to do: {_plain(alarm.action)}.",
        },
    }


def _plain(text: str) -> str:
    """Text of a page without its marks, for an annotation."""
    return _LINK.sub(r"\1", text).replace("`", "")
