"""Every verb that lists something: nothing is cut in a pipe, and `--json` is JSON."""

import json
import shlex
import time

import click
import msgspec
import pytest

from kclrun.cli.program import run_program
from kclrun.outputs.dead_letters import LetterFolder
from tests.support.letters import letter
from tests.unit.cli.memory_site import CLOCKED, Clock
from tests.unit.cli.test_cli_golden import HEALTH
from tests.unit.cli.test_cli_golden import folder as folder  # noqa: PLC0414 - a fixture

pytestmark = pytest.mark.seconds
ERROR = "ValueError: " + "the amount is not a number, " * 12 + "ask the shop"
LETTERS = "--set on_error.then=dead-letter --set on_error.dead_letter.path=letters"
_LIST_NAMES = ("list", "verify")
# The verb, its options, and what its JSON is: one document, or one a line.
LISTINGS = {
    "check": ("check", list),
    "consumers": ("consumers list", list),
    "dead-letters": (f"dead-letters list {LETTERS}", list),
    "doctor": ("doctor", dict),
    "files": ("files verify empty", dict),
    "lag": ("lag", dict),
    "leases": ("leases", list),
    "leases-age": ("leases --age", list),
    "leases-by": ("leases --by owner", dict),
    "leases-explain": ("leases --explain --owner new", list),
    "leases-hot": ("leases --hot --endpoint http://127.0.0.1:9464", list),
    "replays": ("replay --list", list),
    "state-show": ("state show --set state.store=state", "lines"),
    "state-verify": ("state verify --set state.store=state", "lines"),
    "top": ("top --once", list),
    "why": ("why 1", dict),
}


@pytest.fixture
def listing(folder, monkeypatch, tmp_path, capsys):
    """Runs a verb in the golden files' world; its output."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    (folder / "empty").mkdir(exist_ok=True)
    LetterFolder(folder / "letters").keep(letter(11, error=ERROR))
    clock = Clock(time.time())
    for module in CLOCKED:
        monkeypatch.setattr(f"kclrun.cli.{module}.time", clock)
    monkeypatch.setattr("kclrun.cli.leases.hot._body", lambda _: msgspec.json.encode(HEALTH))

    def run(line):
        run_program(shlex.split(line))
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", LISTINGS)
def test_nothing_is_cut_in_a_pipe(name, listing):
    shown = listing(LISTINGS[name][0])

    assert "…" not in shown


@pytest.mark.parametrize("name", LISTINGS)
def test_json_parses(name, listing):
    line, kind = LISTINGS[name]

    shown = listing(f"{line} --json")

    if kind == "lines":
        assert all(isinstance(json.loads(each), dict) for each in shown.splitlines())
    else:
        assert isinstance(json.loads(shown), kind)


def test_an_error_and_a_reason_are_whole_in_a_pipe(listing):
    assert ERROR in listing(f"dead-letters list {LETTERS}")
    for verb in ("leases", "lag", "top"):
        assert "ValueError: bad row in line 7" in listing(verb)


def test_a_letter_has_its_payload_in_json_only_where_it_is_asked_for(listing):
    (plain,) = json.loads(listing(f"dead-letters list {LETTERS} --json"))
    (whole,) = json.loads(listing(f"dead-letters list {LETTERS} --json --payload"))

    assert "data" not in plain
    assert plain["error"] == ERROR
    assert plain["position"] == "11"
    assert {**plain, "data": whole["data"]} == whole


def test_a_verb_that_is_named_list_or_verify_has_json():
    from kclrun.cli.program import program

    def below(command, path=()):
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from below(command.get_command(context, name), (*path, name))

    listed = [
        (path, each) for path, each in below(program) if path[-1:] in [("list",), ("verify",)]
    ]

    assert len(listed) >= 4
    for path, command in listed:
        assert any("--json" in option.opts for option in command.params), path
