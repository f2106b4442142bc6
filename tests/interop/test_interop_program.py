"""What `bin/prove interop` says at its end, and that README has each of its scenarios."""

import re
from pathlib import Path

import pytest

from tests.interop import program
from tests.interop.rig.artefacts import NotToBeHad
from tests.interop.scenarios import SCENARIOS, SHARE

README = (Path(__file__).parent / "README.md").read_text()


def holds(_folder, _version):
    return ["a figure"]


def fails(_folder, _version):
    raise AssertionError("a record was lost")


def is_not_to_be_had(_folder, _version):
    raise NotToBeHad("not installed: java")


@pytest.mark.parametrize(
    ("scenarios", "code"),
    [
        ([holds, holds], 0),
        ([holds, is_not_to_be_had, holds], 69),
        ([fails, is_not_to_be_had], 1),
        ([is_not_to_be_had, fails], 1),
    ],
    ids=["all hold", "one cannot run", "failed before", "failed after"],
)
def test_a_scenario_that_cannot_run_hides_no_failure(monkeypatch, capsys, scenarios, code):
    numbered = {f"s{number}": (scenario, ("1",)) for number, scenario in enumerate(scenarios)}
    monkeypatch.setattr(program, "SCENARIOS", numbered)

    assert program.run([], None) == code
    assert capsys.readouterr().out.count("held") == scenarios.count(holds)


def test_readme_has_each_scenario_and_those_of_the_gate():
    [table] = re.findall(r"^## Scenarios\n(.*?)^All workers", README, re.MULTILINE | re.DOTALL)
    rows = [line.partition("|")[2].partition("|")[0] for line in table.splitlines()]
    named = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    [gate] = re.findall(r"the share of `bin/prove night`: (.*?) with both versions", README)

    assert sorted(named) == sorted(SCENARIOS)
    assert set(re.findall(r"`([a-z-]+)`", gate)) == {name for name, _ in SHARE}
