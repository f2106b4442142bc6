"""The cores decide from what they are given: no clock, no chance, no I/O, no surprise in order."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kclrun"
PURE_ROOMS = ("model", "codec", "leases", "consuming")
PURE_FILES = sorted(path for room in PURE_ROOMS for path in (ROOT / room).rglob("*.py"))
# The stream model is pure too: the simulator drives it in virtual time.
PURE_FILES += [
    ROOT / "local" / f"{name}.py"
    for name in (
        "stream",
        "shards",
        "iterators",
        "limits",
        "sequence_numbers",
        "lease_rows",
        "row_changes",
    )
    if (ROOT / "local" / f"{name}.py").exists()
]

# What decides about the machine, about batches, offsets and ranges on Spark, and about requests in
# the producer.
PURE_FILES += [
    ROOT / room / f"{name}.py"
    for room, names in {
        "manager": (
            "caught_up",
            "instance_events",
            "instance_life",
            "lifecycle_completion",
        ),
        "sinks": ("flow_control", "lanes", "pending_records", "producing", "put_request"),
        "spark": (
            "lineage",
            "offsets",
            "option_reader",
            "options",
            "positions",
            "ranges",
            "settings",
        ),
        "spark/executor": ("range_cursor", "read_pace"),
        "spark/fused": ("cache", "tenure"),
        "spark/sink": ("columns", "options", "report"),
    }.items()
    for name in names
]
PURE_FILES += sorted((ROOT / "spark" / "scout").glob("*.py"))
# A properties file becomes an app.yaml by its text alone.
PURE_FILES += [
    ROOT / "compat" / "kclpy" / f"{name}.py"
    for name in ("app_yaml", "conversions", "properties", "property_table")
]

BANNED_MODULES = {
    "asyncio", "boto3", "botocore", "io", "logging", "multiprocessing", "os", "pathlib", "pyarrow",
    "pyspark", "random", "secrets", "select", "signal", "socket", "subprocess", "sys", "threading",
    "time", "urllib3", "uuid",
}  # fmt: skip
BANNED_CALLS = {"now", "utcnow", "today", "open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_module_imports_nothing_that_acts(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])

    assert imported & BANNED_MODULES == set()


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_module_calls_no_clock_and_does_no_io(path):
    called = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("datetime."):
            called.add(node.func.attr)

    assert called & BANNED_CALLS == set()


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_module_never_iterates_over_a_bare_set(path):
    # Sets of strings come in another order in every process: a replay would not be one.
    bare = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Set | ast.SetComp)
    ]

    assert bare == []
