"""The model stays pure, and light enough to be imported where no server is wanted."""

import ast
import sys
from pathlib import Path

import kclrun.local
from kclrun.ports import ShardReader, StreamAdmin
from tests.support.programs import run_to_end
from tests.support.tables import over_rows

ROOM = Path(kclrun.local.__file__).parent
PURE = (
    "consumers",
    "hash_ranges",
    "iterators",
    "limits",
    "operations",
    "refusals",
    "requests",
    "sequence_numbers",
    "service",
    "settings",
    "shard_log",
    "shard_map",
    "signatures",
    "stream",
)
WORLD = {"asyncio", "io", "logging", "os", "random", "secrets", "socket", "subprocess", "sys"}
WORLD |= {"boto3", "botocore", "moto", "threading", "time", "uuid", "uvicorn"}


def imported(module):
    """The top-level packages a module imports, and our own modules in full."""
    for node in ast.walk(ast.parse((ROOM / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module if node.module.startswith("kclrun") else node.module.partition(".")[0]


@over_rows("module", PURE)
def test_a_pure_module_imports_no_clock_and_nothing_of_the_world(module):
    assert not WORLD & set(imported(module))


@over_rows("module", PURE)
def test_a_pure_module_of_this_room_imports_only_pure_ones_of_it(module):
    prefix = "kclrun.local."
    own = {name.removeprefix(prefix) for name in imported(module) if name.startswith(prefix)}

    assert own <= set(PURE)


def test_starting_the_embedded_aws_loads_no_server_into_this_process():
    code = (
        "import sys, kclrun.local.server\n"
        "print(sorted({'moto', 'uvicorn', 'boto3', 'botocore', 'flask'} & set(sys.modules)))"
    )

    answer = run_to_end([sys.executable, "-c", code])

    assert answer.stdout.strip() == "[]"


def test_the_model_serves_the_ports():
    from tests.support.stream_ports import ModelStream

    for port in (ShardReader, StreamAdmin):
        methods = {name for name in vars(port) if not name.startswith("_")}
        assert methods <= set(vars(ModelStream))
