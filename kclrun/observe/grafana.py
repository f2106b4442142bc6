"""The dashboard of Grafana over the metrics of a fleet.

`dashboard.yaml` has its panels; names, labels and descriptions are those of the catalogue of
metrics. The module does not know a Grafana, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from kclrun.config.data_files import package_data
from kclrun.observe.alarms import SERIES_NAME, narrowed
from kclrun.observe.metrics import MEANINGS, OF_LEASE, labels_by_series

# Grafana 10.4 writes this one; later ones convert a dashboard when they load it.
_SCHEMA_VERSION: Final = 39
_COLUMNS: Final = 24
_HEIGHTS: Final = {"stat": 4, "timeseries": 8}
_WIDTHS: Final = {"stat": 3, "timeseries": 8}
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


class PanelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PromQL, and the legend of its lines."""

    expr: str
    legend: str


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A panel; `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: tuple[PanelQuery, ...]
    kind: Literal["stat", "timeseries"] = "timeseries"


class PanelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the dashboard, by its title."""

    row: str
    panels: tuple[Panel, ...]


def rows() -> tuple[PanelRow, ...]:
    """The rows of the dashboard, from top to bottom."""
    return package_data("kclrun.observe", "dashboard.yaml", tuple[PanelRow, ...])


def dashboard() -> dict[str, Any]:
    """The dashboard, to be imported into a Grafana; it asks for its data source there."""
    return {
        "uid": "kclrun",
        "title": "kclrun",
        "tags": ["kclrun", "kinesis"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_placed()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "source", "label": "data source", "type": "datasource", "query": "prometheus"}
    asked = {
        "application": "label_values(kclrun_info, application)",
        "shard": 'label_values(kclrun_lag_seconds{application=~"$application"}, shard)',
    }
    for name, query in asked.items():
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _placed() -> Iterator[dict[str, Any]]:
    """Rows and panels, from left to right and from top to bottom; each has its number."""
    top = number = 0
    for row in rows():
        number += 1
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": row.row, "gridPos": place, "panels": []}
        top, left = top + 1, 0
        for panel in row.panels:
            width, height = _WIDTHS[panel.kind], _HEIGHTS[panel.kind]
            if left + width > _COLUMNS:
                top, left = top + height, 0
            number += 1
            place = {"h": height, "w": width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_drawn(panel)}
            left += width
        top += height


def _drawn(panel: Panel) -> dict[str, Any]:
    names = dict.fromkeys(
        name for query in panel.queries for name in SERIES_NAME.findall(query.expr)
    )
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": "\n\n".join(f"{name}: {MEANINGS[name]}" for name in names),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": narrowed(query.expr, {name: _chosen(name) for name in names}),
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _chosen(name: str) -> str:
    """The matchers for what a reader chose at the top of the dashboard."""
    chosen = 'application=~"$application"'
    is_of_lease = labels_by_series()[name] == OF_LEASE
    return f'{chosen}, shard=~"$shard"' if is_of_lease else chosen
