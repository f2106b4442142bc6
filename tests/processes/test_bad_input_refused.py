"""What is wrong before AWS is asked ends the program at once: what, where, what to do, and a code.

What is said of each setting is in tests/unit/config and tests/unit/cli, without a process.
"""

import pytest

from tests.processes.bad_input_rig.program import Project

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        # Everything at once, so that nobody repairs a file line by line.
        (
            {"leases": {"max": "many"}, "stall": 120},
            [],
            [
                "leases.max: expected a whole number from 1 to 1024, got 'many' (app.yaml line ",
                "stall:",
            ],
        ),
        ({}, ["--set", "lease.max=1"], ["lease: no such setting; did you mean leases?"]),
        # Before a lease is halted over it.
        ({"output": {"path": "mine.py"}}, [], ["output.path: cannot make the folder /"]),
        ({"output": {"path": "/proc/rows"}}, [], ["output.path: cannot make the folder /"]),
        ({}, ["--report", "mine.py/report.json"], ["--report: cannot make the folder /"]),
    ],
    ids=["settings", "--set", "output", "output in /proc", "--report"],
)
def test_it_is_78_with_place_and_remedy(project, settings, arguments, said):
    ended = project.settings(**settings).run(*arguments)

    assert ended.code == 78
    assert ended.has_reported(*said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("/", ["/ is a folder", "--config"]),
        ("no.yaml", ["cannot read no.yaml: No such file or directory"]),
    ],
)
def test_a_configuration_that_is_no_file_is_78(project, config, said):
    ended = project.run(config=config)

    assert ended.code == 78
    assert ended.has_reported(*said)


def test_a_report_that_cannot_be_written_is_reported_before_the_run(project):
    ended = project.settings().run("--report", ".")

    assert ended.code == 64
    assert "'.' is a directory" in ended.reported


def test_a_processor_is_imported_with_the_environment_it_will_run_with(project):
    """Or it would load here, and halt every shard there."""
    project.code("import os\nfrom mine import Mine\nos.environ['DB_URL']\n", "theirs.py")
    project.environment["DB_URL"] = "canary-7"
    quick = {"processor": "theirs:Mine", "aws": {"start_timeout": "100ms"}}

    passed = project.settings(**quick).run()
    refused = project.settings(**quick, environment={"only": ["OTHER"]}).run()

    assert passed.code == 69
    assert refused.code == 78
    assert refused.has_reported("KeyError: 'DB_URL'", "environment.only keeps DB_URL from lease")
    assert "canary-7" not in refused.reported + refused.out


@pytest.mark.parametrize(
    ("aws", "code", "said"),
    [
        ("aws: {region: us-east-1}", 77, ["no AWS credentials were found", "AWS_PROFILE", "role"]),
        pytest.param("", 78, ["region"], marks=pytest.mark.long),
    ],
)
def test_without_credentials_or_a_region_nothing_is_asked(project, aws, code, said):
    del project.environment["AWS_ACCESS_KEY_ID"], project.environment["AWS_SECRET_ACCESS_KEY"]
    project.text(f"application: orders\nstream: orders\nprocessor: mine:Mine\n{aws}\n")

    ended = project.run()

    assert ended.code == code
    assert ended.has_reported(*said)
    assert "Grant it" not in ended.reported


def test_a_place_for_lock_files_that_cannot_be_written_is_78(project, embedded_aws):
    (project.folder / "state").write_text("a file")
    project.settings(endpoint=embedded_aws.embedded.endpoint, stream=embedded_aws.stream(shards=1))

    ended = project.run()

    assert ended.code == 78
    assert ended.has_reported("KCLRUN_STATE_DIR")


def test_foreign_text_in_a_message_moves_no_cursor(project):
    ended = project.settings(application="\x1b[2Jsoon\r\u202e").run()

    assert ended.code == 78
    assert not any(character in ended.reported for character in "\x1b\r\u202e")
    assert "\ufffd" in ended.reported or "\\x1b" in ended.reported
