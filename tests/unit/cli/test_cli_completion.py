"""`kclrun completion`: a real shell completes what is typed."""

import sys

import pytest

from kclrun.cli.program import run_program
from tests.support.programs import run_to_end


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """bash with the script sourced and a `kclrun` on its PATH; returns the words offered."""
    folder = tmp_path_factory.mktemp("shell")
    program = folder / "kclrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kclrun "$@"\n')
    program.chmod(0o755)
    script = run_to_end([program, "completion", "bash"], check=True).stdout
    (folder / "script").write_text(script)

    def complete(*words):
        # What bash does at Tab: it calls the function that `complete -F` named.
        line = (
            f'PATH="{folder}:$PATH"; . "{folder}/script"; complete -p kclrun >/dev/null || exit 9;'
            ' COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kclrun_completion kclrun "${!#}";'
            ' printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = run_to_end(["bash", "-c", line, "bash", *words])
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return complete


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("kclrun", "dash"), ["dashboards"]),
        (("kclrun", "dashboards", "gr"), ["grafana"]),
        (("kclrun", "dashboards", "alerts", "--ret"), ["--retention"]),
        (("kclrun", "reset", "--state", "dr"), ["drop"]),
        (("kclrun", "completion", "z"), ["zsh"]),
        (("kclrun", "nothing-like-it"), []),
    ],
)
def test_bash_completes_verbs_options_and_their_values(shell, typed, offered):
    assert shell(*typed) == offered


@pytest.mark.parametrize(
    ("shell_name", "begins"), [("zsh", "#compdef kclrun"), ("fish", "function")]
)
def test_other_shells_get_a_script_of_their_own(capsys, shell_name, begins):
    assert run_program(["completion", shell_name]) == 0

    script = capsys.readouterr().out
    assert script.startswith(begins)
    assert f"_KCLRUN_COMPLETE={shell_name}_complete" in script


def test_another_shell_is_refused_with_those_that_are_known(capsys):
    assert run_program(["completion", "tcsh"]) == 64
    assert "bash" in capsys.readouterr().err
