"""The page "How fast, and against what": its tables, of the figures that `--report` kept."""

import json
from pathlib import Path

MEASURED = Path(__file__).with_name("measured.json")
# The rows of the page, and the heading of their table.
SECTIONS = {
    "peers": "The same stream, the whole program",
    "fetch": "GetRecords to records, one thread",
    "aggregates": "KPL aggregates to user records, one thread",
    "spark-source": "Spark, the JVM and all Python under it",
    "spark-whole": "A Spark program with its start, beside awslabs' connector",
}


def tables():
    """The generated part of the page: the machine, a table a row, and what was not measured."""
    if not MEASURED.exists():
        return "Not measured yet: run `bin/bench --report`."
    kept = json.loads(MEASURED.read_text())
    machine = ", ".join(f"{name} {value}" for name, value in kept["machine"].items())
    parts = [f"Measured {kept['measured_on']}: {machine}."]
    for row, heading in SECTIONS.items():
        figures = [each for each in kept["figures"] if each["row"] == row]
        if figures:
            lines = ["| what | unit | median | least to greatest | runs |", "|---|---|---|---|---|"]
            parts += [f"## {heading}", "\n".join(lines + [_line(each) for each in figures])]
    missing = [f"- {each['reason']}" for each in kept["not_measured"]]
    return "\n\n".join([*parts, *(["## Not measured", "\n".join(missing)] if missing else [])])


def _line(figure):
    median, least, greatest = (number(figure[name]) for name in ("median", "least", "greatest"))
    what = f"**{figure['what']}**" if figure["unit"] == "x" else figure["what"]
    return f"| {what} | {figure['unit']} | {median} | {least} to {greatest} | {figure['count']} |"


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
