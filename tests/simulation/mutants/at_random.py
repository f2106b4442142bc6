"""Random one-spot bugs in any package: how much of the code do the tests hold?

Unlike the planted bugs, nobody chose these. Each run copies the checkout, changes one spot in the
copy, and runs the tests that are named for the package there: real processes see the bug too,
because PYTHONPATH puts the copy before the installed package. The checkout is never written.
Of a package's unit tests and tables only those are run that call the changed function, and the
files of tests that start processes, without slow ones: they come with the wider tests.

Left out is what no run can tell apart: annotations, messages of errors, and whether a struct is
frozen, made by keywords, or looked at by the garbage collector. mypy holds the first two of those.
"""

import ast
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from tests.simulation.mutants import meeting
from tests.simulation.mutants.meeting import HUNG, ORDER, RECORD, Meeting
from tests.simulation.mutants.mutant import ROOT
from tests.simulation.mutants.recorded import Recorded, files_for, recorded

COPIED: Final = (
    "kclrun",
    "processors",
    "tests",
    "config",
    "bin",
    "docs",
    "pyproject.toml",
    "README.md",
)
# Folders and files of a package's quick tests, beside its own folder of tests/unit.
QUICK: Final[Mapping[str, tuple[str, ...]]] = {
    "lease": ("tests/scenarios",),
    "leases": ("tests/scenarios",),
    "local": (
        "tests/contract/test_kinesis_stream.py",
        "tests/contract/test_lease_table.py",
        "tests/properties/test_local_stream.py",
    ),
    "protocol": (
        "tests/unit/aws/test_aws_expressions.py",
        "tests/unit/aws/test_aws_rows.py",
        "tests/unit/lease",
        "tests/unit/leases/test_lease_pieces.py",
        "tests/unit/leases/test_lease_writing.py",
        "tests/unit/model/test_values.py",
        "tests/scenarios",
    ),
    "calling": (
        "tests/contract/test_user_code.py",
        "tests/contract/test_user_records.py",
        "tests/contract/test_user_timers.py",
        "tests/unit/worker/test_worker_single_records.py",
        "tests/unit/worker/test_worker_delivering.py",
        "tests/unit/testing",
        "tests/unit/spark/test_spark_single_records.py",
    ),
    "simulation": ("tests/unit/cli/test_cli_simulate.py",),
    "state": (
        "tests/unit/calling/test_timers.py",
        "tests/unit/worker/test_lease_state.py",
        "tests/unit/state/stores/test_local_state.py",
        "tests/unit/cli/test_cli_state.py",
    ),
}
# Tests for what the quick ones let live. Cheap first.
WIDER: Final[Mapping[str, tuple[str, ...]]] = {
    "aws": (
        "tests/contract",
        "tests/properties/test_aws_http_answers.py",
        "tests/properties/test_aws_requests.py",
        "tests/properties/test_aws_rows.py",
    ),
    "calling": (
        "tests/properties/test_single_records.py",
        "tests/properties/test_worker_timers.py",
        "tests/simulation/test_tiny_record_state.py",
        "tests/simulation/test_storms.py",
    ),
    "cli": (
        "tests/processes/test_cli_lease_verbs.py",
        "tests/processes/test_cli_doctor.py",
        "tests/processes/test_cli_tail.py",
    ),
    "codec": ("tests/properties", "tests/fuzz"),
    "compat": ("tests/properties/test_compat_kclpy.py",),
    "lease": (
        "tests/simulation/test_storms.py",
        "tests/simulation/test_tiny_worlds.py",
    ),
    "ipc": ("tests/properties/test_ipc.py", "tests/processes/test_ledger_kills.py"),
    "leases": (
        "tests/properties/test_leases_balance.py",
        "tests/properties/test_doctor_healthy.py",
        "tests/simulation/test_storms.py",
    ),
    "lifecycle": ("tests/properties/test_instance_storms.py", "tests/unit/manager"),
    "local": (
        "tests/properties/test_local_operations.py",
        "tests/properties/test_local_stream.py",
        "tests/contract",
    ),
    "manager": (
        "tests/processes/test_manager_lease_processes.py",
        "tests/processes/test_manager_fleet.py",
        "tests/processes/test_application_deaths.py",
        "tests/processes/test_application_stops.py",
        "tests/processes/test_application_stalls.py",
    ),
    "page": ("tests/processes/test_page_incident.py",),
    "protocol": ("tests/contract", "tests/simulation/test_tiny_worlds.py"),
    "simulation": ("tests/simulation/test_storms.py",),
    "outputs": ("tests/properties/test_emitted_rows.py", "tests/unit/outputs/test_row_ledger.py"),
    "producing": ("tests/properties/test_pending_records.py",),
    "state": (
        "tests/properties/test_worker_state.py",
        "tests/properties/test_worker_timers.py",
        "tests/contract/test_version_store.py",
        "tests/processes/test_application_state.py",
    ),
    "worker": (
        "tests/processes/test_lease_process_whole.py",
        "tests/processes/test_application_halts.py",
        "tests/processes/test_application_deaths.py",
    ),
}
PACKAGES: Final = (
    "aws", "calling", "cli", "codec", "compat", "config", "ipc", "lease", "leases", "lifecycle",
    "local", "manager", "model", "observe", "operating", "outputs", "page", "producing", "protocol",
    "reading", "simulation", "spark", "state", "testing", "traffic", "worker",
)  # fmt: skip
KEPT: Final = ROOT / "build" / "mutants"
# Far above what a package's unit tests take (the slowest, spark, 100 s on two cores). A bug that
# makes a test hang is a bug found, and usually the test's own limit tells it (`meeting`).
UNIT_TESTS_MAX_S: Final = 1800.0
WIDER_TESTS_MAX_S: Final = 1800.0
_VERDICTS: Final[Mapping[int, str | None]] = {0: None, 1: "failed", 5: None, HUNG: "timed out"}

_OTHER_COMPARISON: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OTHER_SIGN: Final = {ast.Add: "-", ast.Sub: "+"}
_OTHER_END: Final = {"min": "max", "max": "min"}
# Of a class: `forbid_unknown_fields` and the like are behaviour.
_NOT_BEHAVIOUR: Final = frozenset({"frozen", "kw_only", "gc"})

Outcome = Literal["killed", "timed out", "killed by wider tests", "survived"]


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """One change: in `file` (from the root) the text from `start` to `end` becomes `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str
    what: str

    def patched(self, source: bytes) -> bytes:
        """The file with the bug in it. Offsets count bytes of UTF-8, as `ast` does."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class AskedRandom(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for: `number` bugs over `packages`, drawn with `seed`."""

    number: int
    seed: int
    packages: tuple[str, ...]
    is_wider: bool
    processes: int


def spots_of(file: Path) -> list[Spot]:
    """Every change that can be made to one file, in the order of its lines."""
    source = file.read_bytes()
    return list(_Spots(str(file.relative_to(ROOT)), source).found_in(ast.parse(source)))


def _parses(spot: Spot) -> bool:
    """A pattern of `match` or a keyword may not stand in brackets."""
    try:
        ast.parse(spot.patched((ROOT / spot.file).read_bytes()))
    except SyntaxError:
        return False
    return True


class _Spots:
    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def found_in(self, node: ast.AST) -> Iterator[Spot]:
        """Depth first. Messages of assertions and errors, and annotations, are not behaviour."""
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.AnnAssign(value=None):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.ClassDef():
                node.keywords = [each for each in node.keywords if each.arg not in _NOT_BEHAVIOUR]
        yield from self._changes(node)
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "type_params", "bases"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.found_in(child)

    def _changes(self, node: ast.AST) -> Iterator[Spot]:
        match node:
            case ast.Compare(ops=[op]) if type(op) in _OTHER_COMPARISON:
                left, right = node.left, node.comparators[0]
                new = _OTHER_COMPARISON[type(op)]
                text = f"{self._text(left)} {new} {self._text(right)}"
                yield self._spot(node, f"({text})", f"comparison becomes {new}")
            case ast.BoolOp():
                other = " or " if isinstance(node.op, ast.And) else " and "
                terms = [f"({self._text(each)})" for each in node.values]
                yield self._spot(node, f"({other.join(terms)})", f"becomes{other.rstrip()}")
                for index in range(len(terms)):
                    kept = [each for at, each in enumerate(terms) if at != index]
                    own = " and " if isinstance(node.op, ast.And) else " or "
                    yield self._spot(node, f"({own.join(kept)})", f"term {index + 1} is dropped")
            case ast.UnaryOp(op=ast.Not()):
                yield self._spot(node, f"({self._text(node.operand)})", "not is dropped")
            case ast.BinOp() if type(node.op) in _OTHER_SIGN and not _is_text(node):
                sign = _OTHER_SIGN[type(node.op)]
                text = f"({self._text(node.left)} {sign} {self._text(node.right)})"
                yield self._spot(node, text, f"sign becomes {sign}")
            case ast.Call(func=ast.Name(id=name)) if name in _OTHER_END:
                yield self._spot(node.func, _OTHER_END[name], f"{name} becomes {_OTHER_END[name]}")
            case ast.Constant(value=bool(value)):
                yield self._spot(node, str(not value), f"{value} becomes {not value}")
            case ast.Constant(value=int(value) | float(value)):
                yield self._spot(node, f"({value!r} + 1)", f"{value!r} becomes one more")
            case ast.Expr(value=ast.Call()):
                yield self._spot(node, "pass", "the call is dropped")
            case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign():
                yield self._spot(node, "pass", "the assignment is dropped")
            case ast.IfExp():
                text = f"({self._text(node.orelse)} if {self._text(node.test)} else"
                yield self._spot(node, f"{text} {self._text(node.body)})", "branches swapped")

    def _spot(self, node: ast.expr | ast.stmt, new: str, what: str) -> Spot:
        start, end = self._span(node)
        return Spot(file=self._file, line=node.lineno, start=start, end=end, new=new, what=what)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in (node.left, node.right)
    )


def drawn(asked: AskedRandom) -> list[tuple[str, Spot]]:
    """(package, spot): as many of each package as its share of the number, never one twice."""
    rng = random.Random(asked.seed)
    found = []
    for at, package in enumerate(asked.packages):
        spots = [
            spot
            for file in sorted((ROOT / "kclrun" / package).rglob("*.py"))
            for spot in spots_of(file)
        ]
        share = asked.number // len(asked.packages) + (at < asked.number % len(asked.packages))
        rng.shuffle(spots)
        valid = itertools.islice(filter(_parses, spots), share)
        found += [(package, spot) for spot in valid]
    return found


def run_random(asked: AskedRandom) -> int:
    """Play them all and print the share that the tests kill. 1 if the code as it is fails."""
    chosen = drawn(asked)
    print(f"{len(chosen)} random bugs; the same again: {_replay_line(asked)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kclrun-random-") as folder:
        copies = [_copied(Path(folder) / str(number)) for number in range(asked.processes)]
        records = {}
        for package in asked.packages:
            found = _recorded(copies[0], package)
            if isinstance(found, str):
                print(f"the tests of {package} fail without any bug ({found}): nothing to learn")
                return 1
            records[package] = found

        changes = {spot: _change_of(spot) for _, spot in chosen}
        outcomes: list[tuple[str, Spot, Outcome]] = []
        free = list(copies)

        def play(each: tuple[str, Spot]) -> None:
            copy = free.pop()
            try:
                outcome = _outcome(copy, *each, asked, records[each[0]])
            finally:
                free.append(copy)
            outcomes.append((*each, outcome))
            spot = each[1]
            print(f"{outcome:<22} {spot.file}:{spot.line} {spot.what}", flush=True)
            if outcome == "survived":
                print(changes[spot], flush=True)

        with ThreadPoolExecutor(asked.processes) as threads:
            list(threads.map(play, chosen))
    _tell(outcomes)
    return 0


def _copied(into: Path) -> Path:
    into.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(source, into / name, ignore=ignored)
        else:
            shutil.copy(source, into / name)
    return into


def _recorded(copy: Path, package: str) -> Mapping[str, Recorded] | str:
    """What each unit test of the package meets in the code as it is, or how they fail."""

    def record(files: list[str]) -> list[Meeting] | str:
        into = copy / "record.json"
        failures = copy / "failures.txt"
        reported = {RECORD: str(into), "KCLRUN_TEST_FAILURES": str(failures)}
        if verdict := _tried(copy, files, UNIT_TESTS_MAX_S, reported):
            return f"{verdict}: {failures.read_text().strip()}" if failures.exists() else verdict
        return msgspec.json.decode(into.read_bytes(), type=list[Meeting])

    return recorded(copy, _quick_tests(package), KEPT / f"{package}.json", record)


def _quick_tests(package: str) -> tuple[str, ...]:
    own = f"tests/unit/{package}"
    return (*((own,) if (ROOT / own).is_dir() else ()), *QUICK.get(package, ()))


def _outcome(
    copy: Path, package: str, spot: Spot, asked: AskedRandom, records: Mapping[str, Recorded]
) -> Outcome:
    file = copy / spot.file
    source = file.read_bytes()
    files, order = files_for(source, spot.file, spot.line, records)
    into = copy / "order.json"
    into.write_bytes(msgspec.json.encode(order))
    file.write_bytes(spot.patched(source))
    try:
        verdict = _tried(copy, files, UNIT_TESTS_MAX_S, {ORDER: str(into)})
        if verdict is not None:
            return "timed out" if verdict == "timed out" else "killed"
        return _judged_wider(copy, package) if asked.is_wider else "survived"
    finally:
        file.write_bytes(source)


def _judged_wider(copy: Path, package: str) -> Outcome:
    for tests in (*_quick_tests(package), *WIDER.get(package, ())):
        if _tried(copy, (tests,), WIDER_TESTS_MAX_S, {}, marked=None) is not None:
            return "killed by wider tests"
    return "survived"


def _tried(
    copy: Path,
    tests: Sequence[str],
    seconds_max: float,
    asked: Mapping[str, str],
    *,
    marked: str | None = "not slow and not alone",
) -> str | None:
    """None if the tests pass; else how they failed. The run is ended with all it started."""
    there = [each for each in tests if (copy / each).exists()]
    if not there:
        return None
    options = ["-p", "no:cacheprovider", "-p", meeting.__name__]
    options += ["-m", marked] if marked is not None else []
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis"),
        **asked,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", *options, *there],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        try:
            code = run.wait(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end_session(run)
    return _VERDICTS.get(code, f"exit code {code}")


def _end_session(run: subprocess.Popen[bytes]) -> None:
    """A bug may have left processes behind; they are in the session of the run."""
    try:
        os.killpg(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _change_of(spot: Spot) -> str:
    """The changed lines, as they were and as they are with the bug."""
    source = (ROOT / spot.file).read_bytes()
    begin = source.rfind(b"\n", 0, spot.start) + 1
    end = source.find(b"\n", spot.end)
    patched = spot.patched(source)
    patched_end = end + len(patched) - len(source)
    lines = [f"    - {line.decode()}" for line in source[begin:end].splitlines()]
    lines += [f"    + {line.decode()}" for line in patched[begin:patched_end].splitlines()]
    return "\n".join(lines)


def _replay_line(asked: AskedRandom) -> str:
    packages = " ".join(asked.packages) if asked.packages != PACKAGES else ""
    wider = " --wider" if asked.is_wider else ""
    return (
        f"bin/prove mutants --random {asked.number} --seed {asked.seed}{wider} {packages}".strip()
    )


def _tell(outcomes: Sequence[tuple[str, Spot, Outcome]]) -> None:
    counts: dict[str, Counter[Outcome]] = defaultdict(Counter)
    for package, _, outcome in outcomes:
        counts[package][outcome] += 1
    print(
        f"\n{'package':<12} {'bugs':>5} {'killed':>7} {'wider':>6} {'hung':>5} {'left':>5}   rate"
    )
    total: Counter[Outcome] = Counter()
    for package in sorted(counts):
        total += counts[package]
        print(_row(package, counts[package]))
    print(_row("all", total))


def _row(name: str, counts: Counter[Outcome]) -> str:
    bugs = counts.total()
    killed, wider = counts["killed"], counts["killed by wider tests"]
    hung, left = counts["timed out"], counts["survived"]
    rate = (bugs - left) / bugs
    return f"{name:<12} {bugs:>5} {killed:>7} {wider:>6} {hung:>5} {left:>5} {rate:>7.0%}"
