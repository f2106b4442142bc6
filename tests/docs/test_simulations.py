"""Every simulation that the documents show can be run as it stands; no picture is left over."""

import re
import shlex
from pathlib import Path

import pytest

from kclrun.cli.program import run_program
from kclrun.errors import SettingsError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "simulate.md").read_text()
FLEET_PAGES = [
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in ("see-the-fleet", "pause-and-repair", "an-incident")
]
COMMANDS = re.findall(r"kclrun simulate --\S+ \d[^\n`]*", PAGE)
PICTURES_FOLDER = ROOT / "docs" / "pictures"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_simulation_of_the_page_is_understood_as_it_stands(command, monkeypatch):
    begun = []

    def begin(asked, _):
        begun.append(asked)
        raise SettingsError("enough is known")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("kclrun.simulation.what_if.run_what_if", begin)

    run_program(shlex.split(command)[1:])

    assert len(begun) == 1


def test_the_page_shows_simulations():
    assert len(COMMANDS) >= 6


def test_no_picture_is_left_over():
    there = {path.name for path in PICTURES_FOLDER.glob("*.png")}
    texts = "".join(page.read_text() for page in FLEET_PAGES)
    of_the_page = re.findall(r"pictures/((?:page|incident)-[a-z-]+\.png)", texts)

    assert there == set(of_the_page)
