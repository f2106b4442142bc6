import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.cli import exit_codes, program
from kclrun.cli.config_options import with_verb_first
from kclrun.cli.messages import bug_report, for_a_person, report_error
from kclrun.cli.program import run_program
from kclrun.errors import (
    AccessDenied,
    HostFailed,
    InvalidRequest,
    InvariantViolation,
    KclrunError,
    NotFound,
    OutcomeUnknown,
    ProcessorLoadError,
    ProcessorVerdict,
    SettingsError,
    TableRefused,
    Throttled,
    Unavailable,
    host_refusal,
)
from kclrun.local import server
from kclrun.model.text import sanitize
from tests.support.programs import run_to_end
from tests.support.tables import over_rows


@over_rows(
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
        (FileNotFoundError(errno.ENOENT, "x"), 70),
        (HostFailed("x"), 69),
        (MemoryError(), 69),
        (OSError(errno.EMFILE, "x"), 69),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_exit_code(error, code):
    assert exit_codes.exit_code_of(error) == code


def leaves(kind: type[KclrunError]) -> list[type[KclrunError]]:
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


def test_no_error_of_the_tree_is_forgotten():
    ours = {leaf for leaf in leaves(KclrunError) if leaf.__module__ == "kclrun.errors"}
    ours = {leaf for leaf in ours if not issubclass(leaf, ProcessorVerdict)}  # end no program
    known = {leaf for leaf in ours if exit_codes.exit_code_of(leaf("x")) != exit_codes.OUR_BUG}

    # What ends the program as a bug: never meant to reach it.
    assert {leaf.__name__ for leaf in ours - known} >= {"InvariantViolation", "LeaseLost"}
    assert {leaf.__name__ for leaf in known} >= {"RowsRefused", "AccessDenied", "NotFound"}


def test_a_message_says_what_happened_and_then_what_to_do():
    reported = for_a_person(Unavailable("no answer\nof DynamoDB"), "run")

    assert reported.splitlines() == [
        "Cannot start: no answer",
        "  of DynamoDB",
        "  Check that it runs and can be reached from here, then try again",
    ]
    reported = for_a_person(Unavailable("no answer", operation="Scan"), "run")
    assert (
        reported.splitlines()[1]
        == "  Check the network, aws.region and aws.endpoint, then try again"
    )


@pytest.mark.parametrize("said", ["table t has no lease for s", "there is no lease table t"])
def test_what_is_not_there_comes_with_no_advice_about_streams(said):
    assert for_a_person(NotFound(said), "leases").splitlines() == [
        f"Cannot show the leases: {said}"
    ]


def test_an_unknown_caller_is_told_to_check_credentials_not_grants():
    reported = for_a_person(AccessDenied("Scan: UnrecognizedClientException: The token"), "check")
    refused = for_a_person(AccessDenied("Scan: AccessDeniedException: no"), "check")

    assert "The credentials are wrong or have expired" in reported
    assert "Grant it" in refused


def test_resuming_explains_itself_without_a_configuration(capsys):
    assert run_program(["leases", "resume", "--help"]) == 0
    assert "nothing is skipped" in " ".join(capsys.readouterr().out.split())
    assert run_program(["leases"]) == 64
    assert run_program(["leases", "resume", "shardId-000000000000"]) == 64


def test_foreign_text_cannot_move_the_cursor_or_forge_a_line():
    assert sanitize("a\x1b[2Jb\rc\u202ed\ne\t") == "a\ufffd[2Jb\ufffdc\ufffdd\ne\t"


def test_a_host_with_nothing_to_give_is_reported_with_where_it_was_missed_and_is_no_bug(capsys):
    try:
        raise OSError(errno.EMFILE, "Too many open files")
    except OSError as error:
        code = report_error(error, "run")

    reported = capsys.readouterr().err
    assert code == 69
    assert "Traceback" in reported
    assert "Ended: this host has no more to give: Too many open files." in reported
    assert "This is a bug" not in reported


def test_our_bug_is_reported_where_no_descriptor_is_left_to_look_up_versions_with():
    program = (
        "import resource\n"
        "from kclrun.cli.messages import bug_report\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(7)[1]))\n"
        "print(bug_report(ZeroDivisionError('x')))\n"
    )
    asked = run_to_end([sys.executable, "-c", program])

    assert asked.returncode == 0, asked.stderr
    assert "This is a bug in kclrun: ZeroDivisionError" in asked.stdout
    assert "Python 3." in asked.stdout


def test_our_bug_comes_with_its_trace_and_where_to_report_it():
    try:
        raise InvariantViolation("two owners")
    except InvariantViolation as error:
        reported = bug_report(error)

    assert "Traceback" in reported
    assert "This is a bug in kclrun: InvariantViolation" in reported
    assert "Python 3." in reported


@pytest.mark.parametrize(
    "arguments",
    [["fly"], ["run"], ["--config"], ["put", "--rate", "0"], ["local", "--port", "x"], ["check"]],
)
def test_a_wrong_command_line_is_64(arguments, capsys):
    assert run_program(arguments) == 64
    reported = capsys.readouterr().err
    assert "Error: " in reported
    assert "Traceback" not in reported


def test_local_makes_the_streams_named_with_one_shard_or_as_many_as_are_asked_for(
    monkeypatch, capsys
):
    served = []
    monkeypatch.setattr(server, "run_local", lambda *_, streams, **__: served.append(streams) or 0)

    assert run_program(["local", "--stream", "orders", "--stream", "audits:3"]) == 0
    assert [streams.shards for streams in served] == [{"orders": 1, "audits": 3}]
    for wrong in ("orders:0", "orders:", "orders:x", "a b:2"):
        assert run_program(["local", "--stream", wrong]) == 64
        assert "expected NAME or NAME:SHARDS" in capsys.readouterr().err
    assert len(served) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "aws", "region"),
    [
        (["--stream", "orders"], {}, None, "us-east-1"),
        (["--stream", "orders"], {"AWS_REGION": "eu-west-1"}, None, "eu-west-1"),
        (["--stream", "orders"], {"AWS_DEFAULT_REGION": "eu-west-2"}, None, "eu-west-2"),
        (
            ["--stream", "orders", "--region", "eu-west-3"],
            {"AWS_REGION": "eu-west-1"},
            None,
            "eu-west-3",
        ),
        ([], {}, "{}", "us-east-1"),
        ([], {"AWS_REGION": "eu-west-1"}, "{}", "eu-west-1"),
        ([], {"AWS_REGION": "eu-west-1"}, "{region: eu-west-2}", "eu-west-2"),
        ([], {}, "{region: eu-west-2, profile: of-production}", "eu-west-2"),
    ],
)
def test_local_makes_streams_where_an_application_of_this_environment_looks_for_them(
    arguments, environment, aws, region, tmp_path, monkeypatch
):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if aws is not None:
        config = tmp_path / "app.yaml"
        config.write_text(f"application: shop\nstream: orders\nprocessor: a:B\naws: {aws}\n")
        config.chmod(0o600)
        arguments = [*arguments, "--config", str(config)]
    ran = []
    monkeypatch.setattr(server, "run_local", lambda *_, **given: ran.append(given) or 0)

    assert run_program(["local", *arguments]) == 0

    assert [given["streams"] for given in ran] == [server.NewStreams({"orders": 1}, region)]
    if aws is None or "profile" not in aws:
        own = region if aws or "--region" in arguments else None
        there = EndpointSettings(region=own, endpoint_url="http://127.0.0.1:1")
        assert resolve_endpoint(open_session(there), "kinesis", there).signing_region == region


@pytest.mark.parametrize(
    "arguments",
    [["--stream", "orders", "--region", "EU West"], ["--config", "app.yaml", "--region", "a"]],
)
def test_local_refuses_a_region_that_it_cannot_use(arguments):
    assert run_program(["local", *arguments]) == 64


VERBS = ("run", "check", "leases")


@over_rows(
    ("line", "meant"),
    [
        ("app.yaml", "run app.yaml"),
        ("app.yaml --until caught-up", "run app.yaml --until caught-up"),
        ("--config F", "run --config F"),
        ("--until caught-up --config F", "run --until caught-up --config F"),
        ("--config F check", "check --config F"),
        ("-c F --set a=b check x", "check -c F --set a=b x"),
        ("-cF check", "check -cF"),
        ("--config=F --set=a=b leases move S", "leases --config=F --set=a=b move S"),
        ("app.yml leases move S", "leases app.yml move S"),
        ("check app.yaml", "check app.yaml"),
        ("--config check check", "check --config check"),
        ("--config", "run --config"),
        ("--report=a.yaml check", "run --report=a.yaml check"),
        ("-c a check", "check -c a"),
        ("app.yaml --help", "run app.yaml --help"),
        ("--help", "--help"),
        ("-h check", "-h check"),
        ("--version", "--version"),
        ("fly", "fly"),
        ("", ""),
    ],
)
def test_what_stands_before_the_verb_goes_behind_it(line, meant):
    assert with_verb_first(line.split(), VERBS, "run") == meant.split()


CHECKABLE = "application: orders\nstream: orders\nprocessor: mine:Mine\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one, with a configuration whose first stage of `check` passes."""
    monkeypatch.chdir(tmp_path)
    for name in ("app.yaml", "other.yml", "plain"):
        (tmp_path / name).write_text(CHECKABLE)
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        *("check", "check app.yaml", "app.yaml check", "check other.yml", "check plain"),
        *("-c app.yaml check", "check -cother.yml", "check --config=plain", "check --set stall=1m"),
    ],
)
@pytest.mark.usefixtures("user_code_here")
def test_the_configuration_is_named_in_any_place_or_is_that_of_the_folder(folder, line, capsys):
    run_program([*line.split(), "--no-environment"])

    assert "settings   ok  application orders" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("check a.yaml", 78, "cannot read a.yaml"),
        ("check a.yaml --config plain", 64, "Two configurations: plain and a.yaml."),
        ("check a.yaml b.yaml", 64, "Two configurations: a.yaml and b.yaml."),
        ("check --config plain a.yaml", 64, "Two configurations: plain and a.yaml."),
        ("check -cplain a.yaml", 64, "Two configurations: plain and a.yaml."),
        ("check -c=plain", 78, "cannot read =plain"),
        ("check --set=stall=1m a.yaml", 78, "cannot read a.yaml"),
        ("check -- a.yaml", 64, "unexpected extra argument (a.yaml)"),
        ("leases plain", 64, "No such command 'plain'"),
        ("lag --max-behind soon", 64, "Invalid value for '--max-behind'"),
        ("put --stream s --set no.thing=1", 78, "no: no such setting"),
        ("put --set no.thing=1", 78, "no: no such setting"),
        ("tail -c a.yaml --stream s", 78, "cannot read a.yaml"),
        ("check nowhere", 64, "unexpected extra argument (nowhere)"),
        # Of verbs with arguments of their own only what looks so is the configuration.
        ("leases a.yaml", 78, "cannot read a.yaml"),
        ("leases a.yaml move S --to x", 78, "cannot read a.yaml"),
        ("leases move S a.yaml --to x", 78, "cannot read a.yaml"),
        ("leases move S --to x -c a.yaml", 78, "cannot read a.yaml"),
        ("leases resume 1 2 a.yaml 3", 78, "cannot read a.yaml"),
        ("leases -c b.yaml resume 1 -c a.yaml", 78, "cannot read a.yaml"),
        ("leases -c a.yaml resume 1", 78, "cannot read a.yaml"),
        ("-c a.yaml leases resume 1", 78, "cannot read a.yaml"),
        ("leases --set x resume 1 -c a.yaml", 78, "cannot read a.yaml"),
        ("leases --owner resume resume 1", 64, "Usage: kclrun leases resume"),
        ("migrate spark checkpoint a.yaml", 78, "cannot read a.yaml"),
        ("a.yaml migrate spark checkpoint", 78, "cannot read a.yaml"),
        ("init --from x.properties", 64, "No such option"),
        ("leases --lag", 64, "No such option"),
        ("leases move plain --to x -c a.yaml", 78, "cannot read a.yaml"),
        ("leases a.yaml release 1 --set x", 78, "cannot read a.yaml"),
        ("put a.yaml rows.csv", 78, "cannot read a.yaml"),
        ("put rows.csv a.yaml", 78, "cannot read a.yaml"),
        ("put --config a.yaml rows.yaml", 78, "cannot read a.yaml"),
        ("tail a.yaml", 78, "cannot read a.yaml"),
        ("lag a.yaml --json", 78, "cannot read a.yaml"),
        ("leases add-index a.yaml", 78, "cannot read a.yaml"),
        # A value of another option is none.
        ("--report a.yaml --config c.yaml", 78, "cannot read c.yaml"),
        ("doctor --backup a.yaml --yes b.yaml", 78, "cannot read b.yaml"),
        ("leasess", 64, "No such verb 'leasess'. Did you mean 'leases'?"),
        ("fly", 64, "No such verb 'fly'.\n"),
    ],
)
def test_which_file_is_the_configuration(folder, line, code, said, capsys):
    assert run_program(line.split()) == code
    assert said in capsys.readouterr().err


def test_without_a_configuration_in_the_folder_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert run_program(["leases"]) == 64
    assert "There is no app.yaml in this folder" in capsys.readouterr().err
    assert run_program(["put"]) == 64
    assert "--stream NAME" in capsys.readouterr().err


def test_without_a_verb_it_runs(tmp_path, capsys):
    code = run_program(["--config", str(tmp_path / "none.yaml")])

    assert code == 78
    assert capsys.readouterr().err.startswith("Cannot start: cannot read ")


@pytest.mark.parametrize("verb", program._VERBS)
def test_every_verb_explains_itself(verb, capsys):
    assert run_program([verb, "--help"]) == 0
    assert f"kclrun {verb}" in capsys.readouterr().out


def test_help_names_every_exit_code(capsys):
    assert run_program(["--help"]) == 0
    reported = capsys.readouterr().out
    assert all(f"{code} " in reported for code in (0, 64, 66, 69, 70, 77, 78))


def test_version_names_what_we_stand_on(capsys):
    assert run_program(["version"]) == 0
    assert run_program(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("kclrun ")


def test_help_imports_nothing_heavy():
    """What costs start-up time is absent, so that `--help` stays below 200 ms anywhere."""
    code = (
        "import sys; from kclrun.cli.program import run_program; run_program(['--help']);"
        "print([m for m in ('botocore', 'boto3', 'moto', 'rich', 'yaml', 'uvicorn',"
        " 'google.protobuf', 'psutil')"
        " if m in sys.modules])"
    )
    done = run_to_end([sys.executable, "-c", code], check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_without_the_current_folder_on_its_path(tmp_path):
    (tmp_path / "click.py").write_text("raise SystemExit('imported from the current folder')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = run_to_end([sys.executable, "-m", "kclrun", "version"], cwd=tmp_path, env=environment)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [(0, 1, 2), (0,)])
def test_closed_standard_files_are_no_bug(tmp_path, closed):
    look = (
        "import os, sys, kclrun.cli as cli; sys.argv[1:] = ['version']; code = cli.main();"
        "kinds = [os.path.realpath(f'/proc/self/fd/{n}') for n in (0, 1, 2)];"
        "is_none = sys.stdin is None or sys.stdout is None;"
        "open('seen', 'w').write(f'{code} {is_none} {kinds}')"
    )

    subprocess.run(
        [
            "sh",
            "-c",
            'exec "$0" -c "$1" ' + " ".join(("<&-", ">&-", "2>&-")[: len(closed)]),
            sys.executable,
            look,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=True,
    )

    assert (
        (tmp_path / "seen")
        .read_text()
        .startswith(f"0 False {['/dev/null'] * len(closed)}".rstrip("]"))
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EFBIG, "File too large"), "ulimit -f, LimitFSIZE="),
        (PermissionError(errno.EACCES, "Permission denied", sys.executable), "may this user"),
        (FileNotFoundError(errno.ENOENT, "No such file", sys.executable), "was it removed?"),
        (OSError(errno.ENOEXEC, "Exec format error", sys.executable), "does not execute"),
    ],
)
def test_what_this_host_refuses_is_no_bug_and_has_no_traceback(monkeypatch, capsys, error, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(program.program, "main", fail)

    assert run_program(["check"]) == 78
    reported = capsys.readouterr().err
    assert words in reported
    assert "Traceback" not in reported
    assert "bug" not in reported


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied", "/x"), ValueError("x")])
def test_other_errors_are_as_they_were(error):
    assert host_refusal(error) is None


def test_a_time_zone_that_python_does_not_take_is_named(monkeypatch, capsys):
    monkeypatch.setenv("TZ", "XXX99999999")
    time.tzset()
    try:
        assert run_program(["check"]) == 78
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "the environment variable TZ is 'XXX99999999'" in capsys.readouterr().err
