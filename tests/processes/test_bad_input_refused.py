"""What is wrong before AWS is asked ends the program at once: what, where, what to do, and 78."""

import pytest

from tests.processes.bad_input_rig.program import Project

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


# What is said of each setting is in tests/unit/config and tests/unit/cli, without a process.
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"leases": {"max": "many"}, "stall": 120},
            # Everything at once, so that nobody mends a file line by line.
            [
                "leases.max: expected a whole number from 1 to 1024, got 'many' (app.yaml line ",
                "stall:",
            ],
        ),
        ({"processor": "mine:Minne"}, ["defines no Minne", "It defines: Mine"]),
    ],
    ids=["settings", "processor"],
)
def test_a_wrong_configuration_is_78_with_place_and_remedy(project, wrong, said):
    ended = project.settings(**wrong).run()

    assert ended.code == 78
    assert ended.has_told(*said)


def test_a_wrong_override_is_78_and_named(project):
    ended = project.settings().run("--set", "lease.max=1")

    assert ended.code == 78
    assert ended.has_told("lease: no such setting; did you mean leases?")


def test_a_configuration_that_is_not_there_is_78(project):
    ended = project.run()

    assert ended.code == 78
    assert ended.has_told(f"cannot read {project.config}: No such file or directory")


def test_a_folder_as_configuration_is_78_and_told_what_to_name(project):
    ended = project.run(config=project.folder)

    assert ended.code == 78
    assert ended.has_told(f"{project.folder} is a folder", "--config")


def test_a_processor_is_imported_with_the_environment_it_will_run_with(project):
    """Or it would load here, and halt every shard there."""
    project.code("import os\nfrom mine import Mine\nos.environ['DB_URL']\n", "theirs.py")
    project.environment["DB_URL"] = "canary-7"
    quick = {"processor": "theirs:Mine", "aws": {"start_timeout": "100ms"}}

    passed = project.settings(**quick).run()
    refused = project.settings(**quick, environment={"only": ["OTHER"]}).run()

    assert passed.code == 69
    assert refused.code == 78
    assert refused.has_told("KeyError: 'DB_URL'", "environment.only keeps DB_URL from lease")
    assert "canary-7" not in refused.told + refused.out


def test_without_credentials_nothing_is_asked_and_it_is_77(project):
    del project.environment["AWS_ACCESS_KEY_ID"], project.environment["AWS_SECRET_ACCESS_KEY"]
    project.text(
        "application: orders\nstream: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
    )

    ended = project.run()

    assert ended.code == 77
    assert ended.has_told("no AWS credentials were found", "AWS_PROFILE", "role")
    assert "Grant it" not in ended.told


def test_without_a_region_it_is_78(project):
    project.text("application: orders\nstream: orders\nprocessor: mine:Mine\n")

    ended = project.run()

    assert ended.code == 78
    assert ended.has_told("region")


def test_a_place_for_lock_files_that_cannot_be_written_is_78(project, embedded_aws):
    (project.folder / "state").write_text("a file")
    project.settings(endpoint=embedded_aws.embedded.endpoint, stream=embedded_aws.stream(shards=1))

    ended = project.run()

    assert ended.code == 78
    assert ended.has_told("KCLRUN_STATE_DIR")


@pytest.mark.parametrize(
    ("more", "arguments", "setting"),
    [
        ({"output": {"path": "mine.py"}}, [], "output.path"),
        ({"output": {"path": "mine.py/rows"}}, [], "output.path"),
        ({"output": {"path": "/proc/rows"}}, [], "output.path"),
        ({}, ["--report", "mine.py/report.json"], "--report"),
    ],
)
def test_a_place_that_cannot_be_written_is_78_before_a_lease_is_halted_over_it(
    project, more, arguments, setting
):
    ended = project.settings(**more).run(*arguments)

    assert ended.code == 78
    assert ended.has_told(f"{setting}: cannot make the folder /")


def test_a_report_that_cannot_be_written_is_told_before_the_run(project):
    ended = project.settings().run("--report", ".")

    assert ended.code == 64
    assert "'.' is a directory" in ended.told


def test_foreign_text_in_a_message_moves_no_cursor(project):
    ended = project.settings(processor="mine:Mine", start="\x1b[2Jsoon\r\u202e").run()

    assert ended.code == 78
    assert not any(character in ended.told for character in "\x1b\r\u202e")
    assert "\ufffd" in ended.told or "\\x1b" in ended.told
