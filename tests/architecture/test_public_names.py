"""A public name or signature changes on purpose, or not at all: docs/reference/public-names.md.

    KCLRUN_SNAPSHOT=write python -m pytest tests/architecture/test_public_names.py

writes the snapshot again.
"""

import importlib
import os
import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.public_names import MODULES

griffe = pytest.importorskip("griffe")
from tests.architecture.signatures import PublicNames  # noqa: E402 - it needs griffe

SNAPSHOT = Path(__file__).with_name("public_names.txt")
HOW = """
The page docs/reference/public-names.md says what a version may change. An old name or keyword goes
on working with a DeprecationWarning: kclrun/deprecation.py. If the change is meant, write:
    KCLRUN_SNAPSHOT=write python -m pytest tests/architecture/test_public_names.py"""


def text_of(facts):
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


def facts_in(text):
    return dict(line.split(": ", 1) for line in text.splitlines())


def differences(before, now):
    """A line for each name or parameter that is not as it was, breaks first."""
    gone = [f"BREAK  {name} is gone" for name in before if name not in now]
    changed = [
        f"BREAK  {name}\n         was {before[name]}\n         is  {now[name]}"
        for name in before
        if name in now and before[name] != now[name]
    ]
    new = [name for name in now if name not in before]
    needed = [
        f"BREAK  {name} is new and has no default: a call of before fails"
        for name in new
        if is_needed(name, now) and not is_of_a_new_call(name, before)
    ]
    added = [f"new    {name}: {now[name]}" for name in new if f"BREAK  {name}" not in str(needed)]
    return gone + changed + needed + added


def is_needed(name, facts):
    """Whether it is a parameter that each call has to give."""
    is_parameter = name.endswith(")") and not name.endswith("()")
    has_default = any(words in facts[name] for words in (" = ", "any further", "may be left out"))
    return is_parameter and not has_default


def is_of_a_new_call(name, before):
    called = name.partition("(")[0]
    return called not in before and f"{called}()" not in before


def test_public_names_and_signatures_are_those_of_the_snapshot():
    now = PublicNames(ROOT).facts
    if os.environ.get("KCLRUN_SNAPSHOT") == "write":
        SNAPSHOT.write_text(text_of(now))
    found = differences(facts_in(SNAPSHOT.read_text()), now)
    assert not found, "\n".join(["", *found, HOW])


def test_every_exported_name_is_in_the_snapshot():
    """The source is read without an import; this is what an import has."""
    facts = facts_in(SNAPSHOT.read_text())
    for module in MODULES:
        if module == "kclrun.spark":
            pytest.importorskip("pyspark")
        exported = importlib.import_module(module).__all__
        missing = [
            name
            for name in exported
            if f"{module}.{name}" not in facts and f"{module}.{name}()" not in facts
        ]
        assert not missing, module


def test_every_class_that_a_public_signature_names_can_be_imported_from_a_public_module():
    strangers = PublicNames(ROOT).strangers
    may_be = {
        "kclrun.state.timers.Step",  # the watermark of a run in memory, which another run reads
        "kclrun.config.schema.Settings",  # the kit takes them from our own tests
    }
    assert set(strangers) <= may_be, strangers


def planted(file, old, new):
    """The differences with `old` in this file, a regular expression, replaced by `new`."""
    text = (ROOT / file).read_text()
    changed = re.sub(old, new, text, count=1, flags=re.DOTALL)
    assert changed != text, f"{file} has no {old}"
    return differences(PublicNames(ROOT).facts, PublicNames(ROOT, {file: changed}).facts)


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        pytest.param(
            "kclrun/windows.py",
            '"Window", "Windows"]',
            '"Window"]',
            ["BREAK  kclrun.windows.Windows is gone"],
            id="a name is gone",
        ),
        pytest.param(
            "kclrun/processor.py",
            r"def release\(self\)",
            "def let_go(self)",
            [
                "BREAK  kclrun.Context.release() is gone",
                "new    kclrun.Context.let_go(): -> None",
            ],
            id="a method has another name",
        ),
        pytest.param(
            "kclrun/processor.py",
            r"row: object, to: str = MAIN_OUTPUT",
            "row: object, output: str = MAIN_OUTPUT",
            [
                "BREAK  kclrun.Context.emit(to) is gone",
                "new    kclrun.Context.emit(output): 2, position or name: str = 'output'",
            ],
            id="a keyword has another name",
        ),
        pytest.param(
            "kclrun/reading/stream.py",
            r"(def read\([^\n]*\s+stream: str,\s+\*,)",
            r"\1 role: str,",
            ["BREAK  kclrun.read(role) is new and has no default: a call of before fails"],
            id="a parameter is new and needed",
        ),
        pytest.param(
            "kclrun/reading/stream.py",
            r'start_timeout: str = "60s"',
            'start_timeout: str = "90s"',
            [
                (
                    "BREAK  kclrun.read(start_timeout)\n"
                    "         was name only: str = '60s'\n"
                    "         is  name only: str = '90s'"
                )
            ],
            id="a default is another",
        ),
        pytest.param(
            "kclrun/model/output.py",
            r'MAIN_OUTPUT: Final = "output"',
            'MAIN_OUTPUT: Final = "rows"',
            ["BREAK  kclrun.Context.emit(to)\n"],
            id="a default that is a constant is another",
        ),
        pytest.param(
            "kclrun/state/timers.py",
            r'Clock = Literal\["event", "wall"\]',
            'Clock = Literal["event"]',
            ["BREAK  type kclrun.state.timers.Clock\n"],
            id="a value is not accepted any more",
        ),
        pytest.param(
            "kclrun/errors.py",
            r"class LeaseLost\(LeaseError\)",
            "class LeaseLost(KclrunError)",
            ["BREAK  kclrun.errors.LeaseLost\n"],
            id="a base class is another",
        ),
        pytest.param(
            "kclrun/processor.py",
            r"at: Record \| str \| None = None, sub_sequence_number",
            "at: Record | str | None = None, *, sub_sequence_number",
            ["BREAK  kclrun.Checkpointer.checkpoint(sub_sequence_number)\n"],
            id="a parameter is not given by position any more",
        ),
        pytest.param(
            "kclrun/model/record.py",
            r"def arrived_at\(self\) -> datetime",
            "def arrived_at(self) -> float",
            ["BREAK  kclrun.Record.arrived_at\n"],
            id="a type is another",
        ),
    ],
)
def test_a_planted_break_is_named(file, old, new, expected):
    found = planted(file, old, new)
    assert len(found) >= len(expected)
    for line in expected:
        assert any(one.startswith(line) for one in found), found


def test_a_new_parameter_with_a_default_is_no_break():
    found = planted("kclrun/reading/stream.py", r'start_timeout: str = "60s"', r"\g<0>, n: int = 1")
    assert found == ["new    kclrun.read(n): name only: int = 1"]
