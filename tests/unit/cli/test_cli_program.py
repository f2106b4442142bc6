import os
import subprocess
import sys
from pathlib import Path

import pytest

from kclrun.cli import exit_codes
from kclrun.cli.messages import bug_report, for_a_person, harmless
from kclrun.cli.program import run_program
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    InvariantViolation,
    KclrunError,
    NotFound,
    OutcomeUnknown,
    ProcessorLoadError,
    SettingsError,
    TableRefused,
    Throttled,
    Unavailable,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), 78),
        (ProcessorLoadError("x"), 78),
        (TableRefused("x"), 78),
        (InvalidRequest("x"), 78),
        (AccessDenied("x"), 77),
        (NotFound("x"), 66),
        (Unavailable("x"), 69),
        (Throttled("x"), 69),
        (OutcomeUnknown("x"), 69),
        (InvariantViolation("x"), 70),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_codes.exit_code_of(error) == code


def leaves(kind: type[KclrunError]) -> list[type[KclrunError]]:
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


def test_no_error_of_the_tree_is_forgotten() -> None:
    ours = {leaf for leaf in leaves(KclrunError) if leaf.__module__ == "kclrun.errors"}
    known = {leaf for leaf in ours if exit_codes.exit_code_of(leaf("x")) != exit_codes.OUR_BUG}

    # What ends the program as a bug: never meant to reach it.
    assert {leaf.__name__ for leaf in ours - known} >= {"InvariantViolation", "LeaseLost"}
    assert {leaf.__name__ for leaf in known} >= {"SettingsError", "AccessDenied", "NotFound"}


def test_a_message_says_what_happened_and_then_what_to_do() -> None:
    told = for_a_person(NotFound("no stream orders\nin eu-west-1"), "run")

    assert told.splitlines() == [
        "Cannot start: no stream orders",
        "  in eu-west-1",
        "  Check the name, aws.region, and the account of the credentials",
    ]


def test_an_unknown_caller_is_told_to_check_credentials_not_grants() -> None:
    told = for_a_person(AccessDenied("Scan: UnrecognizedClientException: The token"), "check")
    refused = for_a_person(AccessDenied("Scan: AccessDeniedException: no"), "check")

    assert "The credentials are wrong or have expired" in told
    assert "Grant it" in refused


def test_resuming_explains_itself_without_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_program(["leases", "resume", "--help"]) == 0
    assert "Nothing is skipped" in capsys.readouterr().out
    assert run_program(["leases"]) == 64
    assert run_program(["leases", "resume", "shardId-000000000000"]) == 64


def test_foreign_text_cannot_move_the_cursor_or_forge_a_line() -> None:
    assert harmless("a\x1b[2Jb\rc\u202ed\ne\t") == "a\ufffd[2Jb\ufffdc\ufffdd\ne\t"


def test_our_bug_comes_with_its_trace_and_where_to_report_it() -> None:
    try:
        raise InvariantViolation("two owners")
    except InvariantViolation as error:
        told = bug_report(error)

    assert "Traceback" in told
    assert "This is a bug in kclrun: InvariantViolation" in told
    assert "Python 3." in told


@pytest.mark.parametrize(
    "arguments",
    [["fly"], ["run"], ["--config"], ["put", "--rate", "0"], ["local", "--port", "x"], ["check"]],
)
def test_a_wrong_command_line_is_64(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(arguments) == 64
    told = capsys.readouterr().err
    assert "Error: " in told
    assert "Traceback" not in told


def test_without_a_verb_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_program(["--config", str(tmp_path / "none.yaml")])

    assert code == 78
    assert capsys.readouterr().err.startswith("Cannot start: cannot read ")


@pytest.mark.parametrize("verb", ["run", "check", "init", "leases", "local", "put", "version"])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program([verb, "--help"]) == 0
    assert f"kclrun {verb}" in capsys.readouterr().out


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"{code} " in told for code in (0, 64, 66, 69, 70, 77, 78))


def test_version_names_what_we_stand_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["version"]) == 0
    assert run_program(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("kclrun ")


def test_help_imports_nothing_heavy() -> None:
    """What costs start-up time is absent, so that `--help` stays below 200 ms anywhere."""
    code = (
        "import sys; from kclrun.cli.program import run_program; run_program(['--help']);"
        "print([m for m in ('botocore', 'boto3', 'rich', 'yaml', 'google.protobuf', 'psutil')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_help_loads_no_heavy_library() -> None:
    """What would make it slow; how slow it is belongs to bin/bench."""
    script = (
        "import sys; from kclrun.cli.program import run_program; run_program(['--help']);"
        "sys.exit(' '.join({'boto3', 'botocore', 'moto', 'rich', 'uvicorn'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.stderr.strip() == ""
    assert "Verbs:" in done.stdout


def test_the_module_runs_without_the_current_folder_on_its_path(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('imported from the current folder')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(
        [sys.executable, "-m", "kclrun", "version"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_closed_standard_files_are_no_bug(tmp_path: Path) -> None:
    look = (
        "import os, sys, kclrun.cli as cli; sys.argv[1:] = ['version']; code = cli.main();"
        "kinds = [os.path.realpath(f'/proc/self/fd/{n}') for n in (0, 1, 2)];"
        "open('seen', 'w').write(f'{code} {sys.stdout.isatty()} {kinds}')"
    )

    subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, look],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=True,
    )

    assert (tmp_path / "seen").read_text() == f"0 False {['/dev/null'] * 3}"
