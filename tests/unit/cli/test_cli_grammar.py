"""One grammar for every verb: this table walks all commands and holds each to the same rules."""

import inspect
import re
from collections import defaultdict
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from kclrun.cli import config_options, program
from kclrun.cli.program import run_program
from kclrun.cli.times import DURATION, DurationType, TimeType
from kclrun.config.units import TIME_FORMS
from tests.support.tables import over_rows

PROGRAM = program.program
VERBS_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "verbs.md"
# Verbs that read no settings file.
WITHOUT_SETTINGS = {
    *("init", "simulate", "completion", "version"),
    *("dashboards grafana", "dashboards alerts", "migrate kclpy"),
}
# Verbs that change what is there, so they show a plan first and need --yes.
CHANGING = {
    *("consumers remove", "dead-letters redrive", "dead-letters drop", "doctor", "migrate spark"),
    *("pause", "resume", "reset", "replay", "state rebuild"),
    *("leases pause", "leases resume", "leases release", "leases move", "leases add-index"),
}
# Options of one name that mean another thing, or choose from another list, in some verb.
DIFFERING = {
    "--config": "local works without a file, and then reads none",
    "--stream": "put and tail take any stream, local makes some, reset takes several",
    "--key": "put takes the column that has the key",
    "--json": "each has its own shape, which the help tells",
    "--from": "each says what begins there",
    "--to": "where it ends or goes: a time, an owner, the processor",
    "--for": "how long: a pause, or a simulation",
    "--all": "more than is shown or done without it",
    "--folder": "what is in the folder",
    "--region": "local makes streams there, the others look for them there",
    "--outputs": "each has its own choices",
}


def leaves(group=PROGRAM, path=""):
    """Each command that does something, by its words: `leases move`, and `leases` itself."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        words = f"{path} {name}".strip()
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield words, command
        if isinstance(command, click.Group):
            yield from leaves(command, words)


LEAVES = dict(leaves())


def options_of(command):
    return [each for each in command.params if isinstance(each, click.Option)]


def option(command, name):
    return next((each for each in options_of(command) if name in each.opts), None)


def test_the_help_has_each_verb_in_one_group_of_what_a_person_wants():
    groups = program._HEADINGS
    named = [verb for lines in groups.values() for verb in lines]

    assert list(groups) == ["Run", "Look", "Repair", "Move", "Develop"]
    assert len(named) == len(set(named))
    assert {words.split()[0] for words in LEAVES} == set(named)
    for line in (text for lines in groups.values() for text in lines.values()):
        assert re.fullmatch(r"[A-Z][^\n]{8,90}\.", line), line


def test_every_verb_is_said_to_read_settings_or_not_and_to_change_something_or_not():
    assert set(LEAVES) >= WITHOUT_SETTINGS | CHANGING
    assert {w for w, c in LEAVES.items() if option(c, "--yes")} == CHANGING


@over_rows("words", sorted(set(LEAVES) - WITHOUT_SETTINGS))
def test_a_verb_that_reads_settings_takes_their_file_in_every_place(words, tmp_path, capsys):
    command = LEAVES[words]
    assert option(command, "--config").opts == ["--config", "-c"]
    assert option(command, "--set").multiple
    needed = {"replay": "--list"}.get(words, "").split()
    for each in command.params:
        if each.required:
            needed += (
                [*each.opts[:1], "TRIM_HORIZON"] if each.param_type_name == "option" else ["1"]
            )
    verb, *rest = words.split()
    file = str(tmp_path / "none.yaml")

    for line in (
        [*words.split(), "--config", file, *needed],
        [*words.split(), "-c", file, *needed],
        [*words.split(), *needed, f"--config={file}"],
        ["--config", file, *words.split(), *needed],
        [verb, "--config", file, *rest, *needed],
        [file, *words.split(), *needed],
        [*words.split(), *needed, file],
    ):
        assert run_program(line) == 78, line
        assert f"cannot read {file}" in capsys.readouterr().err, line


@over_rows("words", sorted(WITHOUT_SETTINGS))
def test_a_verb_without_settings_says_so(words, capsys):
    verb, *rest = words.split()
    for line in ([verb, *rest, "--config", "a"], ["--config", "a.yaml", verb, *rest]):
        assert run_program(line) == 64, line
        assert "This verb reads no settings: leave --config" in capsys.readouterr().err


TIMES = {"--from", "--since", "--at"}
DURATIONS = {"--for", "--wait", "--every", "--timeout", "--max-behind", "--retention", "--failover"}


@over_rows("words", sorted(LEAVES))
def test_every_option_that_asks_for_a_time_has_one_of_the_two_types(words):
    for each in options_of(LEAVES[words]):
        name, metavar = each.opts[0], each.metavar or ""
        if name in TIMES or "TIME" in metavar.split("|"):
            assert isinstance(each.type, TimeType), name
            assert each.help.endswith(f"TIME: {TIME_FORMS}."), name
        if name in DURATIONS:
            assert each.type is DURATION, name
        if isinstance(each.type, DurationType):
            assert each.make_metavar(click.Context(LEAVES[words])) == "DURATION", name
        assert not isinstance(each.type, click.DateTime), name


@over_rows("words", sorted(CHANGING))
def test_a_verb_that_changes_something_has_the_one_yes(words):
    yes = option(LEAVES[words], "--yes")
    assert (yes.help, yes.is_flag) == ("Do it; without, only show the plan.", True)


def test_no_module_has_a_wording_of_its_own_for_a_plan_that_was_only_shown():
    folder = Path(program.__file__).parent
    own = re.compile(r"[Dd]o it with --yes|add --yes|Nothing was done", re.MULTILINE)
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if own.search(path.read_text("utf-8"))
    }

    assert found == {"config_options.py"}


def test_one_option_has_one_help_text_everywhere():
    texts = defaultdict(set)
    for command in LEAVES.values():
        for each in options_of(command):
            if not each.hidden:
                texts[each.opts[0]].add((each.metavar, each.help))

    assert {name for name, found in texts.items() if len(found) > 1} == set(DIFFERING)


@over_rows("words", sorted(LEAVES))
def test_a_help_text_is_written_in_one_style(words):
    command = LEAVES[words]
    first, _, rest = inspect.cleandoc(command.help).partition("\n\n")
    assert re.fullmatch(r"[A-Z].*[.:]", " ".join(first.split())), first
    assert "--config app.yaml" in rest or "app.yaml" not in rest, "examples name the file so"
    for each in options_of(command):
        if each.hidden or each.help is None:
            continue
        assert re.match(r"[A-Z`]|redirected:|again:|drop:|processor:|run:", each.help), each.help
        assert re.search(r"[.\]]$", each.help), each.help
        if "--json" in each.opts:
            assert each.help.startswith("One JSON "), each.help


def test_pause_and_resume_are_one_verb_each():
    assert LEAVES["leases resume"] is LEAVES["resume"]
    assert LEAVES["leases pause"] is LEAVES["pause"]


def test_the_page_of_verbs_lists_each():
    page = VERBS_PAGE.read_text("utf-8")
    for words in LEAVES:
        assert f"\n## kclrun {words}\n" in page, words


@over_rows("words", sorted(LEAVES))
def test_a_shell_completes_each_verb_and_its_options(words):
    complete = ShellComplete(PROGRAM, {}, "kclrun", "_KCLRUN_COMPLETE")
    *before, last = words.split()
    assert last in {each.value for each in complete.get_completions(before, last[:3])}

    offered = {each.value for each in complete.get_completions(words.split(), "--")}
    visible = {each.opts[0] for each in options_of(LEAVES[words]) if not each.hidden}
    assert {name for name in visible if name.startswith("--")} <= offered
    older = {getattr(each, "older", None) for each in options_of(LEAVES[words])}
    assert not older & offered


@pytest.mark.parametrize(
    ("line", "old"),
    [
        ("tail --stream s --limit 0", "--max"),
        ("leases --manager x", "--endpoint"),
        ("iam --purpose nothing", "--for"),
        ("simulate --records-per-second inf", "--records"),
    ],
)
def test_an_older_name_of_an_option_still_means_it(line, old, capsys):
    new = next(word for word in line.split() if word.startswith("--") and word != "--stream")
    answers = []
    for name in (new, old):
        code = run_program(line.replace(new, name).split())
        answers.append((code, capsys.readouterr().err))

    assert answers[0] == answers[1]
    assert answers[0][0] == 64


def test_the_older_minutes_of_a_simulation_are_its_time(capsys):
    answers = []
    for lasting in ("--for 90s", "--minutes 1.5"):
        assert run_program(f"simulate --workers 1 --shards 1 {lasting} --json".split()) == 0
        answers.append(capsys.readouterr().out)

    assert answers[0] == answers[1]
    assert run_program(["simulate", "--for", "1s"]) == 64


def test_the_renamed_option_is_shown_by_its_new_name_alone(capsys):
    assert run_program(["tail", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--limit N" in shown
    assert "--max" not in shown
    assert config_options.CONFIG_NAMES == ("--config", "-c", "--set")
