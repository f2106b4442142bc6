"""Prints figures: a table where somebody sits at a terminal, one plain line each elsewhere."""

import os
import platform
import sys
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Figure, NotMeasured
from bench.report import number

_PACKAGES = ("boto3", "aws_kinesis_agg", "msgspec", "protobuf", "urllib3", "pyspark", "pyarrow")


def show(results: list[Figure | NotMeasured]) -> None:
    """All results, in their order."""
    if sys.stdout.isatty():
        _table(results)
        return
    for result in results:
        print(_line(result))


def machine() -> dict[str, Any]:
    """What the figures depend on. The load is that of all tenants, as the bench begins."""
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def _table(results: list[Figure | NotMeasured]) -> None:
    table = Table(header_style="bold", row_styles=["", "dim"])
    for heading in ("row", "what", "unit"):
        table.add_column(heading, overflow="fold")
    for heading in ("min", "median", "max", "n", "target", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        if isinstance(result, NotMeasured):
            table.add_row(result.row, result.words)
            continue
        spread = [number(value) for value in (result.least, result.median, result.greatest)]
        table.add_row(
            *(result.row, result.what, result.unit, *spread, str(result.count)),
            "" if result.target is None else str(result.target),
            _verdict(result),
        )
    Console().print(table)


def _line(result: Figure | NotMeasured) -> str:
    if isinstance(result, NotMeasured):
        return f"{result.row:<10}  {result.words}"
    spread = "/".join(number(value) for value in (result.least, result.median, result.greatest))
    text = f"{result.row:<10}  {result.what:<52}  {spread} {result.unit} (n={result.count})"
    if result.target is None:
        return text
    return f"{text}  target {result.target}: {_verdict(result)}"


def _verdict(result: Figure) -> str:
    if result.is_met is None:
        return ""
    judged = "" if result.judged == result.median else f" at {number(result.judged)}"
    return f"{'met' if result.is_met else 'FALLS SHORT'}{judged}"
