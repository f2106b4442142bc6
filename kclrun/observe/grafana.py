"""The dashboard of Grafana over the metrics of a fleet.

Its panels are rows of one table; names, labels, units and descriptions are those of the catalogue.
It does not know a Grafana, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kclrun.observe.alarms import SERIES_NAME, narrowed
from kclrun.observe.metrics import MEANINGS, OF_LEASE, labels_by_series

# Grafana 10.4 writes this one; later ones convert a dashboard when they load it.
_SCHEMA_VERSION: Final = 39
_COLUMNS: Final = 24
_HEIGHTS: Final = {"stat": 4, "timeseries": 8}
_WIDTHS: Final = {"stat": 3, "timeseries": 8}
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_BY_SHARD: Final = "{{application}} {{shard}}"
_BY_APPLICATION: Final = "{{application}}"
_BY_MACHINE: Final = "{{application}} {{instance}}"


class Panel(msgspec.Struct, frozen=True):
    """A panel; `queries` are pairs of PromQL and the legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def _stat(title: str, expression: str) -> Panel:
    return Panel(title, "short", ((expression, _BY_APPLICATION),), "stat")


def _worst(title: str, unit: str, name: str) -> Panel:
    """The ten shards with the greatest values: a stream may have thousands."""
    return Panel(title, unit, ((f"topk(10, max by (application, shard) ({name}))", _BY_SHARD),))


def _rate(name: str) -> str:
    return f"sum by (application) (rate({name}[$__rate_interval]))"


def _increase(name: str) -> str:
    return f"sum by (application) (increase({name}[$__rate_interval]))"


def _busiest(title: str, unit: str, name: str) -> Panel:
    rate = f"sum by (application, shard) (rate({name}[$__rate_interval]))"
    return Panel(title, unit, ((f"topk(10, {rate})", _BY_SHARD),))


PANELS: Final[dict[str, tuple[Panel, ...]]] = {
    "Fleet": (
        _stat("Machines", "count by (application) (kclrun_info)"),
        _stat("Machines needed", "avg by (application) (kclrun_needed_workers)"),
        _stat("Machines not healthy", "sum by (application) (1 - kclrun_healthy)"),
        _stat("Shards", "avg by (application) (kclrun_total_shards)"),
        _stat(
            "Shards without a lease",
            "avg by (application) (kclrun_total_shards)"
            " - avg by (application) (kclrun_total_leases)",
        ),
        _stat("Unclaimed leases", "min by (application) (kclrun_unclaimed_leases)"),
        _stat("Halted leases", "sum by (application) (kclrun_halted_leases)"),
        _stat("Paused leases", "sum by (application) (kclrun_paused_leases)"),
        _stat("Hot shards", "sum by (application) (kclrun_hot_leases)"),
    ),
    "Lag": (
        _worst("Lag, the ten shards furthest behind", "s", "kclrun_lag_seconds"),
        Panel(
            "Lag, greatest and smallest of all shards",
            "s",
            (
                ("max by (application) (kclrun_lag_seconds)", f"{_BY_APPLICATION} greatest"),
                ("min by (application) (kclrun_lag_seconds)", f"{_BY_APPLICATION} smallest"),
            ),
        ),
        _worst("Time without progress", "s", "kclrun_still_seconds"),
        _worst("Rows that wait for an output", "s", "kclrun_output_lag_seconds"),
    ),
    "Work": (
        Panel("Records", "cps", ((_rate("kclrun_records_total"), _BY_APPLICATION),)),
        Panel("Bytes", "Bps", ((_rate("kclrun_bytes_total"), _BY_APPLICATION),)),
        _busiest("Records, the ten busiest shards", "cps", "kclrun_records_total"),
        _busiest("Bytes, the ten busiest shards", "Bps", "kclrun_bytes_total"),
        Panel(
            "Leases of each machine",
            "short",
            (
                ("kclrun_worker_leases", _BY_MACHINE),
                ("kclrun_worker_leases_max", f"{_BY_MACHINE} leases.max"),
            ),
        ),
        Panel(
            "Leases by what they do",
            "short",
            (
                (
                    "sum by (application, state) (kclrun_leases)",
                    f"{_BY_APPLICATION} {{{{state}}}}",
                ),
            ),
        ),
    ),
    "Failures": (
        Panel(
            "Calls repeated, records given up",
            "cps",
            tuple(
                (_rate(f"kclrun_{name}_total"), f"{_BY_APPLICATION} {name}")
                for name in ("retries", "dead_letters", "skipped")
            ),
        ),
        _busiest("Restarts of lease processes", "cps", "kclrun_restarts_total"),
        Panel(
            "Requests to AWS that fail, metrics not published",
            "short",
            (
                ("sum by (application) (kclrun_outages)", f"{_BY_APPLICATION} requests"),
                (
                    _increase("kclrun_metrics_unpublished_total"),
                    f"{_BY_APPLICATION} metrics",
                ),
            ),
        ),
    ),
    "Traffic of shards": (
        _worst("Hot", "bool_yes_no", "kclrun_hot"),
        _worst("Bytes put into the shard", "Bps", "kclrun_in_bytes_per_second"),
        _worst("Records put into the shard", "cps", "kclrun_in_records_per_second"),
        _worst("Reads that were throttled", "percentunit", "kclrun_reads_throttled_ratio"),
        _worst("Share of the heaviest key", "percentunit", "kclrun_heaviest_key_ratio"),
    ),
}


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
    for title, panels in PANELS.items():
        number += 1
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top, left = top + 1, 0
        for panel in panels:
            width, height = _WIDTHS[panel.kind], _HEIGHTS[panel.kind]
            if left + width > _COLUMNS:
                top, left = top + height, 0
            number += 1
            place = {"h": height, "w": width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_drawn(panel)}
            left += width
        top += height


def _drawn(panel: Panel) -> dict[str, Any]:
    names = dict.fromkeys(name for query, _ in panel.queries for name in SERIES_NAME.findall(query))
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
                "expr": narrowed(query, {name: _chosen(name) for name in names}),
                "legendFormat": legend,
                "instant": panel.kind == "stat",
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def _chosen(name: str) -> str:
    """The matchers for what a reader chose at the top of the dashboard."""
    chosen = 'application=~"$application"'
    is_of_lease = labels_by_series()[name] == OF_LEASE
    return f'{chosen}, shard=~"$shard"' if is_of_lease else chosen
