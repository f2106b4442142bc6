"""Random bugs: each is one change that still parses, and a run tells which of them live."""

import ast
import os
import subprocess
import sys

import msgspec
import pytest

from tests.simulation.mutants import meeting
from tests.simulation.mutants.at_random import PACKAGES, AskedRandom, drawn, spots_of
from tests.simulation.mutants.meeting import Meeting, Order
from tests.simulation.mutants.mutant import ROOT
from tests.simulation.mutants.recorded import Recorded, files_for, recorded

CHANGES = {
    "a < b": {"(a <= b)"},
    "a and b": {"((a) or (b))", "((b))", "((a))"},
    "not a": {"(a)"},
    "a - b": {"(a + b)"},
    "a = min(b, c)": {"a = max(b, c)"},
    "True": {"False"},
    "7": {"(7 + 1)"},
    "a(b)": {"pass"},
    "a if b else c": {"(c if b else a)"},
    "a.b = c": {"pass"},
}


@pytest.fixture
def spots(tmp_path, monkeypatch):
    def found(source):
        file = ROOT / "kclrun" / "errors.py"
        monkeypatch.setattr(type(file), "read_bytes", lambda _: source.encode())
        return spots_of(file)

    return found


@pytest.mark.parametrize("source", CHANGES)
def test_every_kind_of_expression_has_its_one_spot_changes(spots, source):
    patched = {spot.patched(source.encode()).decode() for spot in spots(source)}

    assert patched == CHANGES[source]


def test_messages_of_errors_and_annotations_are_no_spots(spots):
    source = "def f(a: int = None) -> 'x':\n    raise E(1 + 2)\n"

    assert spots(source) == []


def test_how_a_struct_is_made_is_no_spot_and_what_it_refuses_is_one(spots):
    source = (
        "class A(B, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):\n    pass\n"
    )

    (spot,) = spots(source)

    assert "forbid_unknown_fields=False" in spot.patched(source.encode()).decode()


def test_offsets_count_bytes_so_that_letters_beyond_ascii_move_nothing(spots):
    source = "x = ('§', a < b)\n"

    (spot,) = spots(source)

    assert spot.patched(source.encode()).decode() == "x = ('§', (a <= b))\n"


@pytest.mark.slow
def test_bugs_are_drawn_from_each_package_of_the_product():
    code = {path.parent.name for path in (ROOT / "kclrun").glob("*/__init__.py")}

    # Fixtures, which pytest has loaded before a bug is planted; and a list of folders.
    assert set(PACKAGES) == code - {"pytest_plugin", "samples"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_spots_that_parse_and_change_something(package):
    asked = AskedRandom(number=5, seed=1, packages=(package,), is_wider=False, processes=1)

    for owner, spot in drawn(asked):
        source = (ROOT / spot.file).read_bytes()
        assert owner == package
        assert ast.dump(ast.parse(spot.patched(source))) != ast.dump(ast.parse(source))


def test_the_same_seed_draws_the_same_bugs():
    asked = AskedRandom(number=9, seed=4, packages=("model", "codec"), is_wider=False, processes=1)

    assert drawn(asked) == drawn(asked)


@pytest.mark.slow
def test_a_run_tells_the_rate_and_the_line_that_repeats_it():
    program = [sys.executable, "-m", "tests.simulation.proving", "mutants"]
    done = subprocess.run(
        [*program, "--random", "2", "--seed", "5", "--processes", "1", "testing"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same again: bin/prove mutants --random 2 --seed 5 testing" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:2] == ["all", "2"]


SOURCE = b"""\
LIMIT = 7

@some
def outer(a):
    def inner(b):
        return b - 1
    return inner(a) + 1
"""
FILE = "kclrun/leases/some.py"
OUTER, INNER = (FILE, 3), (FILE, 5)


def met(test, took_s, *functions, starts=False):
    return Meeting(test, took_s, frozenset(functions), starts)


def chosen_for(line, *meetings):
    """The test files, and the tests that go first."""
    records = {}
    for each in meetings:
        file = each.test.partition("::")[0]
        records[file] = Recorded({}, (*(records[file].meetings if file in records else ()), each))
    files, order = files_for(SOURCE, FILE, line, records)
    assert set(order.hung_after_s) == {
        each.test for each in meetings if each.test.partition("::")[0] in files
    }
    return files, order.first


MEETINGS = (
    met("b.py::slow", 5.0, OUTER),
    met("b.py::quick", 2.0, INNER, OUTER),
    met("a.py::slow", 9.0, OUTER),
    met("a.py::quick", 1.0, OUTER),
    met("c.py::other", 0.1, ("kclrun/leases/other.py", 3)),
    met("d.py::processes", 0.1, starts=True),
)


def test_only_tests_that_can_notice_a_change_are_run_the_quickest_first():
    assert chosen_for(7, *MEETINGS) == (
        ("a.py", "b.py", "d.py"),
        ("a.py::quick", "a.py::slow", "b.py::quick", "b.py::slow"),
    )
    assert chosen_for(6, *MEETINGS) == (("b.py", "d.py"), ("b.py::quick",))


@pytest.mark.parametrize(
    ("line", "meetings"),
    [
        pytest.param(1, MEETINGS, id="outside of functions"),
        pytest.param(6, (*MEETINGS, met("c.py::", 0.1, INNER)), id="called as a file is imported"),
    ],
)
def test_a_change_of_what_makes_constants_may_be_met_by_any_test(line, meetings):
    files, first = chosen_for(line, *meetings)

    assert set(files) == {"a.py", "b.py", "c.py", "d.py"}
    assert tuple(each for each in first if each != "c.py::") == chosen_for(7, *MEETINGS)[1]


def test_a_test_file_is_recorded_anew_once_what_it_rests_on_has_changed(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("test_a.py", "test_b.py", "rig.py", "table.yaml"):
        (tests / name).touch()
    (tmp_path / "test_slow.py").touch()
    (tmp_path / "product.py").touch()
    places, asked = ("tests", "test_slow.py"), []

    def record(files):
        asked.append(files)
        return [met(f"{file}::one", 1.0, ("product.py", 1)) for file in files if "b.py" in file] + [
            met(f"{file}::one", 1.0) for file in files if "a.py" in file
        ]

    def after(changed=None):
        if changed is not None:
            changed.write_text(changed.read_text() + "#")
        asked.clear()
        assert set(recorded(tmp_path, places, tmp_path / "kept.json", record)) == {
            "tests/test_a.py",
            "tests/test_b.py",
            "test_slow.py",
        }
        return asked

    assert after() == [["tests/test_a.py", "tests/test_b.py", "test_slow.py"]]
    assert after() == []
    assert after(tests / "test_a.py") == [["tests/test_a.py"]]
    assert after(tmp_path / "product.py") == [["tests/test_b.py"]]
    for shared in ("rig.py", "table.yaml"):
        assert after(tests / shared) == [["tests/test_a.py", "tests/test_b.py"]]


TESTS = """
import os, runpy, subprocess, threading, time

some = runpy.run_path(os.path.abspath("kclrun/some.py"))
called = some["called"]
MADE = some["made"]()

def test_far(): pass
def test_near():
    thread = threading.Thread(target=called)
    thread.start()
    thread.join()
def test_that_hangs(): time.sleep(600)
def test_that_starts_one(): subprocess.run(["true"])
"""


@pytest.fixture
def played(tmp_path):
    """Plays the tests of a checkout of their own, some of them by name."""
    (tmp_path / "kclrun").mkdir()
    (tmp_path / "kclrun" / "some.py").write_text("\ndef called(): pass\ndef made(): pass\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()

    def play(names, **asked):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", meeting.__name__, "-k", names],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
            capture_output=True,
            text=True,
            check=False,
        )

    return play


def test_what_a_test_calls_is_recorded_in_threads_too_and_for_that_test_alone(played, tmp_path):
    record = tmp_path / "record.json"
    done = played("near or far or starts", **{meeting.RECORD: str(record)})

    assert done.returncode == 0, done.stdout + done.stderr
    meetings = msgspec.json.decode(record.read_bytes(), type=list[Meeting])
    assert [(each.test, set(each.met), each.starts_processes) for each in meetings] == [
        ("test_some.py::", {("kclrun/some.py", 3)}, False),
        ("test_some.py::test_far", set(), False),
        ("test_some.py::test_near", {("kclrun/some.py", 2)}, False),
        ("test_some.py::test_that_starts_one", set(), True),
    ]


def test_an_order_puts_tests_first_and_a_test_beyond_its_limit_ends_the_run_as_hung(
    played, tmp_path
):
    order = tmp_path / "order.json"
    near, hangs = "test_some.py::test_near", "test_some.py::test_that_hangs"
    order.write_bytes(msgspec.json.encode(Order((near, hangs), {hangs: 0.1})))

    done = played("test", **{meeting.ORDER: str(order)})

    assert done.returncode == meeting.HUNG, done.stdout + done.stderr
    assert "test_near PASSED" in done.stdout
    assert "test_far" not in done.stdout
