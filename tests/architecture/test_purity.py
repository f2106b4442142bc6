"""The cores decide from what they are given: no clock, no chance, no I/O, no surprise in order."""

import ast

import pytest

from tests.architecture import sources
from tests.architecture.sources import Source, broken, imports

ROOT = sources.ROOT / "kclrun"
PURE_ROOMS = (
    "model", "codec", "protocol", "leases", "lease", "lifecycle", "traffic", "operating",
)  # fmt: skip
PURE_FILES = sorted(path for room in PURE_ROOMS for path in (ROOT / room).rglob("*.py"))
# The stream model is pure too: the simulator drives it in virtual time.
PURE_FILES += [
    ROOT / "local" / f"{name}.py"
    for name in (
        "stream",
        "shard_log",
        "shard_map",
        "iterators",
        "limits",
        "lease_rows",
    )
    if (ROOT / "local" / f"{name}.py").exists()
]

# What decides about calls of user code, about the machine, about batches, offsets and ranges on
# Spark, and about requests in the producer.
PURE_FILES += [
    ROOT / room / f"{name}.py"
    for room, names in {
        "calling": ("concurrency", "delivery", "failures", "retry_later", "timer_run"),
        "producing": ("flow_control", "pending_records"),
        "spark": (
            "lineage",
            "offsets",
            "options",
            "option_table",
            "positions",
        ),
        "spark/executor": ("range_cursor",),
        "spark/processors": ("range_progress",),
        "spark/sink": ("columns", "report"),
    }.items()
    for name in names
]
PURE_FILES += sorted((ROOT / "spark" / "planning").glob("*.py"))
# The stores of state act, what decides about state does not.
PURE_FILES += sorted((ROOT / "state").glob("*.py"))
# A properties file becomes an app.yaml by its text alone.
PURE_FILES += [ROOT / "compat" / "kclpy" / f"{name}.py" for name in ("app_yaml", "property_table")]

BANNED_MODULES = {
    "asyncio", "boto3", "botocore", "io", "logging", "multiprocessing", "os", "pathlib", "pyarrow",
    "pyspark", "random", "secrets", "select", "socket", "subprocess", "sys", "threading",
    "time", "urllib3",
}  # fmt: skip
# `uuid.UUID` is a value.
BANNED_CALLS = {
    "now", "utcnow", "today", "open", "print", "input", "exec", "eval", "uuid1", "uuid4",
}  # fmt: skip


def pure_modules():
    wanted = {str(path.relative_to(sources.ROOT)) for path in PURE_FILES}
    found = [each for each in sources.our_modules() if each.name in wanted]
    assert wanted == {each.name for each in found}, "a file of the list does not exist"
    return found


def acting_imports(source):
    for line, module in imports(source):
        if module in BANNED_MODULES:
            yield line, f"imports {module}"


def acting_calls(source):
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            called = node.func.id
        elif ast.unparse(node.func).startswith(("datetime.", "uuid.")):
            called = node.func.attr
        elif ast.unparse(node.func).startswith("signal."):
            # The names of signals are values; everything else in there acts.
            yield node.lineno, f"calls {ast.unparse(node.func)}"
            continue
        else:
            continue
        if called in BANNED_CALLS:
            yield node.lineno, f"calls {called}"


def loops_over_bare_sets(source):
    # Sets of strings come in another order in every process: a replay would not be one.
    for node in source.nodes:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Set | ast.SetComp):
            yield node.lineno, "iterates over a bare set"


@pytest.mark.seconds
def test_a_pure_module_imports_nothing_that_acts():
    found = broken(acting_imports, pure_modules())

    assert not found, "\n".join(found)


def test_a_pure_module_calls_no_clock_and_does_no_io():
    found = broken(acting_calls, pure_modules())

    assert not found, "\n".join(found)


def test_a_pure_module_never_iterates_over_a_bare_set():
    found = broken(loops_over_bare_sets, pure_modules())

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text", "lines"),
    [
        (acting_imports, "import math\nimport os.path\nfrom time import sleep\n", [2, 3]),
        (acting_calls, "len('')\nprint(1)\ndatetime.datetime.now()\nclock.now()\n", [2, 3]),
        (loops_over_bare_sets, "for x in {1, 2}: 0\nfor x in {y for y in z}: 0\n", [1, 2]),
        (loops_over_bare_sets, "for x in sorted({1, 2}): 0\n", []),
    ],
)
def test_a_rule_finds_what_breaks_it_and_names_the_line(rule, text, lines):
    assert sorted(line for line, _ in rule(Source("kclrun/some.py", text))) == lines
