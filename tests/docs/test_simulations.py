"""Every simulation that the documents show can be run as it stands, and its picture is there."""

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
PICTURES = re.findall(r"!\[([^\]]*)\]\(\.\./pictures/([^)]+)\)", PAGE)
PICTURES_FOLDER = ROOT / "docs" / "pictures"
# Read over a slow line, too; and kept in the repository, version after version.
PICTURE_BYTES_MAX = 100_000


@pytest.mark.parametrize("command", COMMANDS)
def test_each_simulation_of_the_page_is_understood_as_it_stands(command, monkeypatch):
    if "--plot" in command:
        pytest.importorskip("matplotlib")  # in the environment for development
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


def test_there_are_six_pictures_and_each_has_words_for_those_who_do_not_see_it():
    assert len(PICTURES) == len({path for _, path in PICTURES}) == 6
    assert all(len(words) > 40 for words, _ in PICTURES)


@pytest.mark.parametrize("path", [path for _, path in PICTURES])
def test_each_picture_of_the_page_is_there_small_and_named_by_the_command_that_makes_it(path):
    picture = (PICTURES_FOLDER / path).read_bytes()

    assert picture.startswith(b"\x89PNG")
    assert len(picture) < PICTURE_BYTES_MAX
    assert [c for c in COMMANDS if c.endswith(f"--plot docs/pictures/{path}")] != []


def test_no_picture_is_left_over():
    there = {path.name for path in PICTURES_FOLDER.glob("*.png")}
    texts = "".join(page.read_text() for page in FLEET_PAGES)
    of_the_page = re.findall(r"pictures/((?:page|incident)-[a-z-]+\.png)", texts)

    assert there == {*(path for _, path in PICTURES), *of_the_page}
