import contextlib
import os
import re
import sys

import pytest

from kclrun.cli.init import templates
from kclrun.cli.program import run_program
from tests.support.programs import run_to_end


def test_a_starter_project_is_right_from_the_start(tmp_path):
    folder = tmp_path / "hello"

    assert run_program(["init", str(folder)]) == 0
    assert run_program(["check", "--config", str(folder / "app.yaml")]) == 0


@pytest.mark.seconds
def test_the_tests_of_a_starter_project_pass(tmp_path):
    run_program(["init", str(tmp_path)])

    done = run_to_end(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path
    )

    assert done.returncode == 0, done.stdout


def test_its_help_has_a_line_for_each_template_and_an_unknown_one_is_answered_with_the_list(
    tmp_path, capsys
):
    assert run_program(["init", "--help"]) == 0
    reported = capsys.readouterr().out
    assert list(templates()) == [
        *("hello", "dead-letters", "forward", "postgres", "s3-parquet", "sqs"),
    ]
    for name, shows in templates().items():
        assert re.search(rf"^  {name} +{re.escape(shows)}$", reported, re.MULTILINE), reported

    assert run_program(["init", "--template", "kafka", str(tmp_path / "new")]) == 64
    reported = capsys.readouterr().err
    assert all(repr(name) in reported for name in templates())
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, capsys):
    (tmp_path / "app.yaml").write_text("mine")

    assert run_program(["init", str(tmp_path)]) == 78
    assert [path.name for path in tmp_path.iterdir()] == ["app.yaml"]
    assert (tmp_path / "app.yaml").read_text() == "mine"
    assert "already has app.yaml" in capsys.readouterr().err


def test_the_configuration_is_safe_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        run_program(["init", str(tmp_path)])
    finally:
        os.umask(before)

    assert (tmp_path / "app.yaml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["hello", "--add-index"],
        ["hello", "--from", "app.properties"],
        ["hello", "--config", "app.yaml"],
        ["hello", "--yes"],
        ["hello", "--set", "leases.max=1"],
    ],
    ids=" ".join,
)
def test_a_project_needs_a_folder_and_nothing_else(arguments, tmp_path):
    with contextlib.chdir(tmp_path):
        assert run_program(["init", *arguments]) == 64
    assert list(tmp_path.iterdir()) == []
